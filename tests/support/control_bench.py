"""A runner over the fake executor, and what tests of the control plane need around it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fake_executor import WAIT_S, FakeExecutor
from fake_text import FakeText

from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Generation, Reason
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.runner import Runner
from ggml_engine.control.session import Session
from ggml_engine.control.session_state import SessionState
from ggml_engine.ggml.sampler_config import SamplerConfig

PROMPT = [5, 3, 8, 1, 9, 2, 7, 4, 6]  # nine tokens


def greedy(**options: Any) -> GenConfig:
    """A configuration without chance."""
    return GenConfig(sampler=SamplerConfig(temperature=0.0), **options)


class _Barrier:
    """A command that does nothing: what was queued before it has run when it has."""

    session: SessionState | None = None
    is_close = False

    def __init__(self) -> None:
        self.done = threading.Event()

    def run(self, core: object) -> None:
        self.done.set()

    def refuse(self, core: object) -> None:
        self.done.set()


@dataclass
class Bench:
    """A runner, what it runs on, and short ways to use it."""

    executor: FakeExecutor
    text: FakeText
    runner: Runner

    def open(self) -> Session:
        return self.runner.open_session(WAIT_S)

    def session_at(self, tokens: Sequence[int] = PROMPT) -> Session:
        """A session that has committed exactly `tokens`; the token sampled after them is pending."""
        session = self.open()
        session.generate(tokens, greedy(max_tokens=1), timeout=WAIT_S)
        assert session.tokens == list(tokens)
        return session

    def run(self, session: Session, delta: Sequence[int], n: int = 5, **options: Any) -> list[int]:
        """The tokens that a session generates after `delta`."""
        return session.generate(delta, greedy(max_tokens=n, **options), timeout=WAIT_S).tokens

    def expected(self, history: Sequence[Any], n: int = 5) -> list[int]:
        return self.executor.expected(history, n)

    def start(self, session: Session, delta: Any = PROMPT, n: Any = 5, **options: Any) -> Generation:
        return session.generate_async(delta, greedy(), max_tokens=n, **options)

    def start_together(self, sessions: Sequence[Session], n: int) -> list[Generation]:
        """A generation of `n` tokens in each session, after the prompts [1], [2], ...: none is ahead by a step."""
        with self.executor.holding_forward() as gate:
            running = [self.start(sessions[0], [1], n)]
            gate.wait_held()
            running += [self.start(session, [i], n) for i, session in enumerate(sessions[1:], 2)]
        return running

    def drain(self) -> None:
        """Until the engine thread has run everything that was queued, and what that queued."""
        for _ in range(3):
            barrier = _Barrier()
            self.runner._core.submit(barrier)
            assert barrier.done.wait(WAIT_S), "the engine thread does not come back"


@contextmanager
def bench(
    options: RunnerOptions | None = None, *, text: FakeText | None = None, **executor_options: Any
) -> Iterator[Bench]:
    """A bench; at the end everything that was opened must be closed, and all generations counted (R100, R60)."""
    executor, text = FakeExecutor(**executor_options), text or FakeText()
    made = Bench(executor, text, Runner(executor, text, options))
    try:
        yield made
    except BaseException:
        for gate in (executor.forward_gate, executor.clone_gate, executor.open_gate):
            gate.release()
        made.runner.shutdown(WAIT_S)
        raise
    assert made.runner.shutdown(WAIT_S), "the runner did not end"
    executor.check_balance()
    assert text.n_open_samplers == 0, f"{text.n_open_samplers} samplers are open"
    check_counts(made.runner)


def check_counts(runner: Runner) -> None:
    """Every generation that was started has ended in one way."""
    counts = runner.stats()
    assert counts["running"] == 0
    assert counts["started"] == sum(counts[end] for end in ("finished", "cancelled", "failed", "shutdown")), counts


def assert_failed(generation: Generation, message: str) -> None:
    """A generation has failed, and says why."""
    assert generation.wait(WAIT_S)
    assert generation.reason is Reason.FAILED, generation
    assert message in str(generation.error), generation.error


def eventually(condition: Any, what: str) -> None:
    """Wait for something that another thread does and that nothing announces."""
    ticker = threading.Event()
    for _ in range(int(WAIT_S / 0.002)):
        if condition():
            return
        ticker.wait(0.002)
    raise AssertionError(what)
