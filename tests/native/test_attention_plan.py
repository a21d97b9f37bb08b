"""Which form steps run in: the forced one, or what was measured on this machine; and the measuring itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import batch_of, executor_over, feed, loaded
from tiny_models import VOCAB, write_llama

from ggml_engine.errors import AllocationError, ExecutorError
from ggml_engine.executor import calibration, measured_times, planned_rows
from ggml_engine.executor.attention_choice import ROWS, TOKENS
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml.backends import get_data, set_data
from ggml_engine.models.attention import AttentionForm
from ggml_engine.models.model import Model
from ggml_engine.pool.read_plan import ReadKind

TEXT: list[int] = np.random.default_rng(3).integers(3, VOCAB, 30).tolist()
FORCED = ["cells", "flash", "flash_folded", "matmul", "matmul_folded"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    write_llama(path, n_layer=2, n_embd=64, n_head=4, n_head_kv=2, head_size=32, n_ff=32)
    with loaded(path, threads=1) as model:
        yield model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measured_times, "directory", lambda: tmp_path / "attention")
    monkeypatch.delenv(measured_times.SWITCH, raising=False)
    monkeypatch.setattr(calibration, "_MOST_UNITS", 1)  # times are no test's matter
    monkeypatch.setattr(calibration, "_TOO_LONG_S", math.inf)
    monkeypatch.setattr(calibration, "_SPREAD", math.inf)
    return tmp_path / "attention"


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as it is where nothing was built."""
    monkeypatch.setattr(planned_rows, "find_kernel", lambda: None)


def forms_of(executor: GgmlExecutor) -> set[str]:
    """The forms of all steps so far."""
    return {key.form.value for key in executor.graphs._ready}


def keep(model: Model, **seconds: float) -> None:
    """Times as if they had been measured, 1 where none is given."""
    with executor_over(model, calibrate=True) as executor:
        subject = executor.attention.subject
    assert subject is not None
    table = {form: [[seconds.get(form.value, 1.0)] * len(ROWS) for _ in TOKENS] for form in AttentionForm}
    assert measured_times.save(subject.name, table)


@pytest.mark.parametrize("form", FORCED)
def test_a_forced_form_is_what_every_step_runs_in(model: Model, form: str) -> None:
    keep(model, **{form: 9.0})
    with executor_over(model, attention=form, calibrate=True, capacity=512) as executor:
        for chunk in (1, 4, 30):
            feed(executor, executor.open(), TEXT, chunk)
        assert forms_of(executor) == {form}
        assert not executor.do_idle_work()


@pytest.mark.usefixtures("no_kernel")
def test_steps_of_a_few_tokens_are_folded_without_measurements(model: Model) -> None:
    for chunk, form in ((1, "matmul"), (5, "matmul_folded"), (30, "matmul_folded")):
        with executor_over(model, capacity=512) as executor:
            feed(executor, executor.open(), TEXT, chunk)
            assert forms_of(executor) == {form}


@pytest.mark.usefixtures("no_kernel")
def test_auto_runs_in_what_was_measured_as_fastest(model: Model) -> None:
    keep(model, flash=0.1)
    with executor_over(model, calibrate=True, capacity=512) as executor:
        feed(executor, executor.open(), TEXT, 1)
        assert forms_of(executor) == {"flash"}
        assert executor.cache.pool.format.v_layout == "rows"
    with executor_over(model, calibrate=True, v_layout="columns", capacity=512) as executor:
        assert executor.cache.pool.format.v_layout == "columns", "a forced layout stays"
    with executor_over(model, capacity=512) as executor:
        assert executor.cache.pool.format.v_layout == "columns", "nothing is read where it was not asked for"


def test_deterministic_mode_looks_at_no_times(model: Model) -> None:
    keep(model, flash=0.1)
    with executor_over(model, deterministic=True, calibrate=True, capacity=512) as executor:
        feed(executor, executor.open(), TEXT, 10)
        assert forms_of(executor) == {"matmul"}
        assert not executor.do_idle_work()


