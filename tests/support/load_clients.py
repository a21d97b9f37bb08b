"""`ggml-engine serve` in a process of its own, and clients for many connections at once that may leave at any moment.

Requests are HTTP/1.1 as it is written, on a connection each; nothing here knows more of the server than its routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import socket
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from cli_process import command, environment

READY_S = 60.0
WAIT_S = 180.0  # for what comes, however busy the machine is
_METRIC = re.compile(r"^ggml_engine_(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by RST


class ServerProcess:
    """A server that has loaded its model; `log` is all that it wrote to stderr."""

    def __init__(self, child: subprocess.Popen[bytes], log: Path) -> None:
        self.child = child
        self._log = log
        self.port = 0

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def wait_until_ready(self) -> None:
        until = time.monotonic() + READY_S
        while not (self.port and self.health()):
            assert self.child.poll() is None, self.log
            assert time.monotonic() < until, self.log
            if not self.port and (match := re.search(r"at http://127\.0\.0\.1:(\d+)", self.log)):
                self.port = int(match[1])
            time.sleep(0.02)

    def get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        """Status and body, on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def health(self) -> bool:
        with contextlib.suppress(OSError):
            return self.get("/health")[0] == 200
        return False

    def metrics(self) -> dict[str, float]:
        """Gauges and counters of one model by their short names; those with further labels are summed."""
        found: dict[str, float] = {}
        status, text = self.get("/metrics")
        assert status == 200, (text, self.log)
        for match in _METRIC.finditer(text.decode()):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    # ---- what the system says of the process

    def rss(self) -> int:
        """Bytes in memory."""
        pages = int(Path(f"/proc/{self.child.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def n_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.child.pid}/fd"))

    def n_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.child.pid}/task"))


@contextlib.contextmanager
def server_process(directory: Path, *options: str, model: str = "smollm2") -> Iterator[ServerProcess]:
    """A server at a free port; it is gone afterwards."""
    log = directory / "server.log"
    with log.open("wb") as stderr:
        child = subprocess.Popen(
            command("serve", model, "--port", "0", *options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment(),
        )
    server = ServerProcess(child, log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        child.kill()
        child.wait()


def allow_files(n: int) -> None:
    """Let this process open so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < n:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))


# ---- requests


class Response:
    """A response whose head has come; the rest is read as it is asked for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}

    async def read_head(self) -> None:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(head[0].split()[1])
        self.headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body in its parts."""
        if "content-length" in self.headers:
            yield await self._reader.readexactly(int(self.headers["content-length"]))
            return
        while n := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(n + 2))[:-2]
        await self._reader.readexactly(2)

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([part async for part in self.chunks()])

    async def events(self) -> AsyncIterator[str]:
        """Data of the events of a stream, and comments, which begin with a colon."""
        left = ""
        async for part in self.chunks():
            *whole, left = (left + part.decode()).split("\n\n")
            for event in whole:
                yield event.partition("data: ")[2] or event
        assert not left, f"half of an event: {left!r}"

    def leave(self) -> None:
        """Go away at once, whatever is on its way."""
        made = self._writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def send(port: int, path: str, body: Any, *headers: str, method: str = "POST") -> Response:
    """A request on its way; `body` is bytes, or becomes JSON."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
    ]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    await writer.drain()
    return Response(reader, writer)


async def post(port: int, path: str, body: Any, *headers: str, method: str = "POST") -> Response:
    """The response to a request, as far as its head."""
    response = await send(port, path, body, *headers, method=method)
    await response.read_head()
    return response


async def ask(port: int, path: str, body: Any, *headers: str, method: str = "POST") -> tuple[int, bytes]:
    """Status and body of the response to a request."""
    response = await post(port, path, body, *headers, method=method)
    try:
        return response.status, await response.body()
    finally:
        await response.close()


def completion(first: int, n_prompt: int, n_tokens: int, **more: Any) -> dict[str, Any]:
    """A request for exactly `n_tokens` after a prompt of `n_prompt`, whose first token no other `first` shares."""
    prompt = [1000 + first, *(2000 + (7 * first + i) % 20000 for i in range(n_prompt - 1))]
    return {"prompt": prompt, "max_tokens": n_tokens, "ignore_eos": True, "temperature": 0, **more}


def n_tokens_of(event: str) -> int:
    """How many tokens an event of a completion brings, where tokens are shown by their probabilities."""
    choices = json.loads(event).get("choices") or [{}]
    return len((choices[0].get("logprobs") or {}).get("tokens", ()))


# ---- beside the load


class HealthProbe:
    """Asks for /health all the time, on a thread of its own; `seconds` has how long each answer took."""

    def __init__(self, server: ServerProcess, pause_s: float = 0.05) -> None:
        self._server = server
        self._pause_s = pause_s
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seconds: list[float] = []
        self.failures = 0

    def _run(self) -> None:
        while not self._has_ended.wait(self._pause_s):
            begun = time.monotonic()
            self.failures += not self._server.health()
            self.seconds.append(time.monotonic() - begun)

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join(WAIT_S)


def wait_until(condition: Callable[[], object], timeout: float, state: Callable[[], object]) -> float:
    """Seconds until a condition holds; fails with what `state` says where it does not within `timeout`."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + timeout, f"not within {timeout} s: {state()}"
        time.sleep(0.01)
    return time.monotonic() - begun
