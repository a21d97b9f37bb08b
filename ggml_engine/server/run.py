"""`Server`: listens, serves until a signal or a failed start, and ends in less than five seconds.

The order of the end: no new connections and requests; a short time for what runs; then streams end with an error event,
what has not begun to answer answers 503; then the models are closed. What does not end in its time is left behind
(`is_whole`). A second Ctrl-C ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

import uvicorn

from ggml_engine.errors import OptionError
from ggml_engine.server.app import create_app
from ggml_engine.server.ending import TimeLeft
from ggml_engine.server.hosted_model import Loader
from ggml_engine.server.hosting import ModelHost
from ggml_engine.server.lifecycle import Lifecycle
from ggml_engine.server.logs import log
from ggml_engine.server.options import ServeOptions
from ggml_engine.server.transport import Acceptor, ConnectionLimits, Room, ServerProtocol, raise_file_limit
from ggml_engine.server.workers import Workers, WorkThreads

INTERRUPTED: Final = 130
_END_S: Final = 4.0  # all of the end, whatever hangs; the rest of five seconds is for a busy machine
# how much of what is left a step of the end may take; the models get the rest
_STREAMS_PART: Final = 0.2
_REQUESTS_PART: Final = 0.25
_ANSWERS_PART: Final = 0.25
_LAST_WRITES_S: Final = 0.1  # at most
_BACKLOG: Final = 2048

OnListening = Callable[[str], object]


class Server(uvicorn.Server):
    """See the module. `on_listening` is told the address when requests are taken.

    Raises OptionError for options that cannot be, and OSError where the address cannot be had.
    """

    def __init__(
        self, options: ServeOptions, *, loader: Loader | None = None, on_listening: OnListening = lambda _url: None
    ) -> None:
        self._options = options.server
        app = create_app(options, loader=loader, on_failed_start=self._fail)
        self._host: ModelHost = app.state.host
        self._lifecycle: Lifecycle = app.state.lifecycle
        self._workers: tuple[Workers, ...] = app.state.workers
        self._on_listening = on_listening
        self._failure: BaseException | None = None
        self.is_whole = True  # whether everything ended
        self._host.check_sizes()
        self._listening = listen(self._options.host, self._options.port)
        # its own lines repeat ours, or quote what a caller sent
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=ServerProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=self._options.keep_alive_s,  # type: ignore[arg-type]  # seconds for call_later
        )
        super().__init__(config)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._listening[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def serve_until_told(self) -> None:
        """Serve; returns after the end, and raises what the first model could not be loaded for."""
        asyncio.run(self._serve_with_threads())
        if self._failure is not None:
            raise self._failure

    async def _serve_with_threads(self) -> None:
        threads = WorkThreads()
        asyncio.get_running_loop().set_default_executor(threads)
        try:
            await self.serve()
        finally:
            self.is_whole = self.is_whole and not (threads.is_busy or any(each.is_busy for each in self._workers))

    def stop(self) -> None:
        """End as after a first Ctrl-C; on any thread."""
        self.should_exit = True

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self.should_exit = True

    # ---- uvicorn's steps

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Start the application, then accept connections."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise OptionError("the application did not start; its log says why")
        room_for = raise_file_limit(self._options.max_connections)
        limits = ConnectionLimits(self._options.header_timeout_s, self._options.write_timeout_s, room_for)
        room = Room(limits.max_connections)

        def make_protocol() -> ServerProtocol:
            return ServerProtocol(self.config, self.server_state, self.lifespan.state, limits, room.leave)

        self.servers = [Acceptor(each, make_protocol, room) for each in self._listening]  # type: ignore[misc]
        self.started = True
        self._on_listening(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """The end, in the order that the module says."""
        log.info("shutting down")
        left = TimeLeft(_END_S)
        self._lifecycle.close()
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if not await self._lifecycle.drain(self._options.shutdown_grace_s):
            self._lifecycle.end_streams()
            if not await self._lifecycle.drain(left.part(_STREAMS_PART)):
                self._lifecycle.end_all()
                await self._lifecycle.drain(left.part(_REQUESTS_PART))
        await self._end_connections(left)
        await self.lifespan.shutdown()
        self.is_whole = await self._host.close(left.part())
        for server in self.servers:
            await server.wait_closed()

    async def _end_connections(self, left: TimeLeft) -> None:
        tasks = set(self.server_state.tasks)
        if tasks:  # those that were ended still write their answers
            await asyncio.wait(tasks, timeout=left.part(_ANSWERS_PART))
        connections = list(self.server_state.connections)
        if any(connection.transport.get_write_buffer_size() for connection in connections):
            # one time for all of them: some may never read
            await asyncio.sleep(min(_LAST_WRITES_S, left.part(_ANSWERS_PART)))
        for connection in connections:
            connection.transport.abort()
        late = {task for task in tasks if not task.done()}
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=left.part(_ANSWERS_PART))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends the server, with exit code 0; a second one ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A signal came."""
        if self.should_exit:
            leave(INTERRUPTED)
        self.should_exit = True


def leave(code: int) -> None:
    """End the process at once, whatever its threads do."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at every address of `host`; at the first one alone where the system chooses the port.

    Raises OSError.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found[:1] if port == 0 else found):
            made = socket.socket(family, kind, protocol)
            sockets.append(made)
            if os.name == "posix":
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.setblocking(False)
            made.bind(address)
            made.listen(_BACKLOG)
    except OSError as error:
        for made in sockets:
            made.close()
        raise OSError(error.errno, f"cannot listen at {host} port {port}: {os.strerror(error.errno or 0)}") from error
    return sockets
