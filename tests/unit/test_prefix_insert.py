"""What a prefix cache keeps, on an executor without a model. `R` numbers are rules of the contract."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from control_bench import PROMPT, bench, greedy
from fake_executor import BYTES_PER_CELL, WAIT_S
from prefix_bench import FaultyCache, answer, keys, look, put, snapshot_at

from ggml_engine.control.config import GenConfig
from ggml_engine.control.machine_memory import (
    MachineMemory,
    machine_memory,
    parse_meminfo,
    parse_vm_stat,
    within_limit,
)
from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.retention import CacheEntry, LeastRecentlyUsed, Protecting, RetentionPolicy, UnderPressure
from ggml_engine.control.session import Session
from ggml_engine.errors import OptionError
from ggml_engine.executor.prepared import EmbeddingInput

A, B, C, D = [10, 1, 2], [20, 1, 2], [30, 1, 2], [40, 1, 2]


def test_the_one_used_longest_ago_goes_first() -> None:  # R23
    with bench() as b:
        cache = PrefixCache(2)
        assert put(b, cache, A)
        assert put(b, cache, B)
        assert look(b, cache, [*A, 5]).n_reused == 3
        assert put(b, cache, C)
        assert keys(cache) == [A, C]
        assert look(b, cache, [*B, 5]).session is None
        assert look(b, cache, [*A, 5]).n_reused == 3


def test_early_checkpoints_are_not_protected() -> None:  # R23
    with bench() as b:
        cache = PrefixCache(3)
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        generation = session.generate_async(
            PROMPT, greedy(max_tokens=2, prefill_breakpoints=(3, 6)), capture.wrap(), on_breakpoint=capture.observer
        )
        assert generation.wait(WAIT_S)
        assert capture.collect("checkpoint", WAIT_S)
        assert keys(cache) == [PROMPT[:3], PROMPT[:6], PROMPT]
        assert {entry.metadata for entry in cache.entries} == {"checkpoint"}
        assert put(b, cache, B)
        assert keys(cache) == [PROMPT[:6], PROMPT, B]


class KeepsPins:
    """A policy of a caller's own."""

    def is_over(self) -> bool:
        return False

    def victim(self, entries: Sequence[CacheEntry], newcomer: CacheEntry | None) -> CacheEntry | None:
        return next((entry for entry in entries if entry.metadata != "pin"), None)


def pin(metadata: object) -> float:
    return math.inf if metadata == "pin" else 0


@pytest.mark.parametrize("policy", [KeepsPins(), Protecting(pin)])
def test_a_policy_protects_by_metadata(policy: RetentionPolicy) -> None:  # R23
    with bench() as b:
        cache = PrefixCache(3, policy=policy)
        assert put(b, cache, A, "pin")
        for i in range(10):
            assert put(b, cache, [50 + i, 1, 2])
        assert keys(cache) == [A, [58, 1, 2], [59, 1, 2]]
        assert put(b, cache, B, "pin")
        assert put(b, cache, C, "pin")
        assert not put(b, cache, D), "all that is there is protected"
        assert sorted(keys(cache)) == [A, B, C]
        assert look(b, cache, [*A, 5]).n_reused == 3


def test_entries_of_a_low_priority_go_first() -> None:  # R23
    with bench() as b:
        cache = PrefixCache(3, policy=Protecting(float))  # type: ignore[arg-type]
        assert put(b, cache, A, 2)
        assert put(b, cache, B, 1)
        assert put(b, cache, C, 1)
        assert put(b, cache, D, 3)
        assert keys(cache) == [A, C, D]
        assert not put(b, cache, [50, 1], 0)
        assert keys(cache) == [A, C, D]


def test_a_policy_that_fails_refuses_the_newcomer() -> None:  # R23
    with bench() as b:
        cache = PrefixCache(1, policy=Protecting(lambda metadata: metadata[9]))  # type: ignore[index]
        assert put(b, cache, A)
        assert not put(b, cache, B)
        assert keys(cache) == [A]


