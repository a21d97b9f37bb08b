"""`Tool`: a function that the model may call, checked once, from the form in which OpenAI's API has it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ggml_engine.errors import InputError

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function: its name, what it is for, and the JSON schema of its arguments, which are one object.

    Without `parameters` it takes none. The name has 1 to 128 letters, digits, `_`, `.` and `-`.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or _NAME.fullmatch(self.name) is None:
            raise InputError(f"a tool's name has 1 to 128 letters, digits, '_', '.' and '-', one is {self.name!r:.60}")
        if not isinstance(self.description, str):
            raise InputError(f"tool {self.name}: description must be a text, not {type(self.description).__name__}")
        if not isinstance(self.parameters, Mapping):
            raise InputError(f"tool {self.name}: parameters must be a JSON schema, not {self.parameters!r:.60}")
        if self.parameters.get("type", "object") != "object":
            raise InputError(f"tool {self.name}: parameters must be the schema of an object")

    @classmethod
    def from_mapping(cls, tool: Mapping[str, Any]) -> Tool:
        """A tool as `{"type": "function", "function": {"name", "description", "parameters"}}`."""
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise InputError(f"a tool is of the type 'function' and has a function, one is {dict(tool)!r:.80}")
        return cls(function.get("name", ""), function.get("description") or "", function.get("parameters") or {})

    def as_mapping(self) -> dict[str, Any]:
        """The tool as chat templates want it."""
        parameters = dict(self.parameters) or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def read_tools(tools: Sequence[Tool | Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """The tools, checked. Raises InputError for one that is none, for two of one name, and for more than 128."""
    if tools is None:
        return ()
    if not isinstance(tools, (list, tuple)):
        raise InputError(f"tools must be a list, not {type(tools).__name__}")
    if len(tools) > MAX_TOOLS:
        raise InputError(f"at most {MAX_TOOLS} tools are possible, {len(tools)} were given")
    read: dict[str, Tool] = {}
    for tool in tools:
        if not isinstance(tool, (Tool, Mapping)):
            raise InputError(f"a tool must be an object, one is {tool!r:.60}")
        made = tool if isinstance(tool, Tool) else Tool.from_mapping(tool)
        if made.name in read:
            raise InputError(f"two tools have the name {made.name!r}")
        read[made.name] = made
    return tuple(read.values())
