"""`ggml-engine check` on tiny models: all is well, and it can tell when it is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import F16, Q8_0, write_gemma3, write_llama

from ggml_engine.cli.main import main
from ggml_engine.errors import OptionError
from ggml_engine.pool import cells
from ggml_engine.pool.read_plan import WindowRead
from ggml_engine.pool.window import Window
from ggml_engine.reference.check import check_model

OPTIONS = ("--tokens", "24", "--threads", "1")
MODES = {"matmul", "flash", "deterministic"}
SHARED = {"batched", "cloned", "source of clones", "rewound"}
ALONE = {"alone", "alone, chunks", "alone, decoding"}


@pytest.fixture(params=["llama", "gemma3"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write = write_llama if request.param == "llama" else write_gemma3
    return write(tmp_path / f"{request.param}.gguf")


def test_a_sound_engine_is_code_0_and_a_table_of_every_way(tiny: Path, capsys) -> None:
    assert main(["check", str(tiny), *OPTIONS]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    header, *lines = out.splitlines()
    assert header.split("  ")[0] == "mode"
    assert all(line.endswith("  ok") for line in lines)
    ways = ALONE | SHARED | ({"window 5"} if tiny.stem == "gemma3" else set())
    for mode in MODES:
        for way in ways:
            for against in ("libllama", "naive attention"):
                assert any(line.startswith(f"{mode} ") and f"  {way}  " in line and against in line for line in lines)


def test_what_has_to_be_equal_is_equal_and_is_what_the_bounds_say(tiny: Path) -> None:
    rows = check_model(tiny, n_tokens=24, threads=1)
    exact = {(row.mode, row.way, row.against) for row in rows if row.bound == 0}
    windows = {"window 5"} if tiny.stem == "gemma3" else set()
    expected = {(mode, way, "libllama") for mode in ("matmul", "flash") for way in ALONE | windows}
    expected |= {("deterministic", way, "alone") for way in (ALONE | windows | SHARED) - {"alone"}}
    assert exact == expected
    assert all(row.ok and row.bound is not None and row.error is not None for row in rows)
    assert all(row.difference == 0 for row in rows if row.bound == 0)
    by_definition = [row for row in rows if row.against == "naive attention"]
    assert all(row.error > 0 for row in by_definition), "numpy has other last bits"  # type: ignore[operator]


@pytest.mark.parametrize("kv_type", ["f32", "bf16", "q8_0", "q4_0"])
def test_other_types_of_k_and_v_are_within_their_bounds(tmp_path: Path, kv_type: str) -> None:
    path = write_llama(tmp_path / "llama.gguf", head_size=64)
    rows = check_model(path, n_tokens=24, threads=1, kv_type=kv_type)
    assert all(row.ok for row in rows)
    notes = {row.mode for row in rows if row.note}
    assert notes == ({"matmul", "deterministic"} if kv_type.startswith("q") else set())


@pytest.mark.parametrize("types", [F16, Q8_0])
def test_other_types_of_weights_are_within_their_bounds(tmp_path: Path, types: object) -> None:
    assert all(row.ok for row in check_model(write_gemma3(tmp_path / "g.gguf", types=types), n_tokens=24, threads=1))


def test_the_same_seed_gives_the_same_numbers(tiny: Path) -> None:
    first, again, other = (check_model(tiny, n_tokens=16, threads=1, attention="flash", seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_window_that_is_not_passed_is_said(tmp_path: Path) -> None:
    rows = check_model(write_gemma3(tmp_path / "g.gguf", window=40), n_tokens=24, threads=1, attention="flash")
    assert [row.note for row in rows if row.way == "window 40"] == ["24 tokens do not pass it: ask for more tokens"]
    assert all(row.ok for row in rows)


def test_a_model_too_large_for_numpy_is_compared_with_libllama_alone(tiny: Path, monkeypatch) -> None:
    monkeypatch.setattr("ggml_engine.reference.check.MAX_NAIVE_WORK", 1000)
    rows = check_model(tiny, n_tokens=16, threads=1, attention="matmul")
    (row,) = [row for row in rows if row.against == "naive attention"]
    assert "too large for naive attention" in row.note
    assert {row.against for row in rows if row.bound is not None} == {"libllama", "alone"}


def test_what_the_definition_leaves_out_is_compared_with_libllama_alone(tmp_path: Path) -> None:
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    rows = check_model(write_llama(tmp_path / "l.gguf", metadata=yarn), n_tokens=16, threads=1, attention="matmul")
    (row,) = [row for row in rows if row.against == "naive attention"]
    assert "rope.scaling.type" in row.note
    assert all(row.ok for row in rows)


def test_without_the_mask_the_check_fails(tiny: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(WindowRead, "fill_mask", lambda _self, out: out.fill(0))
    assert main(["check", str(tiny), *OPTIONS, "--json"]) == 1
    out, err = capsys.readouterr()
    rows = json.loads(out)
    by_others = [row for row in rows if row["against"] != "alone"]
    assert not any(row["ok"] for row in by_others)
    assert min(row["error"] for row in by_others) > 0.1
    assert "comparisons are past their bound" in err


def test_without_the_window_the_check_fails(tmp_path: Path, monkeypatch) -> None:
    planned = cells.PLANNERS
    everything = {kind: lambda _window, *rest, plan=plan: plan(Window(0), *rest) for kind, plan in planned.items()}
    monkeypatch.setattr(cells, "PLANNERS", everything)
    rows = check_model(write_gemma3(tmp_path / "g.gguf"), n_tokens=24, threads=1, attention="flash")
    failed = {row.way for row in rows if not row.ok}
    assert failed >= {"alone", "window 5", "batched"}


def test_a_rewind_that_keeps_other_tokens_in_sight_fails_only_where_something_is_rewound(
    tmp_path: Path, monkeypatch
) -> None:
    """Cells come back in another order: the bookkeeping stays sound, the K and V are those of other positions."""
    rewind = cells.CellCache.rewind

    def rewind_and_shift(self: cells.CellCache, sequence: int, to: int) -> None:
        rewind(self, sequence, to)
        held = self._sequences[sequence].cells
        held[:] = np.roll(held, 1)

    monkeypatch.setattr(cells.CellCache, "rewind", rewind_and_shift)
    path = write_llama(tmp_path / "l.gguf")
    rows = check_model(path, n_tokens=24, threads=1, attention="matmul")
    assert {row.way for row in rows if not row.ok and row.mode == "deterministic"} == {"rewound"}


def test_options_that_leave_nothing_to_run_are_refused(tiny: Path) -> None:
    with pytest.raises(OptionError, match="nothing can run"):
        check_model(tiny, attention="matmul", kv_type="q8_0")
    with pytest.raises(OptionError, match="16 tokens to the model's context of 512"):
        check_model(tiny, n_tokens=15)
    with pytest.raises(OptionError, match="context of 512"):
        check_model(tiny, n_tokens=513)


def test_progress_counts_every_run_to_its_end(tiny: Path) -> None:
    seen: list[tuple[int, int]] = []
    check_model(tiny, n_tokens=16, threads=1, progress=lambda done, total: seen.append((done, total)))
    total = seen[-1][1]
    assert seen == [(i + 1, total) for i in range(total)]


def test_a_file_that_is_no_model_is_one_line_and_code_1(tmp_path: Path, capsys) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"not a model")
    assert main(["check", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ggml-engine: error: ")
    assert err.count("\n") == 1