def test_a_bad_insert_keeps_what_was_there() -> None:  # R27
    with bench() as b:
        cache = PrefixCache(1)
        assert put(b, cache, A)
        b.drain()
        free, n_open = b.executor.free_cells, b.executor.n_opened - b.executor.n_closed
        five = [7, 8, 9, 1, 2]
        for tokens in ([*five, 3], five[:4], [7, 8, 9, 1, 3], []):
            assert not cache.insert(snapshot_at(b, five), tokens, timeout=WAIT_S)
            b.drain()
            assert b.executor.free_cells == free
            assert b.executor.n_opened - b.executor.n_closed == n_open
        assert look(b, cache, [*A, 5]).n_reused == 3


def test_a_session_that_is_busy_or_closed_is_not_kept() -> None:  # R27
    with bench() as b:
        cache = PrefixCache(4)
        busy, closed = snapshot_at(b, A), snapshot_at(b, B)
        with b.executor.holding_forward() as gate:
            generation = b.start(busy, [5], 3)
            gate.wait_held()
            assert not cache.insert(busy, A, timeout=WAIT_S)
        assert generation.wait(WAIT_S)
        closed.close()
        b.drain()
        assert not cache.insert(closed, B, timeout=WAIT_S)
        assert len(cache) == 0


def test_an_exact_duplicate_refreshes_and_lets_the_newcomer_go() -> None:  # R28
    with bench() as b:
        cache = PrefixCache(2)
        assert put(b, cache, A, "old")
        assert put(b, cache, B)
        first = cache.entries[0].snapshot
        assert put(b, cache, A, "new")
        assert cache.entries[1].snapshot is first, "the newcomer was kept in its place"
        assert (cache.stats()["inserted"], cache.stats()["evicted"]) == (2, 0)
        assert [entry.metadata for entry in cache.entries] == [None, "new"]
        assert put(b, cache, C)
        assert look(b, cache, [*B, 5]).session is None
        assert look(b, cache, [*A, 5]).n_reused == 3
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed == 2


def test_a_snapshot_with_positions_that_are_no_tokens_is_refused() -> None:  # R25
    with bench(kinds=(EmbeddingInput.kind,)) as b:
        cache = PrefixCache(4)
        one, other = EmbeddingInput([[1.0], [2.0]]), EmbeddingInput([[3.0], [4.0]])
        session = b.open()
        capture = cache.capture_prompt(session, [-1, -1, 5])
        session.generate(one, greedy(max_tokens=1), timeout=WAIT_S)
        generation = session.generate_async([5], greedy(max_tokens=1), capture.wrap(), on_settled=capture.at_end())
        assert generation.wait(WAIT_S)
        assert session.tokens[:2] == [-1, -1]
        assert not capture.collect(timeout=WAIT_S)
        assert len(b.executor.calls_of("clone")) == 2, "nothing was captured"
        assert cache.lookup(b.runner, [-1, -1, 5, 6], WAIT_S).session is None
        assert b.run(b.open(), other, 3) == b.expected([other], 3)  # type: ignore[arg-type]


def test_nothing_is_retained_until_asked() -> None:  # R39
    with bench() as b:
        cache = PrefixCache(8)
        for _ in range(3):
            b.run(b.open(), PROMPT)
        assert len(cache) == 0
        assert not b.executor.calls_of("clone")
        assert PrefixCache.__doc__ is not None
        assert "deterministic mode only" in " ".join(PrefixCache.__doc__.split())


def test_a_shared_cell_counts_once() -> None:  # R43
    with bench(capacity=4096) as b:
        cache = PrefixCache(8)
        prompt = [(i * i) % 96 for i in range(1000)]
        assert put(b, cache, prompt)
        b.drain()
        used = b.executor.cache.used_cells
        assert cache.n_bytes(WAIT_S) == 1000 * BYTES_PER_CELL
        found = look(b, cache, [*prompt, 7]).session
        assert found is not None
        assert b.executor.cache.used_cells == used
        b.run(found, [7], 1)
        assert b.executor.cache.used_cells == used + 1
        snapshot = found.snapshot_async().result(WAIT_S)
        assert isinstance(snapshot, Session)
        assert cache.insert(snapshot, [*prompt, 7], timeout=WAIT_S)
        assert cache.n_bytes(WAIT_S) == 1001 * BYTES_PER_CELL
        assert PrefixCache.__doc__ is not None
        assert "no measure of memory" in PrefixCache.__doc__


