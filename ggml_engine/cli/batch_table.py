"""What a batch came to, as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ggml_engine.cli.output import one_line, text_table

if TYPE_CHECKING:
    from ggml_engine.control.rounds import RoundResult

COLUMNS: Final = (
    "prompt", "round", "tokens", "evaluated", "reused", "generated", "first token", "total", "tokens/s", "end",
)  # fmt: skip
_MOST_LABEL: Final = 24


def table(labels: Sequence[str], results: Sequence[RoundResult], elapsed_s: float) -> str:
    """A row for each result, by round and prompt, and one for their sums.

    `labels` are the names of the prompts. Tokens are those of the prompt; tokens/s counts generated ones over the
    seconds of `total`, waiting included: for a row since its round began, for the sums `elapsed_s`.
    """
    rows = sorted(results, key=lambda result: (result.round, result.index))
    cells = [COLUMNS, *(_row(labels[each.index], each) for each in rows), _sums(rows, elapsed_s)]
    return text_table(cells, right=range(1, len(COLUMNS) - 1))


def _row(label: str, result: RoundResult) -> tuple[str, ...]:
    stats = result.stats
    return (
        one_line(label)[:_MOST_LABEL],
        str(result.round + 1),
        *_counts([result]),
        "none" if stats.first_token_s is None else f"{stats.first_token_s:.2f} s",
        f"{result.total_s:.2f} s",
        _rate(stats.generated_tokens, result.total_s),
        result.reason.value,
    )


def _sums(results: Sequence[RoundResult], elapsed_s: float) -> tuple[str, ...]:
    n_failed = sum(result.has_failed for result in results)
    generated = sum(result.stats.generated_tokens for result in results)
    return (
        "all",
        "",
        *_counts(results),
        "",
        f"{elapsed_s:.2f} s",
        _rate(generated, elapsed_s),
        f"{n_failed} failed" if n_failed else "",
    )


def _counts(results: Sequence[RoundResult]) -> list[str]:
    names = ("prompt_tokens", "evaluated_tokens", "reused_tokens", "generated_tokens")
    return [str(sum(getattr(result.stats, name) for result in results)) for name in names]


def _rate(n: int, seconds: float) -> str:
    return f"{n / seconds:.1f}" if seconds > 0 else "0.0"
