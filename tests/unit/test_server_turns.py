"""Embeddings and tokenisations have turns: so many at once, a bounded queue, a share of it for each key."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from dialect_fakes import Bytes, FakeServer, fake_server, run
from server_fakes import WAIT_S

from ggml_engine.errors import QueueFullError
from ggml_engine.server import app as application
from ggml_engine.server import embeddings
from ggml_engine.server.turns import Turns

MESSAGES = [{"role": "user", "content": "hi"}]
TOKEN_BODIES: dict[str, dict[str, Any]] = {
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [104, 105]},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}


async def until(condition: Callable[[], object]) -> None:
    """Until it holds."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


class TestTurns:
    def test_no_more_at_once_than_may_and_partitions_one_after_the_other(self) -> None:
        async def test() -> None:
            turns, order, gate, most = Turns(2, 8), [], asyncio.Event(), 0

            async def work(name: str) -> None:
                nonlocal most
                async with turns.turn(name[0]):
                    order.append(name)
                    most = max(most, turns.n_running)
                    await gate.wait()

            tasks = []
            for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
                tasks.append(asyncio.create_task(work(name)))
                await asyncio.sleep(0)
            assert (turns.n_running, turns.n_waiting) == (2, 5)
            gate.set()
            await asyncio.gather(*tasks)
            assert order == ["a1", "a2", "a3", "b1", "c1", "a4", "b2"]
            assert most == 2
            assert (turns.n_running, turns.n_waiting) == (0, 0)

        run(test())

    def test_a_full_queue_refuses_who_has_its_share_and_says_when_to_come_again(self) -> None:
        async def test() -> None:
            now = [100.0]
            turns, gate = Turns(1, 2, clock=lambda: now[0]), asyncio.Event()

            async def work(partition: str) -> None:
                async with turns.turn(partition):
                    await gate.wait()

            async def all_of(*partitions: str) -> list[asyncio.Task[None]]:
                gate.clear()
                tasks = [asyncio.create_task(work(partition)) for partition in partitions]
                await asyncio.sleep(0)
                return tasks

            tasks = await all_of("a", "a", "a", "b")
            with pytest.raises(QueueFullError, match="3 requests wait already") as refused:
                await work("a")
            assert refused.value.retry_after_s == 1
            now[0] += 20
            gate.set()
            await asyncio.gather(*tasks)
            tasks = await all_of("a", "a", "a")
            with pytest.raises(QueueFullError) as refused:
                await work("a")
            assert refused.value.retry_after_s == 5, "the last ones took 20, 0, 0 and 0 seconds"
            gate.set()
            await asyncio.gather(*tasks)

        run(test())

    @pytest.mark.parametrize("is_given_it", [False, True])
    def test_who_leaves_gives_its_turn_on(self, is_given_it: bool) -> None:
        async def test() -> None:
            turns, gate = Turns(1, 8), asyncio.Event()
            begun: list[str] = []

            async def work(name: str) -> None:
                async with turns.turn(""):
                    begun.append(name)
                    await gate.wait()

            tasks = {name: asyncio.create_task(work(name)) for name in ("first", "leaves", "last")}
            await asyncio.sleep(0)
            if is_given_it:
                gate.set()
                while turns.n_waiting == 2:
                    await asyncio.sleep(0)
                assert begun == ["first"]
            tasks["leaves"].cancel()
            gate.set()
            await asyncio.gather(tasks["first"], tasks["last"])
            assert tasks["leaves"].cancelled()
            assert begun == ["first", "last"]
            assert (turns.n_running, turns.n_waiting) == (0, 0)

        run(test())

    def test_what_fails_gives_its_turn_back(self) -> None:
        async def test() -> None:
            turns = Turns(1, 0)
            for _ in range(3):
                with pytest.raises(ZeroDivisionError):
                    async with turns.turn(""):
                        raise ZeroDivisionError
            assert turns.n_running == 0

        run(test())


# ---- over HTTP


