"""`context_management` of Anthropic's clients: which thinking of earlier turns a prompt still has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from ggml_engine.server.jobs import Message
from ggml_engine.server.validation import Many, RequestModel, unsupported

KEPT_TURNS = 1  # where an edit does not say


class ThinkingTurns(RequestModel):
    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class AllThinking(RequestModel):
    type: Literal["all"]


class ClearThinking(RequestModel):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | Annotated[ThinkingTurns | AllThinking, Field(discriminator="type")] | None = None

    @property
    def n_turns(self) -> int | None:
        """How many turns keep their thinking, None for all of them."""
        if self.keep is None:
            return KEPT_TURNS
        return self.keep.value if isinstance(self.keep, ThinkingTurns) else None


class OtherEdit(RequestModel):
    """An edit that would cut or rewrite a prompt by its length."""

    model_config = ConfigDict(extra="allow")

    type: Literal["clear_tool_uses_20250919", "compact_20260112"]

    @model_validator(mode="after")
    def _refuse(self) -> OtherEdit:
        raise unsupported(f"of type {self.type!r} is not supported by this server: it shortens no prompt")


class ContextManagement(RequestModel):
    edits: Many[Annotated[ClearThinking | OtherEdit, Field(discriminator="type")]] | None = None

    def applied(self, messages: list[Message]) -> list[Message]:
        """The messages that the model is shown."""
        for edit in self.edits or ():
            if isinstance(edit, ClearThinking) and edit.n_turns is not None:
                messages = without_old_thinking(messages, edit.n_turns)
        return messages


def without_old_thinking(messages: list[Message], n_turns: int) -> list[Message]:
    """Messages with the thinking of the last `n_turns` turns alone. A turn lasts until the user speaks again."""
    turns: list[int] = []
    turn = 0
    for message in messages:
        turn += message["role"] == "user"
        turns.append(turn)
    answered = sorted({turn for message, turn in zip(messages, turns, strict=True) if message["role"] == "assistant"})
    kept = set(answered[-n_turns:])
    return [
        message if turn in kept else {name: value for name, value in message.items() if name != "reasoning_content"}
        for message, turn in zip(messages, turns, strict=True)
    ]
