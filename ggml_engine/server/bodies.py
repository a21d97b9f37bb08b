"""Bodies of requests: read within bounds of size and time, counted together while they are held, parsed as JSON.

What all requests hold is bounded, with a share for each partition (see `Shares`). Bytes count as they come, whatever a
client says that it will send, and until its request has ended: what was made of them lives so long. A request that
finds no room is refused, and does not wait: many half-read ones could wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from ggml_engine.server.errors import CLIENT_GONE, HttpProblem
from ggml_engine.server.strict_json import parse_object
from ggml_engine.server.timeouts import timeout
from ggml_engine.serving.shares import Shares

_LARGE_BODY: Final = 1 << 18  # is parsed beside the event loop
_DISCARDED_BYTES: Final = 1 << 26  # of a body that is too large: read so far that a client sees the answer
_DISCARDING_S: Final = 2.0
_RETRY_S: Final = 1.0


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object of a request's body. Raises HttpProblem 400 for what is none (see `strict_json`)."""
    body = await request.body()
    if len(body) < _LARGE_BODY:
        return parse_object(body)
    return await asyncio.to_thread(parse_object, body)


class Bodies:
    """How large one body may be, how long it may take, and how much all of them may hold. For the loop's thread."""

    def __init__(self, most_bytes: int, most_bytes_together: int, timeout_s: float) -> None:
        self.most_bytes = most_bytes
        self.timeout_s = timeout_s
        self._shares = Shares(most_bytes_together)

    @property
    def n_bytes(self) -> int:
        """What is held now."""
        return self._shares.total

    @contextmanager
    def holding(self, partition: str) -> Iterator[Held]:
        """While entered, a request holds what is added; nothing after that, however it ends."""
        held = Held(self._shares, partition)
        try:
            yield held
        finally:
            held.let_go()


class Held:
    """What one request holds of a body."""

    def __init__(self, shares: Shares, partition: str) -> None:
        self._shares = shares
        self._partition = partition
        self._n_bytes = 0

    def check(self, n_bytes: int) -> None:
        """Raise HttpProblem 503 where there is no room for so many more now."""
        if not self._shares.has_room(self._partition, n_bytes):
            raise HttpProblem(
                503,
                "bodies_full",
                f"the requests that the server works on hold {self._shares.total} bytes of bodies, "
                f"{self._shares.most} are possible: there is no room for {n_bytes} more now",
                retry_after_s=_RETRY_S,
            )

    def add(self, n_bytes: int) -> None:
        """Hold so many more. Raises as `check`."""
        self.check(n_bytes)
        self._shares.take(self._partition, n_bytes)
        self._n_bytes += n_bytes

    def let_go(self) -> None:
        """Hold nothing; idempotent."""
        self._shares.give_back(self._partition, self._n_bytes)
        self._n_bytes = 0


class BodyReader:
    """The body of one request. `is_read`: whether it has come to its end."""

    def __init__(self, bodies: Bodies, headers: Headers, receive: Receive) -> None:
        self._bodies = bodies
        self._headers = headers
        self._receive = receive
        self.is_read = False

    @property
    def is_announced(self) -> bool:
        """Whether the headers say that there is one."""
        return bool({"content-length", "transfer-encoding"} & set(self._headers))

    async def read(self, held: Held) -> bytes:
        """The whole body, which is held. Raises HttpProblem.

        413 for too long a one, 503 where all of them together are, 408 for one that does not come, 499.
        """
        length = self._headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > self._bodies.most_bytes:
            raise self._too_large()
        held.check(int(length))
        try:
            async with timeout(self._bodies.timeout_s):
                return await self._whole(held.add)
        except asyncio.TimeoutError:
            raise HttpProblem(
                408, "body_timeout", f"the body did not come within {self._bodies.timeout_s:g} seconds"
            ) from None

    async def _whole(self, hold: Callable[[int], None]) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise HttpProblem(CLIENT_GONE, "client_gone", "the client left before its body was there")
            part = message.get("body", b"")
            if len(body) + len(part) > self._bodies.most_bytes:
                raise self._too_large()
            hold(len(part))
            body += part
            if not message.get("more_body", False):
                self.is_read = True
                return bytes(body)

    def _too_large(self) -> HttpProblem:
        return HttpProblem(413, "body_too_large", f"a body has at most {self._bodies.most_bytes} bytes here")

    async def discard(self) -> None:
        """Read on for a while: a client that is still writing when the connection closes would see no answer."""
        if "expect" in self._headers or not self.is_announced:
            return
        n_bytes = 0
        with suppress(asyncio.TimeoutError):
            async with timeout(_DISCARDING_S):
                while n_bytes < _DISCARDED_BYTES:
                    message = await self._receive()
                    n_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        self.is_read = True
                        return
