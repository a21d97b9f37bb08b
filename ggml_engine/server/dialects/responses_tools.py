"""The tools of /v1/responses: functions, and functions within a namespace.

A model knows a namespace's function by both names with a dot between; clients have two fields for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from ggml_engine.server.dialects.parts import MAX_TOOLS, FunctionFields, FunctionName
from ggml_engine.server.validation import Disabled, Many, RequestModel, only

Spelled = dict[str, dict[str, str]]  # what stands in a call's item for the name by which the model knows a function


class FunctionTool(FunctionFields):
    type: Annotated[Any, AfterValidator(only("function", "namespace"))]
    defer_loading: Disabled = None


class NamespaceTool(RequestModel):
    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[Many[FunctionTool], Field(max_length=MAX_TOOLS)]


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "namespace" if kind == "namespace" else "function"


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[NamespaceTool, Tag("namespace")], Discriminator(_kind)
]


def joined(namespace: str | None, name: str) -> str:
    """The name by which the model knows a function."""
    return name if namespace is None else f"{namespace}.{name}"


def functions_of(tools: Sequence[FunctionTool | NamespaceTool]) -> list[dict[str, Any]]:
    """The functions as chat templates know them."""
    found = []
    for tool in tools:
        if isinstance(tool, FunctionTool):
            found.append(tool.tool())
            continue
        for inner in tool.tools:
            known = inner.tool()
            known["function"]["name"] = joined(tool.name, inner.name)
            found.append(known)
    return found


def spelled(tools: Sequence[FunctionTool | NamespaceTool]) -> Spelled:
    """The fields of a call's item by the name by which the model knows a namespace's function."""
    return {
        joined(tool.name, inner.name): {"name": inner.name, "namespace": tool.name}
        for tool in tools
        if isinstance(tool, NamespaceTool)
        for inner in tool.tools
    }


def echoed_tool(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    """As a response repeats it."""
    if isinstance(tool, NamespaceTool):
        inner = [echoed_tool(each) for each in tool.tools]
        return {"type": "namespace", "name": tool.name, "description": tool.description, "tools": inner}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict is not False,
    }
