"""The benchmark on tiny models: who takes part does the same work, and what is counted is right. Times are not tested."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_process import TIMEOUT_S, started
from tiny_models import VOCAB, write_gemma3, write_llama

import ggml_engine.bench.cases as cases_module
from ggml_engine.bench import setting as setting_module
from ggml_engine.bench import start as start_module
from ggml_engine.bench.cases import CASES, run
from ggml_engine.bench.driver import N_BATCH, Driver, Room
from ggml_engine.bench.llama_cpp import MODES, LlamaCppDriver, Mode, n_cells_of
from ggml_engine.bench.ours import OurDriver, capacity_for
from ggml_engine.bench.overhead import share_outside, timed_computes
from ggml_engine.bench.report import ModelReport
from ggml_engine.bench.setting import QUICK, Setting
from ggml_engine.cli import output
from ggml_engine.cli.main import main
from ggml_engine.control.machine_memory import MachineMemory
from ggml_engine.engine import Engine
from ggml_engine.errors import ComputeError, OptionError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions

SPLIT = Mode(flash=False, unified=False)
UNIFIED = Mode(flash=False, unified=True)
QUICK_ARGUMENTS = ("--quick", "--threads", "1", "--against", "llama.cpp")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama.gguf")


@pytest.fixture
def setting(tiny: Path) -> Iterator[Setting]:
    made = Setting(tiny, QUICK, 2, against_llama_cpp=True, threads=1, attention="matmul")
    yield made
    made.release()


def ids(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, n, dtype=np.int32)


def measured(path: Path, *names: str, **changes: Any) -> ModelReport:
    setting = Setting(path, **{"sizes": QUICK, "repetitions": 2, "against_llama_cpp": True, "threads": 1, **changes})
    report = ModelReport("tiny")
    run(setting, report, names)
    return report


# ---- the same work


def our_logits(driver: OurDriver, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What its steps come to from now on."""
    kept: list[np.ndarray] = []
    forward = driver.executor.forward

    def keep(batch: Batch) -> np.ndarray:
        kept.append(forward(batch))
        return kept[-1]

    monkeypatch.setattr(driver.executor, "forward", keep)
    return kept


def their_logits(driver: LlamaCppDriver, n: int) -> np.ndarray:
    """Of the last step, f32 [n, n_vocab]."""
    pointer = driver._llama.llama_get_logits(driver._context)
    return np.ctypeslib.as_array(pointer, shape=(n * VOCAB,)).reshape(n, VOCAB).copy()


@pytest.mark.parametrize("flash", [False, True])
def test_a_sequence_that_is_read_and_decoded_has_llama_cpps_logits_to_the_bit(
    setting: Setting, monkeypatch, flash: bool
) -> None:
    options = ExecutorOptions(attention="flash" if flash else "matmul")
    ours = OurDriver(setting.model, options, Room(1, 64))
    theirs = LlamaCppDriver(setting.llama_cpp, Mode(flash, False), Room(1, 64))
    try:
        kept = our_logits(ours, monkeypatch)
        for driver in (ours, theirs):
            driver.prefill(0, ids(40))
            driver.rewind([30])
            driver.decode(ids(1, 1))
            driver.decode(ids(1, 2))
        assert [logits.shape for logits in kept] == [(1, VOCAB)] * 3
        np.testing.assert_array_equal(kept[-1], their_logits(theirs, 1))
    finally:
        ours.close()
        theirs.close()