# ---- memory that is missing


@pytest.mark.parametrize("point", ["lookup", "clone", "found"])
def test_a_look_up_without_memory_is_a_miss(point: str) -> None:  # R38
    with bench() as b:
        cache = FaultyCache(2)
        assert put(b, cache, A)
        b.drain()
        n_open = b.executor.n_opened - b.executor.n_closed
        cache.fails_at = point
        assert look(b, cache, [*A, 5]).session is None
        assert cache.n_failed == 1
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed == n_open
        assert answer(b, cache, [*A, 5]) == 1


@pytest.mark.parametrize("point", ["insert", "retain", "collect", "capture"])
def test_a_capture_without_memory_keeps_nothing_and_harms_nobody(point: str) -> None:  # R38 R30
    with bench() as b:
        cache = FaultyCache(2)
        assert put(b, cache, A)
        assert put(b, cache, B)
        cache.fails_at = point
        session = b.open()
        capture = cache.capture_prompt(session, PROMPT)
        generation = b.start(session, PROMPT, 4, on_update=capture.wrap())
        assert generation.result(WAIT_S)
        assert generation.tokens == b.expected(PROMPT, 4)
        assert not capture.collect(timeout=WAIT_S)
        assert cache.n_failed == 1
        assert len(cache) <= 2
        session.close()
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed == len(cache)
        assert answer(b, cache, [*B, 5]) == 1
        assert put(b, cache, PROMPT)
        assert len(cache) == 2


# ---- bounds


