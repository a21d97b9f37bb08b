"""A server of its own process under load: many callers, callers that leave in every state, strangers' bodies, its end.

Counts are asserted, and the two times that the server promises: /health within a second, cells back within two.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from load_clients import (
    WAIT_S,
    HealthProbe,
    Response,
    ServerProcess,
    allow_files,
    ask,
    completion,
    n_tokens_of,
    post,
    send,
    server_process,
    wait_until,
)

pytestmark = pytest.mark.slow

HEALTH_S = 1.0
CELLS_BACK_S = 2.0
N_PROMPT = 24  # tokens of most prompts, so that cells can be counted
COMPLETIONS = "/v1/completions"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` that ends."""
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_S))


@contextlib.contextmanager
def quiet_server(directory: Path, *options: str, n_cells: int = 4096) -> Iterator[ServerProcess]:
    """A server whose log has a line for each request and nothing that went wrong."""
    with server_process(directory, "--ctx", str(n_cells), "--threads", "1", *options) as server:
        yield server
        assert_quiet(server)


def assert_quiet(server: ServerProcess) -> None:
    log = server.log
    assert server.child.poll() in (None, 0), log
    assert not re.search(r"Traceback|[Ee]xception|[Ee]rror|Task |socket\.send", log), log


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server as it is by default, but for times that a test would have to wait for."""
    with quiet_server(tmp_path_factory.mktemp("busy"), "--write-timeout-s", "2") as server:
        yield server


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of two places and two that wait, which keeps no snapshots: at rest no cell is in use."""
    options = ("--max-requests", "2", "--max-queue", "2", "--prefix-cache-entries", "0", "--max-batch-tokens", "64")
    with quiet_server(tmp_path_factory.mktemp("narrow"), *options) as server:
        yield server


# ---- what is left


def is_idle(now: dict[str, float]) -> bool:
    """Nothing but the scrape itself runs."""
    left = now["active_requests"] + now["queued_requests"] + now["capture_lanes_used"]
    return left == 0 and now["running_requests"] == 1


def assert_soon_at_rest(server: ServerProcess, cells_of_snapshot: int = 0, named: int = 0) -> None:
    """Within two seconds no request and no lane is left, and cells are those of snapshots and named sessions."""

    def is_at_rest() -> bool:
        now = server.metrics()
        return is_idle(now) and now["cells_used"] == cells_of_snapshot * now["snapshots"] + named

    wait_until(is_at_rest, CELLS_BACK_S, server.metrics)


async def read_stream(response: Response, leave_after: int | None = None) -> list[str]:
    """Events of a stream, comments left out; after so many the client is gone."""
    assert response.status == 200, await response.body()
    events: list[str] = []
    async for event in response.events():
        if not event.startswith(":"):
            events.append(event)
        if leave_after is not None and len(events) >= leave_after:
            response.leave()
            return events
    await response.close()
    return events


async def streamed(server: ServerProcess, body: dict[str, Any], leave_after: int | None = None) -> list[str]:
    return await read_stream(await post(server.port, COMPLETIONS, {**body, **STREAMED}), leave_after)


def assert_whole(events: list[str], n_tokens: int) -> None:
    """A stream that says that it has so many tokens, and ends as it should."""
    *_, ended, counted, done = events
    assert done == "[DONE]"
    assert json.loads(ended)["choices"][0]["finish_reason"] == "length"
    assert json.loads(counted)["usage"]["completion_tokens"] == n_tokens


# ---- many


def test_of_a_hundred_streams_thirty_are_dropped_and_the_others_are_whole(busy: ServerProcess) -> None:
    rng = random.Random(8)
    dropped = set(rng.sample(range(100), 30))

    async def one(i: int) -> None:
        leave_after = rng.randint(0, 20) if i in dropped else None
        body = completion(i, N_PROMPT, 2000 if i in dropped else 20)  # no dropped one ends in time by itself
        if leave_after == 0:
            response = await send(busy.port, COMPLETIONS, {**body, **STREAMED})
            await asyncio.sleep(rng.random() * 3)
            response.leave()
            return
        events = await streamed(busy, body, leave_after)
        if leave_after is None:
            assert_whole(events, 20)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(i) for i in range(100)))

    with HealthProbe(busy) as probe:
        run(all_of_them())
    assert_soon_at_rest(busy, N_PROMPT)
    assert busy.metrics()["snapshots"] >= 50
    assert not probe.failures
    assert max(probe.seconds) < HEALTH_S


