"""A serving runtime over the fake executor, and what tests of it need around it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from control_bench import PROMPT, Bench, bench, eventually, greedy
from fake_executor import WAIT_S

from ggml_engine.control.generation import Update
from ggml_engine.control.options import RunnerOptions
from ggml_engine.serving.options import ServingOptions
from ggml_engine.serving.reply import Choice, Reply
from ggml_engine.serving.request import ServingRequest
from ggml_engine.serving.runtime import ServingRuntime


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Ear:
    """A listener that keeps what it was told."""

    updates: list[tuple[int, Update]] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    first_token: threading.Event = field(default_factory=threading.Event)

    def on_update(self, index: int, update: Update) -> None:
        self.updates.append((index, update))
        if update.tokens:
            self.first_token.set()

    def on_settled(self, index: int, choice: Choice) -> None:
        assert choice.reason is not None
        self.settled.append(index)


@dataclass
class Serving:
    """A runtime, what it runs on, and short ways to use it."""

    b: Bench
    runtime: ServingRuntime
    clock: Clock

    def submit(self, tokens: Sequence[int] = PROMPT, n_tokens: int = 4, listener: Any = None, **options: Any) -> Reply:
        return self.runtime.submit(ServingRequest(tokens, greedy(max_tokens=n_tokens), **options), listener)

    def ask(self, tokens: Sequence[int] = PROMPT, n_tokens: int = 4, **options: Any) -> Reply:
        """A request that ends well, with the tokens of a cold run in every choice."""
        reply = self.submit(tokens, n_tokens, **options)
        for choice in reply.result(WAIT_S):
            assert choice.tokens == self.b.expected(tokens, n_tokens)
        self.drain()
        return reply

    def reused(self, tokens: Sequence[int] = PROMPT, n_tokens: int = 4, **options: Any) -> int:
        """How many tokens of a prompt such a request did not evaluate."""
        stats = self.ask(tokens, n_tokens, **options).stats
        assert stats.cached_tokens + stats.evaluated_tokens == stats.prompt_tokens == len(tokens)
        return stats.cached_tokens

    def turn(self, session: str, history: Sequence[int], n_tokens: int = 4, **options: Any) -> list[int]:
        """A turn of a named session; prompt and reply."""
        reply = self.ask(history, n_tokens, session=session, **options)
        return [*history, *reply.choices[0].tokens]

    def control_barrier(self) -> bool:
        """Whether the control thread comes to what is posted now: it waits for nothing."""
        done = threading.Event()
        self.runtime._control.post(done.set)
        return done.wait(WAIT_S)

    def drain(self) -> None:
        """Until engine and control thread have done what there was, and what that asked for."""
        for _ in range(3):
            self.b.drain()
            assert self.control_barrier()

    @property
    def keys(self) -> list[list[int]]:
        """The tokens of the snapshots, the least recently used one first."""
        return [entry.tokens.tolist() for entry in self.runtime.cache.entries]

    @property
    def n_clones(self) -> int:
        return len(self.b.executor.calls_of("clone"))

    @property
    def n_open(self) -> int:
        """Sequences that are open."""
        return self.b.executor.n_opened - self.b.executor.n_closed

    def check_at_rest(self) -> None:
        """Nothing is in use but snapshots and idle named sessions, and what they hold is all that is held."""
        self.drain()
        stats = self.runtime.stats()
        assert stats["running"] == stats["waiting"] == stats["lanes_in_use"] == 0, stats
        kept = [entry.snapshot for entry in self.runtime.cache.entries]
        kept += [named.session for named in self.runtime._names if named.session is not None]
        assert not any(named.is_busy for named in self.runtime._names)
        n_cells = self.b.runner.count_cells_async(kept).result(WAIT_S)
        self.b.drain()
        assert self.b.executor.cache.used_cells == n_cells
        n_alive = sum(session.status == "open" for session in kept)
        assert self.n_open == n_alive == self.b.runner.stats()["sessions"]
        assert stats["submitted"] == sum(stats[end] for end in ("finished", "cancelled", "failed", "shutdown")), stats


@contextmanager
def serving(runner_options: RunnerOptions | None = None, **options: Any) -> Iterator[Serving]:
    """A runtime with these options, or options of the fake executor; at the end nothing must be left behind."""
    fields = ServingOptions.__dataclass_fields__
    of_runtime = {name: value for name, value in options.items() if name in fields}
    of_executor = {name: value for name, value in options.items() if name not in fields}
    with bench(runner_options, **of_executor) as b:
        clock = Clock()
        runtime = ServingRuntime(b.runner, ServingOptions(**of_runtime), clock=clock)
        made = Serving(b, runtime, clock)
        try:
            yield made
            if not runtime._is_closing:
                made.check_at_rest()
        except BaseException:
            for gate in (b.executor.forward_gate, b.executor.clone_gate, b.executor.open_gate):
                gate.release()
            runtime.shutdown(WAIT_S)
            raise
        assert runtime.shutdown(WAIT_S), "the control thread did not end"
        b.drain()
        assert made.n_open == 0, f"{made.n_open} sequences are open after the end"


def wait_for(condition: Any, what: str) -> None:
    """Until something is so that another thread does and nothing announces."""
    eventually(condition, what)
