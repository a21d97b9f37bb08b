"""The picture of a benchmark: what is drawn, and what is refused before anything is measured."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from bench_reports import MODES, whole_report

from ggml_engine.bench.plot import check_plot, draw
from ggml_engine.bench.report import ModelReport, Report
from ggml_engine.cli.main import main
from ggml_engine.errors import OptionError


def test_a_png_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "speed.png"
    check_plot(path)
    assert draw(whole_report(), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_drawing_names_cases_units_modes_and_the_ratio(tmp_path: Path) -> None:
    import matplotlib as mpl

    path = tmp_path / "speed.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):  # text as text
        assert draw(whole_report(), path)
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))
    assert {"Prefill", "prompt, tokens", "Decode on a shared prefix", "sequences, 64 tokens shared"} <= set(shown)
    assert shown.count("tokens/s") == 2
    assert ["ours", *(f"llama.cpp {mode}" for mode in MODES)] == [
        text for text in shown if text == "ours" or re.match(r"llama\.cpp (no )?flash", text)
    ]
    assert [text for text in shown if re.fullmatch(r"[\d.]+x", text)] == ["1.50x", "2.00x"]
    assert "A Processor, 2 threads, ggml 1.2.3" in shown


def test_without_races_there_is_nothing_to_draw(tmp_path: Path) -> None:
    model = ModelReport("tiny")
    model.row("clone", "x").add("time", "s").values.append(1.0)
    assert not draw(Report({}, {}, [model]), tmp_path / "speed.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["speed.pdf", "speed", "speed.png.txt"])
def test_another_kind_of_picture_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match=r"\.png or \.svg"):
        check_plot(tmp_path / name)


def test_a_picture_in_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no directory"):
        check_plot(tmp_path / "nowhere" / "speed.png")


def test_without_matplotlib_the_command_says_what_to_install(monkeypatch, capsys, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    assert main(["bench", "no-such-model", "--plot", str(tmp_path / "speed.png")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("pip install 'ggml-engine[bench]'\n")
