"""Connections: HTTP/1.1 by h11 and uvicorn, with bounds on lines, headers, times and the number of connections.

Owns what happens before a request is one, and after its response is written. A connection beyond the bound is not
accepted: it waits in the system's queue, and is neither reset nor answered with an error. Does not know: bodies and
routes (`guard`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.logs import log, log_bug

MAX_HEADER_BYTES: Final = 64 << 10  # of all headers, names and values
MAX_HEADERS: Final = 100
MAX_TARGET_BYTES: Final = 8 << 10  # of a request's path and query
_SEND_BUFFER: Final = 64 << 10  # in the system, for each connection: a reader that stalls is noticed soon
READ_BYTES: Final = 16 << 10  # taken from a connection at once: in the smallest chunks, some 20 ms of h11's work
_RETRY_ACCEPT_S: Final = 0.2
_LINGER_S: Final = 2.0
_OF_ONE_CLIENT: Final = frozenset({errno.ECONNABORTED, errno.ECONNRESET, errno.EPROTO, errno.EPERM})  # it is gone


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Times of a connection, in seconds, and how many there may be."""

    header_timeout_s: float
    write_timeout_s: float
    max_connections: int


class _Connection(h11.Connection):
    """h11's state machine, which also bounds what a request may have. `refusal` is the answer to what it raised for."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES + MAX_TARGET_BYTES)
        self.refusal = HttpProblem(400, "bad_request", "this is no HTTP/1.1 request")

    def next_event(self) -> Any:
        is_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431 and is_head:  # else it is a chunk's first line, or what follows the last
                self._refuse_head()
            raise
        if isinstance(event, h11.Request):
            self._check(event)
        return event

    def _refuse_head(self) -> None:
        first_line = self.trailing_data[0][: MAX_TARGET_BYTES + 32]
        if b"\n" not in first_line:
            self.refusal = _TARGET_TOO_LONG
        else:
            self.refusal = _HEADERS_TOO_LARGE

    def _check(self, request: h11.Request) -> None:
        n_bytes = sum(len(name) + len(value) for name, value in request.headers)
        if len(request.target) > MAX_TARGET_BYTES:
            self.refusal = _TARGET_TOO_LONG
        elif n_bytes > MAX_HEADER_BYTES or len(request.headers) > MAX_HEADERS:
            self.refusal = _HEADERS_TOO_LARGE
        else:
            return
        raise h11.RemoteProtocolError(self.refusal.message, self.refusal.status)


_TARGET_TOO_LONG: Final = HttpProblem(414, "uri_too_long", f"a path and query have at most {MAX_TARGET_BYTES} bytes")
_HEADERS_TOO_LARGE: Final = HttpProblem(
    431, "headers_too_large", f"there may be {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes in all"
)
_HEADERS_TOO_LATE: Final = HttpProblem(408, "header_timeout", "the headers did not come in time")


class ServerProtocol(H11Protocol):
    """One connection. Its requests have `state.abort_connection`, which ends it at once."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: ConnectionLimits,
        on_lost: Callable[[], object],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.conn = _Connection()
        self._limits = limits
        self._on_lost = on_lost
        self._head_timer: asyncio.TimerHandle | None = None
        self._has_received = False
        self._is_refused = False  # what still comes is dropped

    # ---- the time of a request's head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own is 256 KiB, before anybody else is served
            transport.max_size = READ_BYTES
        self.app_state = {**self.app_state, "abort_connection": transport.abort}
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Feed h11; the time of a head begins with its first byte, and ends when it is whole."""
        self._has_received = True
        if self._is_refused:
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not (self._is_refused or self.transport.is_closing()):
            self._arm()
        else:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone: what runs for it learns of that."""
        self._disarm()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._on_lost()

    def _arm(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self._on_head_timeout)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._has_received:
            self.conn.refusal = _HEADERS_TOO_LATE  # type: ignore[attr-defined]
            self.send_400_response("")
        else:
            self.transport.close()

    # ---- answers without an application

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's own sentence
        """Refuse what is no request, with the status that says why, and end the connection."""
        problem: HttpProblem = self.conn.refusal  # type: ignore[attr-defined]
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # in the middle of a response there is nothing left to say
            return
        body = json.dumps(problem.body("openai")).encode("ascii")
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        with suppress(h11.LocalProtocolError):
            for event in (
                h11.Response(status_code=problem.status, headers=headers, reason=b"Refused"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self._close_soon()

    def _unsupported_upgrade_warning(self) -> None:
        """A request to upgrade is answered as if it asked for none."""

    # ---- the end of a response

    def on_response_complete(self) -> None:
        """Wait for the next request; but not for ever for a reader of the last response."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came after a response."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """The server ends: no request after the one that runs."""
        if not (self._is_refused or self.transport.is_closing()):
            super().shutdown()

    def _close_soon(self) -> None:
        """Say that this was all, and let the client finish writing: it would not read the answer otherwise."""
        self._is_refused = True
        self._disarm()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
        self.loop.call_later(min(_LINGER_S, self._limits.write_timeout_s), self.transport.abort)

    def _abort_later(self) -> None:
        self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)


class Acceptor:
    """Accepts the connections of one listening socket, as long as there is room for them."""

    def __init__(self, listening: socket.socket, make_protocol: Callable[[], asyncio.Protocol], room: Room) -> None:
        self._listening = listening
        self._make_protocol = make_protocol
        self._room = room
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._room.enter()
            try:
                await self._accept()
            except OSError as error:
                self._room.leave()
                if error.errno not in _OF_ONE_CLIENT:
                    log.warning("no connection can be accepted now: %s", error.strerror or error)
                    await asyncio.sleep(_RETRY_ACCEPT_S)
            except Exception as error:  # a bug must not end the accepting
                self._room.leave()
                log_bug(error, "a connection could not be accepted")
                await asyncio.sleep(_RETRY_ACCEPT_S)
            except BaseException:
                self._room.leave()
                raise

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        accepted, _ = await loop.sock_accept(self._listening)
        try:
            with suppress(OSError):
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            await loop.connect_accepted_socket(self._make_protocol, accepted)
        except Exception:
            accepted.close()
            raise

    def close(self) -> None:
        """Accept no more."""
        self._task.cancel()
        self._listening.close()

    async def wait_closed(self) -> None:
        """Until it has ended."""
        await asyncio.wait({self._task})


class Room:
    """How many connections there may be."""

    def __init__(self, n: int) -> None:
        self._places = asyncio.Semaphore(n)

    async def enter(self) -> None:
        """Take a place, when there is one."""
        await self._places.acquire()

    def leave(self) -> None:
        """Give it back."""
        self._places.release()


def raise_file_limit(n_connections: int, reserve: int = 64) -> int:
    """Let the process open so many connections and `reserve` other files; how many connections that is after all."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return n_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n_connections + reserve
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return n_connections
    possible = max(8, soft - reserve)
    log.warning("at most %d connections at once, not %d: the process may have %d files", possible, n_connections, soft)
    return possible
