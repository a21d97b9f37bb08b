"""The ways in which a check runs a model: how the tokens of one sequence are cut, and what happens beside it.

A way is a script over an executor. A `Run` collects the logits of the main sequence by position, whichever
sequence and step computed them; ways know nothing of what they are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import CacheError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml.gguf import GGUFArray, GGUFFile

Ids = npt.NDArray[np.int32]

_NORMAL = 1  # of llama.cpp's enum llama_token_type
_N_DECODED = 8  # steps of single tokens, enough to move within a block and slow only by that


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What is fed: the main sequence, others as long, and the positions whose logits are compared (ascending)."""

    main: Ids  # [n]
    others: npt.NDArray[np.int32]  # [3, n]
    wanted: npt.NDArray[np.int64]
    is_wanted: npt.NDArray[np.bool_]  # [n]

    @classmethod
    def random(cls, file: GGUFFile, n: int, seed: int, max_wanted: int) -> Tokens:
        """Tokens of a seed; at most `max_wanted` positions, evenly spread, the last among them.

        As in a text: the model's begin token first, where it has one, then normal tokens, those of low ids (which
        vocabularies give to what is frequent) far more often than others. Elsewhere a model is where it never was in
        training, and its logits hang on the last bits of everything.
        """
        n_vocab = file.tensors["token_embd.weight"].shape[1]
        normal = _normal_tokens(file, n_vocab)
        ranks = normal.size ** np.random.default_rng(seed).random((4, n))  # 1 to size, its logarithm uniform: Zipf
        drawn = normal[ranks.astype(np.int64) - 1]
        begin = file.metadata.find_integer("tokenizer.ggml.bos_token_id")
        if begin is not None and 0 <= begin < n_vocab:
            drawn[:, 0] = begin
        wanted = np.unique(np.linspace(n - 1, 0, min(n, max_wanted)).round().astype(np.int64))
        is_wanted = np.zeros(n, np.bool_)
        is_wanted[wanted] = True
        return cls(drawn[0], drawn[1:], wanted, is_wanted)

    @property
    def n(self) -> int:
        """Length of the main sequence."""
        return int(self.main.size)


def _normal_tokens(file: GGUFFile, n_vocab: int) -> Ids:
    """Ids of text, neither control tokens nor unused ones; all ids where the file does not say."""
    ids = np.arange(n_vocab, dtype=np.int32)
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, GGUFArray) or not kinds.kind.is_integer or len(kinds) != n_vocab:
        return ids
    normal = ids[kinds.numpy() == _NORMAL]
    return normal if normal.size else ids


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Tokens of one sequence in a step; `start` is their first position where they are the main sequence's."""

    sequence: int
    tokens: Ids
    start: int | None = None


class Run:
    """An executor and the logits of the main sequence so far, f32 [n_wanted, n_vocab]."""

    def __init__(self, executor: GgmlExecutor, tokens: Tokens) -> None:
        self.tokens = tokens
        self.logits = np.full((tokens.wanted.size, executor.model.hp.n_vocab), np.nan, np.float32)
        self._executor = executor
        self._open: list[int] = []

    def open(self) -> int:
        """A new sequence, closed with this."""
        self._open.append(self._executor.open())
        return self._open[-1]

    def clone(self, source: int, upto: int) -> int:
        """A clone, closed with this."""
        clone = self._executor.clone(source, upto)
        if clone is None:
            raise CacheError(f"no clone of {upto} positions of sequence {source} could be had")
        self._open.append(clone)
        return clone

    def rewind(self, sequence: int, to: int) -> None:
        """Drop what a sequence holds from `to` on."""
        self._executor.rewind(sequence, to)

    def part(self, sequence: int, start: int, stop: int) -> Part:
        """Those positions of the main sequence, fed to `sequence`."""
        return Part(sequence, self.tokens.main[start:stop], start)

    def step(self, *parts: Part, interleave: bool = False) -> None:
        """One forward of all parts, one after the other or token by token; the main sequence's logits are kept."""
        parts = tuple(part for part in parts if part.tokens.size)
        if not parts:
            return
        places = np.concatenate([np.arange(part.tokens.size) for part in parts])
        order = np.argsort(places, kind="stable") if interleave else np.arange(places.size)
        batch = np.concatenate(
            [np.array([(token, part.sequence) for token in part.tokens.tolist()], np.int64) for part in parts]
        )[order]
        is_main = np.concatenate([np.full(part.tokens.size, part.start is not None) for part in parts])[order]
        positions = np.concatenate([(part.start or 0) + np.arange(part.tokens.size) for part in parts])[order]
        wants = is_main & self.tokens.is_wanted[positions]
        logits = self._executor.forward(Batch(batch[:, 0].astype(np.int32), batch[:, 1], wants))
        self.logits[np.searchsorted(self.tokens.wanted, positions[wants])] = logits

    def close(self) -> None:
        """Close all sequences."""
        while self._open:
            self._executor.close(self._open.pop())


