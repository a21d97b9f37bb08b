"""Random mixes of requests, cancels, closes, branches and ends: nothing is left behind. `R`: rules of the contract."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from control_bench import greedy
from fake_executor import WAIT_S
from serving_bench import Ear, Serving, serving

from ggml_engine.control.generation import Reason, Update
from ggml_engine.errors import EngineError
from ggml_engine.serving.reply import Reply
from ggml_engine.serving.request import ServingRequest

N_SEEDS = 60
N_ALL = 600
PIECE = 20
N_ACTIONS = 40
NAMES = ["a", "b", "c", None]
MODES: list[dict[str, Any]] = [
    {},
    {"prefix_cache_entries": 3},
    {"prefix_cache_entries": 6, "prefix_checkpoint_prompt_end": "every"},
    {"prefix_cache_entries": 4, "prefix_checkpoint_interval": 5},
    {"prefix_cache_entries": 4, "prefix_checkpoint_policy": lambda start, _, prompt: [start + 2, len(prompt)]},
]


class Watching(Ear):
    """Looks at the lanes whenever it hears something, and sometimes cancels."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk = walk
        self.reply: Reply | None = None
        self.cancels_at = walk.random.choice([0, 0, 0, 1, 3])

    def on_update(self, index: int, update: Update) -> None:
        super().on_update(index, update)
        self.walk.look()
        if self.cancels_at and len(self.updates) >= self.cancels_at and self.reply is not None:
            self.reply.cancel()

    def on_settled(self, index: int, choice: Any) -> None:
        super().on_settled(index, choice)
        self.walk.look()


class Walk:
    """One mix: what was asked for, and what is known of the names' histories."""

    def __init__(self, s: Serving, seed: int) -> None:
        self.s = s
        self.random = random.Random(seed)
        self.asked: list[tuple[list[int], int, Reply, Watching]] = []
        self.histories: dict[tuple[str, str | None], list[int]] = {}
        self.refused: Counter[str] = Counter()
        self.too_many: list[int] = []

    def look(self) -> None:
        pool = self.s.runtime._lanes
        if not 0 <= pool.in_use <= pool.size:
            self.too_many.append(pool.in_use)

    def run(self) -> None:
        actions: list[tuple[Callable[[], object], int]] = [
            (self.submit, 12),
            (self.cancel, 4),
            (self.close, 2),
            (self.fork, 2),
            (self.rewind, 1),
            (self.expire, 1),
            (self.wait, 3),
            (self.fail, 1),
        ]
        calls, weights = zip(*actions, strict=True)
        for _ in range(N_ACTIONS):
            try:
                self.random.choices(calls, weights)[0]()
            except EngineError as error:
                self.refused[type(error).__name__] += 1
            self.look()

    def submit(self) -> None:
        key = (self.random.choice(["", "x"]), self.random.choice(NAMES))
        history = list(self.histories.get(key, []))
        if self.random.random() < 0.3:  # a branch
            history = history[: self.random.randint(0, len(history))]
        if len(history) > 40:
            history = []
        prompt = [*history, *(self.random.randrange(4) for _ in range(self.random.randint(1, 8)))]
        n_tokens, ear = self.random.randint(1, 6), Watching(self)
        request = ServingRequest(
            prompt, greedy(max_tokens=n_tokens), self.random.choice([1, 1, 1, 2, 3]), session=key[1], partition=key[0]
        )
        reply = self.s.runtime.submit(request, ear)
        ear.reply = reply
        self.histories[key] = [*prompt, *self.s.b.expected(prompt, n_tokens)]
        self.asked.append((prompt, n_tokens, reply, ear))

    def cancel(self) -> None:
        if self.asked:
            self.random.choice(self.asked)[2].cancel()

    def close(self) -> None:
        self.s.runtime.close_session(self.random.choice(["", "x"]), self.random.choice("abc"))

    def fork(self) -> None:
        self.s.runtime.fork("", self.random.choice("abc"), self.random.choice("abcd"), timeout=WAIT_S)

    def rewind(self) -> None:
        self.s.runtime.rewind("", self.random.choice("abcd"), 2, WAIT_S)

    def expire(self) -> None:
        self.s.clock.now += self.random.choice([1, 700])
        self.s.runtime.expire()

    def wait(self) -> None:
        if self.asked:
            self.random.choice(self.asked)[2].wait(WAIT_S)

    def fail(self) -> None:
        executor = self.s.b.executor
        self.random.choice([executor.fail_forward, executor.fail_clone])(RuntimeError("broken"), 2)

    def check(self) -> Counter[str]:
        """Every reply has ended, each choice once, with the tokens of a cold run as far as it came."""
        ends: Counter[str] = Counter()
        for prompt, n_tokens, reply, ear in self.asked:
            assert reply.wait(WAIT_S), "a reply has not ended"
            assert sorted(ear.settled) == list(range(len(reply.choices)))
            for choice in reply.choices:
                assert choice.reason is not None
                ends[choice.reason.value] += 1
                assert choice.tokens == self.s.b.expected(prompt, n_tokens)[: len(choice.tokens)]
                if choice.reason is Reason.LENGTH:
                    assert len(choice.tokens) == n_tokens
        assert not self.too_many
        return ends


def walk(seed: int) -> tuple[Counter[str], dict[str, int]]:
    rng = random.Random(seed)
    options = {
        **rng.choice(MODES),
        "capacity": rng.choice([80, 160, 1024]),
        "max_batch_tokens": rng.choice([4, 64]),
        "ring": rng.choice([None, None, 64]),
        "max_requests": rng.choice([3, 5]),
        "max_queue": rng.choice([3, 50]),
        "max_sessions": rng.choice([2, 8]),
        "prefix_capture_slots": rng.choice([None, 1, 2]),
    }
    with serving(None, **options) as s:
        made = Walk(s, seed)
        made.run()
        if rng.random() < 0.3:
            assert s.runtime.shutdown(WAIT_S)
        ends = made.check()
        if not s.runtime._is_closing:
            s.check_at_rest()
        stats = s.runtime.stats()
        assert stats["lanes_in_use"] == 0
        ends.update(made.refused)
    assert s.runtime.stats()["lanes_in_use"] == 0
    return ends, stats


@pytest.mark.parametrize("first", range(0, N_SEEDS, PIECE))
def test_no_mix_leaves_a_lane_a_session_or_a_cell(first: int) -> None:  # R81
    for seed in range(first, first + PIECE):
        walk(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(N_SEEDS, N_ALL, PIECE))
def test_none_of_many_mixes_leaves_a_lane_a_session_or_a_cell(first: int) -> None:  # R81
    for seed in range(first, first + PIECE):
        walk(seed)


def test_the_mixes_reach_what_they_are_there_for() -> None:  # R95 R96
    total: Counter[str] = Counter()
    for seed in range(30):
        ends, stats = walk(seed)
        total.update(ends)
        total.update({name: stats[name] for name in ("cache_hits", "cache_inserted", "cached_tokens", "expired")})
    for name in ("length", "cancelled", "failed", "shutdown", "cache_hits", "cache_inserted", "cached_tokens"):
        assert total[name] >= 10, total
    for name in ("SessionBusyError", "QueueFullError", "UnknownSessionError", "expired"):
        assert total[name] >= 3, total
