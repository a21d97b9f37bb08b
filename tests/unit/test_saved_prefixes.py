"""A prefix cache that is saved comes back in its order, with its metadata, and each shared cell once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from control_bench import PROMPT, Bench, bench
from fake_executor import BYTES_PER_CELL, WAIT_S
from prefix_bench import answer, keys, look, put
from saved_bench import file_of, forged, metadata_of, state_of

from ggml_engine.control.machine_memory import MachineMemory
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.retention import UnderPressure
from ggml_engine.errors import OptionError, SavedStateError, WouldBlockError

TRUNK = [5, 3, 8, 1, 9, 2, 7, 4]
A, B, C = [*TRUNK, 10, 11], [*TRUNK, 20], [6, 6, 6]
N_CELLS = 8 + 2 + 1 + 3


def filled(b: Bench, max_entries: int = 8, **options: Any) -> PrefixCache:
    """A cache of C, A and B, used in this order; A and B share their trunk."""
    cache = PrefixCache(max_entries, **options)
    assert put(b, cache, C, "c")
    with b.session_at(TRUNK) as trunk:
        for tokens, metadata in ((A, {"turn": 1}), (B, None)):
            child = trunk.clone_async().result(WAIT_S)
            assert child is not None
            with child:
                b.run(child, tokens[len(TRUNK) :], 1)
                snapshot = child.snapshot_async().result(WAIT_S)
            assert snapshot is not None
            assert cache.insert(snapshot, tokens, metadata, WAIT_S)
    assert keys(cache) == [C, A, B]
    return cache


def n_used(b: Bench) -> int:
    b.drain()
    return b.executor.cache.used_cells


@pytest.mark.parametrize("run", [1, 4])
def test_everything_comes_back_and_shared_cells_once(tmp_path: Path, run: int) -> None:
    with bench(run=run) as b:
        cache = filled(b)
        assert n_used(b) == N_CELLS
        assert cache.save(tmp_path, timeout=WAIT_S) == 3
        assert n_used(b) == N_CELLS
        assert metadata_of(file_of(tmp_path, "prefix-cache"))["n_rows"] == N_CELLS
    with bench(run=run) as b:
        cache = PrefixCache(8)
        assert cache.load(b.runner, tmp_path, timeout=WAIT_S) == 3
        assert keys(cache) == [C, A, B]
        assert [entry.metadata for entry in cache.entries] == ["c", {"turn": 1}, None]
        assert n_used(b) == N_CELLS
        assert cache.n_bytes(WAIT_S) == N_CELLS * BYTES_PER_CELL
        assert cache.stats()["inserted"] == 3
        for entry in cache.entries:
            assert b.executor.keys(entry.snapshot._state.sequence) == entry.tokens.tolist()
        for prompt, n_evaluated in ((A, 1), (B, 1), ([*TRUNK, 77, 78], 2), ([*C, 1, 2], 2)):
            assert answer(b, cache, prompt) == n_evaluated


def test_the_snapshots_of_a_loaded_cache_give_way_in_its_order(tmp_path: Path) -> None:
    with bench() as b:
        filled(b).save(tmp_path, timeout=WAIT_S)
    with bench(capacity=20) as b:
        cache = PrefixCache(8)
        assert cache.load(b.runner, tmp_path, timeout=WAIT_S) == 3
        b.run(b.open(), [40 + i for i in range(8)], 1)  # 6 cells are free
        assert keys(cache) == [A, B]


def test_entries_that_are_there_stay_and_count_as_used_later(tmp_path: Path) -> None:
    with bench() as b:
        cache = filled(b)
        cache.save(tmp_path, timeout=WAIT_S)
        assert cache.load(b.runner, tmp_path, timeout=WAIT_S) == 0  # all are there
        assert keys(cache) == [C, A, B]
        other = PrefixCache(8)
        assert put(b, other, PROMPT, "own")
        assert put(b, other, A, "mine")
        assert other.load(b.runner, tmp_path, timeout=WAIT_S) == 2
        assert keys(other) == [C, B, PROMPT, A]
        assert [entry.metadata for entry in other.entries] == ["c", None, "own", "mine"]


@pytest.mark.parametrize(
    ("options", "bound", "wanted"),
    [
        ({}, {"max_entries": 2}, [A, B]),
        ({}, {"max_entries": 1}, [B]),
        ({}, {"max_entries": 0}, []),
        ({}, {"max_bytes": 11 * BYTES_PER_CELL}, [A, B]),
        ({}, {"max_bytes": 10 * BYTES_PER_CELL}, [B]),
        ({}, {"max_bytes": 8 * BYTES_PER_CELL}, []),
        ({"capacity": 13}, {}, [A, B]),
        ({"capacity": 10}, {}, [B]),
        ({"capacity": 12, "run": 4}, {}, [B]),  # 12 cells for 11 rows, but positions 8 and 9 are wanted twice
        ({"capacity": 8}, {}, [C]),  # no session of this runner can be as long as the others
        ({"runner": RunnerOptions(max_sessions=3)}, {}, [A, B]),
        ({"runner": RunnerOptions(max_sessions=1)}, {}, []),
        ({"runner": RunnerOptions(max_session_tokens=9)}, {}, [C, B]),
    ],
)
def test_where_fewer_fit_those_used_last_are_loaded(
    tmp_path: Path, options: dict[str, Any], bound: dict[str, Any], wanted: list[list[int]]
) -> None:
    options = dict(options)
    runner, run = options.pop("runner", None), options.get("run", 1)
    with bench(run=run) as b:
        filled(b).save(tmp_path, timeout=WAIT_S)
    with bench(runner, **options) as b:
        cache = PrefixCache(**{"max_entries": 8, **bound})
        assert cache.load(b.runner, tmp_path, timeout=WAIT_S) == len(wanted)
        assert keys(cache) == wanted
        for tokens in wanted:
            assert look(b, cache, tokens).n_reused == len(tokens) - 1


def test_loading_takes_no_cells_from_snapshots_that_are_there(tmp_path: Path) -> None:
    with bench() as b:
        filled(b).save(tmp_path, timeout=WAIT_S)
    with bench(capacity=20) as b:
        cache = PrefixCache(8)
        assert put(b, cache, PROMPT)
        assert cache.load(b.runner, tmp_path, timeout=WAIT_S) == 2
        assert keys(cache) == [A, B, PROMPT]


def test_a_machine_without_memory_loads_nothing(tmp_path: Path) -> None:
    with bench() as b:
        filled(b).save(tmp_path, timeout=WAIT_S)
        full = UnderPressure(0.5, memory=lambda: MachineMemory(100, 10))
        assert full.is_over()
        cache = PrefixCache(8, policy=full)
        assert cache.load(b.runner, tmp_path, timeout=WAIT_S) == 0


def test_an_entry_that_went_meanwhile_is_left_out(tmp_path: Path) -> None:
    with bench() as b:
        cache = filled(b)
        handle = cache.entries[1].snapshot
        entries = cache.entries
        b.run(handle, [30], 2)  # whoever kept a handle went on with it: it is no longer a snapshot of its tokens only
        cache.entries[0].snapshot.rewind_async(1).result(WAIT_S)
        assert len(entries) == 3
        assert cache.save(tmp_path, timeout=WAIT_S) == 2
        other = PrefixCache(8)
        with bench() as another:
            assert other.load(another.runner, tmp_path, timeout=WAIT_S) == 2
            assert keys(other) == [A, B]


@pytest.mark.parametrize("metadata", [(1, 2), {1: 2}, {3}, float("nan"), object(), [float("inf")]])
def test_metadata_that_json_does_not_keep_are_refused(tmp_path: Path, metadata: object) -> None:
    with bench() as b:
        cache = PrefixCache(8)
        assert put(b, cache, PROMPT, metadata)
        with pytest.raises(SavedStateError, match="an entry of 9 tokens cannot be saved") as caught:
            cache.save(tmp_path, timeout=WAIT_S)
        assert caught.value.code == "unsavable"
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("metadata", [None, 0, -1.5, "é\ud800", [1, [2, {}]], {"a": {"b": [True, None]}}])
def test_metadata_that_json_keeps_come_back(tmp_path: Path, metadata: object) -> None:
    with bench() as b:
        cache, other = PrefixCache(8), PrefixCache(8)
        assert put(b, cache, PROMPT, metadata)
        cache.save(tmp_path, timeout=WAIT_S)
        cache.clear()
        assert other.load(b.runner, tmp_path, timeout=WAIT_S) == 1
        assert other.entries[0].metadata == metadata


def test_too_much_metadata_is_refused(tmp_path: Path) -> None:
    with bench() as b:
        cache = PrefixCache(8)
        assert put(b, cache, PROMPT, "x" * (5 << 20))
        with pytest.raises(SavedStateError, match="4194304 are the most"):
            cache.save(tmp_path, timeout=WAIT_S)


def test_a_file_holds_entries_of_one_runner(tmp_path: Path) -> None:
    with bench() as b, bench() as other:
        cache = PrefixCache(8)
        with pytest.raises(OptionError, match="of 0: name the runner"):
            cache.save(tmp_path)
        assert cache.save(tmp_path, runner=b.runner, timeout=WAIT_S) == 0
        assert cache.load(b.runner, tmp_path, timeout=WAIT_S) == 0
        assert put(b, cache, A)
        assert put(other, cache, B)
        with pytest.raises(OptionError, match="of 2: name the runner"):
            cache.save(tmp_path)
        assert cache.save(tmp_path, runner=other.runner, timeout=WAIT_S) == 1
        found = PrefixCache(8)
        assert found.load(b.runner, tmp_path, timeout=WAIT_S) == 1
        assert keys(found) == [B]


def test_entries_of_another_execution_are_left_out(tmp_path: Path) -> None:
    with bench() as b:
        cache = filled(b)
        b.executor._fingerprint = "another"
        assert put(b, cache, PROMPT)
        assert cache.save(tmp_path, timeout=WAIT_S) == 1
        found = PrefixCache(8)
        assert found.load(b.runner, tmp_path, timeout=WAIT_S) == 1
        assert keys(found) == [PROMPT]


def test_a_cache_and_a_session_are_not_taken_for_each_other(tmp_path: Path) -> None:
    with bench() as b, b.session_at() as session:
        cache = filled(b)
        cache.save(tmp_path, "cache", WAIT_S)
        session.save(tmp_path, "session", WAIT_S)
        before = state_of(b)
        with pytest.raises(SavedStateError, match="saved 'prefix-cache', a session is asked for") as caught:
            b.runner.load_session(tmp_path, "cache", WAIT_S)
        assert caught.value.code == "other-kind"
        with pytest.raises(SavedStateError, match="saved 'session', a prefix-cache is asked for"):
            PrefixCache(8).load(b.runner, tmp_path, "session", WAIT_S)
        assert state_of(b) == before


def test_sequences_of_the_same_tokens_are_loaded_once(tmp_path: Path) -> None:
    with bench() as b:
        cache = PrefixCache(8)
        assert put(b, cache, [4, 4])
        assert put(b, cache, [4, 5])
        cache.save(tmp_path, timeout=WAIT_S)
        forged(file_of(tmp_path, "prefix-cache"), rest=_same_tokens)
        found = PrefixCache(8)
        assert found.load(b.runner, tmp_path, timeout=WAIT_S) == 1
        assert keys(found) == [[4, 4]]


def _same_tokens(rest: bytes) -> bytes:
    """Tokens and table of two sequences of two positions: the second one gets the tokens of the first."""
    return rest[:16] + rest[:8] + rest[24:]


def test_a_callback_cannot_save_or_load_a_cache(tmp_path: Path) -> None:
    with bench() as b:
        cache = filled(b)
        cache.save(tmp_path, timeout=WAIT_S)
        errors: list[type] = []

        def on_update(update: Any) -> None:
            for call in (lambda: cache.save(tmp_path), lambda: cache.load(b.runner, tmp_path)):
                try:
                    call()
                except Exception as error:
                    errors.append(type(error))

        generation = b.start(session := b.open(), PROMPT, 1, on_update=on_update)
        assert generation.wait(WAIT_S)
        assert set(errors) == {WouldBlockError}
        assert len(errors) >= 2
        session.close()
