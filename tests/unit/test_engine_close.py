"""The end of an engine, and what its callbacks may do meanwhile. Without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from control_bench import PROMPT, greedy
from fake_executor import WAIT_S, FakeExecutor
from fake_text import FakeText

from ggml_engine.control import text
from ggml_engine.control.generation import Generation, Reason
from ggml_engine.engine import Engine
from ggml_engine.errors import ClosedError


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(text, "VocabularyText", lambda _: FakeText())
    executor: Any = FakeExecutor()
    freed: list[str] = []
    executor.model = SimpleNamespace(free=lambda: freed.append("model"))
    executor.close_all = lambda: freed.append("executor")
    file: Any = SimpleNamespace(close=lambda: freed.append("file"))
    vocabulary: Any = None
    loaded: Any = SimpleNamespace(executor=executor, kind="native", reason="", adapters=())
    made: Any = Engine(file, vocabulary, loaded)
    made.freed = freed
    return made


def test_a_callback_that_asks_for_the_engine_does_not_hold_up_its_end(engine: Any) -> None:
    told: list[object] = []

    def go_on(generation: Generation) -> None:
        try:
            engine.runner().open_session_async()
        except ClosedError as error:
            told.append((generation.reason, str(error)))

    session = engine.session()
    with engine.executor.holding_forward() as gate:
        generation = session.generate_async(PROMPT, greedy(), on_settled=go_on)
        gate.wait_held()
        engine.close()
    assert generation.wait(WAIT_S)
    assert told == [(Reason.SHUTDOWN, "the engine was closed")]
    assert engine.freed == ["executor", "model", "file"]
    engine.close()
    assert len(engine.freed) == 3


def test_calibrating_asks_for_the_work_that_waits_and_does_all_of_it(engine: Any) -> None:
    done: list[str] = []
    engine.executor.want_idle_work = lambda: done.append("asked")
    engine.executor.do_idle_work = lambda: (done.append("slice"), len(done) < 4)[1]
    engine.calibrate()
    engine.close()
    assert done == ["asked", "slice", "slice", "slice"]