def test_measured_times_change_the_last_digits_and_no_fingerprint(model: Model) -> None:
    found = []
    for seconds in ({}, {"matmul_folded": 0.1}, {"flash": 0.1}, {"flash_folded": 0.1}, {"cells": 0.1}):
        keep(model, **seconds)
        with executor_over(model, calibrate=True, capacity=512, k_type="f16") as executor:
            first, second = executor.open(), executor.open()
            logits = [feed(executor, first, TEXT, 30), feed(executor, second, TEXT[:10], 1)]
            logits.append(executor.forward(batch_of([(first, TEXT[:1]), (second, TEXT[10:14])])))
            found.append((executor.fingerprint, np.concatenate(logits)))
    assert len({name for name, _ in found}) == 1
    for _, logits in found[1:]:
        assert np.square(logits - found[0][1]).mean() / np.square(found[0][1]).mean() < 1e-4


def test_measuring_in_slices_is_done_once_and_for_the_next_executor(model: Model, cache: Path) -> None:
    with executor_over(model, calibrate=True, capacity=512) as executor:
        table = executor.attention.table
        n_slices = 1
        while executor.do_idle_work():
            n_slices += 1
            if n_slices == 2:
                feed(executor, executor.open(), TEXT)  # a step between two slices
        assert len(list(cache.iterdir())) == 1
        assert not executor.do_idle_work()
        assert executor.attention.table is table, "a running executor's steps keep their forms"
        subject = executor.attention.subject
        assert subject is not None
        times = measured_times.load(subject.name)
    assert times is not None
    assert set(times) == set(AttentionForm)
    with executor_over(model, calibrate=True, capacity=512) as executor:
        assert not executor.do_idle_work()