class HeldBytes(Bytes):
    """A vocabulary that holds whoever reads or writes a text."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.n_held = self.most_held = 0
        self._lock = threading.Lock()

    def _hold(self) -> None:
        with self._lock:
            self.n_held += 1
            self.most_held = max(self.most_held, self.n_held)
        assert self.gate.wait(WAIT_S)
        with self._lock:
            self.n_held -= 1

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> Any:
        self._hold()
        return super().encode(text, add_special=add_special, parse_special=parse_special)

    def decode(self, tokens: Any, **options: bool) -> str:
        self._hold()
        return super().decode(tokens)


def held(server: FakeServer) -> HeldBytes:
    """The server's vocabulary, which holds from here on."""
    vocabulary = HeldBytes()
    server.app.state.host.loaded()[0].engine.vocabulary = vocabulary
    return vocabulary


def refused(response: httpx.Response, path: str) -> None:
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    error = response.json()["error"]
    assert error["type"] == "rate_limit_error"
    if path.startswith("/v1/messages"):
        assert response.json()["type"] == "error"
    else:
        assert error["code"] == "queue_full"
    assert "requests wait already" in error["message"]


@pytest.mark.parametrize("path", TOKEN_BODIES)
def test_so_many_texts_are_read_at_once_and_the_others_wait_or_are_refused(path: str) -> None:
    n_threads = application._TOKEN_THREADS

    async def test() -> None:
        async with fake_server(max_queue=3) as server:
            await until(server.app.state.host.loaded)
            vocabulary = held(server)
            tasks = [asyncio.create_task(server.post(path, **TOKEN_BODIES[path])) for _ in range(n_threads + 3)]
            await until(lambda: vocabulary.n_held == n_threads)
            turns = server.app.state.token_turns
            await until(lambda: turns.n_waiting == 3)
            refused(await server.post(path, **TOKEN_BODIES[path]), path)
            begun = time.monotonic()
            assert (await server.client.get("/health")).status_code == 200
            assert time.monotonic() - begun < 1
            found = await server.post("/v1/completions", prompt=[104, 105])
            assert found.json()["choices"][0]["text"] == "hello", "generations do not wait for them"
            lines = (await server.client.get("/metrics")).text.splitlines()
            assert 'ggml_engine_queued_calls{kind="tokens"} 3.0' in lines
            assert f'ggml_engine_active_calls{{kind="tokens"}} {n_threads}.0' in lines
            assert 'ggml_engine_queued_calls{kind="embeddings"} 0.0' in lines
            tasks.pop().cancel()
            await until(lambda: turns.n_waiting == 2)
            vocabulary.gate.set()
            assert [response.status_code for response in await asyncio.gather(*tasks)] == [200] * (n_threads + 2)
            assert vocabulary.most_held == n_threads
            assert (turns.n_running, turns.n_waiting) == (0, 0)

    run(test())


def test_clients_that_leave_take_no_more_threads_than_there_are() -> None:
    async def test() -> None:
        async with fake_server() as server:
            await until(server.app.state.host.loaded)
            vocabulary = held(server)
            for _ in range(20):
                task = asyncio.create_task(server.post("/tokenize", content="hi"))
                await asyncio.sleep(0.005)
                task.cancel()
            turns = server.app.state.token_turns
            await until(lambda: turns.n_waiting == 0)
            assert turns.n_running == vocabulary.n_held == application._TOKEN_THREADS, "until their threads are free"
            assert server.app.state.workers[1]._threads._work_queue.empty()
            found = await server.post("/v1/completions", prompt=[104, 105])
            assert found.status_code == 200
            vocabulary.gate.set()
            assert (await server.post("/tokenize", content="hi")).json() == {"tokens": [104, 105]}
            assert vocabulary.most_held <= application._TOKEN_THREADS

    run(test())


