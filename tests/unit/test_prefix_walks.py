"""Random walks over a prefix cache, beside a plain list of what must be in it. `R` numbers: rules of the contract."""

from __future__ import annotations

import random

import pytest
from control_bench import Bench, bench, greedy
from fake_executor import BYTES_PER_CELL, WAIT_S
from prefix_bench import keys, look

from ggml_engine.control.prefix_cache import PrefixCache

MOST_ENTRIES = 5
MOST_TOKENS = 14  # of prompts: few symbols and short ones meet often


def n_common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Walk:
    """A cache, and `expected`: the tokens of its entries, the least recently used first."""

    def __init__(self, b: Bench, seed: int, max_bytes: int | None) -> None:
        self.b = b
        self.random = random.Random(seed)
        self.cache = PrefixCache(MOST_ENTRIES, max_bytes)
        self.max_bytes = max_bytes
        self.expected: list[list[int]] = []

    def prompt(self) -> list[int]:
        """New, or an entry changed somewhere, cut, or made longer."""
        if not self.expected or self.random.random() < 0.2:
            return [self.random.randrange(3) for _ in range(self.random.randrange(1, MOST_TOKENS))]
        base = list(self.random.choice(self.expected))
        cut = base[: self.random.randrange(1, len(base) + 1)]
        return (cut + [self.random.randrange(3) for _ in range(self.random.randrange(4))])[:MOST_TOKENS]

    def ask(self) -> None:
        """Look up, generate, and capture the prompt, its end, or a checkpoint."""
        prompt = self.prompt()
        best = max((n_common(tokens, prompt[:-1]) for tokens in self.expected), default=0)
        found = look(self.b, self.cache, prompt)
        assert found.n_reused == best
        if best:
            used = next(tokens for tokens in reversed(self.expected) if n_common(tokens, prompt[:-1]) == best)
            self._touch(used)
        session = found.session or self.b.open()
        capture = self.cache.capture_prompt(session, prompt)
        if prompt in self.expected:
            self._touch(prompt)
        point = self.random.randrange(best + 1, len(prompt) + 1)
        which = self.random.randrange(4)
        generation = session.generate_async(
            prompt[best:],
            greedy(max_tokens=3, prefill_breakpoints=(point,)),
            capture.wrap() if which == 0 else None,
            on_breakpoint=capture.observer if which == 1 else None,
            on_settled=capture.at_end() if which == 2 else None,
        )
        assert generation.result(WAIT_S)
        assert generation.tokens == self.b.expected(prompt, 3)
        taken = {0: prompt, 1: prompt[:point], 2: [*prompt, *generation.tokens[:-1]]}.get(which)
        fits = taken is None or self.max_bytes is None or len(taken) * BYTES_PER_CELL <= self.max_bytes
        was_there = prompt in self.expected  # refreshed when it is collected
        assert capture.collect(timeout=WAIT_S) == ((taken is not None and fits) or was_there)
        session.close()
        if was_there:
            self._touch(prompt)
        if taken in self.expected:
            self._touch(taken)
        elif taken is not None and fits:
            self.expected = [*self.expected, taken][-MOST_ENTRIES:]

    def _touch(self, tokens: list[int]) -> None:
        self.expected.remove(tokens)
        self.expected.append(tokens)

    def check(self) -> None:
        """Bounds are kept, and bytes are those of the cells that the snapshots own."""
        entries = self.cache.entries
        assert len(entries) <= MOST_ENTRIES
        owned = {cell for e in entries for cell in self.b.executor.cache.cells_of(e.snapshot._state.sequence).tolist()}
        assert self.cache.n_bytes(WAIT_S) == len(owned) * BYTES_PER_CELL
        if self.max_bytes is None:
            assert keys(self.cache) == self.expected
        else:
            assert len(owned) * BYTES_PER_CELL <= self.max_bytes
            assert keys(self.cache) == self.expected[len(self.expected) - len(entries) :]  # the oldest went for bytes
            self.expected = keys(self.cache)


@pytest.mark.parametrize("max_bytes", [None, 30 * BYTES_PER_CELL, 8 * BYTES_PER_CELL])
@pytest.mark.parametrize("seed", range(4))
def test_a_cache_holds_what_a_plain_list_says(seed: int, max_bytes: int | None) -> None:  # R23 R24 R26 R28 R43
    with bench(capacity=512) as b:
        walk = Walk(b, seed, max_bytes)
        for _ in range(80):
            walk.ask()
            walk.check()
            if walk.random.random() < 0.02:
                walk.cache.clear()
                walk.expected = []
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed == len(walk.cache)
        assert walk.cache.stats()["hits"] > 20
