"""Reports of a benchmark as they could have been measured."""

from __future__ import annotations

from ggml_engine.bench.report import ModelReport, Report, Row

MODES = ("flash, split", "flash, unified", "no flash, split", "no flash, unified")
MACHINE = {
    "cpu": "A Processor", "cores": 4, "usable_cores": 2, "ggml": "1.2.3", "ggml_engine": "0.1", "llama_cpp_python": "0.3",
}  # fmt: skip
OPTIONS = {"repetitions": 3, "threads": 2}


def race(model: ModelReport, case: str, label: str, times: dict[str, list[float]], n_tokens: int = 10) -> Row:
    """A race with these times, ours first; llama.cpp's defaults are flash attention and split."""
    row = model.row(case, label, is_race=True)
    for name, values in times.items():
        row.add(name, "s", n_tokens).values.extend(values)
    row.defaults = "flash, split" if len(times) > 1 else ""
    return row


def whole_report() -> Report:
    """Two races and a row of figures."""
    model = ModelReport("tiny")
    race(model, "prefill", "128 tokens", {"ours": [1.0, 1.0, 2.0], "flash, split": [2.0, 1.5, 2.0]})
    times = {"ours": [1.0, 2.0, 1.0], **{name: [2.0 + i, 4.0, 3.0] for i, name in enumerate(MODES)}}
    race(model, "shared", "8 sequences on 64", times)
    figures = model.row("clone", "a prefix of 64")
    figures.add("time", "s").values.extend([1e-5, 2e-5, 3e-5])
    figures.add("cells taken", "cells").values.extend([0.0] * 3)
    figures.add("K/V added", "bytes").values.extend([0.0] * 3)
    return Report(MACHINE, OPTIONS, [model])
