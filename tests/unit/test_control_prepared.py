"""Inputs that are not tokens: asked for, sliced, counted, refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from control_bench import PROMPT, assert_failed, bench, greedy
from fake_executor import WAIT_S

from ggml_engine.control.generation import Reason
from ggml_engine.errors import InputError
from ggml_engine.executor.prepared import OPAQUE, EmbeddingInput, Kind, PreparedInput

KINDS = (EmbeddingInput.kind,)


def rows(n: int = 10, seed: int = 1, fingerprint: str = "") -> EmbeddingInput:
    return EmbeddingInput(np.random.default_rng(seed).normal(size=(n, 3)), fingerprint)


class Sized(PreparedInput):
    """An input that says of its size what it is told to."""

    kind = Kind("sized")

    def __init__(self, sizes: Sequence[object]) -> None:
        self._sizes = list(sizes)

    def size(self) -> int:
        size = self._sizes.pop(0) if len(self._sizes) > 1 else self._sizes[0]
        if isinstance(size, Exception):
            raise size
        return size  # type: ignore[return-value]

    def content_hash(self) -> bytes:
        return b"sized"


def test_a_whole_history_is_no_prepared_input() -> None:  # R47 R109
    with bench(kinds=KINDS) as b:
        session = b.session_at()
        given: Any = rows()
        assert_failed(session.generate_from(given, greedy()), "a history to generate from is token ids")
        assert session.tokens == PROMPT
        assert session.pending is not None


def test_an_input_that_is_not_accepted_fails_alone() -> None:  # R44
    with bench() as b:
        one, two = b.open(), b.open()
        with b.executor.holding_forward() as gate:
            running = b.start(two, PROMPT, 6)
            gate.wait_held()
            refused = b.start(one, rows())
        assert_failed(refused, "does not take <kind embeddings>")
        assert isinstance(refused.error, InputError)
        assert b.executor.n_accepts == 1, "it was not asked"
        assert running.result(WAIT_S)
        assert running.tokens == b.expected(PROMPT, 6)
        assert one.status == "open"
        assert b.run(one, [4, 5]) == b.expected([4, 5])
        assert not any(chunk.prepared for forward in b.executor.forwards for chunk in forward.chunks)


def test_chunks_are_slices_of_the_one_object_and_decoding_is_by_tokens() -> None:  # R45
    with bench(kinds=KINDS, max_batch_tokens=4) as b:
        session, given = b.open(), rows(10)
        generation = b.start(session, given, 3)
        assert generation.result(WAIT_S)
        assert generation.tokens == b.expected([given], 3)
        chunks = b.executor.chunks_of(session._state.sequence)
        slices = [chunk.prepared for chunk in chunks if chunk.prepared]
        assert [(each.start, each.stop) for each in slices] == [(0, 4), (4, 8), (8, 10)]
        assert all(each.source is given for each in slices)
        assert [chunk.tokens for chunk in chunks[3:]] == [(token,) for token in generation.tokens[:2]]
        assert session.tokens == [OPAQUE] * 10 + generation.tokens[:2]


def test_inputs_and_tokens_mix_in_one_forward_and_in_one_history() -> None:  # R45
    with bench(kinds=KINDS) as b:
        one, two = b.open(), b.open()
        first, second = rows(6, 1), rows(5, 2)
        with b.executor.holding_forward() as gate:
            running = b.start(two, PROMPT, 1)
            gate.wait_held()
            mixed = b.start(one, first, 3)
        assert running.result(WAIT_S)
        assert mixed.result(WAIT_S)
        history = [first, *mixed.tokens]
        assert mixed.tokens == b.expected([first], 3)
        again = b.start(one, second, 2)
        assert again.result(WAIT_S)
        history.append(second)
        assert again.tokens == b.expected(history, 2), "the pending token comes before the input"
        history += again.tokens
        assert b.run(one, [7]) == b.expected([*history, 7])


def test_a_clone_keeps_positions_of_inputs() -> None:  # R45
    with bench(kinds=KINDS) as b:
        session, given = b.open(), rows(6)
        assert b.start(session, given, 1).wait(WAIT_S)
        child = session.clone_async(6).result(WAIT_S)
        assert child is not None
        assert b.run(child, [9]) == b.expected([given, 9])


def test_a_whole_history_never_matches_positions_of_inputs() -> None:  # R45
    with bench(kinds=KINDS) as b:
        session = b.open()
        assert b.start(session, rows(3), 1).wait(WAIT_S)
        whole = session.generate_from([4, 5, 6, 7], greedy(max_tokens=3))
        assert whole.result(WAIT_S)
        assert whole.stats.reused_tokens == 0
        assert whole.tokens == b.expected([4, 5, 6, 7], 3)


def test_metrics_count_positions() -> None:  # R46
    with bench(kinds=KINDS) as b:
        session = b.open()
        generation = b.start(session, rows(10), 2)
        assert generation.result(WAIT_S)
        assert generation.stats.prompt_tokens == 10
        assert generation.stats.evaluated_tokens == 10
        assert session.position == 11
        assert b.runner.stats()["prefill_tokens"] == 10


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([0], "at least one position"),
        ([-1], "at least one position"),
        ([None], "at least one position"),
        ([True], "at least one position"),
        ([2**62], "needs 4611686018427387904 tokens"),
        ([200], "needs 200 tokens"),
        ([RuntimeError("no size")], "no size"),
        ([8, 9], "must not change"),
    ],
)
def test_an_unfit_size_is_refused_and_takes_no_cell(sizes: list[object], message: str) -> None:  # R47
    with bench(kinds=[Sized.kind], capacity=128) as b:
        session, other = b.open(), b.session_at()
        free = b.executor.free_cells
        generation = b.start(session, Sized(sizes))
        assert_failed(generation, message)
        assert b.executor.free_cells == free
        assert session.status == "open"
        assert b.run(session, [1, 2]) == b.expected([1, 2])
        assert b.run(other, [3]) == b.expected([*PROMPT, b.expected(PROMPT, 1)[0], 3])


def test_nothing_is_no_input() -> None:  # R47
    with bench(kinds=KINDS) as b:
        session = b.open()
        assert_failed(b.start(session, None), "nothing was given")
        with pytest.raises(InputError):
            rows(0)


def test_an_input_whose_size_changes_between_chunks_fails_alone() -> None:  # R47
    with bench(kinds=[Sized.kind], max_batch_tokens=4) as b:
        session, other = b.open(), b.open()
        with b.executor.holding_forward() as gate:
            changing = Sized([8])
            generation = b.start(session, changing)
            gate.wait_held()
            running = b.start(other, PROMPT)
            changing._sizes = [9]
        assert_failed(generation, "must not change")
        assert running.result(WAIT_S)
        assert running.tokens == b.expected(PROMPT)


def test_an_executor_that_cannot_say_fails_the_input_alone() -> None:  # R44
    class Broken(EmbeddingInput):
        @property
        def kind(self) -> Kind:  # type: ignore[override]
            raise RuntimeError("no kind")

    with bench(kinds=KINDS) as b:
        session = b.open()
        assert_failed(b.start(session, Broken(np.ones((2, 3)))), "no kind")
        assert b.run(session, [1]) == b.expected([1])


def test_the_same_kind_made_for_another_model_is_not_accepted() -> None:  # R48
    with bench(kinds=KINDS) as b:
        session = b.open()
        assert_failed(b.start(session, rows(4, fingerprint="another")), "not this one with its model")
        fitting = rows(4, fingerprint="fake")
        generation = b.start(session, fitting)
        assert generation.result(WAIT_S)
        assert generation.reason is Reason.LENGTH
        assert generation.tokens == b.expected([fitting])


def test_a_kind_is_itself_and_not_its_name() -> None:  # R48
    assert Kind("embeddings") != EmbeddingInput.kind
    with bench(kinds=[Kind("embeddings")]) as b:
        session = b.open()
        assert_failed(b.start(session, rows()), "does not take")
