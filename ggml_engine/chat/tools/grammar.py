"""`Grammar`: GBNF put together from markup and from the schemas of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

from ggml_engine.errors import InputError

from .tool import Tool

# what a grammar is made of: texts, classes, special tokens, bounds and comments, in which names are no rules; names
_TOKEN: Final = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|<[^>]*>|\{[^}]*\}|#[^\n]*|([a-zA-Z0-9-]+)', re.DOTALL
)


class Grammar:
    """Rules by name. What a method returns stands for its rule, or is an expression, in other rules."""

    def __init__(self) -> None:
        self._rules: list[str] = []

    def text(self, root: str) -> str:
        """The grammar, which begins with this expression."""
        return "\n".join([f"root ::= {root}", *self._rules]) + "\n"

    @property
    def rules(self) -> str:
        """The rules, without one to begin with."""
        return "\n".join(self._rules) + "\n"

    @staticmethod
    def literal(text: str) -> str:
        """The expression of a text."""
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
        return f'"{escaped}"'

    def add(self, name: str, body: str) -> str:
        """A rule."""
        self._rules.append(f"{name} ::= {body}")
        return name

    def any_of(self, name: str, expressions: Sequence[str]) -> str:
        """A rule for one of the expressions."""
        return self.add(name, " | ".join(expressions))

    def repeated(self, expression: str, separator: str, is_parallel: bool) -> str:
        """The expression once, or more often with the separator between."""
        if not is_parallel:
            return expression
        between = f"{self.literal(separator)} " if separator else ""
        return f"{expression} ({between}{expression})*"

    def repeated_after(self, expression: str, separator: str, mark: str, is_parallel: bool) -> str:
        """As `repeated`, for what stands behind a mark, behind the first one."""
        if not is_parallel:
            return expression
        return f"{expression} ({self.literal(separator + mark)} {expression})*"

    def json_calls(self, tools: Sequence[Tool], begin: Callable[[str], str], end: str = "") -> str:
        """A rule for a call of one of the tools: the expression `begin` gives for its name, arguments, and `end`."""
        calls = [
            f"{begin(tool.name)} {self.arguments(tool, f'tool-{index}')} {end}".rstrip()
            for index, tool in enumerate(tools)
        ]
        return self.any_of("call", calls)

    def arguments(self, tool: Tool, name: str) -> str:
        """A rule for the tool's arguments as JSON; InputError for a schema that cannot be obeyed."""
        if not tool.parameters:
            return self.add(name, '"{}"')
        try:
            return self.schema(dict(tool.parameters), name)
        except InputError as error:
            raise InputError(f"tool {tool.name}: {error}") from error

    def schema(self, schema: dict[str, Any], name: str) -> str:
        """A rule for the JSON that a schema allows."""

        def renamed(match: re.Match[str]) -> str:
            if match[1] is None:
                return match[0]
            return name if match[1] == "root" else f"{name}-{match[1]}"

        self._rules.append(_TOKEN.sub(renamed, _converted(json.dumps(schema))).strip())
        return name

    def until(self, name: str, mark: str) -> str:
        """Rules for any text up to the first `mark`, and the mark."""
        for n_matched in range(len(mark)):
            # a state is how much of the mark stands at the end of the text so far
            nexts: dict[int, str] = {}
            for character in dict.fromkeys(mark):
                state = _n_matched(mark, mark[:n_matched] + character)
                if state:
                    nexts.setdefault(state, "")
                    nexts[state] += character
            options = [
                f"[{_in_class(characters)}]" + ("" if state == len(mark) else f" {name}-{state}")
                for state, characters in nexts.items()
            ]
            others = "".join(nexts.values())
            options.append(f"[^{_in_class(others)}] {name}-0")
            self.add(f"{name}-{n_matched}", " | ".join(options))
        return f"{name}-0"


@lru_cache(maxsize=64)  # the tools of a conversation come with each of its requests
def _converted(schema: str) -> str:
    # libllama's converter, and with it the native libraries: only who asks for a grammar needs them
    from ggml_engine.ggml.json_schema import schema_to_grammar  # noqa: PLC0415

    return schema_to_grammar(schema)


def _n_matched(mark: str, text: str) -> int:
    """How much of the mark's beginning stands at the end of the text."""
    return next(n for n in range(min(len(mark), len(text)), -1, -1) if text.endswith(mark[:n]))


def _in_class(characters: str) -> str:
    escaped = re.sub(r"[\\\]\[^-]", lambda match: f"\\x{ord(match[0]):02x}", characters)
    return escaped.replace("\n", "\\n").replace('"', "\\x22")
