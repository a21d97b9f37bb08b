"""A server on a socket of this machine, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from ggml_engine.server.app import create_app
from ggml_engine.server.hosting import ModelHost
from ggml_engine.server.options import resolve


class LiveServer:
    """`url` is where it listens; `host` has its models."""

    def __init__(self, url: str, host: ModelHost) -> None:
        self.url = url
        self.host = host


@contextmanager
def live_server(**options: Any) -> Iterator[LiveServer]:
    """A server with these options, its first model loaded; it is closed at the end."""
    app = create_app(resolve({"host": "127.0.0.1", "api_key_env": None, **options}))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    host = app.state.host
    while not (server.started and host.loaded()):
        assert time.monotonic() < deadline, "the server did not start"
        assert thread.is_alive(), "the server ended"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield LiveServer(f"http://127.0.0.1:{port}", host)
    finally:
        server.should_exit = True
        thread.join(10)
        for model in host.loaded():
            assert model.close(5.0)
        assert not thread.is_alive()
