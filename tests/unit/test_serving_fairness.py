"""Partitions in one queue: turns between them, a share for each, and two keys of a server that wait in it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from control_bench import PROMPT
from dialect_fakes import Bytes
from fake_executor import WAIT_S
from server_fakes import client_of, options_of, run
from serving_bench import Ear, Serving, serving

from ggml_engine.errors import QueueFullError, SessionBusyError
from ggml_engine.server.app import create_app
from ggml_engine.server.hosted_model import HostedModel, ModelSize
from ggml_engine.serving.shares import Shares
from ggml_engine.serving.waiting import FairQueue


class Noting(Ear):
    """Notes a name at the end of its request."""

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__()
        self._name, self._order = name, order

    def on_settled(self, index: int, choice: Any) -> None:
        self._order.append(self._name)


def ends(s: Serving, *names: str, **options: Any) -> list[str]:
    """The order in which requests end that wait behind one; a name's first letter is its partition."""
    order: list[str] = []
    with s.b.executor.holding_forward() as gate:
        replies = [s.submit()]
        gate.wait_held()
        for name in names:
            replies.append(s.submit([1, 2], 2, Noting(name, order), partition=name[0], **options))
    for reply in replies:
        assert reply.result(WAIT_S)
    s.drain()
    return order


class TestTurns:
    def test_partitions_take_turns_and_each_keeps_its_order(self) -> None:
        with serving(max_requests=1) as s:
            assert ends(s, "a1", "a2", "a3", "a4", "b1", "c1", "b2") == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]

    def test_one_partition_alone_is_first_come_first_served(self) -> None:
        with serving(max_requests=1) as s:
            assert ends(s, *(f"a{i}" for i in range(6))) == [f"a{i}" for i in range(6)]

    def test_who_comes_again_waits_for_all_others(self) -> None:
        queue: FairQueue[str] = FairQueue(8)
        for name in ("a1", "b1", "b2", "c1"):
            queue.put(name[0], name)
        assert queue.take() == "a1"
        queue.put("a", "a2")
        assert [queue.take() for _ in range(4)] == ["b1", "c1", "a2", "b2"]
        assert queue.first() is None
        assert len(queue) == 0

    def test_one_whose_turn_it_is_and_that_does_not_fit_is_not_overtaken(self) -> None:
        order: list[str] = []
        with serving(max_requests=2) as s:
            with s.b.executor.holding_forward() as gate:
                first = [s.submit([7, 8], 2), s.submit([7, 9], 20)]
                gate.wait_held()
                wide = s.submit([1, 2], 1, Noting("wide", order), n=2, partition="a")
                narrow = s.submit([1, 3], 1, Noting("narrow", order), partition="b")
            for reply in (*first, wide, narrow):
                assert reply.result(WAIT_S)
        assert order == ["wide", "wide", "narrow"]

    def test_a_cancel_gives_the_turn_on(self) -> None:
        order: list[str] = []
        with serving(max_requests=1) as s:
            with s.b.executor.holding_forward() as gate:
                first = s.submit()
                gate.wait_held()
                replies = {
                    name: s.submit([1, 2], 2, Noting(name, order), partition=name[0]) for name in ("a1", "a2", "b1")
                }
                replies["a1"].cancel()
                assert replies["a1"].wait(WAIT_S)
                assert s.runtime.stats()["waiting"] == 2
            for reply in (first, replies["a2"], replies["b1"]):
                assert reply.result(WAIT_S)
        assert order == ["a1", "a2", "b1"]

    def test_a_named_session_has_one_request_at_a_time_whosever_turn_it_is(self) -> None:
        with serving(max_requests=1) as s:
            with s.b.executor.holding_forward() as gate:
                replies = [s.submit()]
                gate.wait_held()
                replies += [s.submit(session="s", partition=partition) for partition in ("a", "b")]
                for partition in ("a", "b"):
                    with pytest.raises(SessionBusyError):
                        s.submit(session="s", partition=partition)
            for reply in replies:
                assert reply.result(WAIT_S)


