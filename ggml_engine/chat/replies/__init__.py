"""Tool calls and reasoning as text: from what a model writes to parts, and from tools and results to what it reads.

`detect_format` says which format a template has; the format makes a `ReplyParser` for each reply, and the grammar that
holds a model to calling a tool. Knows no engine and no HTTP.
"""

from __future__ import annotations

from .format import ToolFormat
from .messages import prepare_messages
from .parser import ReplyParser
from .parts import (
    ContentPart,
    ReasoningPart,
    ReplyMessage,
    ReplyPart,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from .registry import FORMATS, detect_format

__all__ = [
    "FORMATS",
    "ContentPart",
    "ReasoningPart",
    "ReplyMessage",
    "ReplyParser",
    "ReplyPart",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
    "ToolFormat",
    "detect_format",
    "prepare_messages",
]
