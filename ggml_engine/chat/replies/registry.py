"""Which format a model has: `detect_format`, by its template, and `FORMATS`, by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from .format import ToolFormat
from .formats import GenericFormat, HermesFormat, Qwen3CoderFormat

FORMATS: Final[dict[str, type[ToolFormat]]] = {
    made.name: made for made in (HermesFormat, Qwen3CoderFormat, GenericFormat)
}


def detect_format(template_source: str | None, special_tokens: Collection[str] = ()) -> ToolFormat:
    """The format of a chat template, by the markup that it writes; `generic` for one that has no place for tools.

    `special_tokens` are the texts of the vocabulary's control tokens, which tell where there is no template.
    """
    source = template_source or "\n".join(special_tokens)
    knows_developer = "developer" in source
    if "<function=" in source and "<parameter=" in source:
        return Qwen3CoderFormat(knows_developer=knows_developer)
    if "<tool_call>" in source:
        return HermesFormat(knows_developer=knows_developer)
    return GenericFormat(knows_developer=knows_developer)
