"""Which format a model has: `detect_format`, by its template, and `FORMATS`, by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from . import gemma, mistral
from .format import ToolFormat
from .formats import (
    GemmaFormat,
    GenericFormat,
    GptOssFormat,
    HermesFormat,
    Llama3Format,
    MarkedGemmaFormat,
    MistralFormat,
    Qwen3CoderFormat,
)

_ALL: Final[tuple[type[ToolFormat], ...]] = (
    *(HermesFormat, Qwen3CoderFormat, Llama3Format, MistralFormat),
    *(GemmaFormat, MarkedGemmaFormat, GptOssFormat, GenericFormat),
)
FORMATS: Final[dict[str, type[ToolFormat]]] = {made.name: made for made in _ALL}
# of GLM and MiniMax, which have Hermes' tag and other markup inside
_OTHERS: Final = ("<arg_key>", "<invoke")


def detect_format(template_source: str | None, special_tokens: Collection[str] = ()) -> ToolFormat:
    """The format of a chat template, by the markup that it writes; `generic` for one that has no place for tools.

    `special_tokens` are the texts of the vocabulary's control tokens, which tell where there is no template.
    """
    source = template_source or "\n".join(special_tokens)
    facts: dict[str, Any] = {"knows_system": "System role not supported" not in source}
    if "developer" in source:
        facts["knows_developer"] = True
    return _found(source, facts) or (GemmaFormat if "<start_of_turn>" in source else GenericFormat)(**facts)


def _found(source: str, facts: dict[str, Any]) -> ToolFormat | None:
    """The format whose markup for calls is in the source."""
    found: ToolFormat | None = None
    if "<|channel|>" in source and "<|message|>" in source:
        found = GptOssFormat(**facts)
    elif marks := [marks for marks in (gemma.GEMMA4, gemma.FUNCTION_GEMMA) if marks.begin in source]:
        thoughts = gemma.THOUGHT if "<|channel>" in source else None
        found = MarkedGemmaFormat(call_marks=marks[0], reasoning=thoughts, **facts)
    elif mistral.TOOL_CALLS in source:
        if "[THINK]" in source:
            facts["reasoning"] = ("[THINK]", "[/THINK]")
        found = MistralFormat(has_args=mistral.ARGS in source, has_ids=mistral.CALL_ID in source, **facts)
    elif "<function=" in source and "<parameter=" in source:
        found = Qwen3CoderFormat(**facts)
    elif "<tool_call>" in source and not any(mark in source for mark in _OTHERS):
        found = HermesFormat(**facts)
    elif (
        "<|start_header_id|>" in source
        and "<function=" not in source
        and ('"parameters"' in source or "<|python_tag|>" in source)
    ):
        found = Llama3Format(**facts)
    return found
