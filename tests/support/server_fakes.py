"""Servers without a model: a loader that loads nothing, endpoints that hold and stream, and a server on a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ggml_engine.errors import CancelledError, EngineError
from ggml_engine.server.app import ROUTES, create_app
from ggml_engine.server.bodies import read_json
from ggml_engine.server.hosted_model import HostedModel, ModelSize
from ggml_engine.server.options import resolve
from ggml_engine.server.run import Server
from ggml_engine.server.signals import Signal
from ggml_engine.server.sse import EventStream

WAIT_S = 10.0  # no wait of a test takes longer; what is waited for comes at once
BASE = "http://127.0.0.1"


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Until a condition of another thread holds."""
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(0.005)


class FakeLoader:
    """Sizes by path, and models that do nothing. `gate` holds loads; `faults` break them, by path.

    While it `hangs`, loads do not listen to being cancelled, and closes to their time.
    """

    def __init__(self, sizes: dict[str, int] | None = None) -> None:
        self.sizes = sizes or {}
        self.gate = threading.Event()
        self.gate.set()
        self.close_gate = threading.Event()
        self.close_gate.set()
        self.hangs = False
        self.faults: dict[str, Exception] = {}
        self.events: list[tuple[str, str]] = []  # ("load" | "cancelled" | "close", name)
        self.engine: Any = SimpleNamespace(executor=SimpleNamespace(stats=lambda: {"cells_used": 3}))
        self.runtime: Any = SimpleNamespace(stats=lambda: {"waiting": 1})

    def measure(self, path: str) -> ModelSize:
        return ModelSize(self.sizes.get(path, 10), 0)

    def load(self, name: str, path: str, cancel: Callable[[], bool]) -> HostedModel:
        self.events.append(("load", name))
        until = time.monotonic() + WAIT_S
        while not self.gate.wait(0.005):
            assert time.monotonic() < until
            if cancel() and not self.hangs:
                self.events.append(("cancelled", name))
                raise CancelledError("told to")
        if path in self.faults:
            raise self.faults[path]

        def close(timeout: float) -> bool:
            is_free = self.close_gate.wait(WAIT_S if self.hangs else timeout)
            self.events.append(("close", name))
            return is_free

        return HostedModel(name, self.engine, self.runtime, close)

    def count(self, kind: str, name: str | None = None) -> int:
        """How often something happened."""
        return sum(event == kind and name in (None, of) for event, of in self.events)


class Jobs:
    """What `/hold`, `/stream` and `/fail` do, as their callers ask for it."""

    def __init__(self) -> None:
        self.cancels: list[str] = []
        self.streams: list[EventStream] = []
        self.signals: list[Signal] = []
        self.error: Exception = EngineError("it broke")

    async def hold(self, request: Request) -> Response:
        """Answers when its signal is set."""
        await read_json(request)
        signal = Signal()
        self.signals.append(signal)
        await signal.wait(lambda: self.cancels.append("hold"))
        return JSONResponse({"held": True})

    async def stream(self, request: Request) -> Response:
        """Streams what the test puts; the body's `put` comes at once."""
        body = await read_json(request)
        stream = EventStream(request, lambda: self.cancels.append("stream"))
        for text in body.get("put", []):
            stream.put({"text": text})
        if body.get("put"):
            stream.finish()
        self.streams.append(stream)
        return stream

    async def echo(self, request: Request) -> Response:
        """The body as it was understood."""
        return JSONResponse({"body": await read_json(request), "partition": request.state.partition})

    async def fail(self, request: Request) -> Response:
        """Raises `error`."""
        await read_json(request)
        raise self.error

    def routes(self) -> list[Route]:
        """Further routes, of both dialects."""
        return [
            Route("/hold", self.hold, methods=["POST"]),
            Route("/stream", self.stream, methods=["POST"]),
            Route("/v1/messages/stream", self.stream, methods=["POST"]),
            Route("/echo", self.echo, methods=["POST"]),
            Route("/fail", self.fail, methods=["POST"]),
            Route("/v1/messages/fail", self.fail, methods=["POST"]),
        ]


def options_of(**given: Any) -> Any:
    """Options of a server of one model, at a port that the system chooses."""
    return resolve({"models": ["m=path"], "port": 0, "shutdown_grace_s": 0.05, **given})


def app_of(
    jobs: Jobs | None = None,
    loader: FakeLoader | None = None,
    on_failed_start: Callable[[BaseException], object] | None = None,
    **given: Any,
) -> Starlette:
    """An application with a fake loader; with `jobs` their routes beside its own."""
    routes = [*ROUTES, *([] if jobs is None else jobs.routes())]
    return create_app(
        options_of(**given), loader=loader or FakeLoader(), routes=routes, on_failed_start=on_failed_start
    )


@asynccontextmanager
async def client_of(app: Starlette, *, started: bool = True, base: str = BASE) -> AsyncIterator[httpx.AsyncClient]:
    """A client in process; the first model is loaded."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=base, timeout=WAIT_S) as client:
            if started:
                await asyncio.wait_for(app.state.started.wait(), WAIT_S)
            yield client
    await app.state.host.close()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` that ends."""

    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, 3 * WAIT_S)

    return asyncio.run(bounded())


class RunningServer:
    """A `Server` on a thread."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.thread = threading.Thread(target=server.serve_until_told)
        self.address: tuple[str, int] = server._listening[0].getsockname()[:2]
        self.url = server.url

    def connect(self, **options: Any) -> socket.socket:
        """A connection; `rcvbuf` makes it one that takes little in advance."""
        made = socket.socket()
        if "rcvbuf" in options:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["rcvbuf"])
        made.settimeout(WAIT_S)
        made.connect(self.address)
        return made

    def ask(self, data: bytes) -> bytes:
        """Everything that comes for these bytes until the server closes the connection."""
        with self.connect() as connection:
            connection.sendall(data)
            return everything(connection)

    def health(self) -> int:
        """The status of /health on a connection of its own."""
        return httpx.get(f"{self.url}/health", timeout=WAIT_S).status_code


def everything(connection: socket.socket) -> bytes:
    """What comes until the end."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def post(path: str, body: bytes = b"{}", *headers: str, length: int | None = None) -> bytes:
    """A request as it is sent."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextmanager
def running(
    jobs: Jobs | None = None, loader: FakeLoader | None = None, monkeypatch: Any = None, **given: Any
) -> Iterator[RunningServer]:
    """A server that listens; ended, and found whole, after the block."""
    if jobs is not None:
        monkeypatch.setattr("ggml_engine.server.dialects.routes", jobs.routes)
    found = RunningServer(Server(options_of(**given), loader=loader or FakeLoader()))
    found.thread.start()
    try:
        wait_for(lambda: found.server.started, "the server listens")
        yield found
    finally:
        found.server.stop()
        found.thread.join(WAIT_S)
        assert not found.thread.is_alive(), "the server did not end"
