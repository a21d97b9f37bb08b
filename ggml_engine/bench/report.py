"""What a benchmark found: rows of series, what is compared in them, and all of it as plain values for JSON.

A row is put into its report before it is measured, and fills as it goes: an interrupted run has what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ggml_engine.bench.measure import ratios, spread


@dataclass(frozen=True, slots=True)
class Series:
    """One value for each repetition, in `unit`; times ("s") of `n_tokens` tokens have a speed."""

    name: str
    unit: str
    values: list[float] = field(default_factory=list)
    n_tokens: int = 0

    @property
    def tokens_per_s(self) -> list[float]:
        """The speed of each repetition; empty where no tokens are counted."""
        return [self.n_tokens / value for value in self.values] if self.n_tokens else []


@dataclass(frozen=True, slots=True)
class Comparison:
    """Quotients of two series, repetition by repetition."""

    name: str
    over: Series
    under: Series

    @property
    def values(self) -> list[float]:
        """One for each repetition that both have."""
        return ratios(self.over.values, self.under.values)


@dataclass(slots=True)
class Row:
    """What was measured together. In a race, series are times of the same work, the first one ours.

    `skipped` has what could not be measured, and why. `defaults` names the series that nobody's settings changed.
    """

    case: str
    label: str
    is_race: bool = False
    series: list[Series] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    defaults: str = ""

    def add(self, name: str, unit: str, n_tokens: int = 0) -> Series:
        """A new series, to be filled."""
        made = Series(name, unit, n_tokens=n_tokens)
        self.series.append(made)
        return made

    def find(self, name: str) -> Series | None:
        """A series that has values."""
        return next((each for each in self.series if each.name == name and each.values), None)

    @property
    def ours(self) -> Series | None:
        """Ours in a race, if it was measured."""
        return self.series[0] if self.is_race and self.series and self.series[0].values else None

    @property
    def best(self) -> Series | None:
        """The fastest of the others in a race."""
        others = [each for each in self.series[1:] if each.values] if self.is_race else []
        return min(others, key=lambda each: spread(each.values).median, default=None)

    def against(self, other: Series | None) -> list[float]:
        """How many times as fast as `other` ours is, for each repetition."""
        return [] if other is None or self.ours is None else ratios(other.values, self.ours.values)

    @property
    def compared(self) -> dict[str, list[float]]:
        """All quotients that the row has, by name."""
        found = {each.name: each.values for each in self.comparisons}
        found["ours against the best mode"] = self.against(self.best)
        found["ours against the defaults"] = self.against(self.find(self.defaults))
        return {name: values for name, values in found.items() if values}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.skipped and not any(each.values for each in self.series)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "case": self.case,
            "label": self.label,
            "series": [_plain_series(each) for each in self.series if each.values],
            "ratios": [
                {"name": name, "values": values, **asdict(spread(values))} for name, values in self.compared.items()
            ],
            "best": self.best.name if self.best else None,
            "defaults": self.defaults or None,
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped.items()],
        }


def _plain_series(series: Series) -> dict[str, Any]:
    plain = {"name": series.name, "unit": series.unit, "values": series.values, **asdict(spread(series.values))}
    if speeds := series.tokens_per_s:
        plain |= {"n_tokens": series.n_tokens, "tokens_per_s": asdict(spread(speeds))}
    return plain


@dataclass(slots=True)
class ModelReport:
    """What was found with one model; `about` describes it, `failed` has the error of each case that ended with one."""

    model: str
    about: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def row(self, case: str, label: str, *, is_race: bool = False) -> Row:
        """A new row."""
        made = Row(case, label, is_race)
        self.rows.append(made)
        return made

    def of(self, case: str) -> list[Row]:
        """The rows of a case that have something to tell."""
        return [row for row in self.rows if row.case == case and not row.is_empty]

    @property
    def cases(self) -> list[str]:
        """The cases that have something to tell, in order."""
        return list(dict.fromkeys(row.case for row in self.rows if not row.is_empty))

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        rows = [row.plain() for row in self.rows if not row.is_empty]
        return {"model": self.model, **self.about, "rows": rows, "failed": dict(self.failed)}


@dataclass(slots=True)
class Report:
    """A whole run: the machine, the options, and a report of each model."""

    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    models: list[ModelReport] = field(default_factory=list)
    interrupted: bool = False

    def __iter__(self) -> Iterator[ModelReport]:
        return iter(self.models)

    def plain(self) -> dict[str, Any]:
        """One document: format, machine, options, and every value that was measured."""
        return {
            "format": 1,
            "machine": dict(self.machine),
            "options": dict(self.options),
            "interrupted": self.interrupted,
            "models": [model.plain() for model in self.models],
        }
