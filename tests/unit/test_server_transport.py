"""A server on a socket: hostile lines, headers, bodies and readers; many connections; and the end of all of it."""

from __future__ import annotations

import asyncio
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from server_fakes import WAIT_S, FakeLoader, Jobs, RunningServer, everything, options_of, post, running, wait_for
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ggml_engine.errors import GGUFError
from ggml_engine.server.run import Server
from ggml_engine.server.transport import MAX_HEADER_BYTES, MAX_HEADERS, MAX_TARGET_BYTES

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def server(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    limits = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "write_timeout_s": 0.3, "keep_alive_s": 5}
    with running(jobs, monkeypatch=monkeypatch, max_body_bytes=100_000, **limits) as found:
        yield found


def status_of(answer: bytes) -> int:
    match = re.match(rb"HTTP/1.1 (\d+) ", answer)
    assert match, answer[:200]
    return int(match[1])


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join((f"GET {path} HTTP/1.1", "Host: localhost", *headers)).encode() + b"\r\n\r\n"


def one_answer(connection: socket.socket) -> bytes:
    """The answer of a small object of JSON."""
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(65536)
        assert part, answer
        answer += part
    return answer


CLOSE = "Connection: close"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (get("/health", CLOSE), 200),
        (get("/" + "x" * MAX_TARGET_BYTES, CLOSE), 414),
        (b"GET /" + b"x" * (2 * MAX_HEADER_BYTES), 414),
        (get("/health", CLOSE, "X-Long: " + "x" * MAX_HEADER_BYTES), 431),
        (get("/health", CLOSE, *(f"X-{n}: {'x' * 1000}" for n in range(80))), 431),
        (get("/health", CLOSE, *(f"X-{n}: 1" for n in range(MAX_HEADERS))), 431),
        (get("/health", CLOSE, *(f"X-{n}: 1" for n in range(MAX_HEADERS - 2))), 200),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (2 * MAX_HEADER_BYTES), 431),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA b: c\r\n\r\n", 400),
        (post("/echo", b"{}", "Content-Length: 3", CLOSE), 400),
        (get("http://localhost/v1/models", CLOSE), 404),
        (post("/echo", b"{}", CLOSE, length=100_001), 413),
        (post("/echo", b"[" * 100_000 + b"]", CLOSE), 413),
        (post("/echo", b"{}", CLOSE, length=3), 408),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else str(value),
)
def test_what_is_no_fit_request_has_its_status_and_the_server_lives(
    server: RunningServer, data: bytes, status: int
) -> None:
    answer = server.ask(data)
    assert status_of(answer) == status
    if status != 200:
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error.keys() >= {"message", "type", "code"}
    assert server.health() == 200


def test_a_head_that_does_not_come_to_its_end_is_a_408_also_when_bytes_trickle(server: RunningServer) -> None:
    with server.connect() as connection:
        answer = b""
        for byte in b"GET /health HTTP/1.1\r\nX-Slow: " + b"x" * 10_000:
            connection.sendall(bytes((byte,)))
            if select.select([connection], [], [], 0.01)[0]:
                answer = everything(connection)
                break
        assert status_of(answer) == 408


def test_a_connection_that_says_nothing_is_closed(server: RunningServer) -> None:
    assert server.ask(b"") == b""


