"""Scopes of a prefix cache, and look-ups that wait for nothing, on an executor without a model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from control_bench import PROMPT, Bench, bench
from fake_executor import WAIT_S
from prefix_bench import FaultyCache, keys, put, snapshot_at

from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.prefix_match import Lookup, MissReason
from ggml_engine.errors import InputError, SessionError
from ggml_engine.executor.protocol import Executor
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.registry import ClonesAnywhere
from ggml_engine.pool.sequence_cache import SequenceCache


def put_in(b: Bench, cache: PrefixCache, scope: object, tokens: list[int] = PROMPT, metadata: Any = None) -> bool:
    return cache.insert(snapshot_at(b, tokens), tokens, metadata, WAIT_S, scope=scope)


def test_a_snapshot_serves_look_ups_of_its_own_scope_alone() -> None:
    with bench() as b:
        cache = PrefixCache(8)
        assert put_in(b, cache, "x")
        for scope in (None, "y"):
            found = cache.lookup(b.runner, PROMPT, WAIT_S, scope=scope)
            assert found.session is None
            assert found.miss is not None
            assert found.miss.reason is MissReason.EMPTY, "that there are others is nobody's business"
            assert cache.count_reusable(b.runner, PROMPT, scope=scope) == 0
        found = cache.lookup(b.runner, PROMPT, WAIT_S, scope="x")
        assert found.n_reused == len(PROMPT) - 1
        assert cache.count_reusable(b.runner, PROMPT, scope="x") == len(PROMPT) - 1
        found.session.close()  # type: ignore[union-attr]


def test_the_same_tokens_in_two_scopes_are_two_entries() -> None:
    with bench() as b:
        cache = PrefixCache(8, replace_extended=True)
        for scope in ("x", "y", "x"):
            assert put_in(b, cache, scope)
        assert [entry.scope for entry in cache.entries] == ["y", "x"]
        assert put_in(b, cache, "y", [*PROMPT, 1])
        assert [(entry.scope, entry.tokens.size) for entry in cache.entries] == [("x", 9), ("y", 10)]


def test_holding_is_of_exactly_these_tokens_and_counts_as_a_use() -> None:
    with bench() as b:
        cache = PrefixCache(8)
        assert put_in(b, cache, "x")
        assert put_in(b, cache, "x", [1, 2])
        with b.open() as session:
            for tokens, scope in ((PROMPT, None), (PROMPT, "y"), (PROMPT[:5], "x"), ([*PROMPT, 1], "x")):
                assert not cache.holds(session, tokens, scope=scope)
            assert keys(cache) == [PROMPT, [1, 2]]
            assert cache.holds(session, PROMPT, scope="x")
            assert keys(cache) == [[1, 2], PROMPT]


def test_a_file_has_no_entries_of_a_scope(tmp_path: Path) -> None:
    with bench() as b:
        cache = PrefixCache(8)
        assert put_in(b, cache, "x")
        assert put(b, cache, [1, 2, 3])
        assert cache.save(tmp_path, timeout=WAIT_S) == 1
        assert put_in(b, cache, "x", [1, 2, 3])
        other = PrefixCache(8)
        assert put_in(b, other, "x", [1, 2, 3])
        assert other.load(b.runner, tmp_path, timeout=WAIT_S) == 1, "one of a scope stands for none without"
        assert [entry.scope for entry in other.entries] == [None, "x"]


# ---- look-ups that wait for nothing


def test_a_look_up_can_be_had_as_a_future() -> None:
    with bench() as b:
        cache = PrefixCache(8)
        assert put(b, cache, PROMPT)
        assert put(b, cache, [1, 2])
        with b.executor.holding_clone() as gate:
            future = cache.lookup_async(b.runner, [*PROMPT, 1])
            gate.wait_held()
            assert not future.done()
        found = future.result(WAIT_S)
        assert found.n_reused == len(PROMPT)
        assert found.session is not None
        assert found.session.tokens == PROMPT
        found.session.close()
        assert keys(cache) == [[1, 2], PROMPT]
        assert cache.lookup_async(b.runner, [50, 51]).result(0).session is None
        assert cache.lookup_async(b.runner, [1]).result(0).miss == cache.lookup(b.runner, [1]).miss
        assert (cache.stats()["lookups"], cache.stats()["hits"]) == (4, 1)
        with pytest.raises(InputError):
            cache.lookup_async(b.runner, [1.5])  # type: ignore[list-item]


def test_a_look_up_goes_on_to_the_next_snapshot_and_to_the_end() -> None:  # R26
    with bench() as b:
        cache = PrefixCache(8)
        assert put(b, cache, PROMPT)
        assert put(b, cache, PROMPT[:4])
        b.executor.fail_clone(RuntimeError("no"))
        found = cache.lookup_async(b.runner, [*PROMPT, 1]).result(WAIT_S)
        assert found.n_reused == 4
        found.session.close()  # type: ignore[union-attr]
        for at in (0, 1):
            b.executor.fail_clone(RuntimeError("no"), at)
        found = cache.lookup_async(b.runner, [*PROMPT, 1]).result(WAIT_S)
        assert found.session is None
        assert found.miss is not None
        assert (found.miss.reason, found.miss.position) == (MissReason.REFUSED, len(PROMPT))


def test_a_look_up_may_be_begun_in_a_callback() -> None:  # R33
    with bench() as b:
        cache = PrefixCache(8)
        assert put(b, cache, PROMPT)
        found: list[Lookup] = []
        done = threading.Event()

        def on_update(update: Any) -> None:
            if update.tokens:
                future = cache.lookup_async(b.runner, [*PROMPT, 1])
                future.add_done_callback(lambda future: (found.append(future.result(0)), done.set()))

        with b.open() as session:
            assert b.start(session, PROMPT, 1, on_update=on_update).result(WAIT_S)
        assert done.wait(WAIT_S)
        assert found[0].n_reused == len(PROMPT)
        found[0].session.close()  # type: ignore[union-attr]


def test_what_a_cancelled_look_up_finds_is_closed() -> None:
    with bench() as b:
        cache = PrefixCache(8)
        assert put(b, cache, PROMPT)
        with b.executor.holding_clone() as gate:
            future = cache.lookup_async(b.runner, [*PROMPT, 1])
            gate.wait_held()
            assert future.cancel()
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed == 1


@pytest.mark.parametrize("point", ["lookup", "clone", "found"])
def test_a_look_up_that_finds_no_memory_finds_nothing(point: str) -> None:  # R38
    with bench() as b:
        cache = FaultyCache(8)
        assert put(b, cache, PROMPT)
        cache.fails_at = point
        found = cache.lookup_async(b.runner, [*PROMPT, 1]).result(WAIT_S)
        assert found.session is None
        assert cache.n_failed == 1
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed == 1


# ---- sessions that give way, and executors that clone at any position


def test_an_idle_session_that_yields_goes_before_a_prompt_fails() -> None:
    with bench(capacity=16, max_batch_tokens=16) as b:
        yielding, other = b.session_at(PROMPT), b.open()
        yielding.yield_when_idle()
        assert b.run(other, [1, 2, 3, 4, 5, 6, 7, 8], 4) == b.expected([1, 2, 3, 4, 5, 6, 7, 8], 4)
        assert yielding.status == "evicted"
        with pytest.raises(SessionError, match="given up"):
            b.run(yielding, [1])


def test_a_session_that_yields_keeps_what_it_has_while_it_generates() -> None:
    with bench(capacity=16, max_batch_tokens=16) as b:
        yielding, other = b.session_at(PROMPT), b.open()
        yielding.yield_when_idle()
        with b.executor.holding_forward() as gate:
            running = b.start(yielding, [1], 3)
            gate.wait_held()
            waiting = b.start(other, [1, 2, 3, 4, 5, 6, 7, 8], 2)
        assert running.result(WAIT_S)
        assert waiting.result(WAIT_S)
        assert running.tokens == b.expected([*PROMPT, *b.expected(PROMPT, 1), 1], 3)


def test_an_executor_says_whether_it_clones_at_every_position() -> None:
    assert isinstance(CellCache(64), ClonesAnywhere)
    assert CellCache(64).clones_anywhere
    assert not SequenceCache(64).clones_anywhere
    assert Executor.clones_anywhere.fget(None) is False  # type: ignore[attr-defined]
    for options, expected in (({}, True), ({"ring": 64}, False), ({"clones": False}, False)):
        with bench(**options) as b:  # type: ignore[arg-type]
            assert b.executor.clones_anywhere is expected
