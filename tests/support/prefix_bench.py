"""Short ways to fill a prefix cache and to look into it, on the fake executor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from control_bench import Bench, greedy
from fake_executor import WAIT_S

from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.prefix_match import Lookup
from ggml_engine.control.session import Session


def snapshot_at(b: Bench, tokens: Sequence[int]) -> Session:
    """A snapshot that holds exactly `tokens`; the session that it is of is closed."""
    with b.session_at(tokens) as session:
        snapshot = session.snapshot_async().result(WAIT_S)
    assert isinstance(snapshot, Session)
    return snapshot


def put(b: Bench, cache: PrefixCache, tokens: Sequence[int], metadata: Any = None) -> bool:
    """Compute `tokens`, and insert a snapshot of them."""
    return cache.insert(snapshot_at(b, tokens), tokens, metadata, WAIT_S)


def look(b: Bench, cache: PrefixCache, tokens: Sequence[int]) -> Lookup:
    """A look-up in time; its session, where there is one, is at what was reused, and idle."""
    found = cache.lookup(b.runner, tokens, WAIT_S)
    if found.session is None:
        assert found.n_reused == 0
        assert found.miss is not None
    else:
        assert found.session.tokens == list(tokens[: found.n_reused])
        assert found.session.pending is None
        assert not found.session.is_busy
    return found


def answer(b: Bench, cache: PrefixCache, tokens: Sequence[int], n: int = 4) -> int:
    """Look up, generate, compare with a cold run; how many tokens of the prompt were forwarded."""
    found = look(b, cache, tokens)
    with found.session or b.open() as session:
        generation = session.generate(tokens[found.n_reused :], greedy(max_tokens=n), timeout=WAIT_S)
        assert generation.tokens == b.expected(tokens, n)
        assert generation.stats.reused_tokens == found.n_reused
        return generation.stats.evaluated_tokens


def keys(cache: PrefixCache) -> list[list[int]]:
    """The tokens of the entries, the least recently used one first."""
    return [entry.tokens.tolist() for entry in cache.entries]


def reusable(prompt: Sequence[int], known: Iterable[Sequence[int]]) -> int:
    """How many tokens a prompt begins with, its last one left out, that one of `known` begins with, too."""
    most = 0
    for tokens in known:
        n = 0
        while n < min(len(tokens), len(prompt) - 1) and tokens[n] == prompt[n]:
            n += 1
        most = max(most, n)
    return most


class FaultyCache(PrefixCache):
    """A cache in which memory is missing at the point `fails_at`, once."""

    fails_at = ""
    n_failed = 0

    def _fault(self, point: str) -> None:
        if point == self.fails_at:
            self.fails_at = ""
            self.n_failed += 1
            raise MemoryError(f"no memory at {point}")