def test_a_thousand_idle_connections_keep_nobody_from_their_answers(busy: ServerProcess) -> None:
    allow_files(1200)
    before = busy.n_fds()
    idle = [socket.create_connection(("127.0.0.1", busy.port), timeout=WAIT_S) for _ in range(1000)]
    try:
        with HealthProbe(busy) as probe:
            wait_until(lambda: busy.n_fds() >= before + 1000, WAIT_S, busy.n_fds)

            async def some() -> None:
                found = await asyncio.gather(*(streamed(busy, completion(i, N_PROMPT, 20)) for i in range(4)))
                for events in found:
                    assert_whole(events, 20)

            run(some())
    finally:
        for connection in idle:
            connection.close()
    wait_until(lambda: busy.n_fds() <= before, CELLS_BACK_S, busy.n_fds)
    assert not probe.failures
    assert max(probe.seconds) < HEALTH_S
    assert_soon_at_rest(busy, N_PROMPT)


def test_a_reader_that_takes_nothing_is_given_up_and_the_others_get_all(busy: ServerProcess) -> None:
    before = busy.metrics()["tokens_total"]
    lost = completion(300, N_PROMPT, 3000, logprobs=5, **STREAMED)
    data = json.dumps(lost).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.socket() as slow, HealthProbe(busy) as probe:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", busy.port))
        slow.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: busy.metrics()["active_requests"] == 1, WAIT_S, busy.metrics)

        async def others() -> None:
            found = await asyncio.gather(*(streamed(busy, completion(301 + i, N_PROMPT, 40)) for i in range(6)))
            for events in found:
                assert_whole(events, 40)

        run(others())
        wait_until(lambda: is_idle(busy.metrics()), WAIT_S, busy.metrics)
        assert not probe.failures
        assert max(probe.seconds) < HEALTH_S
    assert busy.metrics()["tokens_total"] - before < 6 * (40 + N_PROMPT) + N_PROMPT + 2000
    assert_soon_at_rest(busy, N_PROMPT)


# ---- strangers

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": False}),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 1, "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        ], "tool_choice": "auto", "stop": ["x"], "logit_bias": {"5": 1.0}, "response_format": {"type": "text"},
    }),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 1, "stream": True, "logprobs": 1, "n": 1, "temperature": 0.5}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 1, "store": False}),
    ("/v1/messages", {"model": "smollm2", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/embeddings", {"model": "smollm2", "input": ["hi"], "encoding_format": "float"}),
    ("/tokenize", {"content": "hi", "add_special": True}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/sessions/nobody/fork", {"name": "other", "at": 1}),
    ("/v1/sessions/nobody/rewind", {"to": 1}),
    ("/v1/sessions/nobody/save", {"file": "f"}),
    ("/v1/sessions/nobody/load", {"file": "f"}),
]  # fmt: skip
STRANGE: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**30, 1.5, -0.0, 1e308, "", "x", "\0", "é" * 300, [], [[]], {}, {"a": {}}, [None],
    ["x", 1], {"type": "x"}, "auto", "required", ["\ud800"], [{"role": "x"}], [{"role": "tool", "content": None}],
]  # fmt: skip


def spoilt(body: dict[str, Any], rng: random.Random) -> bytes:
    """A body with something wrong in it, most of the time."""
    whole = json.dumps(body).encode()
    at = rng.randrange(len(whole))
    others: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randrange(200)),
        lambda: whole[:at],
        lambda: whole[:at] + rng.randbytes(rng.randint(1, 4)) + whole[at + rng.randrange(3) :],
        lambda: b'{"a":' * rng.choice([1, 64, 5000]) + b"[" * rng.choice([1, 65, 100_000]),
        lambda: (
            whole[:-1] + rng.choice([b', "x": NaN}', b', "x": 1e999}', b', "stream": 1, "stream": 2}', b', "x":1}'])
        ),
        lambda: json.dumps(rng.choice(STRANGE)).encode(),
        lambda: with_a_strange_value(whole, rng),
        lambda: with_a_strange_value(whole, rng),
    ]
    return rng.choice(others)()


def with_a_strange_value(whole: bytes, rng: random.Random) -> bytes:
    """The body with another name or value somewhere in it."""
    body = json.loads(whole)
    target: Any = body
    while True:
        keys = list(target) if isinstance(target, dict) else range(len(target))
        key = rng.choice(keys)
        inner = target[key]
        if not (isinstance(inner, dict | list) and inner and rng.random() < 0.6):
            break
        target = inner
    if key in ("max_tokens", "max_output_tokens"):
        target[key] = rng.choice(["", "x", [], {}, 1.5, True, -2, 0, 2**63])  # none that means many, as -1 does
    elif isinstance(target, dict) and rng.random() < 0.5:
        target[f"{key}_"] = target.pop(key)
    else:
        target[key] = rng.choice(STRANGE)
    return json.dumps(body).encode()