def test_a_second_request_on_a_connection_has_its_own_time(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(get("/health"))
        assert status_of(one_answer(connection)) == 200
        time.sleep(0.5)  # longer than a head may take: no head has begun
        connection.sendall(get("/health"))
        assert status_of(one_answer(connection)) == 200
        connection.sendall(b"GET /he")
        assert status_of(everything(connection)) == 408


def test_a_request_to_upgrade_gets_an_ordinary_answer(server: RunningServer) -> None:
    headers = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    with server.connect() as connection:
        connection.sendall(get("/v1/nothing", *headers))
        assert status_of(one_answer(connection)) == 404


@pytest.mark.parametrize("path", ["/hold", "/stream"])
def test_a_connection_that_ends_cancels_its_request(server: RunningServer, jobs: Jobs, path: str) -> None:
    with server.connect() as connection:
        connection.sendall(post(path))
        wait_for(lambda: jobs.signals or jobs.streams, "the request runs")
        assert not jobs.cancels
    wait_for(lambda: jobs.cancels == [path[1:]], "the request is cancelled")
    assert server.health() == 200


def test_a_slow_reader_is_cut_off_and_others_get_all_of_theirs(server: RunningServer, jobs: Jobs) -> None:
    with server.connect(rcvbuf=4096) as slow, server.connect() as quick:
        slow.sendall(post("/stream"))
        wait_for(lambda: len(jobs.streams) == 1, "the slow stream")
        quick.sendall(post("/stream", b"{}", CLOSE))
        wait_for(lambda: len(jobs.streams) == 2, "the quick stream")
        events = 0
        until = time.monotonic() + WAIT_S
        while not jobs.cancels:
            assert time.monotonic() < until, "the slow reader is never given up"
            jobs.streams[0].put({"text": "x" * 2000})
            if events < 300:
                assert jobs.streams[1].put({"n": events})
                events += 1
            time.sleep(0.002)
        jobs.streams[1].finish()
        answer = everything(quick).decode()
        assert [int(n) for n in re.findall(r'"n":(\d+)', answer)] == list(range(events))
        assert "[DONE]" in answer
        assert jobs.cancels == ["stream"]
        wait_for(lambda: len(server.server.server_state.connections) <= 1, "the slow connection is gone")


def test_a_thousand_idle_connections_leave_room_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Jobs(), monkeypatch=monkeypatch, header_timeout_s=60) as server, ExitStack() as stack:
        limit = len(range(400)) if _files() < 2200 else 1000  # both ends are files of this process
        for _ in range(limit):
            stack.enter_context(server.connect())
        wait_for(lambda: len(server.server.server_state.connections) >= limit, "all are accepted")
        assert server.health() == 200
        answer = httpx.post(f"{server.url}/stream", json={"put": ["a"]}, timeout=WAIT_S)
        assert "[DONE]" in answer.text


def _files() -> int:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def test_a_connection_beyond_the_bound_waits_and_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"header_timeout_s": 60, "max_connections": 3}
    with ExitStack() as stack, running(Jobs(), monkeypatch=monkeypatch, **limits) as server:
        first = [stack.enter_context(server.connect()) for _ in range(3)]
        wait_for(lambda: len(server.server.server_state.connections) == 3, "three are there")
        late = [stack.enter_context(server.connect()) for _ in range(5)]
        for connection in late:
            connection.sendall(get("/health", CLOSE))
        assert not select.select(late, [], [], 0.1)[0]
        first[0].close()
        assert [status_of(everything(connection)) for connection in late] == [200] * 5