@dataclass(frozen=True, slots=True)
class ChunkedWay:
    """The main sequence alone, in steps of these sizes."""

    name: str
    sizes: tuple[int, ...]

    def feed(self, run: Run) -> None:
        """Feed it."""
        sequence = run.open()
        start = 0
        for size in self.sizes:
            run.step(run.part(sequence, start, start + size))
            start += size


@dataclass(frozen=True, slots=True)
class SharedWay:
    """The main sequence with something beside it, or under it."""

    name: str
    feed: Callable[[Run], None]


def chunked_ways(n: int, windows: Sequence[int]) -> list[ChunkedWay]:
    """In one step, in chunks, prompt and single tokens, and with steps that end around the border of each window."""
    third = n // 3 + 1
    n_decoded = min(_N_DECODED, n // 2)
    ways = [
        ChunkedWay("alone", (n,)),
        ChunkedWay("alone, chunks", (third, third, n - 2 * third)),
        ChunkedWay("alone, decoding", (n - n_decoded, *(1,) * n_decoded)),
    ]
    for window in windows:
        if window < n:
            ways.append(ChunkedWay(f"window {window}", tuple(_around(window, n))))
    return ways


def _around(window: int, n: int) -> Iterator[int]:
    """Step sizes: up to one before the window's end, over it token by token, then wider than the window."""
    left = n
    for wanted in (window - 1, 1, 1, 1, window + 2, n):
        size = min(wanted, left)
        if size:
            yield size
        left -= size


def _batched(run: Run) -> None:
    """Three sequences prefill token by token in one step, then decode together; one ends early."""
    n, others = run.tokens.n, run.tokens.others
    n_decoded = min(_N_DECODED, n // 2)
    main, second, third = run.open(), run.open(), run.open()
    run.step(
        Part(second, others[0, : n // 2]),
        run.part(main, 0, n - n_decoded),
        Part(third, others[1, : n // 3]),
        interleave=True,
    )
    for i in range(n_decoded):
        parts = [run.part(main, n - n_decoded + i, n - n_decoded + i + 1), Part(second, others[0, i : i + 1])]
        if i < n_decoded // 2:
            parts.insert(0, Part(third, others[1, i : i + 1]))
        run.step(*parts)


def _cloned(run: Run) -> None:
    """A clone goes on with the main sequence while its source goes on with other tokens."""
    _fork(run, main_is_clone=True)


def _source_of_clones(run: Run) -> None:
    """The source goes on with the main sequence while a clone of its clone goes on with other tokens."""
    _fork(run, main_is_clone=False)


def _fork(run: Run, *, main_is_clone: bool) -> None:
    n, half = run.tokens.n, run.tokens.n // 2
    source = run.open()
    run.step(run.part(source, 0, half))
    clone = run.clone(source, half)
    main, other = clone, source
    if not main_is_clone:
        main, other = source, run.clone(clone, half)
    beside = run.tokens.others[0, half:]
    middle = (half + n) // 2
    run.step(Part(other, beside[: middle - half]), run.part(main, half, middle), interleave=True)
    run.step(run.part(main, middle, n), Part(other, beside[middle - half :]))


def _rewound(run: Run) -> None:
    """Another continuation is dropped, as long as the first half, beyond every window that fits: then the real one."""
    n, half = run.tokens.n, run.tokens.n // 2
    main, beside = run.open(), run.open()
    run.step(run.part(main, 0, half), Part(beside, run.tokens.others[0, :half]))
    run.step(Part(main, run.tokens.others[1]))  # n tokens: more than a window that n passes
    run.rewind(main, half)
    run.step(Part(beside, run.tokens.others[0, half:]), run.part(main, half, n))


WAYS = (
    SharedWay("batched", _batched),
    SharedWay("cloned", _cloned),
    SharedWay("source of clones", _source_of_clones),
    SharedWay("rewound", _rewound),
)