def test_two_thousand_malformed_bodies_are_no_fault_of_the_server(busy: ServerProcess) -> None:
    rng = random.Random(2000)
    cases = [(path, spoilt(body, rng)) for path, body in (rng.choice(BODIES) for _ in range(2000))]
    statuses: dict[int, int] = {}
    waiting = iter(cases)

    async def some() -> None:
        for path, data in waiting:
            status, answer = await ask(busy.port, path, data)
            statuses[status] = statuses.get(status, 0) + 1
            assert status < 500, (path, data[:400], answer)
            if status != 200:
                assert json.loads(answer)["error"]["message"]

    async def all_of_them() -> None:
        await asyncio.gather(*(some() for _ in range(16)))

    with HealthProbe(busy) as probe:
        run(all_of_them())
    assert sum(statuses.values()) == 2000
    assert statuses[400] > 1500, statuses
    assert not probe.failures
    assert max(probe.seconds) < HEALTH_S
    wait_until(lambda: is_idle(busy.metrics()), CELLS_BACK_S, busy.metrics)


# ---- clients that leave


def keep_busy(narrow: ServerProcess, n: int) -> Coroutine[Any, Any, list[Response]]:
    """So many streams that decode for a long time."""

    async def begin() -> list[Response]:
        found = []
        for i in range(n):
            response = await post(narrow.port, COMPLETIONS, completion(400 + i, N_PROMPT, 1500, logprobs=0, **STREAMED))
            assert response.status == 200, await response.body()
            async for event in response.events():
                if not event.startswith(":"):
                    break
            found.append(response)
        return found

    return begin()


async def until(server: ServerProcess, name: str, n: int, timeout: float = WAIT_S) -> None:
    """A gauge has this value."""
    await asyncio.to_thread(wait_until, lambda: server.metrics()[name] == n, timeout, server.metrics)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_clients_that_leave_while_they_wait_are_out_of_the_queue(narrow: ServerProcess, is_streamed: bool) -> None:
    async def go() -> None:
        running = await keep_busy(narrow, 2)
        waiting = [
            await send(narrow.port, COMPLETIONS, completion(410 + i, N_PROMPT, 9, stream=is_streamed)) for i in range(2)
        ]
        await until(narrow, "queued_requests", 2)
        for response in waiting:
            response.leave()
        await until(narrow, "queued_requests", 0, CELLS_BACK_S)
        assert narrow.metrics()["active_requests"] == 2  # nobody else's has ended
        for response in running:
            response.leave()

    run(go())
    assert_soon_at_rest(narrow)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_clients_that_leave_in_the_prefill_give_their_cells_back(narrow: ServerProcess, is_streamed: bool) -> None:
    async def go() -> None:
        response = await send(narrow.port, COMPLETIONS, completion(420, 3900, 9, stream=is_streamed))
        await asyncio.to_thread(wait_until, lambda: narrow.metrics()["cells_used"] > 100, WAIT_S, narrow.metrics)
        assert narrow.metrics()["cells_used"] < 3900
        response.leave()

    run(go())
    assert_soon_at_rest(narrow)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_clients_that_leave_while_it_decodes_give_their_cells_back(narrow: ServerProcess, is_streamed: bool) -> None:
    async def go() -> None:
        body = completion(430, N_PROMPT, 3000, stream=is_streamed, n=2)
        response = await send(narrow.port, COMPLETIONS, body)
        await asyncio.to_thread(
            wait_until, lambda: narrow.metrics()["cells_used"] > N_PROMPT + 20, WAIT_S, narrow.metrics
        )
        assert narrow.metrics()["active_requests"] == 2
        response.leave()

    run(go())
    assert_soon_at_rest(narrow)


def test_clients_that_leave_between_the_last_token_and_the_end_leave_nothing(narrow: ServerProcess) -> None:
    async def go(i: int) -> None:
        response = await post(narrow.port, COMPLETIONS, completion(440 + i, N_PROMPT, 4, logprobs=0, **STREAMED))
        n_tokens = 0
        async for event in response.events():
            n_tokens += 0 if event.startswith(":") else n_tokens_of(event)
            if n_tokens == 4:
                break
        response.leave()

    for i in range(25):
        run(go(i))
        assert_soon_at_rest(narrow)


def test_sessions_whose_clients_left_hold_what_they_say_and_nothing_more(narrow: ServerProcess) -> None:
    rng = random.Random(4)

    async def one(i: int) -> None:
        body = completion(500 + i, N_PROMPT, 12, session_id=f"s{i}", logprobs=0)
        while True:
            response = await post(narrow.port, COMPLETIONS, {**body, **STREAMED})
            if response.status == 200:
                break
            assert response.status == 429
            await response.close()
            await asyncio.sleep(0.02)
        await read_stream(response, rng.choice([None, None, 1, 5]))

    async def all_of_them() -> None:
        await asyncio.gather(*(one(i) for i in range(20)))

    run(all_of_them())
    wait_until(lambda: is_idle(narrow.metrics()), CELLS_BACK_S, narrow.metrics)
    sessions = json.loads(narrow.get("/v1/sessions")[1])["data"]
    assert_soon_at_rest(narrow, named=sum(each["position"] for each in sessions))
    assert sum(each["position"] >= N_PROMPT for each in sessions) >= 10
    for each in sessions:
        assert narrow.get(f"/v1/sessions/{each['id']}", "DELETE")[0] == 200
    assert_soon_at_rest(narrow)