def build(driver: Driver) -> None:
    """Three sequences: a shared prefix of 20, own tokens, then one step for all."""
    driver.prefill(0, ids(20))
    driver.share(3)
    for i in range(3):
        driver.prefill(i, ids(4, 10 + i))
    driver.decode(ids(3, 3))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_shared_sequences_hold_in_every_mode_what_ours_hold(setting: Setting, monkeypatch, mode: Mode) -> None:
    room = Room(3, 8, 20)
    ours = OurDriver(setting.model, setting.options(), room)
    theirs = LlamaCppDriver(setting.llama_cpp, mode, room)
    try:
        kept = our_logits(ours, monkeypatch)
        build(ours)
        build(theirs)
        np.testing.assert_allclose(kept[-1], their_logits(theirs, 3), atol=2e-2)
        others = np.roll(kept[-1], 1, axis=0)
        assert np.abs(others - kept[-1]).max() > 0.2  # what the tolerance would not forgive
        assert ours.executor.stats()["cells_used"] == 20 + 3 * 5
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("mode", [SPLIT, UNIFIED], ids=lambda mode: mode.name)
def test_copies_have_cells_of_their_own_and_give_what_was_copied(setting: Setting, monkeypatch, mode: Mode) -> None:
    room = Room(4, 40)
    ours = OurDriver(setting.model, setting.options(), room)
    theirs = LlamaCppDriver(setting.llama_cpp, mode, room)
    try:
        kept = our_logits(ours, monkeypatch)
        for driver in (ours, theirs):
            driver.prefill(0, ids(30))
            driver.copy(2)
            driver.copy(4)
            driver.decode(np.repeat(ids(1, 5), 4))
        assert ours.executor.stats()["cells_used"] == 4 * 31
        np.testing.assert_allclose(kept[-1], np.repeat(kept[-1][:1], 4, axis=0), atol=2e-2)
        np.testing.assert_allclose(kept[-1], their_logits(theirs, 4), atol=2e-2)
    finally:
        ours.close()
        theirs.close()


def test_our_copies_are_read_as_if_each_had_been_read_from_a_prompt(setting: Setting) -> None:
    rows_read = []
    for copies in (True, False):
        driver = OurDriver(setting.model, setting.options(), Room(4, 80))
        driver.prefill(0, ids(70))
        if copies:
            driver.copy(4)
        else:
            for i in range(1, 4):
                driver.prefill(i, ids(70))
        before = driver.executor.stats()["rows_read"]
        for step in range(4):
            driver.decode(ids(4, step))
        rows_read.append(driver.executor.stats()["rows_read"] - before)
        driver.close()
    assert rows_read[0] == rows_read[1]


def test_prompts_are_cut_into_the_same_steps(setting: Setting, monkeypatch) -> None:
    driver = OurDriver(setting.model, setting.options(), Room(1, N_BATCH))
    sizes: list[int] = []
    forward = driver.executor.forward
    monkeypatch.setattr(driver.executor, "forward", lambda batch: sizes.append(batch.n_tokens) or forward(batch))
    monkeypatch.setattr("ggml_engine.bench.ours.N_BATCH", 64)
    driver.prefill(0, ids(150))
    assert sizes == [64, 64, 22]
    driver.close()


def test_llama_cpp_that_refuses_a_step_is_an_error_and_not_a_time(setting: Setting) -> None:
    driver = LlamaCppDriver(setting.llama_cpp, SPLIT, Room(1, 256))
    try:
        driver.prefill(0, ids(256))
        with pytest.raises(ComputeError, match="llama_decode gave 1 for 1 tokens in the mode 'no flash, split'"):
            driver.decode(ids(1))
    finally:
        driver.close()


def test_room_is_counted_in_cells_of_each_engine() -> None:
    room = Room(8, 100, 2048)
    assert (room.n_positions, room.n_cells) == (2148, 2848)
    assert n_cells_of(UNIFIED, room) == 3072
    assert n_cells_of(SPLIT, room) == 8 * 2304
    assert 2848 <= capacity_for(room) < 2848 + 8 * 64 + 256


# ---- the cases


def test_races_count_tokens_and_have_every_mode_that_a_row_can_have(tiny: Path) -> None:
    report = measured(tiny, "prefill", "decode", "separate", "shared")
    assert report.failed == {}
    names = [mode.name for mode in MODES]
    rows = {row.label: row for row in report.rows}
    assert list(rows) == [
        "16 tokens", "64 tokens", "1 sequence at 0", "1 sequence at 32", "2 sequences at 16", "4 sequences at 16",
        "2 sequences on 64",
    ]  # fmt: skip
    for label, row in rows.items():
        n_tokens = int(label.split()[0]) * (1 if row.case == "prefill" else QUICK.steps_of(int(label.split()[0])))
        assert {series.n_tokens for series in row.series} == {n_tokens}
        assert all(len(series.values) == 2 and min(series.values) > 0 for series in row.series)
        single = row.case in ("prefill", "decode")
        assert [series.name for series in row.series] == ["ours", *(n for n in names if not single or "split" in n)]
        assert set(row.skipped) == ({n for n in names if "unified" in n} if single else set())
        assert row.defaults == "flash, split"
        assert set(row.compared) == {"ours against the best mode", "ours against the defaults"}


