"""What the control plane may rely on, of every executor: our graphs, libllama's context, and the fake one of its tests.

A memory that keeps every position can be cloned and rewound at any; a recurrent one at its end, and refuses the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from architecture_rows import ROWS, model_file
from engines import batch_of, feed, libllama_running, running
from fake_executor import FakeExecutor
from tiny_models import VOCAB, write_gemma3, write_llama

from ggml_engine.errors import (
    AbortedError,
    InputError,
    PoolFullError,
    PositionError,
    RewindError,
    UnknownSequenceError,
)
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.protocol import Executor
from ggml_engine.models.registry import ARCHITECTURES

# f16 K and V in other cells, steps of other lengths: kernels round by shape
ROUNDED = 1e-1
CAPACITY = 256
MOST = 64  # tokens of a step
N_VOCAB = 97  # of the fake one; the files have more
TOKENS: list[list[int]] = np.random.default_rng(7).integers(3, N_VOCAB, (4, 48)).tolist()
Open = Callable[[], AbstractContextManager[Executor]]


@contextmanager
def fake(_folder: Path) -> Iterator[Executor]:
    executor = FakeExecutor(CAPACITY, n_vocab=N_VOCAB, max_batch_tokens=MOST)
    yield executor
    assert not executor.violations


def native(write: Callable[..., Path], **options: Any) -> Callable[[Path], AbstractContextManager[Executor]]:
    def opened(folder: Path) -> AbstractContextManager[Executor]:
        path = write(folder / "model.gguf", **options)
        return running(path, capacity=CAPACITY, max_batch_tokens=MOST, run=1, read_block=64)

    return opened


def libllama(make: Callable[[Path], Path]) -> Callable[[Path], AbstractContextManager[Executor]]:
    def opened(folder: Path) -> AbstractContextManager[Executor]:
        return libllama_running(make(folder / "model.gguf"), capacity=CAPACITY, max_batch_tokens=MOST)

    return opened


EXECUTORS: dict[str, Callable[[Path], AbstractContextManager[Executor]]] = {
    "fake": fake,
    "native llama": native(write_llama),
    "native gemma3": native(write_gemma3, window=5),
    "libllama llama": libllama(write_llama),
    "libllama gemma3": libllama(lambda path: write_gemma3(path, window=5)),
    **{f"libllama {name}": libllama(lambda _, name=name: model_file(name)) for name in ("mamba", "mamba2")},
    **{f"libllama {name}": libllama(lambda _, name=name: model_file(name)) for name in ("lfm2", "qwen35")},
}
FIRST_ROWS = [next(name for name, row in ROWS.items() if row.architecture == each) for each in ARCHITECTURES]
EVERY_ARCHITECTURE: dict[str, Callable[[Path], AbstractContextManager[Executor]]] = {
    **{f"native row {name}": native(lambda _, name=name: model_file(name)) for name in FIRST_ROWS},
    **{f"libllama row {name}": libllama(lambda _, name=name: model_file(name)) for name in FIRST_ROWS},
}
KEEPS_THE_END_ONLY = {"libllama mamba", "libllama mamba2", "libllama lfm2", "libllama qwen35"}


@pytest.fixture(params=[*EXECUTORS, *(pytest.param(name, marks=pytest.mark.slow) for name in EVERY_ARCHITECTURE)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def executor(name: str, tmp_path: Path) -> Iterator[Executor]:
    """At the end all cells are free when all sequences are closed."""
    with (EXECUTORS | EVERY_ARCHITECTURE)[name](tmp_path) as executor:
        yield executor


def cold(executor: Executor, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """The logits of all tokens in a sequence of their own."""
    sequence = executor.open()
    logits = feed(executor, sequence, tokens, MOST)
    executor.close(sequence)
    return logits


def assert_near(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < ROUNDED
    assert np.ptp(expected) > 1  # else nothing was compared


def test_sequences_have_numbers_that_never_come_again(executor: Executor) -> None:
    first, second = executor.open(), executor.open()
    executor.close(first)
    third = executor.open()
    assert len({first, second, third}) == 3
    for refused in (executor.length, executor.close):
        with pytest.raises(UnknownSequenceError):
            refused(first)
    assert executor.length(third) == 0


def test_what_runs_in_one_step_is_what_runs_alone(executor: Executor) -> None:
    alone = [cold(executor, tokens[:20]) for tokens in TOKENS[:3]]
    sequences = [executor.open() for _ in range(3)]
    done = [0, 0, 0]
    for step in [(9, 0, 0), (0, 12, 3), (1, 1, 1), (1, 3, 10), (1, 1, 1), (8, 3, 5)]:
        parts = [(i, TOKENS[i][done[i] : done[i] + n]) for i, n in enumerate(step) if n]
        found = executor.forward(batch_of([(sequences[i], tokens) for i, tokens in parts]))
        assert_near(found, np.concatenate([alone[i][done[i] : done[i] + len(tokens)] for i, tokens in parts]))
        done = [length + n for length, n in zip(done, step, strict=True)]
        assert [executor.length(sequence) for sequence in sequences] == done
    assert executor.free_cells == executor.capacity - sum(done)


def test_tokens_of_sequences_may_interleave_and_logits_come_in_batch_order(executor: Executor) -> None:
    alone = [cold(executor, tokens[:6]) for tokens in TOKENS[:2]]
    sequences = [executor.open(), executor.open()]
    whose = np.array([0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1])
    at = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    wanted = np.array([i % 3 == 1 for i in range(12)])
    tokens = np.array([TOKENS[i][p] for i, p in zip(whose, at, strict=True)])
    found = executor.forward(Batch(tokens, np.array(sequences)[whose], wanted))
    rows = zip(whose[wanted], at[wanted], strict=True)
    assert_near(found, np.stack([alone[i][p] for i, p in rows]))


def test_no_logits_are_an_array_without_rows(executor: Executor) -> None:
    sequence = executor.open()
    found = executor.forward(Batch.of_sequence(sequence, TOKENS[0][:5], logits="none"))
    assert found.shape == (0, executor.n_vocab)
    assert executor.length(sequence) == 5


def test_a_clone_at_the_end_costs_no_cell_and_both_go_their_own_way(executor: Executor) -> None:  # R2 R4 R63 R64
    source = executor.open()
    feed(executor, source, TOKENS[0][:21])
    free = executor.free_cells
    clone = executor.clone(source, 21)
    assert clone is not None
    assert (executor.length(clone), executor.free_cells) == (21, free)
    own, other = cold(executor, TOKENS[0][:30]), cold(executor, TOKENS[0][:21] + TOKENS[1][:9])
    for at in range(9):
        found = executor.forward(batch_of([(clone, [TOKENS[1][at]]), (source, [TOKENS[0][21 + at]])]))
        assert_near(found, np.stack([other[21 + at], own[21 + at]]))
    executor.close(source)
    assert executor.free_cells == executor.capacity - 30
    assert_near(
        feed(executor, clone, TOKENS[2][:3]), cold(executor, TOKENS[0][:21] + TOKENS[1][:9] + TOKENS[2][:3])[30:]
    )


@pytest.mark.parametrize("upto", [0, 1, 9, 20])
def test_a_clone_at_an_earlier_position_is_exact_or_refused(
    name: str, executor: Executor, upto: int
) -> None:  # R2 R8 R65
    source = executor.open()
    feed(executor, source, TOKENS[0][:21])
    clone = executor.clone(source, upto)
    assert (clone is None) == (name in KEEPS_THE_END_ONLY and upto > 0)
    if clone is not None:
        assert executor.length(clone) == upto
        assert_near(feed(executor, clone, TOKENS[1][:9]), cold(executor, TOKENS[0][:upto] + TOKENS[1][:9])[upto:])
    assert_near(feed(executor, source, TOKENS[0][21:25]), cold(executor, TOKENS[0][:25])[21:])
    for refused in (-1, 26):
        with pytest.raises(PositionError):
            executor.clone(source, refused)
    with pytest.raises(UnknownSequenceError):
        executor.clone(10_000, 0)


@pytest.mark.parametrize("to", [0, 1, 6, 29, 30])
def test_a_rewind_continues_as_a_cold_run_or_is_refused_with_nothing_changed(
    name: str, executor: Executor, to: int
) -> None:  # R65 R101 R103
    sequence = executor.open()
    feed(executor, sequence, TOKENS[0][:21])
    feed(executor, sequence, TOKENS[0][21:30], 1)
    kept = 30
    assert executor.can_rewind(sequence, to) is (name not in KEEPS_THE_END_ONLY or to in (0, 30))
    if executor.can_rewind(sequence, to):
        executor.rewind(sequence, to)
        kept = to
    else:
        with pytest.raises(RewindError, match=f"not from 30 to {to}"):
            executor.rewind(sequence, to)
    assert (executor.length(sequence), executor.free_cells) == (kept, executor.capacity - kept)
    assert_near(feed(executor, sequence, TOKENS[1][:9]), cold(executor, TOKENS[0][:kept] + TOKENS[1][:9])[kept:])


def test_rewinds_outside_of_a_sequence_are_refused(name: str, executor: Executor) -> None:
    if name == "fake":
        return  # it notes these as mistakes of the control plane
    sequence = executor.open()
    feed(executor, sequence, TOKENS[0][:5])
    for to in (-1, 6):
        with pytest.raises(PositionError):
            executor.rewind(sequence, to)
    with pytest.raises(UnknownSequenceError):
        executor.rewind(10_000, 0)
    assert executor.length(sequence) == 5


def test_a_step_that_does_not_fit_changes_nothing(executor: Executor) -> None:  # R73
    first, second = executor.open(), executor.open()
    while executor.free_cells > 10:
        feed(executor, first, [5] * min(MOST, executor.free_cells - 10))
    length = executor.length(first)
    with pytest.raises(PoolFullError) as told:
        executor.forward(batch_of([(first, [5] * 6), (second, TOKENS[1][:5])]))
    assert (told.value.free, told.value.capacity) == (10, CAPACITY)
    assert (executor.length(first), executor.length(second), executor.free_cells) == (length, 0, 10)
    feed(executor, second, TOKENS[1][:5])
    executor.close(first)
    assert executor.free_cells == CAPACITY - 5
    assert_near(feed(executor, second, TOKENS[1][5:9]), cold(executor, TOKENS[1][:9])[5:])


def test_bad_steps_are_refused_with_nothing_changed(name: str, executor: Executor) -> None:
    sequence = executor.open()
    feed(executor, sequence, TOKENS[0][:5])
    bad: list[tuple[Batch, type[Exception]]] = [
        (Batch(np.array([5]), np.array([10_000]), np.array([True])), UnknownSequenceError),
        *[
            (Batch(np.array([5]), np.array([sequence]), np.array([True]), np.array([at])), PositionError)
            for at in (0, 4, 6)
        ],
    ]
    if name != "fake":  # it leaves both to the control plane
        bad.append((Batch.of_sequence(sequence, [5] * (MOST + 1)), InputError))
        bad += [(Batch.of_sequence(sequence, [token]), InputError) for token in (-1, VOCAB, 2**31 - 1)]
    for batch, kind in bad:
        with pytest.raises(kind, match=r"sequence|position|token ids must be|max_batch_tokens"):
            executor.forward(batch)
        assert (executor.length(sequence), executor.free_cells) == (5, CAPACITY - 5)
    assert_near(feed(executor, sequence, TOKENS[0][5:9]), cold(executor, TOKENS[0][:9])[5:])


def test_an_aborted_step_is_rewound_and_run_again(executor: Executor) -> None:  # R69 R107
    first, second = executor.open(), executor.open()
    feed(executor, first, TOKENS[0][:7])
    step = batch_of([(first, TOKENS[0][7:20]), (second, TOKENS[1][:9])])
    executor.abort()
    with pytest.raises(AbortedError):
        executor.forward(step)
    assert (executor.length(first), executor.length(second)) == (7, 0)
    executor.clear_abort()
    executor.rewind(first, 7)
    executor.rewind(second, 0)
    assert executor.free_cells == CAPACITY - 7
    found = executor.forward(step)
    assert_near(found, np.concatenate([cold(executor, TOKENS[0][:20])[7:], cold(executor, TOKENS[1][:9])]))


def test_cells_are_counted_once_however_many_share_them(executor: Executor) -> None:  # R43
    source = executor.open()
    feed(executor, source, TOKENS[0][:12])
    clone = executor.clone(source, 12)
    assert clone is not None
    feed(executor, clone, TOKENS[1][:3])
    assert executor.count_cells([source, clone]) == 15
    assert executor.count_cells([source]) == 12
    for sequence in (source, clone):
        executor.close(sequence)
    assert executor.free_cells == executor.capacity


def test_the_name_of_what_its_cells_hold_is_the_same_when_it_is_opened_again(name: str, tmp_path: Path) -> None:  # R25
    with (EXECUTORS | EVERY_ARCHITECTURE)[name](tmp_path) as executor:
        first = executor.fingerprint
    with (EXECUTORS | EVERY_ARCHITECTURE)[name](tmp_path) as executor:
        assert executor.fingerprint == first
    assert first
