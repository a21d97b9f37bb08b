"""A reader that takes nothing: what that costs the others is counted in steps, and it is given up by its bounds.

Over a real `ServingRuntime` and runner, whose executor is a fake that computes a step when it is told to.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

from dialect_fakes import FakeServer, ScriptedText, fake_server, run
from fake_executor import WAIT_S, Gate
from serving_bench import Serving, serving

from ggml_engine.server.sse import MAX_PARTS


class Reader:
    """Stands for a connection: one that takes everything, or one that takes no more than the head of a response."""

    def __init__(self, *, stalls: bool = False) -> None:
        self.takes = asyncio.Event()
        self.stalls = stalls
        self.messages: list[Any] = []
        self.n_aborts = 0

    async def send(self, message: Any) -> None:
        if self.stalls and message["type"] == "http.response.body":
            await self.takes.wait()
        self.messages.append(message)

    def abort(self) -> None:
        self.n_aborts += 1

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    @property
    def said(self) -> str:
        return "".join(re.findall(r'"text": ?"(x*)"', self.text))


async def stream(server: FakeServer, reader: Reader, prompt: str, n_tokens: int) -> None:
    """A stream of so many tokens at most, as the application serves it to this reader."""
    body = json.dumps({"prompt": prompt, "max_tokens": n_tokens, "stream": True}).encode()
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "scheme": "http",
        "query_string": b"", "root_path": "", "http_version": "1.1", "headers": headers, "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1), "state": {"abort_connection": reader.abort},
    }  # fmt: skip
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()
        raise AssertionError

    await server.app(scope, receive, reader.send)


async def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.0005)


async def step(s: Serving, gate: Gate) -> None:
    """Let one forward through, and wait for the next one, or for the end of all requests."""
    n = gate.n_held
    gate.release_one()
    await until(lambda: gate.n_held > n or not s.runtime.stats()["running"])


def steps_of(s: Serving, sequence: int) -> list[int]:
    """The forwards that computed something of a sequence, by their number."""
    return [i for i, forward in enumerate(s.b.executor.forwards) if forward.chunk_of(sequence) is not None]


def bytes_serving() -> Any:
    text = ScriptedText("x" * 4000)
    return serving(text=text, n_vocab=text.n_vocab, capacity=8192)


def test_a_reader_that_stalls_costs_the_others_no_step_and_ends_by_the_number_of_its_events() -> None:
    n_tokens = 40

    async def test(s: Serving) -> None:
        async with fake_server(runtime=s.runtime, write_timeout_s=60) as server:
            slow, quick = Reader(stalls=True), Reader()
            with s.b.executor.holding_forward() as gate:
                stalled = asyncio.create_task(stream(server, slow, "ab", 3000))
                await asyncio.to_thread(gate.wait_held)
                answered = asyncio.create_task(stream(server, quick, "cd", n_tokens))
                await until(lambda: s.runtime.stats()["running"] == 2)
                while not answered.done():
                    await step(s, gate)
                    await asyncio.sleep(0.001)
                assert quick.said == "x" * n_tokens
                assert quick.text.endswith("data: [DONE]\n\n")
                slow_sequence, quick_sequence = (
                    next(
                        chunk.sequence
                        for forward in s.b.executor.forwards
                        for chunk in forward.chunks
                        if chunk.start == 0 and bytes(chunk.tokens) == prompt
                    )
                    for prompt in (b"ab", b"cd")
                )
                mine = steps_of(s, quick_sequence)
                assert len(mine) == n_tokens, "the prompt, and each token but the last"
                assert mine[-1] - mine[0] == n_tokens - 1, "none was computed without it"
                assert not stalled.done()
                assert s.runtime.stats()["running"] == 1, "who stalls is computed for meanwhile"
                while s.runtime.stats()["running"]:
                    await step(s, gate)
                    await asyncio.sleep(0.001)
            n_computed = len(steps_of(s, slow_sequence))
            assert abs(n_computed - MAX_PARTS) <= 4, "each token is an event; so are some comments of the prompt"
            await asyncio.to_thread(s.check_at_rest)
            assert not s.b.executor.cache.used_cells
            slow.takes.set()
            await stalled
            assert MAX_PARTS - 4 <= len(slow.said) <= n_computed, "what waited comes"
            assert '"code": "slow_reader"' in slow.text
            assert slow.text.endswith("data: [DONE]\n\n")

    with bytes_serving() as s:
        run(test(s))


def test_a_reader_that_stalls_in_a_write_is_given_up_by_its_time() -> None:
    async def test(s: Serving) -> None:
        async with fake_server(runtime=s.runtime, write_timeout_s=0.05) as server:
            slow, quick = Reader(stalls=True), Reader()
            with s.b.executor.holding_forward(after=1) as gate:
                stalled = asyncio.create_task(stream(server, slow, "ab", 3000))
                await asyncio.wait_for(stalled, WAIT_S)  # the engine is in a forward, and nothing more comes
                assert slow.n_aborts == 1
                assert not slow.said
                await asyncio.to_thread(gate.wait_held)
            await until(lambda: not s.runtime.stats()["running"])
            assert len(s.b.executor.forwards) == 2, "nothing more was computed for it"
            await asyncio.to_thread(s.check_at_rest)
            assert s.runtime.stats()["cancelled"] == 1
            await asyncio.wait_for(stream(server, quick, "cd", 40), WAIT_S)
            assert quick.said == "x" * 40

    with bytes_serving() as s:
        run(test(s))