def test_answers_that_nobody_reads_do_not_hold_up_the_end_one_by_one(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    _files()
    n = 240  # each would have its own twentieth of a second
    body = json.dumps({"put": ["x" * 180_000]}).encode()  # more than the system takes, less than a write waits for
    with ExitStack() as stack, running(jobs, monkeypatch=monkeypatch, keep_alive_s=60, write_timeout_s=60) as server:
        for _ in range(n):
            stack.enter_context(server.connect(rcvbuf=4096)).sendall(post("/stream", body))
        state = server.server.server_state

        def are_left() -> bool:
            return (
                not state.tasks and sum(each.transport.get_write_buffer_size() > 0 for each in state.connections) == n
            )

        wait_for(are_left, "all have answered, and nobody reads")


@contextmanager
def child(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    command = [sys.executable, "-W", "error", str(SUPPORT / "server_child.py"), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http"), process.communicate(timeout=WAIT_S)
        yield process, url
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_streams_with_an_error_and_the_process_with_0(number: int) -> None:
    with child() as (process, url), httpx.Client(timeout=WAIT_S) as client:
        with client.stream("POST", f"{url}/stream", json={}) as response:
            process.send_signal(number)
            text = "".join(response.iter_text())
        assert '"shutting_down"' in text
        assert text.endswith("data: [DONE]\n\n")
        _, errors = process.communicate(timeout=5)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


def test_a_signal_answers_503_to_what_has_not_begun_to_answer() -> None:
    with child() as (process, url):
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as connection:
            connection.sendall(post("/hold"))
            assert httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 200
            process.send_signal(signal.SIGINT)
            assert status_of(everything(connection)) == 503
        process.communicate(timeout=5)
        assert process.returncode == 0


def test_a_second_signal_ends_the_process_at_once() -> None:
    with child() as (process, url):
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as connection:
            connection.sendall(post("/hold"))
            assert httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 200
            process.send_signal(signal.SIGSTOP)  # so that both wait for it
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
            process.communicate(timeout=5)
        assert process.returncode == 130


def test_a_process_with_few_files_serves_more_clients_than_it_has_files() -> None:
    with child("128") as (_, url), ExitStack() as stack:
        host, _, port = url.removeprefix("http://").partition(":")
        connections = [stack.enter_context(socket.create_connection((host, int(port)), WAIT_S)) for _ in range(300)]
        for connection in connections:
            connection.sendall(get("/health", CLOSE))
        assert [status_of(everything(connection)) for connection in connections] == [200] * 300


def test_a_first_model_that_cannot_be_loaded_ends_the_server() -> None:
    loader = FakeLoader()
    loader.faults["path"] = GGUFError("truncated", "x.gguf", 3, "header", "cut")
    with pytest.raises(GGUFError):
        Server(options_of(), loader=loader).serve_until_told()


def test_an_address_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1 port {port}"):
            Server(options_of(port=port), loader=FakeLoader())


def test_an_engine_that_does_not_end_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = FakeLoader()
    monkeypatch.setattr("ggml_engine.server.run._END_S", 0.2)
    with running(loader=loader) as server:
        wait_for(lambda: server.health() == 200, "the model is loaded")
        loader.close_gate.clear()
    assert not server.server.is_whole
    loader.close_gate.set()


@pytest.mark.parametrize("what", ["session", "work"])
def test_a_call_in_a_thread_that_does_not_end_is_told_of(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    loader, let_go = FakeLoader(), threading.Event()
    begun: list[str] = []

    def hang(*_arguments: object, **_options: object) -> None:
        begun.append(what)
        let_go.wait(2 * WAIT_S)

    async def work(request: Request) -> Response:
        await asyncio.to_thread(hang)
        return JSONResponse({})

    loader.runtime.fork = hang
    monkeypatch.setattr(jobs, "routes", lambda: [Route("/work", work, methods=["POST"])])
    data = post("/work") if what == "work" else post("/v1/sessions/a/fork", b'{"name": "b"}')
    try:
        with ExitStack() as stack, running(jobs, loader, monkeypatch) as server:
            wait_for(lambda: server.health() == 200, "the model is loaded")
            stack.enter_context(server.connect()).sendall(data)
            wait_for(lambda: begun == [what], "it runs")
        assert not server.server.is_whole
    finally:
        let_go.set()


@pytest.mark.parametrize("grace", [0, 2.5])
def test_the_end_takes_less_than_five_seconds_whatever_hangs(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, grace: float
) -> None:
    """A request that runs on, a call in a thread, an answer that nobody reads, a load and a model that do not end."""
    loader, let_go = FakeLoader(), threading.Event()
    given = {"models": ["m=path", "late=other"], "shutdown_grace_s": grace, "write_timeout_s": 60, "keep_alive_s": 60}

    async def busy(request: Request) -> Response:
        await asyncio.to_thread(let_go.wait, 2 * WAIT_S)
        return JSONResponse({})

    async def stubborn(request: Request) -> Response:
        for _ in range(2):  # cancelled once for the end of requests, once for that of connections
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return JSONResponse({})

    own = jobs.routes
    more = [Route("/busy", busy, methods=["POST"]), Route("/stubborn", stubborn, methods=["POST"])]
    monkeypatch.setattr(jobs, "routes", lambda: [*own(), *more])
    try:
        with ExitStack() as stack, running(jobs, loader, monkeypatch, **given) as server:
            wait_for(lambda: server.health() == 200, "the model is loaded")
            loader.gate.clear()
            late = json.dumps({"model": "late", "input": "x"}).encode()
            unread = json.dumps({"put": ["x" * 180_000]}).encode()
            for data in (
                post("/busy"),
                post("/stubborn"),
                post("/hold"),
                post("/stream"),
                post("/v1/embeddings", late),
            ):
                stack.enter_context(server.connect()).sendall(data)
            stack.enter_context(server.connect(rcvbuf=4096)).sendall(post("/stream", unread))
            lifecycle = server.server._lifecycle
            wait_for(lambda: lifecycle.n_running == 5 and len(jobs.streams) == 2, "all of them run")
            loader.hangs = True
            loader.close_gate.clear()
            begun = time.monotonic()
            server.server.stop()
            server.thread.join(WAIT_S)
            assert time.monotonic() - begun < 5
            assert not server.server.is_whole
    finally:
        let_go.set()
        loader.hangs = False
        loader.gate.set()
        loader.close_gate.set()