class TestShares:
    def test_one_partition_has_the_whole_queue(self) -> None:
        with serving(max_requests=1, max_queue=4) as s:
            with s.b.executor.holding_forward() as gate:
                replies = [s.submit(partition="a")]
                gate.wait_held()
                replies += [s.submit(partition="a") for _ in range(4)]
                with pytest.raises(QueueFullError):
                    s.submit(partition="a")
            for reply in replies:
                assert reply.result(WAIT_S)

    def test_a_full_queue_has_a_share_for_another_and_nobody_loses_a_place(self) -> None:
        order: list[str] = []
        with serving(max_requests=1, max_queue=4) as s:
            with s.b.executor.holding_forward() as gate:
                replies = [s.submit(partition="a")]
                gate.wait_held()

                def submit(name: str) -> None:
                    replies.append(s.submit([1, 2], 2, Noting(name, order), partition=name[0]))

                for name in ("a1", "a2", "a3", "a4", "b1", "b2"):
                    submit(name)
                for partition in ("a", "b"):
                    with pytest.raises(QueueFullError, match="6 requests wait already"):
                        s.submit(partition=partition)
                submit("c1")
                assert s.runtime.stats()["waiting"] == 7
            for reply in replies:
                assert reply.result(WAIT_S)
        assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]

    def test_a_queue_for_nobody_has_no_share_either(self) -> None:
        with serving(max_requests=1, max_queue=0) as s:
            with s.b.executor.holding_forward() as gate:
                reply = s.submit(partition="a")
                gate.wait_held()
                with pytest.raises(QueueFullError):
                    s.submit(partition="b")
            assert reply.result(WAIT_S)

    @pytest.mark.parametrize("seed", range(20))
    def test_what_is_promised_holds_whatever_comes_and_goes(self, seed: int) -> None:
        rng = random.Random(seed)
        most, names = rng.choice([5, 12, 64]), "abcd"[: rng.randint(1, 4)]
        bound = most * sum(1 / n for n in range(1, len(names) + 1))
        shares, held = Shares(most), dict.fromkeys(names, 0)
        n_refused = 0
        for _ in range(3000):
            name = rng.choice(names)
            if rng.random() < 0.6:
                n = rng.randint(1, 3)
                if shares.has_room(name, n):
                    shares.take(name, n)
                    held[name] += n
                else:
                    n_refused += 1
                    assert held[name] + n > most // len(names), "its share was refused"
                    assert sum(held.values()) + n > most, "there was room"
            elif held[name]:
                n = min(held[name], rng.randint(1, 3))
                shares.give_back(name, n)
                held[name] -= n
            assert shares.total == sum(held.values()) <= bound
            assert all(shares.held(each) == n for each, n in held.items())
        assert n_refused


# ---- over HTTP


class RuntimeLoader:
    """A loader of one model: a runtime over the fake executor."""

    def __init__(self, s: Serving) -> None:
        self._runtime = s.runtime

    def measure(self, path: str) -> ModelSize:
        return ModelSize(1, 0)

    def load(self, name: str, path: str, cancel: Callable[[], bool]) -> HostedModel:
        limit = self._runtime.runner.executor.capacity
        engine = SimpleNamespace(vocabulary=Bytes(), executor=SimpleNamespace(max_positions=limit, stats=dict))
        return HostedModel(name, engine, self._runtime, lambda _timeout: True)


def test_a_key_whose_requests_fill_the_queue_keeps_no_other_key_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_ENGINE_API_KEY", "greedy modest")

    async def ask(s: Serving, order: list[str]) -> None:
        app = create_app(options_of(max_requests=1, max_queue=4), loader=RuntimeLoader(s))
        async with client_of(app) as client:

            async def complete(key: str) -> Any:
                body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
                response = await client.post("/v1/completions", json=body, headers={"x-api-key": key})
                order.append(f"{key} {response.status_code}")
                return response

            async def send(key: str, n_waiting: int) -> asyncio.Task[Any]:
                task = asyncio.create_task(complete(key))
                while s.runtime.stats()["waiting"] < n_waiting:
                    await asyncio.sleep(0.001)
                return task

            with s.b.executor.holding_forward() as gate:
                tasks = [await send("greedy", 0)]
                await asyncio.to_thread(gate.wait_held)
                tasks += [await send("greedy", n) for n in range(1, 5)]
                refused = await complete("greedy")
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
                assert int(refused.headers["retry-after"]) >= 1
                tasks.append(await send("modest", 5))
            for response in await asyncio.gather(*tasks):
                assert response.status_code == 200

    with serving(max_requests=1, max_queue=4) as s:
        order: list[str] = []
        run(ask(s, order))
        assert order == ["greedy 429", "greedy 200", "greedy 200", "modest 200", *["greedy 200"] * 3]
