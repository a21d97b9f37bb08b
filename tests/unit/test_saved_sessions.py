"""A session that is saved comes back as it was, in another runner too, and nobody else notices."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from control_bench import PROMPT, Bench, bench, eventually, greedy
from fake_executor import WAIT_S
from saved_bench import file_of, state_of

from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.runner import Runner
from ggml_engine.control.session import Session
from ggml_engine.errors import (
    ClosedError,
    ComputeError,
    ContextLengthError,
    PoisonedError,
    PoolFullError,
    SavedStateError,
    SessionError,
    SessionLimitError,
    WouldBlockError,
)
from ggml_engine.executor.image import KvImage
from ggml_engine.executor.prepared import EmbeddingInput
from ggml_engine.executor.protocol import Executor

MIB = 1 << 20
LONG = [(7 * i) % 89 + 1 for i in range(40)]


def saved(b: Bench, directory: Path, tokens: Sequence[int] = PROMPT, name: str = "one") -> int | None:
    """Save a session of exactly `tokens`, and close it; its pending token."""
    with b.session_at(tokens) as session:
        session.save(directory, name, WAIT_S)
        return session.pending


def load(b: Bench, directory: Path, name: str = "one") -> Session:
    return b.runner.load_session(directory, name, WAIT_S)


# ---- what comes back


@pytest.mark.parametrize("run", [1, 4, 64])
def test_a_session_comes_back_in_another_runner_and_goes_on(tmp_path: Path, run: int) -> None:
    with bench(run=run) as b:
        pending = saved(b, tmp_path)
        assert pending is not None
    with bench(run=run) as b, b.session_at(LONG):
        with load(b, tmp_path) as session:
            assert (session.tokens, session.pending, session.status) == (PROMPT, pending, "open")
            assert b.executor.keys(session._state.sequence) == PROMPT
            assert b.run(session, [33], 6) == b.expected([*PROMPT, pending, 33], 6)
        with load(b, tmp_path) as again:  # the file stays
            again.rewind_async(4).result(WAIT_S)
            assert b.run(again, [7], 3) == b.expected([*PROMPT[:4], 7], 3)


def test_the_same_prompt_is_evaluated_but_for_one_token(tmp_path: Path) -> None:
    with bench() as b:
        saved(b, tmp_path, LONG)
    with bench() as b, load(b, tmp_path) as session:
        generation = session.generate_from(LONG, greedy(max_tokens=3))
        assert generation.wait(WAIT_S)
        assert generation.tokens == b.expected(LONG, 3)
        assert generation.stats.evaluated_tokens == 1
        generation = session.generate_from([*LONG, 1, 2, 3], greedy(max_tokens=3))
        assert generation.wait(WAIT_S)
        assert generation.tokens == b.expected([*LONG, 1, 2, 3], 3)
        assert generation.stats.evaluated_tokens <= 3 + 1


def test_an_empty_session_comes_back_empty(tmp_path: Path) -> None:
    with bench() as b:
        b.open().save(tmp_path, "nothing", WAIT_S)
        with load(b, tmp_path, "nothing") as session:
            assert (session.tokens, session.pending) == ([], None)
            assert b.run(session, PROMPT) == b.expected(PROMPT)


def test_an_executor_that_cannot_clone_is_read_in_place(tmp_path: Path) -> None:
    with bench(clones=False) as b:
        pending = saved(b, tmp_path)
    with bench(clones=False) as b, load(b, tmp_path) as session:
        assert pending is not None
        assert b.run(session, [3], 4) == b.expected([*PROMPT, pending, 3], 4)


def test_what_cannot_be_cloned_and_is_rewound_meanwhile_is_not_saved(tmp_path: Path) -> None:
    with bench(clones=False, row_bytes=MIB) as b, b.session_at(LONG) as session:
        rows, read = b.executor.rows, b.executor.rows.read

        def read_and_rewind(cells: Any) -> Any:
            if len(rows.parts) == 1:
                session.rewind_async(2)
            return read(cells)

        rows.read = read_and_rewind  # type: ignore[method-assign]
        with pytest.raises(SessionError, match="has changed"):
            session.save(tmp_path, "one", WAIT_S)
        assert list(tmp_path.iterdir()) == []
        assert len(rows.parts) >= 2


# ---- while others run


def test_streams_go_on_between_the_parts_of_a_big_one(tmp_path: Path) -> None:
    with bench(row_bytes=MIB, capacity=4096) as b, b.session_at(LONG) as session:
        b.executor.on_forward = lambda _: time.sleep(0.002)
        beside = b.open()
        stream = b.start(beside, [1], 3500)
        session.save(tmp_path, "big", WAIT_S)
        with load(b, tmp_path, "big") as loaded:
            assert stream.reason is None, "the stream ended too early to show something"
            assert loaded.tokens == LONG
        stream.cancel()
        assert stream.wait(WAIT_S)
        assert stream.tokens[-50:] == b.expected([1, *stream.tokens[:-50]], 50)
        for what in ("read", "write"):
            parts = [(n, at) for each, n, at in b.executor.rows.parts if each == what]
            assert [n for n, _ in parts] == [4] * 10  # 4 MiB each
            moments = [at for _, at in parts]
            assert all(before < after for before, after in pairwise(moments)), moments


def test_a_session_that_generates_saves_what_it_has_committed(tmp_path: Path) -> None:
    with bench(capacity=8192) as b:
        b.executor.on_forward = lambda _: time.sleep(0.001)
        session = b.open()
        generation = b.start(session, PROMPT, 2000)
        eventually(lambda: len(generation.tokens) > 2, "nothing came")
        session.save(tmp_path, "busy", WAIT_S)
        assert generation.reason is None, "it ended too early to show something"
        with load(b, tmp_path, "busy") as loaded:
            assert generation.reason is None
            assert len(PROMPT) < loaded.position < session.position
            assert loaded.pending is None
            assert loaded.tokens == [*PROMPT, *generation.tokens][: loaded.position]
            history = [*loaded.tokens, 33]
            assert b.run(loaded, [33], 2) == b.expected(history, 2)
        generation.cancel()
        assert generation.wait(WAIT_S)
        assert generation.tokens == b.expected(PROMPT, len(generation.tokens))


def test_many_threads_save_and_load_at_once(tmp_path: Path) -> None:
    with bench(row_bytes=1 << 14) as b, b.session_at(LONG) as session:
        beside = b.open()
        stream = b.start(beside, [1], 400)
        errors: list[BaseException] = []

        def save_and_load(i: int) -> None:
            for _ in range(4):
                session.save(tmp_path, "shared", WAIT_S)
                session.save(tmp_path, f"own-{i}", WAIT_S)
                for name in ("shared", f"own-{i}"):
                    with load(b, tmp_path, name) as loaded:
                        assert (loaded.tokens, loaded.pending) == (LONG, session.pending)

        threads = [threading.Thread(target=_catch, args=(errors, lambda i=i: save_and_load(i))) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert errors == []
        assert stream.result(WAIT_S)
        assert stream.tokens == b.expected([1], 400)
        assert Runner.saved_names(tmp_path) == ["own-0", "own-1", "own-2", "own-3", "shared"]
        assert len(list(tmp_path.iterdir())) == 5


def test_a_session_may_be_closed_while_it_is_saved(tmp_path: Path) -> None:
    with bench(row_bytes=MIB) as b:
        session = b.session_at(LONG)
        rows, read = b.executor.rows, b.executor.rows.read

        def read_and_close(cells: Any) -> Any:
            session.close()
            return read(cells)

        rows.read = read_and_close  # type: ignore[method-assign]
        session.save(tmp_path, "one", WAIT_S)
        assert session.status == "closed"
        with load(b, tmp_path) as loaded:
            assert b.executor.keys(loaded._state.sequence) == LONG
        b.drain()
        assert b.executor.free_cells == b.executor.capacity


def test_what_is_held_for_a_save_gives_way_to_a_generation(tmp_path: Path) -> None:
    with bench(capacity=50, row_bytes=MIB) as b:
        session = b.session_at(LONG)
        rows, read = b.executor.rows, b.executor.rows.read
        grown: list[Any] = []

        def read_and_fill(cells: Any) -> Any:
            if not grown:
                session.close()
                grown.append(b.start(other, LONG[::-1], 3))
            return read(cells)

        other = b.open()
        rows.read = read_and_fill  # type: ignore[method-assign]
        with pytest.raises(SessionError, match="given to others"):
            session.save(tmp_path, "one", WAIT_S)
        assert grown[0].result(WAIT_S)
        assert grown[0].tokens == b.expected(LONG[::-1], 3)
        assert list(tmp_path.iterdir()) == []


def test_a_snapshot_goes_first_where_what_is_held_keeps_no_cells(tmp_path: Path) -> None:
    with bench(capacity=60, row_bytes=MIB) as b, b.session_at(LONG) as session:
        snapshot = b.session_at(PROMPT).snapshot_async().result(WAIT_S)
        other = b.open()
        rows, read = b.executor.rows, b.executor.rows.read
        begun: list[Any] = []

        def read_and_fill(cells: Any) -> Any:
            if not begun:
                begun.append(b.start(other, LONG[:15], 2))
            return read(cells)

        rows.read = read_and_fill  # type: ignore[method-assign]
        session.save(tmp_path, "one", WAIT_S)
        assert begun[0].result(WAIT_S)
        assert snapshot is not None
        assert snapshot.status == "evicted"


# ---- room


def test_loading_gives_up_snapshots_as_a_prompt_does(tmp_path: Path) -> None:
    with bench(capacity=50) as b:
        saved(b, tmp_path, LONG)
        snapshots = [b.session_at(PROMPT).snapshot_async().result(WAIT_S) for _ in range(2)]
        with load(b, tmp_path) as session:
            assert b.executor.keys(session._state.sequence) == LONG
            assert [each.status for each in snapshots if each] == ["evicted", "open"]


def test_where_there_is_no_room_it_says_what_was_asked_and_what_is_there(tmp_path: Path) -> None:
    with bench(capacity=50) as b:
        saved(b, tmp_path, LONG)
        with b.session_at([*PROMPT, 1, 2]):
            before = state_of(b)
            with pytest.raises(
                PoolFullError, match="what is loaded needs 40 more cells, 39 of 50 can be had"
            ) as caught:
                load(b, tmp_path)
            assert (caught.value.needed, caught.value.free, caught.value.capacity) == (40, 39, 50)
            assert state_of(b) == before


def test_free_cells_at_other_offsets_are_no_room(tmp_path: Path) -> None:
    with bench(capacity=16, run=4) as b:
        saved(b, tmp_path, LONG[:8])
        kept = [b.session_at(LONG[:2]) for _ in range(3)]  # six cells of 16, three runs begun
        before = state_of(b)
        with pytest.raises(PoolFullError, match="8 more cells"):
            load(b, tmp_path)
        assert state_of(b) == before
        assert [each.status for each in kept] == ["open"] * 3


def test_cells_that_a_prompt_was_promised_are_not_taken(tmp_path: Path) -> None:
    with bench(capacity=64, max_batch_tokens=8) as b:
        saved(b, tmp_path, LONG)
        other = b.open()
        with b.executor.holding_forward() as gate:
            generation = b.start(other, LONG[:30], 2)
            gate.wait_held()
            errors: list[BaseException] = []
            thread = threading.Thread(target=_catch, args=(errors, lambda: load(b, tmp_path)))
            thread.start()
            eventually(lambda: b.runner._core._commands, "nothing was asked for")  # it has read the file
            gate.release_one()
            thread.join(WAIT_S)
            assert [type(each) for each in errors] == [PoolFullError]
        assert generation.result(WAIT_S)


def _catch(errors: list[BaseException], call: Any) -> None:
    try:
        call()
    except BaseException as error:
        errors.append(error)


def test_a_loaded_session_is_one_of_the_resident_ones(tmp_path: Path) -> None:
    with bench(RunnerOptions(max_sessions=2)) as b:
        saved(b, tmp_path)
        with load(b, tmp_path), b.open():
            before = state_of(b)
            with pytest.raises(SessionLimitError, match="at most 2"):
                load(b, tmp_path)
            assert state_of(b) == before
        load(b, tmp_path).close()


def test_what_is_on_its_way_in_counts_as_resident(tmp_path: Path) -> None:
    with bench(RunnerOptions(max_sessions=1), row_bytes=MIB) as b:
        saved(b, tmp_path, LONG)
        rows, write = b.executor.rows, b.executor.rows.write
        opened: list[Any] = []

        def write_and_open(cells: Any, given: Any) -> None:
            opened.append(b.runner.open_session_async())
            write(cells, given)

        rows.write = write_and_open  # type: ignore[method-assign]
        with load(b, tmp_path):
            assert len(opened) == 10
            assert all(isinstance(each.exception(WAIT_S), SessionLimitError) for each in opened)


def test_a_session_that_is_longer_than_may_be_is_refused(tmp_path: Path) -> None:
    with bench() as b:
        saved(b, tmp_path, LONG)
    refusal = "the saved session needs 40 tokens, the context holds 39"
    with bench(RunnerOptions(max_session_tokens=39)) as b, pytest.raises(ContextLengthError, match=refusal):
        load(b, tmp_path)


# ---- what goes wrong


def test_a_prepared_input_cannot_be_saved(tmp_path: Path) -> None:
    with bench(kinds=(EmbeddingInput.kind,)) as b, b.open() as session:
        session.generate(EmbeddingInput(np.ones((3, 2))), greedy(max_tokens=1), timeout=WAIT_S)
        with pytest.raises(SavedStateError, match="prepared input cannot be saved") as caught:
            session.save(tmp_path, "one", WAIT_S)
        assert caught.value.code == "unsavable"
        assert list(tmp_path.iterdir()) == []


def test_an_executor_without_images_says_so(tmp_path: Path) -> None:
    with bench() as b:
        assert Executor.read_image(b.executor, []) is None  # the default of the protocol
        assert Executor.write_image(b.executor, KvImage(8, 0, (), ())) is None
        assert Executor.description.fget(b.executor) == {}  # type: ignore[attr-defined]
        saved(b, tmp_path)
    with bench(images=False) as b:
        with b.session_at() as session, pytest.raises(SavedStateError, match="cannot give its K/V out"):
            session.save(tmp_path, "two", WAIT_S)
        with pytest.raises(SavedStateError, match="cannot take K/V") as caught:
            load(b, tmp_path)
        assert caught.value.code == "unsavable"
    assert Runner.saved_names(tmp_path) == ["one"]


def test_a_session_that_is_closed_or_poisoned_is_not_saved(tmp_path: Path) -> None:
    with bench() as b:
        session = b.session_at()
        session.close()
        with pytest.raises(SessionError, match="was closed"):
            session.save(tmp_path, "one", WAIT_S)
        broken = b.open()
        b.executor.fail_forward(ComputeError("broken"))
        with pytest.raises(ComputeError):
            b.run(broken, PROMPT)
        with pytest.raises(PoisonedError, match="broken"):
            broken.save(tmp_path, "one", WAIT_S)
        assert list(tmp_path.iterdir()) == []


def test_a_failure_while_rows_come_in_leaves_nothing(tmp_path: Path) -> None:
    with bench(row_bytes=MIB) as b:
        saved(b, tmp_path, LONG)
        with b.session_at(PROMPT) as session:
            before = state_of(b)
            b.executor.rows.write_fault = MemoryError("no memory")
            with pytest.raises(MemoryError):
                load(b, tmp_path)
            assert state_of(b) == before
            assert session.tokens == PROMPT
        load(b, tmp_path).close()


def test_a_clone_that_fails_leaves_nothing_held(tmp_path: Path) -> None:
    with bench() as b, b.session_at() as session:
        before = state_of(b)
        b.executor.fail_clone(ComputeError("broken"))
        with pytest.raises(ComputeError):
            session.save(tmp_path, "one", WAIT_S)
        assert state_of(b) == before
        assert list(tmp_path.iterdir()) == []


def test_a_timeout_leaves_nothing(tmp_path: Path) -> None:
    with bench() as b:
        session = b.session_at()
        session.save(tmp_path, "one", WAIT_S)
        b.drain()
        used = b.executor.cache.used_cells
        before = file_of(tmp_path, "one").read_bytes()
        other = b.open()
        with b.executor.holding_forward() as gate:
            generation = b.start(other, [1], 2)
            gate.wait_held()
            with pytest.raises(TimeoutError):
                session.save(tmp_path, "one", 0.05)
            with pytest.raises(TimeoutError):
                b.runner.load_session(tmp_path, "one", 0.05)
            with pytest.raises(TimeoutError):
                session.save(tmp_path, "one", 0)
        assert generation.result(WAIT_S)
        b.drain()
        assert [path.name for path in tmp_path.iterdir()] == ["one.ggkv"]
        assert file_of(tmp_path, "one").read_bytes() == before
        assert b.executor.cache.used_cells == used + 2  # those of the generation
        assert b.runner.stats()["sessions"] == 2


def test_a_runner_that_has_stopped_says_so(tmp_path: Path) -> None:
    with bench() as b:
        session = b.session_at()
        session.save(tmp_path, "one", WAIT_S)
        assert b.runner.shutdown(WAIT_S)
        with pytest.raises(ClosedError):
            session.save(tmp_path, "one", WAIT_S)
        with pytest.raises(ClosedError):
            load(b, tmp_path)


def test_shutting_down_gives_up_what_is_saved_and_loaded(tmp_path: Path) -> None:
    with bench(row_bytes=MIB) as b:
        saved(b, tmp_path, LONG)
        write = b.executor.rows.write

        def write_and_stop(cells: Any, given: Any) -> None:
            b.runner.shutdown(WAIT_S)  # on the engine's thread: it ends after this
            write(cells, given)

        b.executor.rows.write = write_and_stop  # type: ignore[method-assign]
        with pytest.raises(ClosedError):
            load(b, tmp_path)
    with bench(row_bytes=MIB) as b:
        read = b.executor.rows.read

        def read_and_stop(cells: Any) -> Any:
            b.runner.shutdown(WAIT_S)
            return read(cells)

        session = b.session_at(LONG)
        b.executor.rows.read = read_and_stop  # type: ignore[method-assign]
        with pytest.raises(ClosedError):
            session.save(tmp_path, "two", WAIT_S)
    assert Runner.saved_names(tmp_path) == ["one"]


def test_a_callback_cannot_save_or_load(tmp_path: Path) -> None:
    with bench() as b:
        saved(b, tmp_path)
        session = b.open()
        errors: list[BaseException] = []

        def on_update(update: Any) -> None:
            _catch(errors, lambda: session.save(tmp_path, "two", WAIT_S))
            _catch(errors, lambda: load(b, tmp_path))

        generation = b.start(session, PROMPT, 1, on_update=on_update)
        assert generation.wait(WAIT_S)
        assert len(errors) >= 2
        assert {type(each) for each in errors} == {WouldBlockError}
        assert Runner.saved_names(tmp_path) == ["one"]


# ---- files


def test_directory_and_file_are_for_their_owner_only(tmp_path: Path) -> None:
    with bench() as b:
        saved(b, tmp_path / "of" / "mine")
    directory = tmp_path / "of" / "mine"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(directory, "one").stat().st_mode) == 0o600
    assert Runner.saved_names(directory) == ["one"]


def test_saving_again_replaces_what_was_there(tmp_path: Path) -> None:
    with bench() as b:
        saved(b, tmp_path, LONG)
        saved(b, tmp_path, PROMPT)
        with load(b, tmp_path) as session:
            assert session.tokens == PROMPT