def test_a_model_with_windows_runs_in_every_mode(tmp_path: Path) -> None:
    report = measured(write_gemma3(tmp_path / "gemma3.gguf"), "separate", "shared")
    assert report.failed == {}
    assert all(len(row.series) == 5 and not row.skipped for row in report.rows)


def test_every_repetition_forwards_the_same_tokens(tiny: Path, monkeypatch) -> None:
    forwarded: list[int] = []
    close = OurDriver.close
    monkeypatch.setattr(OurDriver, "close", lambda self: forwarded.append(self.executor.n_forwarded) or close(self))
    measured(tiny, "decode", against_llama_cpp=False, repetitions=3)
    steps = QUICK.steps_of(1)
    assert forwarded == [32 + 2 * (1 + 3) * steps]  # the history once; two rows with a warm-up each


def test_a_clone_takes_no_cells_and_no_bytes(tiny: Path) -> None:
    (row,) = measured(tiny, "clone").of("clone")
    found = {series.name: set(series.values) for series in row.series if series.unit != "s"}
    assert found == {"cells taken": {0.0}, "K/V added": {0.0}}


@pytest.mark.parametrize("parked", [128, 140, 20])  # whole copies of the history, with a rest, and less than one
def test_parked_cells_are_there_while_one_sequence_decodes(tiny: Path, monkeypatch, parked: int) -> None:
    used: list[int] = []
    close = OurDriver.close
    monkeypatch.setattr(
        OurDriver, "close", lambda self: used.append(self.executor.stats()["cells_used"]) or close(self)
    )
    (row,) = measured(tiny, "parked", sizes=replace(QUICK, parked=parked)).of("parked")
    history, steps = QUICK.parked_history, QUICK.steps_of(1)
    grown = 8 * max(history, parked // 8)
    assert used == [history + steps, history + steps + parked, history + steps + grown]
    assert [name for name in row.compared if name.startswith("speed")] == [
        "speed parked behind / alone", "speed parked between / alone",
    ]  # fmt: skip
    assert sum(name.startswith("llama.cpp") for name in row.compared) == 2


def test_what_needs_more_positions_than_the_model_has_is_left_out_with_both_numbers(tiny: Path) -> None:
    sizes = replace(QUICK, histories=(0, 600), prompts=(600,), clone_prefix=600, warm_prompt=600, stream_prompt=600)
    report = measured(tiny, "prefill", "decode", "clone", "warm", "stream", sizes=sizes)
    assert report.failed == {}
    reasons = {row.label: row.skipped.get("ours", "") for row in report.rows}
    assert reasons.pop("1 sequence at 0") == ""
    assert len(reasons) == 5
    assert all("the model's context has 512" in reason for reason in reasons.values())
    assert all("needs 60" in reason for reason in reasons.values())


def test_a_mode_that_the_memory_does_not_hold_is_left_out_and_others_are_not(tiny: Path, monkeypatch) -> None:
    per_cell = 2 * 2 * 2 * 2 * 16  # K and V, f16, of two layers, two heads of 16
    room = Room(2, QUICK.width_history + QUICK.steps_of(2))
    monkeypatch.setattr(setting_module, "estimate_bytes_per_cell", lambda *_types: per_cell)
    enough = per_cell * (capacity_for(room) + 2 * n_cells_of(UNIFIED, room) + 100) * 10 // 8
    monkeypatch.setattr(setting_module, "machine_memory", lambda: MachineMemory(1 << 40, enough))
    (row,) = measured(tiny, "separate", sizes=replace(QUICK, widths=(2,))).rows
    assert [series.name for series in row.series] == ["ours", "flash, unified", "no flash, unified"]
    assert set(row.skipped) == {"flash, split", "no flash, split"}
    assert all("MiB of memory are free" in reason for reason in row.skipped.values())


def test_what_ours_cannot_hold_is_left_out_whole(tiny: Path, monkeypatch) -> None:
    monkeypatch.setattr(setting_module, "machine_memory", lambda: MachineMemory(1 << 40, 1000))
    report = measured(tiny, "prefill", "decode", "separate", "shared", "parked")
    assert report.failed == {}
    assert all("ours" in row.skipped and not any(series.values for series in row.series) for row in report.rows)


def test_a_case_that_fails_is_noted_and_the_others_run(tiny: Path, monkeypatch) -> None:
    def fail(_setting: Setting, _report: ModelReport) -> None:
        raise ComputeError("no more of this")

    monkeypatch.setitem(CASES, "decode", fail)
    report = measured(tiny, "decode", "clone")
    assert report.failed == {"decode": "no more of this"}
    assert report.cases == ["clone"]


# ---- the share of Python


def test_only_graphs_that_are_computed_meanwhile_are_timed(setting: Setting) -> None:
    driver = OurDriver(setting.model, setting.options(), Room(1, 8))
    with timed_computes() as intervals:
        driver.prefill(0, ids(3))
        driver.decode(ids(1))
    driver.decode(ids(1))
    driver.close()
    assert len(intervals) == 2
    assert all(began < ended for began, ended in intervals)


def test_the_share_is_of_whole_steps() -> None:
    intervals = [(0.0, 1.0), (2.0, 5.0), (6.0, 9.0), (10.0, 50.0)]
    assert share_outside(intervals, 2.0, 20.0) == pytest.approx(1 - 6 / 8)
    assert share_outside(intervals, 2.0, 3.0) is None


def test_the_share_is_told_of_the_forward_and_of_whole_steps(tiny: Path) -> None:
    rows = measured(tiny, "python").of("python")
    assert [row.label for row in rows] == ["1 sequence", "2 sequences"]
    for row in rows:
        assert [series.name for series in row.series] == [
            "of the forward", "of the step, greedy", "of the step, temperature, top-k 40",
        ]  # fmt: skip
        assert all(0 < value < 1 for series in row.series for value in series.values)
        assert all(len(series.values) == 2 for series in row.series)


# ---- the command


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some machines set it, and the command then tells on stderr that it is left out."""
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)


def test_the_command_prints_a_table_of_every_case(tiny: Path, capsys) -> None:
    assert main(["bench", str(tiny), *QUICK_ARGUMENTS, "--only", "prefill,clone,warm,stream"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    heads = [line for line in out.splitlines() if line.startswith(f"{tiny}: ")]
    assert len(heads) == 4
    assert "ours/best" in out
    assert "cold / warm" in out
    assert "longest gap / step alone" in out
    assert "failed" not in out


def test_the_document_is_one_line_of_everything(tiny: Path, capsys) -> None:
    arguments = ["bench", str(tiny), str(tiny), *QUICK_ARGUMENTS, "--only", "decode", "--histories", "3", "--json"]
    assert main([*arguments, "--seed", "5"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (line,) = out.splitlines()
    document = json.loads(line)
    assert document["interrupted"] is False
    assert {"cpu", "cores", "ggml", "llama_cpp_python", "ggml_engine"} <= set(document["machine"])
    options = document["options"]
    assert (options["threads"], options["repetitions"], options["against"], options["seed"]) == (1, 2, "llama.cpp", 5)
    assert options["sizes"]["histories"] == [3]
    assert len(document["models"]) == 2
    for model in document["models"]:
        assert (model["architecture"], model["n_vocab"], model["n_ctx"]) == ("llama", VOCAB, 512)
        (row,) = model["rows"]
        assert (row["case"], row["label"]) == ("decode", "1 sequence at 3")
        assert [len(series["values"]) for series in row["series"]] == [2, 2, 2]


def test_ctrl_c_prints_what_was_measured_and_is_code_130(tiny: Path, monkeypatch, capsys) -> None:
    show = output.StatusLine.show

    def interrupt(line: output.StatusLine, text: str) -> None:
        if text == "decode, 1 sequence at 0: 1 of 2 repetitions":
            raise KeyboardInterrupt
        show(line, text)

    monkeypatch.setattr(output.StatusLine, "show", interrupt)
    arguments = ["bench", str(tiny), *QUICK_ARGUMENTS, "--only", "prefill,decode,clone"]
    assert main(arguments) == 130
    out, err = capsys.readouterr()
    assert "16 tokens" in out
    assert "1 sequence at 0" in out
    assert "1 sequence at 32" not in [line for line in out.splitlines() if "not measured" not in line]
    assert "clone" not in out
    assert err == "interrupted: what was measured is above\n"

    assert main([*arguments, "--json"]) == 130
    document = json.loads(capsys.readouterr().out)
    assert document["interrupted"] is True
    rows = document["models"][0]["rows"]
    assert [len(series["values"]) for row in rows for series in row["series"] if row["case"] == "decode"] == [1, 1, 1]


def test_ctrl_c_ends_a_process_that_is_in_the_middle_of_a_case(tiny: Path) -> None:
    # decode takes minutes, and prefill next to nothing
    sizes = ["--prompts", "16", "--histories", "100", "--steps", "400", "--repetitions", "500"]
    with started("bench", str(tiny), "--threads", "1", "--only", "prefill,decode", *sizes) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert any(b"prefill, tokens/s" in line for line in iter(child.stdout.readline, b""))
        child.send_signal(signal.SIGINT)
        out, err = child.stdout.read(), child.stderr.read()
        child.wait(TIMEOUT_S)
    assert child.returncode == 130
    assert b"ours  least..greatest\n16 tokens " in out
    assert err == b"interrupted: what was measured is above\n"


def test_a_failed_case_is_code_1_after_the_tables(tiny: Path, monkeypatch, capsys) -> None:
    def fail(_setting: Setting, _report: ModelReport) -> None:
        raise ComputeError("no more of this")

    monkeypatch.setitem(cases_module.CASES, "decode", fail)
    assert main(["bench", str(tiny), "--quick", "--threads", "1", "--only", "decode,clone"]) == 1
    out = capsys.readouterr().out
    assert "failed: no more of this" in out
    assert "cells taken" in out


def test_forced_attention_and_capacity_reach_the_executor(tiny: Path, monkeypatch) -> None:
    seen: list[ExecutorOptions] = []
    init = GgmlExecutor.__init__

    def note(self: GgmlExecutor, model: Any, options: ExecutorOptions, *rest: Any) -> None:
        seen.append(options)
        init(self, model, options, *rest)

    monkeypatch.setattr(GgmlExecutor, "__init__", note)
    arguments = ["--only", "prefill", "--prompts", "16", "--attention", "flash", "--capacity", "1000"]
    assert main(["bench", str(tiny), "--quick", "--threads", "1", *arguments]) == 0
    assert [(options.attention, options.capacity, options.k_type) for options in seen] == [("flash", 1000, "f16")]


def test_the_second_layout_of_weights_reaches_the_model_the_engine_and_the_child(tiny: Path, monkeypatch) -> None:
    seen: list[str] = []
    load = setting_module.load_model

    def note(*args: Any, prefill_weights: str, **options: Any) -> Any:
        seen.append(prefill_weights)
        return load(*args, **options)

    def load_engine(*_: Any, prefill_weights: str, **__: Any) -> None:
        seen.append(prefill_weights)

    def run_child(command: list[str], **_: Any) -> Any:
        seen.append(json.loads(command[-1])[5])
        raise ComputeError("noted")

    monkeypatch.setattr(setting_module, "load_model", note)
    monkeypatch.setattr(Engine, "load", load_engine)
    monkeypatch.setattr(start_module.subprocess, "run", run_child)
    setting = Setting(tiny, QUICK, 1, threads=1, prefill_weights="bf16")
    run(setting, ModelReport("tiny"), ["prefill", "start"])
    setting.load_engine(64)
    setting.release()
    assert setting.plain()["prefill_weights"] == "bf16"
    assert seen == ["bf16"] * 3
    with pytest.raises(OptionError, match="q4_0"):
        Setting(tiny, QUICK, 1, threads=1, prefill_weights="q4_0")  # type: ignore[arg-type]