def test_so_many_embeddings_are_computed_at_once_and_keys_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_ENGINE_API_KEY", "greedy modest")
    monkeypatch.setattr(embeddings, "_pooling_of", lambda _model: "mean")
    n_at_once = application._EMBEDDINGS_AT_ONCE
    gates: list[asyncio.Event] = []

    async def computed(_model: Any, texts: list[Any], _pooling: str, turns: Turns, partition: str) -> Any:
        async with turns.turn(partition, goes_on=True):
            gates.append(asyncio.Event())
            await gates[-1].wait()
        return Bytes().encode(bytes(texts[0].tolist()).decode(), add_special=True, parse_special=False)[None]

    monkeypatch.setattr(embeddings, "_computed", computed)

    async def test() -> None:
        async with fake_server(max_queue=2, api_key_env="GGML_ENGINE_API_KEY") as server:
            await until(server.app.state.host.loaded)
            ended: list[str] = []

            async def embed(key: str) -> httpx.Response:
                response = await server.post("/v1/embeddings", {"x-api-key": key}, input="a")
                ended.append(key)
                return response

            turns = server.app.state.embedding_turns
            tasks = [asyncio.create_task(embed("greedy")) for _ in range(n_at_once + 2)]
            await until(lambda: turns.n_waiting == 2 and len(gates) == n_at_once)
            refused(await embed("greedy"), "/v1/embeddings")
            tasks.append(asyncio.create_task(embed("modest")))
            await until(lambda: turns.n_waiting == 3)
            ended.clear()
            for n in range(len(tasks)):
                await until(lambda n=n: len(gates) > n)
                gates[n].set()
                await until(lambda n=n: len(ended) > n)
            assert [response.status_code for response in await asyncio.gather(*tasks)] == [200] * len(tasks)
            assert ended == ["greedy"] * (n_at_once + 2) + ["modest"], "it waited for each of its two turns"

    run(test())


class Long:
    """An embedding of as many texts as `n`, each of two steps."""

    def __init__(self, texts: list[Any], _pooling: str) -> None:
        self.n_texts, self.n_done, self.is_begun = int(texts[0].size), 0, False

    def check_length(self, _most: int) -> None:
        """None is too long."""

    def step(self, _executor: Any, *, begins: bool = True) -> bool:
        assert begins or self.is_begun
        self.n_done += self.is_begun
        self.is_begun = not self.is_begun
        return self.is_begun or self.n_done < self.n_texts

    def abandon(self, _executor: Any) -> None:
        """Holds nothing."""

    def result(self) -> Any:
        assert self.n_done == self.n_texts
        return np.ones((1, 2), np.float32)


def test_one_text_waits_for_no_request_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_ENGINE_API_KEY", "greedy modest")
    monkeypatch.setattr(embeddings, "_pooling_of", lambda _model: "mean")
    monkeypatch.setattr(embeddings, "Embedding", Long)
    n_at_once, n_steps = application._EMBEDDINGS_AT_ONCE, 0

    async def computed(step: Callable[[Any], bool]) -> bool:
        nonlocal n_steps
        n_steps += 1
        await asyncio.sleep(0.001)
        return step(None)

    async def test() -> None:
        async with fake_server(max_queue=4, api_key_env="GGML_ENGINE_API_KEY") as server:
            await until(server.app.state.host.loaded)
            engine = server.app.state.host.loaded()[0].engine
            engine.runner = lambda: SimpleNamespace(compute_async=lambda step: asyncio.ensure_future(computed(step)))

            def embed(key: str, n: int) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(server.post("/v1/embeddings", {"x-api-key": key}, input="a" * n))

            turns = server.app.state.embedding_turns
            greedy = [embed("greedy", 400) for _ in range(n_at_once + 2)]
            await until(lambda: n_steps > 40)
            begun_by_then = n_steps
            assert (await embed("modest", 1)).status_code == 200
            assert n_steps - begun_by_then < 800, "of 4800"
            assert not any(task.done() for task in greedy)
            greedy.pop().cancel()
            await until(lambda: turns.n_running + turns.n_waiting == n_at_once + 1)
            assert [response.status_code for response in await asyncio.gather(*greedy)] == [200] * (n_at_once + 1)
            assert (turns.n_running, turns.n_waiting) == (0, 0)

    run(test())
