"""What a benchmark found, as tables for people: a heading, a table of each case, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ggml_engine.cli.output import MIB, mib, one_line, text_table

if TYPE_CHECKING:
    from ggml_engine.bench.report import ModelReport, Row, Series

HEADS: Final = {
    "prefill": "prefill, tokens/s",
    "decode": "decode of one sequence, tokens/s",
    "separate": "decode of sequences with separate histories, tokens/s",
    "shared": "decode of sequences on a shared prefix, tokens/s",
    "parked": "decode beside parked cells",
    "clone": "clone",
    "warm": "first token of a prompt that was read before",
    "stream": "a stream while a long prompt is read beside it",
    "python": "share of a decode step outside of ggml's compute",
    "start": "process start to first token, and peak memory",
}
_NONE: Final = "-"
_SCALES: Final = ((1.0, "s", 2), (1e-3, "ms", 2), (1e-6, "us", 1))


def heading(machine: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """What everything ran on."""
    cells = f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores, {options['threads']} threads"
    versions = (
        f"ggml-engine {machine['ggml_engine']}, ggml {machine['ggml']}, llama-cpp-python {machine['llama_cpp_python']}"
    )
    how = f"medians of {options['repetitions']} interleaved repetitions (least..greatest)"
    return f"{one_line(cells)}\n{versions}\n{how}\n"


def case_table(report: ModelReport, case: str) -> str:
    """A case's rows; empty where it has nothing to tell."""
    rows = report.of(case)
    if not rows and case not in report.failed:
        return ""
    text = f"\n{one_line(report.model)}: {HEADS[case]}\n"
    measured = [row for row in rows if any(each.values for each in row.series)]
    if measured:
        text += _race(measured) if measured[0].is_race else _figures(measured)
    text += "".join(f"{note}\n" for note in _notes(rows))
    if case in report.failed:
        text += f"failed: {one_line(report.failed[case])}\n"
    return text


# ---- races: the same work done by several, a column each


def _race(rows: Sequence[Row]) -> str:
    others = list(dict.fromkeys(each.name for row in rows for each in row.series[1:]))
    if not others:
        cells = [("", "ours", "least..greatest")]
        cells += [(row.label, _speed(row.ours), _range(row.ours.tokens_per_s)) for row in rows if row.ours]
        return text_table(cells, right=(1,))
    heads = ("", "ours", *others, "ours/best", "spread", "best mode", "ours/defaults", "spread")
    cells_of_others = [heads]
    for row in rows:
        best = row.best
        cells_of_others.append(
            (
                row.label,
                _speed(row.ours),
                *(_speed(row.find(name)) for name in others),
                *_quotient(row.against(best)),
                best.name if best else _NONE,
                *_quotient(row.against(row.find(row.defaults))),
            )
        )
    n = len(others)
    table = text_table(cells_of_others, right=(*range(1, n + 3), n + 5))
    defaults = {row.defaults for row in rows if row.defaults}
    return table + f"llama.cpp's defaults: {'; '.join(sorted(defaults))}. A ratio above 1 is ours ahead.\n"


def _speed(series: Series | None) -> str:
    return f"{_median(series.tokens_per_s):.1f}" if series and series.values else _NONE


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f}..{max(values):.1f}"


def _quotient(values: Sequence[float]) -> tuple[str, str]:
    if not values:
        return _NONE, ""
    return f"{_median(values):.2f}", f"{min(values):.2f}..{max(values):.2f}"


# ---- figures: a line for each series and each quotient


def _figures(rows: Sequence[Row]) -> str:
    has_speed = any(series.n_tokens for row in rows for series in row.series)
    cells: list[tuple[str, ...]] = [("", "", "median", "least..greatest", "tokens/s" if has_speed else "")]
    for row in rows:
        label = row.label
        for series in row.series:
            if series.values:
                cells.append((label, series.name, *_values(series.values, series.unit), _speed_of(series)))
                label = ""
        for name, values in row.compared.items():
            cells.append(("", name, *_values(values, "ratio"), ""))
    return text_table(cells, right=(2, 3, 4))


def _speed_of(series: Series) -> str:
    return _speed(series) if series.n_tokens else ""


def _values(values: Sequence[float], unit: str) -> tuple[str, str]:
    middle, least, most = _median(values), min(values), max(values)
    if unit == "s":
        scale, name, digits = next((each for each in _SCALES if middle >= each[0]), _SCALES[-1])
        return f"{middle / scale:.{digits}f} {name}", f"{least / scale:.{digits}f}..{most / scale:.{digits}f}"
    if unit == "bytes":
        return (mib(int(middle)), f"{least / MIB:.1f}..{most / MIB:.1f}") if most else ("0 bytes", "0..0")
    if unit == "share":
        return f"{middle:.1%}", f"{least * 100:.1f}..{most * 100:.1f}"
    if unit == "cells":
        return f"{middle:.0f} cells", f"{least:.0f}..{most:.0f}"
    return f"{middle:.3g}", f"{least:.3g}..{most:.3g}"


def _median(values: Sequence[float]) -> float:
    from ggml_engine.bench.measure import spread  # noqa: PLC0415 - its package is imported when a command runs

    return spread(values).median


# ---- what was left out


def _notes(rows: Sequence[Row]) -> list[str]:
    """Every reason once, with the rows that it holds for where these are not all."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.skipped.items():
            found.setdefault((name, reason), []).append(row.label)
    return [
        f"not measured: {one_line(name)}{'' if len(labels) == len(rows) else ' (' + '; '.join(labels) + ')'}: "
        f"{one_line(reason)}"
        for (name, reason), labels in found.items()
    ]
