"""What the model may call: tools, checked, and the grammars that hold a model to calling them. Knows no format."""

from __future__ import annotations

from .choice import ToolChoice, read_tool_choice
from .grammar import Grammar
from .tool import Tool, read_tools

__all__ = ["Grammar", "Tool", "ToolChoice", "read_tool_choice", "read_tools"]
