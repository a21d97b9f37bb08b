"""Random interleavings of everything that callers, callbacks, executors and other threads do to the control plane.

What is checked after every command stands in `control_simulator.Simulation.check` and in `control_model`.
`test_control_simulator_finds.py` shows that these checks can fail.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from collector import no_collector
from control_simulator import play, replay_command
from fake_executor import FakeExecutor
from fake_text import FakeText

from ggml_engine.control.future import EngineFuture
from ggml_engine.control.generation import Generation
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.runner import Runner
from ggml_engine.control.session import Session
from ggml_engine.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]
N_QUICK = 1_000  # interleavings of the README's test command
N_ALL = 10_000
PIECE = 250  # interleavings of one test


def play_all(first: int, n: int) -> None:
    with no_collector():
        for seed in range(first, first + n):
            play(seed)
            if seed % 50 == 0:
                gc.collect()


@pytest.mark.parametrize("first", range(0, N_QUICK, PIECE))
def test_every_interleaving_does_what_lists_of_tokens_say(first: int) -> None:  # R54, R60, R74, R100, R101-R107, R109
    play_all(first, PIECE)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(N_QUICK, N_ALL, PIECE))
def test_every_one_of_many_interleavings_does_what_lists_of_tokens_say(first: int) -> None:  # R54, R60, R74, R100
    play_all(first, PIECE)


def test_the_interleavings_reach_what_they_are_there_for() -> None:  # R95, R96
    """Numbers that would be zero if a part of the simulator had died; far below what comes."""
    total = dict.fromkeys(("finished", "cancelled", "failed", "shutdown", "steps", "evicted", "victims", "poisoned"), 0)
    most_in_one_forward = 0
    with no_collector():
        for seed in range(60):
            simulation = play(seed)
            assert simulation.n_done >= 100
            counts, model = simulation.core.scheduler.counts, simulation.model
            found = {"evicted": model.n_evicted, "victims": model.n_victims, "poisoned": model.n_poisoned}
            for name in total:
                total[name] += found[name] if name in found else counts[name]
            most_in_one_forward = max(most_in_one_forward, model.most_together)
    assert all(n >= 10 for n in total.values()), total
    assert total["finished"] > 200
    assert total["steps"] > 600
    assert most_in_one_forward >= 3


def test_a_seed_decides_everything() -> None:
    def counts(seed: int) -> tuple[dict[str, int], int]:
        simulation = play(seed)
        return simulation.core.scheduler.counts, len(simulation.model.sessions)

    assert counts(7) == counts(7) != counts(8)


def test_a_failure_says_how_to_play_it_again() -> None:
    seed = 3
    command = replay_command(seed).split()
    played = subprocess.run(
        [sys.executable, *command[1:]], check=False, capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert played.returncode == 0, played.stderr
    assert f"seed {seed}: {play(seed).core.scheduler.counts}" in played.stdout


# ---- the same with threads: what is asked for while the runner stops is settled, too


WAIT_S = 5.0
N_CALLERS = 4
N_ASKED = 200  # futures and generations of one seed


class Caller(threading.Thread):
    """Asks for random things, and remembers what it was given."""

    def __init__(self, runner: Runner, seed: int, n: int, *, stops_at: int | None) -> None:
        super().__init__(daemon=True)
        self._runner = runner
        self._random = random.Random(seed)
        self._n = n
        self._stops_at = stops_at
        self.futures: list[EngineFuture[Session | None] | EngineFuture[Session]] = []
        self.generations: list[Generation] = []
        self.error: BaseException | None = None
        self._sessions: list[Session] = []

    def run(self) -> None:
        try:
            while len(self.futures) + len(self.generations) < self._n:
                if len(self.futures) + len(self.generations) == self._stops_at:
                    self._stops_at = None
                    assert self._runner.shutdown(WAIT_S), "the engine thread was left behind"
                self._ask()
        except BaseException as error:
            self.error = error

    def _ask(self) -> None:
        session = self._random.choice(self._sessions) if self._sessions else None
        kind = self._random.choice(("open", "clone", "generate", "generate", "generate", "take", "drop"))
        if session is None or kind == "open":
            self.futures.append(self._runner.open_session_async())
            if session is None:
                self._take(WAIT_S)
        elif kind == "clone":
            self.futures.append(session.clone_async(self._random.choice((None, 0, 3))))
        elif kind == "generate":
            self._generate(session)
        elif kind == "take":
            self._take(0)
        else:
            self._sessions.remove(session)

    def _generate(self, session: Session) -> None:
        tokens = [self._random.randrange(97) for _ in range(self._random.randint(1, 6))]
        generation = session.generate_async(tokens, max_tokens=self._random.randint(1, 5))
        self.generations.append(generation)
        what = self._random.random()
        if what < 0.2:
            generation.cancel()
        elif what < 0.5:  # so that callers keep step with the engine; for its own end, or for the runner's
            assert generation.wait(WAIT_S)

    def _take(self, timeout: float) -> None:
        """Use the session of a future, if it comes in time."""
        with suppress(EngineError, TimeoutError):
            session = self._random.choice(self.futures).result(timeout)
            if session is not None and session not in self._sessions:
                self._sessions.append(session)

    def check_settled(self, deadline: float) -> None:
        assert self.error is None, self.error
        for future in self.futures:
            future.exception(max(0.0, deadline - time.monotonic()))  # TimeoutError where it is not settled
        for generation in self.generations:
            assert generation.wait(max(0.0, deadline - time.monotonic())), f"{generation} is not settled"


def stop_at_some_point(seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    executor, text = FakeExecutor(rng.choice((48, 256)), max_batch_tokens=16), FakeText()
    runner = Runner(executor, text, RunnerOptions(max_sessions=rng.choice((8, 64))))
    n = N_ASKED // N_CALLERS
    stopping = rng.randrange(N_CALLERS)
    callers = [
        Caller(runner, seed * N_CALLERS + i, n, stops_at=rng.randrange(n) if i == stopping else None)
        for i in range(N_CALLERS)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(2 * WAIT_S)  # it waits for nothing but the shutdown
        assert not caller.is_alive()
    deadline = time.monotonic() + WAIT_S
    for caller in callers:
        caller.check_settled(deadline)
    stats = runner.stats()
    assert stats["started"] == sum(stats[name] for name in ("finished", "cancelled", "failed", "shutdown"))
    assert stats["started"] == sum(len(caller.generations) for caller in callers)
    assert stats["sessions"] == stats["running"] == 0
    executor.check_balance()
    assert text.n_open_samplers == 0
    return stats


def stop_many(first: int, n: int) -> None:
    """Also finds that a shutdown met work, with the counts of all: else it proves nothing."""
    total = dict.fromkeys(("started", "finished", "shutdown", "cancelled"), 0)
    interval = sys.getswitchinterval()
    try:
        for seed in range(first, first + n):
            sys.setswitchinterval(1e-5 if seed % 2 else interval)  # so that threads also meet in short pieces of code
            stats = stop_at_some_point(seed)
            for name in total:
                total[name] += stats[name]
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    finally:
        sys.setswitchinterval(interval)
    assert all(n > 0 for n in total.values()), total


def test_whatever_threads_ask_for_is_settled_when_the_runner_stops() -> None:  # R54
    stop_many(0, 40)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, 500, 46))
def test_whatever_threads_ask_for_is_settled_when_the_runner_stops_at_many_points(first: int) -> None:  # R54
    stop_many(first, 46)