# ---- too much, and the end


def test_beyond_the_queue_there_is_429_with_retry_after(narrow: ServerProcess) -> None:
    async def go() -> None:
        running = await keep_busy(narrow, 2)
        waiting = [await send(narrow.port, COMPLETIONS, completion(450 + i, N_PROMPT, 2)) for i in range(2)]
        await until(narrow, "queued_requests", 2)
        for is_streamed in (True, False):
            refused = await post(narrow.port, COMPLETIONS, completion(460, N_PROMPT, 2, stream=is_streamed))
            assert refused.status == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert json.loads(await refused.body())["error"]["code"] == "queue_full"
            await refused.close()
        for response in running:
            response.leave()
        for response in waiting:  # who was let in is served
            await response.read_head()
            assert response.status == 200
            assert json.loads(await response.body())["usage"]["completion_tokens"] == 2
            await response.close()

    run(go())
    assert_soon_at_rest(narrow)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_end_under_load_ends_every_stream_and_itself(
    tmp_path: Path, number: signal.Signals
) -> None:
    with quiet_server(tmp_path, "--max-requests", "8") as server:
        ends: list[list[str]] = []
        began = 0.0

        async def one(i: int) -> None:
            response = await post(server.port, COMPLETIONS, completion(i, N_PROMPT, 3000, **STREAMED))
            ends.append((await read_stream(response))[-2:])

        async def whole() -> tuple[int, bytes]:
            return await ask(server.port, COMPLETIONS, completion(90, N_PROMPT, 3000))

        async def go() -> tuple[int, bytes]:
            nonlocal began
            streams = [asyncio.create_task(one(i)) for i in range(20)]
            other = asyncio.create_task(whole())
            await until(server, "active_requests", 8)
            await until(server, "queued_requests", 13)
            began = time.monotonic()
            server.child.send_signal(number)
            await asyncio.gather(*streams)
            return await other

        status, answer = run(go())
        assert server.child.wait(WAIT_S) == 0
        assert time.monotonic() - began < 5
    assert status == 503
    assert json.loads(answer)["error"]["code"] == "shutting_down"
    assert len(ends) == 20
    for error, done in ends:
        assert json.loads(error)["error"]["code"] == "shutting_down"
        assert done == "[DONE]"


# ---- for long


def test_what_the_process_holds_does_not_grow_with_what_it_served(tmp_path: Path) -> None:
    """One after the other: many at once come in ever new numbers, for which graphs are kept up to their bound."""
    rng = random.Random(1)
    with quiet_server(tmp_path, "--prefix-cache-entries", "4", "--max-batch-tokens", "64", n_cells=512) as server:

        async def one(i: int) -> None:
            kind = i % 4
            body = completion(i, N_PROMPT, 3, logprobs=2)
            if kind == 0:
                await streamed(server, {**body, "max_tokens": 400}, leave_after=rng.randint(1, 3))
            elif kind == 1:
                assert (await ask(server.port, COMPLETIONS, body))[0] == 200
            elif kind == 2:
                assert (await ask(server.port, COMPLETIONS, b"{"))[0] == 400
            else:
                assert_whole(await streamed(server, body), 3)

        async def some(n: int) -> None:
            for _ in range(n):
                await one(rng.randrange(10_000))

        run(some(60))
        assert_soon_at_rest(server, N_PROMPT)
        rss, n_fds, n_threads = server.rss(), server.n_fds(), server.n_threads()
        run(some(200))
        assert_soon_at_rest(server, N_PROMPT)
        assert server.rss() - rss < 4 << 20  # less than 21 KB for each
        wait_until(lambda: server.n_fds() <= n_fds, CELLS_BACK_S, server.n_fds)
        assert server.n_threads() <= n_threads


@pytest.mark.source_tree
def test_the_script_that_measures_a_server_under_load_prints_its_tables() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "server_load.py"
    command = [sys.executable, str(script), "--turns", "1", "--tokens", "4", "--streams", "2", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\| \S.*\d+ \(\d+ to \d+\)", done.stdout, re.MULTILINE)) == 3 + 4
    assert re.search(r"/health while they run: \d+ answers, .* 0 failed", done.stdout)
