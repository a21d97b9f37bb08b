"""A picture of the races: a panel for each case of each model, bars for ours and for every mode of llama.cpp.

Needs matplotlib, which the extra `bench` brings; nothing else of the package knows it.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Final

from ggml_engine.bench.measure import spread
from ggml_engine.bench.report import ModelReport, Report, Row
from ggml_engine.errors import OptionError

SUFFIXES: Final = (".png", ".svg")
TITLES: Final = {
    "prefill": ("Prefill", "prompt, tokens"),
    "decode": ("Decode, one sequence", "history, tokens"),
    "separate": ("Decode, separate histories", "sequences"),
    "shared": ("Decode on a shared prefix", "sequences"),
}
# ours, then the modes: a pair of hues for flash and no flash, light for split and dark for unified
_COLOURS: Final = {
    "ours": "#c8442d",
    "flash, split": "#8fb8de",
    "flash, unified": "#2f6ca8",
    "no flash, split": "#b5cf9b",
    "no flash, unified": "#5d8a3c",
}
_THEIRS: Final = "llama.cpp "
_OTHER: Final = "#888888"
_GROUP: Final = 0.84  # of the distance between two groups that bars take
_WIDTH_IN, _HEIGHT_IN = 5.6, 3.7  # of a panel
_N_COLUMNS: Final = 2
_NARROW_LEGEND: Final = 2  # names in a line below a single panel


def check_plot(path: Path) -> None:
    """Raise OptionError, before anything is measured, for a picture that cannot be drawn or written."""
    if path.suffix.lower() not in SUFFIXES:
        raise OptionError(f"a picture is a file in {' or '.join(SUFFIXES)}, asked for {os.fspath(path)!r}")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"there is no directory {os.fspath(path.absolute().parent)!r} for the picture")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("a picture is drawn by matplotlib, which is not installed: pip install 'ggml-engine[bench]'")


def panels(report: Report) -> list[tuple[ModelReport, str, list[Row]]]:
    """What there is to draw: races that were measured."""
    found = []
    for model in report:
        for case in TITLES:
            if rows := [row for row in model.of(case) if row.ours is not None]:
                found.append((model, case, rows))
    return found


def draw(report: Report, path: Path) -> bool:
    """Write the picture; False where there is nothing to draw. Raises OSError."""
    wanted = panels(report)
    if not wanted:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # see the top
    from matplotlib.figure import Figure  # noqa: PLC0415  # no window, and no global state

    n_columns = min(_N_COLUMNS, len(wanted))
    n_rows = -(-len(wanted) // n_columns)
    figure = Figure(figsize=(_WIDTH_IN * n_columns, _HEIGHT_IN * n_rows + 1.1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for axis, (model, case, rows) in zip(axes, wanted, strict=False):
        _panel(axis, model if len(report.models) > 1 else None, case, rows)
    for axis in axes[len(wanted) :]:
        axis.set_axis_off()
    entries: dict[str, Any] = {}
    for axis in axes[: len(wanted)]:
        entries |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    is_compared = len(entries) > 1
    if is_compared:
        order = sorted(entries, key=_order)
        figure.legend(
            [entries[label] for label in order],
            order,
            loc="outside lower center",
            frameon=False,
            fontsize=9 if n_columns > 1 else 8,
            ncols=len(order) if n_columns > 1 else _NARROW_LEGEND,
        )
    names = ", ".join(model.model for model in report)
    machine = report.machine
    about = ["tokens per second, higher is better", "bars are medians, whiskers least and greatest"]
    if is_compared:
        about.append("below: ours against the best mode of llama.cpp")
    lines = [names, f"{machine['cpu']}, {report.options['threads']} threads, ggml {machine['ggml']}"]
    lines += ["; ".join(about)] if n_columns > 1 else about
    figure.suptitle("\n".join(lines), fontsize=10 if n_columns > 1 else 8)
    figure.savefig(path, dpi=150)
    return True


def _order(label: str) -> int:
    names = [name for name in _COLOURS if label in (name, f"{_THEIRS}{name}")]
    return list(_COLOURS).index(names[0]) if names else len(_COLOURS)


def _panel(axis: Any, model: ModelReport | None, case: str, rows: list[Row]) -> None:
    title, x_label = TITLES[case]
    names = list(dict.fromkeys(each.name for row in rows for each in row.series if each.values))
    width = _GROUP / len(names)
    for i, name in enumerate(names):
        found = [(at, row.find(name)) for at, row in enumerate(rows)]
        present = [(at, spread(series.tokens_per_s)) for at, series in found if series is not None]
        x = [at - _GROUP / 2 + width * (i + 0.5) for at, _ in present]
        middle = [each.median for _, each in present]
        below = [each.median - each.min for _, each in present]
        above = [each.max - each.median for _, each in present]
        label = name if name == "ours" else f"{_THEIRS}{name}"
        axis.bar(
            x, middle, width * 0.92, yerr=(below, above), label=label, color=_COLOURS.get(name, _OTHER),
            error_kw={"elinewidth": 0.8, "capsize": 1.5, "ecolor": "#333333"},
        )  # fmt: skip
    beside = 0.5 if len(rows) > 1 else 1.0  # a single group would else be as wide as the panel
    axis.set_xlim(-beside, len(rows) - 1 + beside)
    axis.set_xticks(range(len(rows)), [_tick(case, row) for row in rows])
    axis.set_title(f"{model.model}: {title}" if model else title, fontsize=10)
    axis.set_xlabel(x_label + _detail(case, rows), fontsize=9)
    axis.set_ylabel("tokens/s", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.yaxis.grid(True, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)


def _tick(case: str, row: Row) -> str:
    """What tells a row from the others of its case, and below it how ours compares with the best mode."""
    words = row.label.split()
    name = words[-1] if case == "decode" else words[0]
    compared = row.against(row.best)
    return f"{name}\n{spread(compared).median:.2f}x" if compared else name


def _detail(case: str, rows: list[Row]) -> str:
    """What the rows of a case have in common."""
    last = rows[0].label.split()[-1]
    if case == "separate":
        return f", {last} tokens of history each"
    return f", {last} tokens shared" if case == "shared" else ""
