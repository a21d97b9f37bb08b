"""What happens to what is dropped, and how a runner ends."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from collector import no_collector
from control_bench import PROMPT, bench, check_counts, eventually, greedy
from fake_executor import WAIT_S, FakeExecutor
from fake_text import FakeText

from ggml_engine.control.generation import Reason, Update
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.runner import Runner
from ggml_engine.control.session import Session
from ggml_engine.errors import ClosedError, InputError, SessionLimitError

SUPPORT = Path(__file__).parents[1] / "support"


# ---- dropped handles


def test_a_generation_that_nobody_holds_is_cancelled() -> None:
    with bench() as b:
        session = b.open()
        with b.executor.holding_forward(after=1) as gate:
            generation = b.start(session, PROMPT, 500)
            gate.wait_held()
            del generation
        eventually(lambda: not session.is_busy, "it runs on")
        b.drain()
        assert b.runner.stats()["cancelled"] == 1
        assert session.position < 100
        assert session.status == "open"


def test_a_generation_that_somebody_listens_to_runs_on() -> None:
    with bench() as b:
        session = b.open()
        seen: list[int] = []
        done = threading.Event()

        def on_update(update: Update) -> None:
            seen.extend(update.tokens)
            if len(seen) == 30:
                done.set()

        with b.executor.holding_forward(after=1) as gate:
            generation = b.start(session, PROMPT, 30, on_update=on_update)
            gate.wait_held()
            del generation
        assert done.wait(WAIT_S)
        assert seen == b.expected(PROMPT, 30)
        b.drain()
        assert b.runner.stats()["finished"] == 1


def test_a_session_that_nobody_holds_is_closed() -> None:
    with no_collector(), bench() as b:
        session = b.session_at()
        assert b.executor.cache.used_cells == 9
        with b.executor.holding_forward() as gate:
            generation = b.start(session, [1], 500, on_update=lambda _: None)
            gate.wait_held()
            del session
        assert generation.wait(WAIT_S)
        assert generation.reason is Reason.CANCELLED
        b.drain()
        assert b.executor.n_closed == 1
        assert b.executor.cache.used_cells == 0


def test_a_result_keeps_neither_its_session_nor_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:  # R53
    monkeypatch.setattr(logging.getLogger("ggml_engine.control"), "disabled", True)  # pytest keeps what was logged
    with no_collector():
        executor = FakeExecutor()
        gone = weakref.ref(executor)
        runner = Runner(executor, FakeText())
        session = runner.open_session(WAIT_S)
        generation = session.generate(PROMPT, greedy(max_tokens=3), timeout=WAIT_S)
        failed = session.generate_async([], greedy())
        with pytest.raises(Exception, match="nothing to generate"):
            failed.result(WAIT_S)
        executor.fail_forward(RuntimeError("the device is gone"))
        broken = session.generate_async([1], greedy())
        assert broken.wait(WAIT_S)
        future = session.clone_async(2)
        assert future.result(WAIT_S) is None
        assert runner.shutdown(WAIT_S)
        del session, runner, executor
        eventually(lambda: gone() is None, "something keeps the executor")
        assert len(generation.tokens) == 3
        assert broken.error is not None


@pytest.mark.parametrize("what", ["session", "runner"])
def test_what_the_collector_finds_when_the_thread_lies_down_is_heard(what: str) -> None:  # R52
    class Finalizer:
        """Drops the last handle on the engine thread, at the last call before it sleeps."""

        def __init__(self) -> None:
            self.held: list[object] = []
            self.is_armed = False

        def __call__(self, frame: object, event: str, function: Any) -> None:
            names = ("allocate_lock", "acquire", "get")  # whatever it sleeps in
            if self.is_armed and event == "c_call" and function.__name__ in names:
                self.is_armed = False
                self.held.clear()

    class Arm:
        session = None
        is_close = False

        def run(self, core: object) -> None:
            finalizer.is_armed = True

        def refuse(self, core: object) -> None:
            raise AssertionError

    finalizer, executor = Finalizer(), FakeExecutor()
    threading.setprofile(finalizer)
    try:
        runner = Runner(executor, FakeText())
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]  # which is how it is taken off
    core, thread = runner._core, runner._core._thread
    session = runner.open_session(WAIT_S)
    finalizer.held = [session, *([runner] if what == "runner" else [])]
    del session
    if what == "runner":
        del runner
    core.submit(Arm())
    eventually(lambda: executor.n_closed == 1, "the close is not heard")
    assert not finalizer.held
    if what == "runner":
        assert thread is not None
        thread.join(WAIT_S)
        assert not thread.is_alive()
    else:
        assert runner.shutdown(WAIT_S)
    executor.check_balance()


def test_results_that_are_kept_keep_no_cells() -> None:
    with bench(capacity=64) as b:
        kept = []
        for prompt, n in ([0] * 30, 5), ([1] * 30, 5), ([2] * 60, None), ([], 5), ([4] * 30, 5):
            kept.append(b.open().generate_alone(prompt, greedy(), max_tokens=n))
            assert kept[-1].wait(WAIT_S)
        ends = [Reason.LENGTH] * 3 + [Reason.FAILED, Reason.LENGTH]
        assert [each.reason for each in kept] == ends, [each.error for each in kept]
        b.drain()
        assert b.executor.cache.used_cells == 0
        assert b.runner.stats()["sessions"] == 0
        assert kept[0].tokens == b.expected([0] * 30)


def test_a_failed_result_that_is_dropped_lets_go_of_its_session() -> None:  # R53
    def fail(b_session: Session) -> None:
        generation = b_session.generate_alone([], greedy())
        try:
            generation.result(WAIT_S)
        except InputError:
            return
        raise AssertionError("it did not fail")

    with no_collector(), bench() as b:
        session = b.open()
        gone = weakref.ref(session)
        fail(session)
        del session
        b.drain()
        assert gone() is None
        assert b.executor.n_closed == 1


def test_a_refusal_that_was_caught_keeps_nothing() -> None:  # R53
    def refused(runner: Runner) -> None:
        try:
            runner.open_session(WAIT_S)
        except SessionLimitError:
            pass
        else:
            raise AssertionError("it was not refused")

    with no_collector():
        executor = FakeExecutor()
        gone = weakref.ref(executor)
        runner = Runner(executor, FakeText(), RunnerOptions(max_sessions=1))
        session = runner.open_session(WAIT_S)
        refused(runner)
        del session, runner, executor
        eventually(lambda: gone() is None, "the refusal keeps the executor")


@pytest.mark.parametrize("first", ["cache", "runner"])
def test_sessions_held_outside_make_no_cycle(first: str) -> None:  # R53
    with no_collector():
        executor = FakeExecutor()
        gone = weakref.ref(executor)
        runner = Runner(executor, FakeText())
        thread = runner._core._thread
        assert thread is not None
        session = runner.open_session(WAIT_S)
        session.generate(PROMPT, greedy(max_tokens=3), timeout=WAIT_S)
        cache = [session.snapshot_async(n).result(WAIT_S) for n in (3, 6, 9)]
        assert all(isinstance(each, Session) for each in cache)
        counts: list[tuple[int, int]] = []
        weakref.finalize(executor, lambda: counts.append((1, 1)))
        del session
        if first == "cache":
            del cache
            del runner
        else:
            del runner
            assert thread.is_alive(), "sessions keep their runner going"
            del cache
        thread.join(WAIT_S)
        assert not thread.is_alive()
        executor.check_balance()
        del executor
        eventually(lambda: gone() is None, "something keeps the executor")
        assert counts == [(1, 1)]


def test_a_runner_that_nobody_holds_stops_its_thread() -> None:  # R53
    with no_collector():
        executor, text = FakeExecutor(), FakeText()
        runner = Runner(executor, text)
        thread = runner._core._thread
        assert thread is not None
        session = runner.open_session(WAIT_S)
        settled: list[Reason | None] = []
        with executor.holding_forward() as gate:
            kept = session.generate_async(
                PROMPT,
                greedy(max_tokens=50),
                lambda _: None,
                on_settled=lambda handle: settled.append(handle.reason),
            )
            gate.wait_held()
            del session, runner
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert kept.wait(WAIT_S)
        assert settled == [kept.reason]
        assert kept.reason in {Reason.CANCELLED, Reason.SHUTDOWN}
        executor.check_balance()
        assert text.n_open_samplers == 0


def test_a_runner_that_is_over_leaves_the_executor_to_others() -> None:  # R53
    executor = FakeExecutor()
    first = Runner(executor, FakeText())
    assert first.shutdown(WAIT_S)
    second = Runner(executor, FakeText())
    session = second.open_session(WAIT_S)
    with executor.holding_forward() as gate:
        generation = session.generate_async(PROMPT, greedy(max_tokens=4))
        gate.wait_held()
        n_aborts = executor.n_aborts
        assert first.shutdown(WAIT_S)
        del first
        assert executor.n_aborts == n_aborts, "the second runner's forward was aborted"
    assert generation.result(WAIT_S)
    assert second.shutdown(WAIT_S)
    executor.check_balance()


# ---- many threads


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("seed", range(4))
def test_many_threads_use_one_runner(seed: int) -> None:  # R54 R60
    with bench(RunnerOptions(max_sessions=64), capacity=4096) as b:
        problems: list[BaseException] = []

        def work(number: int) -> None:
            chance = random.Random(100 * seed + number)
            try:
                for _ in range(15):
                    prompt = [chance.randrange(97) for _ in range(chance.randrange(1, 20))]
                    session = b.open()
                    n = chance.randrange(2, 10)
                    generation = b.start(session, prompt, n)
                    clone = session.clone_async(1)
                    if chance.random() < 0.3:
                        generation.cancel()
                    if chance.random() < 0.2:
                        session.close()
                    assert generation.wait(WAIT_S), "it never ended"
                    assert generation.tokens == b.expected(prompt, n)[: len(generation.tokens)]
                    if generation.reason is Reason.LENGTH:
                        assert len(generation.tokens) == n
                    child = clone.result(WAIT_S)
                    if child is not None:
                        assert b.run(child, [number], 3) == b.expected([prompt[0], number], 3)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(6 * WAIT_S)
            assert not thread.is_alive()
        assert not problems, problems
        b.drain()
        check_counts(b.runner)


# ---- shutdown


def test_an_executor_that_hangs_does_not_keep_anybody_waiting() -> None:  # R54
    with bench(ignores_abort=True) as b:
        session, other = b.open(), b.session_at()
        settled: list[Reason | None] = []
        with b.executor.holding_forward() as gate:
            running = b.start(session, PROMPT, on_settled=lambda handle: settled.append(handle.reason))
            gate.wait_held()
            queued = b.start(other, [1], on_settled=lambda handle: settled.append(handle.reason))
            futures = [b.runner.open_session_async(), other.clone_async(3), other.rewind_async(2)]
            assert not b.runner.shutdown(0.05), "the executor hangs"
            assert running.reason is queued.reason is Reason.SHUTDOWN
            assert settled == [Reason.SHUTDOWN] * 2
            for future in futures:
                assert future.done()
            with pytest.raises(ClosedError):
                futures[0].result(0)
            assert futures[1].result(0) is None
            with pytest.raises(ClosedError):
                running.result(0)
            late = b.start(other, [1])
            assert late.wait(0) or late.reason is Reason.SHUTDOWN
        assert b.runner.shutdown(WAIT_S), "the executor came back"
        assert settled == [Reason.SHUTDOWN] * 2


def test_a_shutdown_in_a_callback_does_not_wait_for_itself() -> None:  # R54 R13
    with bench() as b:
        session, other = b.open(), b.open()
        returned: list[bool] = []

        def on_update(update: Update) -> None:
            if update.tokens and not returned:
                returned.append(b.runner.shutdown(WAIT_S))

        with b.executor.holding_forward() as gate:
            running = b.start(other, [1], 50)
            gate.wait_held()
            generation = b.start(session, PROMPT, 50, on_update=on_update)
        for each in (generation, running):
            assert each.wait(WAIT_S)
            assert each.reason is Reason.SHUTDOWN
        assert returned == [False]


def test_shutdown_by_several_threads_at_once() -> None:  # R54
    with bench() as b:
        session = b.open()
        generation = b.start(session, PROMPT, 500)
        ended: list[bool] = []
        threads = [threading.Thread(target=lambda: ended.append(b.runner.shutdown(WAIT_S))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert ended == [True] * 6
        assert generation.reason is not None


def test_a_process_that_ends_with_a_live_runner_is_silent() -> None:  # R53
    program = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        from control_bench import PROMPT, greedy
        from fake_executor import FakeExecutor
        from fake_text import FakeText
        from ggml_engine.control.runner import Runner

        runner = Runner(FakeExecutor(1 << 16), FakeText())
        session = runner.open_session(10)
        generation = session.generate_async(PROMPT, greedy(), lambda update: None)
        next(generation)
        other = runner.open_session(10)
        print("end", generation.reason, flush=True)
        """
    )
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "ignore::DeprecationWarning", "-c", program, str(SUPPORT)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "end None\n", "")


def test_a_forked_process_is_told_that_the_runner_stayed_behind() -> None:
    program = textwrap.dedent(
        """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        from control_bench import PROMPT, bench, greedy
        from fake_executor import WAIT_S
        from ggml_engine.errors import ClosedError

        with bench() as b:
            session = b.session_at()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    b.runner.open_session(WAIT_S)
                except ClosedError:
                    generation = session.generate_async([1], greedy())
                    code = 0 if generation.wait(WAIT_S) and generation.reason.value == "shutdown" else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert b.run(session, [1], 3), "the parent goes on"
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(SUPPORT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
