"""Eight sessions on real models, prefilled apart and decoded together, with clones and rewinds among them.

The same tokens are fed to each session alone: in deterministic mode its logits are the same bits, else they stay close.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from engines import Logits, batch_of, executor_over, loaded
from real_models import gemma3_270m, smollm2

from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml.vocab import Vocabulary
from ggml_engine.models.model import Model

MODELS = {"S": smollm2, "G": gemma3_270m}

# Words in an order that a model has an opinion about. On random tokens G is chaotic: libllama, cutting one prompt into 7
# tokens a step and not 8, differs from itself by a normalised mean squared error of 0.3.
TEXT = """The harbour lay still in the early morning, and the boats that had come in during the night were tied along the
wall in the order of their arrival. An old man walked from one to the next, reading the names aloud and writing the weight
of each catch into a small book. He had done this for forty years, and nobody remembered who had asked him to begin. When
the sun came over the hill, the buyers arrived with their carts. They asked him for the numbers, as their fathers had, and
he gave them without looking up. The price of a fish depends on how many others there are, he liked to say, and on how long
the road is to the people who want to eat it. Most of what he knew about the world he had learned from those two facts."""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with loaded(MODELS[request.param](), threads=2) as model:
        yield model


class Sessions:
    """What each session was fed, and the logits that were asked for, by the history that they follow."""

    def __init__(self, executor: GgmlExecutor) -> None:
        self.executor = executor
        self.text = Vocabulary.load(executor.model.file).encode(TEXT, add_special=True, parse_special=False).tolist()
        self.histories: dict[int, list[int]] = {}
        self.logits: dict[int, dict[tuple[int, ...], Logits]] = defaultdict(dict)

    def open(self) -> int:
        sequence = self.executor.open()
        self.histories[sequence] = []
        return sequence

    def step(self, lengths: Mapping[int, int]) -> None:
        """Appends that many tokens of the text, to each session from another place; keeps the logits of the last."""
        parts = []
        for sequence, n in lengths.items():
            start = 7 * sequence + len(self.histories[sequence])
            parts.append((sequence, self.text[start : start + n]))
        batch = batch_of(parts)
        last = np.cumsum([len(tokens) for _, tokens in parts]) - 1
        marks = np.zeros(batch.n_tokens, np.bool_)
        marks[last] = True
        logits = self.executor.forward(Batch(batch.tokens, batch.sequences, marks))
        for row, (sequence, tokens) in zip(logits, parts, strict=True):
            self.histories[sequence] += tokens
            self.logits[sequence][tuple(self.histories[sequence])] = row

    def clone(self, source: int, upto: int) -> int:
        clone = self.executor.clone(source, upto)
        self.histories[clone] = self.histories[source][:upto]
        return clone

    def rewind(self, sequence: int, to: int) -> None:
        self.executor.rewind(sequence, to)
        del self.histories[sequence][to:]


def live(executor: GgmlExecutor) -> Sessions:
    """Eight prefills apart, decodes together, a clone, two rewinds, a session that ends and one that comes in its place."""
    sessions = Sessions(executor)
    eight = [sessions.open() for _ in range(8)]
    for i, sequence in enumerate(eight):
        sessions.step({sequence: 10 + 9 * i})
    for _ in range(4):
        sessions.step(dict.fromkeys(eight, 1))
    clone = sessions.clone(eight[7], 60)
    sessions.rewind(eight[1], 12)
    sessions.rewind(eight[6], 33)
    executor.close(eight[0])
    newcomer = sessions.open()
    rest = [*eight[1:], clone]
    sessions.step({newcomer: 21, **dict.fromkeys(rest, 1)})
    for _ in range(4):
        sessions.step(dict.fromkeys([*rest[::-1], newcomer], 1))
    return sessions


def alone(
    executor: GgmlExecutor, history: tuple[int, ...], steps: set[tuple[int, ...]]
) -> dict[tuple[int, ...], Logits]:
    """The logits after each of `steps`, all beginnings of `history`, of a session of its own.

    In deterministic mode in one prefill, since chunks are to make no difference; else by a prefill and decodes.
    """
    sequence = executor.open()
    first = len(history) if executor.options.deterministic else min(len(step) for step in steps)
    marks = np.array([history[: i + 1] in steps for i in range(first)])
    logits = list(executor.forward(Batch(np.array(history[:first]), np.full(first, sequence), marks)))
    for n in range(first, len(history)):
        logits.append(executor.forward(Batch.of_sequence(sequence, history[n : n + 1]))[0])
    executor.close(sequence)
    lengths = [*(np.flatnonzero(marks) + 1).tolist(), *range(first + 1, len(history) + 1)]
    return {history[:n]: row for n, row in zip(lengths, logits, strict=True)}


def pairs(model: Model, **options: Any) -> Iterator[tuple[Logits, Logits]]:
    """Logits together and alone, of everything that was asked for."""
    with (
        executor_over(model, capacity=1536, **options) as together,
        executor_over(model, capacity=512, **options) as single,
    ):
        sessions = live(together)
        assert len(sessions.logits) == 10
        for kept in sessions.logits.values():
            left = set(kept)
            while left:  # a session that was rewound has two histories
                longest = max(left, key=len)
                steps = {step for step in left if longest[: len(step)] == step}
                found = alone(single, longest, steps)
                for step in steps:
                    yield kept[step], found[step]
                left -= steps


def test_in_deterministic_mode_every_session_has_the_bits_that_it_has_alone(model: Model) -> None:  # R72, R73
    n = 0
    for ours, single in pairs(model, deterministic=True):
        assert ours.std() > 0.5, "flat logits would hide mistakes"
        assert ours.tobytes() == single.tobytes(), f"differs by {np.abs(ours - single).max()}"
        n += 1
    assert n > 80


# Kernels round by the number of rows in a step and by where cells lie, and the models' quantised products (activations in
# 8 bits, a block at a time) turn a last bit into another quantum now and then. The worst of 85 rows measured, teacher-forced:
# a normalised mean squared error of 0.018 on both models, a largest difference of 0.3 (S) and 0.4 (G) standard deviations;
# allowed is three times that. The logits of another token are at an error above 0.5, which the control below asks for.
WORST_ERROR = 0.054
WORST_DIFFERENCE = 1.2  # in standard deviations of the logits


def error_of(found: Logits, expected: Logits) -> float:
    return float(np.square(found - expected).mean() / expected.var())


@pytest.mark.parametrize("attention", ["matmul", "cells"])
def test_in_ordinary_mode_the_same_tokens_give_nearly_the_same_logits(model: Model, attention: str) -> None:  # R72
    others: list[float] = []
    previous = None
    for ours, single in pairs(model, attention=attention):
        assert error_of(ours, single) < WORST_ERROR
        assert np.abs(ours - single).max() < WORST_DIFFERENCE * single.std()
        if previous is not None:
            others.append(error_of(previous, single))
        previous = single
    assert len(others) > 80
    assert np.median(others) > 2 * WORST_ERROR, "the logits of other tokens are as near: nothing is shown"