def test_500_prompts_stay_under_the_cap_at_every_moment() -> None:  # R23
    most = 40 * BYTES_PER_CELL
    with bench(capacity=4096) as b:
        seen: list[int] = []

        class Watched(PrefixCache):
            def _fault(self, point: str) -> None:
                seen.append(len(self))
                if point in {"insert", "retain"}:
                    assert self.n_bytes(WAIT_S) <= most

        cache = Watched(7, most)
        for i in range(500):
            prompt = [i % 97, i // 97, *range(1, 3 + i % 9)]
            session = b.open()
            capture = cache.capture_prompt(session, prompt)
            assert b.start(session, prompt, 1, on_update=capture.wrap()).wait(WAIT_S)
            assert capture.collect(timeout=WAIT_S)
            session.close()
            b.drain()
            assert len(cache) <= 7
            assert cache.n_bytes(WAIT_S) <= most
            assert b.executor.cache.used_cells * BYTES_PER_CELL <= most
            assert b.executor.n_opened - b.executor.n_closed == len(cache)
        assert max(seen) <= 7
        assert cache.stats()["inserted"] == 500
        assert cache.stats()["evicted"] == 500 - len(cache)


def test_room_is_made_before_the_newcomer_is_kept() -> None:  # R23
    with bench() as b:
        sizes: list[int] = []

        class Watched(PrefixCache):
            def _fault(self, point: str) -> None:
                if point == "retain":
                    sizes.append(len(self))

        cache = Watched(2)
        for tokens in (A, B, C, D):
            assert put(b, cache, tokens)
        assert sizes == [0, 1, 1, 1]


def test_a_newcomer_larger_than_the_cap_evicts_nobody() -> None:
    with bench() as b:
        cache = PrefixCache(9, 8 * BYTES_PER_CELL)
        assert put(b, cache, A)
        assert put(b, cache, B)
        assert not put(b, cache, PROMPT)
        assert keys(cache) == [A, B]
        assert put(b, cache, C)
        assert keys(cache) == [B, C]


def test_bytes_are_those_of_distinct_cells() -> None:
    with bench() as b:
        cache = PrefixCache(9, 12 * BYTES_PER_CELL)
        session = b.session_at(PROMPT)
        for n in (3, 5, 7, 9):  # 24 tokens in 9 cells
            snapshot = session.snapshot_async(n).result(WAIT_S)
            assert isinstance(snapshot, Session)
            assert cache.insert(snapshot, PROMPT[:n], timeout=WAIT_S)
        assert len(cache) == 4
        assert put(b, cache, A)
        assert len(cache) == 5
        assert put(b, cache, B)
        # that would be 15 cells: those that the prompt's snapshots share are free when the last one that has them goes
        assert keys(cache) == [A, B]
        assert cache.n_bytes(WAIT_S) == 6 * BYTES_PER_CELL


# ---- taking the place of an older one


def test_an_entry_takes_the_place_of_those_it_extends() -> None:
    with bench() as b:
        cache = PrefixCache(9, replace_extended=True)
        assert put(b, cache, A, "one")
        assert put(b, cache, A[:2], "another")
        assert put(b, cache, [*A, 3, 4], "one")
        assert keys(cache) == [A[:2], [*A, 3, 4]]
        assert look(b, cache, [*A, 60]).n_reused == 3
        assert put(b, cache, [*B])
        assert put(b, cache, [*B, 3])
        assert keys(cache).count(B) == 0
        kept = PrefixCache(9)
        assert put(b, kept, A)
        assert put(b, kept, [*A, 3])
        assert keys(kept) == [A, [*A, 3]]


def test_a_replaced_entry_makes_room_for_the_newcomer() -> None:
    with bench() as b:
        cache = PrefixCache(2, replace_extended=True)
        assert put(b, cache, B)
        assert put(b, cache, A)
        assert put(b, cache, [*A, 3])
        assert keys(cache) == [B, [*A, 3]]


# ---- the machine's memory


def test_entries_go_while_the_machine_is_over() -> None:
    with bench() as b:
        used = [10]
        policy = UnderPressure(0.8, memory=lambda: MachineMemory(100, 100 - used[0]))
        cache = PrefixCache(9, policy=policy)
        for tokens in (A, B, C):
            assert put(b, cache, tokens)
        assert cache.trim() == 0

        class Falling(UnderPressure):
            def victim(self, entries: Sequence[CacheEntry], newcomer: CacheEntry | None) -> CacheEntry | None:
                used[0] -= 5
                return super().victim(entries, newcomer)

        cache._policy = Falling(0.8, memory=lambda: MachineMemory(100, 100 - used[0]))
        used[0] = 90
        assert cache.trim() == 2
        assert keys(cache) == [C]
        used[0] = 84
        assert put(b, cache, D)
        assert keys(cache) == [D]
        used[0] = 100
        assert not put(b, cache, A), "nothing is kept while the machine is over"
        assert len(cache) == 0


def test_where_the_memory_cannot_be_told_nothing_is_over() -> None:
    assert not UnderPressure(0.5, memory=lambda: None).is_over()
    assert not LeastRecentlyUsed().is_over()
    with pytest.raises(OptionError, match="most_used"):
        UnderPressure(90)


def test_the_memory_of_this_machine() -> None:
    now = machine_memory()
    assert now is not None
    assert 0 < now.available < now.total
    assert 0 < now.used_share < 1


def test_what_systems_say_of_their_memory() -> None:
    linux = parse_meminfo("MemTotal:       16000 kB\nMemFree:   10 kB\nMemAvailable:    4000 kB\n")
    assert linux == MachineMemory(16000 << 10, 4000 << 10)
    assert linux.used_share == 0.75
    mac = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:    10.\nPages active:  99.\n"
    mac += "Pages inactive:   20.\nPages speculative:  5.\nPages wired down:  7.\n"
    assert parse_vm_stat(mac, 1 << 30) == MachineMemory(1 << 30, 35 * 16384)
    assert within_limit(linux, None) == linux
    assert within_limit(linux, (1 << 60, 5)) == linux
    assert within_limit(linux, (1000, 600)) == MachineMemory(1000, 400)
    assert within_limit(linux, (1000, 1600)) == MachineMemory(1000, 0)


def test_no_configuration_of_a_generation_turns_the_cache_on() -> None:  # R39
    assert not [name for name in GenConfig.__dataclass_fields__ if "cache" in name]