def test_a_slice_is_one_run_where_runs_are_long(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SLICE_S", 0.0)
    with executor_over(model, calibrate=True, capacity=512) as executor:
        executor.do_idle_work()
        pending = executor.attention._pending
        assert pending is not None
        for _ in range(20):
            before = pending.n_runs
            executor.do_idle_work()
            assert pending.n_runs <= before + 1


def test_what_would_take_too_long_is_reckoned(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LONGEST_RUN_S", 0.0)
    with executor_over(model, calibrate=True, capacity=512) as executor:
        times = executor.attention.measure_all()
    assert times is not None
    for rows in times.values():
        first = rows[0][0]
        expected = [[first * n * m / ROWS[0] for m in ROWS] for n in TOKENS]
        assert np.allclose(rows, expected)


def test_every_run_of_a_graph_computes_the_same(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph was given once is still there after its runs: no result lies in its place."""
    given: list[tuple[Any, Any]] = []
    built, compute = calibration.Calibration._built, calibration.Graph.compute
    n_compared = 0

    def noted(self: Any, *args: Any) -> Any:
        given.clear()
        return built(self, *args)

    def compared(graph: calibration.Graph) -> None:
        nonlocal n_compared
        compute(graph)
        for tensor, values in given:
            found = np.empty_like(values)
            get_data(model.libraries, tensor, found)
            assert found.tobytes() == values.tobytes(), f"{graph.name}: {tensor.name}"
            n_compared += 1

    monkeypatch.setattr(calibration, "_MOST_UNITS", 4)
    monkeypatch.setattr(calibration, "_RUN_S", 1.0)
    monkeypatch.setattr(calibration.Calibration, "_built", noted)
    monkeypatch.setattr(calibration.Graph, "compute", compared)
    monkeypatch.setattr(calibration, "set_data", lambda *args: (given.append(args[1:]), set_data(*args)))
    with executor_over(model, calibrate=True, capacity=512) as executor:
        assert executor.attention.measure_all() is not None
    assert n_compared > 100


def test_memory_that_cannot_be_had_ends_the_measuring(
    model: Model, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AllocationError("no memory")

    with executor_over(model, calibrate=True, capacity=512) as executor:
        monkeypatch.setattr(calibration, "GgmlKvPool", fail)
        while executor.do_idle_work():
            pass
        assert not executor.do_idle_work()
        feed(executor, executor.open(), TEXT)
    assert not cache.exists()


def test_the_environment_turns_it_off(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(model, flash=0.1)
    monkeypatch.setenv(measured_times.SWITCH, "off")
    with executor_over(model, calibrate=True, capacity=512) as executor:
        assert executor.attention.forms == {AttentionForm.CELLS}
        executor.want_idle_work()
        assert not executor.do_idle_work()


# ---- beside the compiled kernel


def keep_mixed(model: Model) -> None:
    """Flash attention is faster than the compiled kernel for a few tokens, folded products for many."""
    with executor_over(model, calibrate=True) as executor:
        subject = executor.attention.subject
    assert subject is not None
    table = {form: [[1.0] * len(ROWS) for _ in TOKENS] for form in AttentionForm}
    table[AttentionForm.FLASH][1] = table[AttentionForm.FLASH][2] = [0.5] * len(ROWS)
    assert measured_times.save(subject.name, table)


def test_auto_is_the_compiled_kernel_for_all_steps_without_measurements(model: Model) -> None:
    with executor_over(model, calibrate=True, capacity=512) as executor:
        for chunk in (1, 4, 30):
            feed(executor, executor.open(), TEXT, chunk)
        assert forms_of(executor) == {"cells"}
        assert executor.attention.read_kind is ReadKind.EXACT
        assert not executor.attention.has_masks


def test_steps_by_the_compiled_kernel_and_with_masks_share_a_cache(model: Model) -> None:
    with executor_over(model, attention="matmul", k_type="f32", v_type="f32", capacity=512) as executor:
        expected = _walk(executor)
    keep_mixed(model)
    with executor_over(model, calibrate=True, capacity=512) as executor:
        assert executor.attention.read_kind is ReadKind.IN_BLOCKS
        found = _walk(executor)
        assert forms_of(executor) == {"cells", "flash"}
    assert np.square(found - expected).mean() / np.square(expected).mean() < 1e-4


def _walk(executor: GgmlExecutor) -> Any:
    """Steps of many tokens, of one, of a few, and of several sequences over cells that they share in part."""
    first = executor.open()
    logits = [feed(executor, first, TEXT, 30), feed(executor, first, TEXT[:3], 1), feed(executor, first, TEXT[:10], 5)]
    second = executor.clone(first, 35)
    assert second is not None
    for i in range(4):
        logits.append(executor.forward(batch_of([(first, TEXT[i : i + 1]), (second, TEXT[i + 5 : i + 6])])))
        logits.append(executor.forward(batch_of([(first, TEXT[i : i + 3]), (second, TEXT[i + 5 : i + 7])])))
    return np.concatenate(logits)


def test_where_forms_are_mixed_only_steps_with_masks_pay_for_pieces(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_mixed(model)
    with executor_over(model, calibrate=True, capacity=512) as executor:
        noted: list[int] = []
        monkeypatch.setattr(executor._compaction, "note", lambda placement: noted.append(placement.positions.size))
        for chunk in (1, 5, 30):
            feed(executor, executor.open(), TEXT, chunk)
        assert set(noted) == {5}


def test_measuring_on_request_needs_no_option(model: Model, cache: Path) -> None:
    with executor_over(model, capacity=512) as executor:
        assert not executor.do_idle_work()
        assert not cache.exists()
        executor.want_idle_work()
        while executor.do_idle_work():
            pass
        assert len(list(cache.iterdir())) == 1
        executor.want_idle_work()
        assert not executor.do_idle_work(), "it is known"


def test_what_the_kernel_measured_is_not_taken_where_it_is_not_there(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(model, cells=0.1)
    monkeypatch.setattr(planned_rows, "find_kernel", lambda: None)
    with executor_over(model, calibrate=True, capacity=512) as executor:
        assert executor.attention.forms <= {AttentionForm.MATMUL, AttentionForm.MATMUL_FOLDED}


class Clock:
    """Time that passes by computing alone: so many seconds a run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_no_slice_allocates_or_builds_beside_a_run(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for owner, name in ((calibration.Calibration, "_built"), (calibration.GgmlKvPool, "grow")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, real=real: (events.append("built"), real(*args))[1])
    with executor_over(model, calibrate=True, capacity=512) as executor:
        is_more = True
        while is_more:
            events.clear()
            n_before = 0 if executor.attention._pending is None else executor.attention._pending.n_runs
            is_more = executor.do_idle_work()
            pending = executor.attention._pending
            n_runs = 0 if pending is None else pending.n_runs - n_before
            assert len(events) + min(n_runs, 1) <= 1


@pytest.mark.parametrize("seconds", [0.001, 0.004, 0.009])
def test_a_slice_ends_before_a_run_that_would_be_too_long(
    model: Model, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    clock = Clock(seconds)

    def compute(_: Any) -> None:
        clock.now += clock.seconds

    monkeypatch.setattr(calibration.Graph, "compute", compute)
    with executor_over(model, calibrate=True, capacity=512) as executor:
        subject = executor.attention.subject
        assert subject is not None
        pending = calibration.Calibration(subject, clock)
        is_more, longest = True, 0.0
        while is_more:
            before = clock.now
            is_more = pending.step()
            longest = max(longest, clock.now - before)
        assert 0 < longest <= calibration.SLICE_S + seconds
        assert clock.now < 5, "all of it takes some seconds"


def measured_with(
    model: Model, monkeypatch: pytest.MonkeyPatch, seconds_of_run: Callable[[int], float]
) -> calibration.Calibration:
    """A measuring whose runs take such times."""
    clock = Clock(0.0)

    def compute(_: Any) -> None:
        clock.seconds += 1
        clock.now += seconds_of_run(int(clock.seconds))

    monkeypatch.setattr(calibration.Graph, "compute", compute)
    with executor_over(model, calibrate=True, capacity=512) as executor:
        assert executor.attention.subject is not None
        pending = calibration.Calibration(executor.attention.subject, clock)
        try:
            while pending.step():
                pass
        finally:
            pending.free()
    return pending


def test_what_more_tokens_take_is_measured_where_fewer_were_slow(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms have other kernels for many tokens: those of few say nothing about them."""
    clock = Clock(0.0)

    def compute(graph: calibration.Graph) -> None:
        n_tokens, n_rows = (int(word) for word in graph.name.split() if word.isdecimal())
        clock.now += (0.002 if n_tokens == 32 else 0.001) * n_rows / ROWS[0]

    monkeypatch.setattr(calibration.Graph, "compute", compute)
    with executor_over(model, calibrate=True, capacity=512) as executor:
        assert executor.attention.subject is not None
        pending = calibration.Calibration(executor.attention.subject, clock)
        while pending.step():
            pass
    assert pending.times is not None
    for rows in pending.times.values():
        assert np.allclose(rows[TOKENS.index(128)], [0.001, 0.004, 0.016])


def test_runs_that_take_far_too_long_end_the_measuring(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_TOO_LONG_S", 0.03)
    found = measured_with(model, monkeypatch, lambda i: 0.5 if i in {1, 20} else 0.001)
    assert found.times is not None, "one or two are bad luck"
    with pytest.raises(ExecutorError, match="something else computes"):
        measured_with(model, monkeypatch, lambda _: 0.5)


def test_runs_that_differ_are_repeated_and_end_the_measuring(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SPREAD", 1.3)
    found = measured_with(model, monkeypatch, lambda i: 0.001 * (1 + i % 3))
    assert found.times is not None
    found = measured_with(model, monkeypatch, lambda i: 0.001 if i > 40 or i % 16 == 0 else 0.002)
    assert found.times is not None, "a graph may take a while to have two"
    with pytest.raises(ExecutorError, match="once"):
        measured_with(model, monkeypatch, lambda i: 0.001 * 1.4**i)


def test_measuring_that_was_disturbed_keeps_nothing(model: Model, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(calibration, "_TOO_LONG_S", 0.0)
    with executor_over(model, calibrate=True, capacity=512) as executor:
        while executor.do_idle_work():
            pass
        assert not cache.exists()
        assert not executor.do_idle_work(), "not tried again by itself"
