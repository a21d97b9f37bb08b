"""Rules for the arguments of a call in the syntax of Gemma 4 and FunctionGemma, by the JSON schema of the tool.

Objects are `{key:value,key:value}`, texts stand between marks and have no escapes, all else is as in JSON. What the
schema compiler for JSON takes is taken here, except patterns and formats of texts: those are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ggml_engine.chat.tools import Grammar, Tool
from ggml_engine.errors import InputError

from .gemma import CallMarks

_BARE_KEY: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_REFERENCE: Final = re.compile(r"#/(\$defs|definitions)/(.+)")
_INTEGER: Final = '"-"? ("0" | [1-9] [0-9]{0,14})'
_SCALARS: Final = {
    "integer": _INTEGER,
    "number": f'{_INTEGER} ("." [0-9]{{1,15}})?',
    "boolean": '("true" | "false")',
    "null": '"null"',
}


def arguments_rule(grammar: Grammar, tool: Tool, name: str, marks: CallMarks) -> str:
    """A rule for the tool's arguments; InputError for a schema that cannot be obeyed, with the name of the tool."""
    if not tool.parameters:
        return grammar.add(name, '"{}"')
    Grammar().arguments(tool, name)  # refuses what cannot be obeyed, as for the other formats
    try:
        return grammar.add(name, _Values(grammar, name, marks, tool.parameters).expression(tool.parameters))
    except InputError as error:
        raise InputError(f"tool {tool.name}: {error}") from error


class _Values:
    """Expressions for the values that a schema allows, which the compiler for JSON has let through."""

    def __init__(self, grammar: Grammar, name: str, marks: CallMarks, schema: Mapping[str, Any]) -> None:
        self._grammar = grammar
        self._name = name
        self._marks = marks
        self._schema = schema
        self._rules: dict[str, str] = {}  # by what they are for
        self._n_rules = 0

    def expression(self, schema: Mapping[str, Any]) -> str:
        """The expression of the values."""
        kind = schema.get("type")
        if "$ref" in schema:
            found = self._reference(schema["$ref"])
        elif options := schema.get("oneOf") or schema.get("anyOf"):
            found = self._any_of([self.expression(option) for option in options])
        elif "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            found = self._any_of([self._literal(value) for value in values])
        elif isinstance(kind, list):
            found = self._any_of([self.expression({"type": one}) for one in kind])
        elif kind == "object" or (kind is None and "properties" in schema):
            found = self._object(schema)
        elif kind == "array" or "items" in schema or "prefixItems" in schema:
            found = self._array(schema)
        elif kind == "string":
            found = self._text(schema)
        else:
            found = _SCALARS[kind] if kind is not None else self._anything()
        return found

    def _any_of(self, expressions: Sequence[str]) -> str:
        return f"({' | '.join(expressions)})"

    def _new_name(self) -> str:
        self._n_rules += 1
        return f"{self._name}-{self._n_rules}"

    def _reference(self, reference: str) -> str:
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise InputError(f"$ref {reference!r:.80} cannot be obeyed here")
        if reference not in self._rules:
            name = self._rules[reference] = self._new_name()  # before its body, which may refer to it
            self._grammar.add(name, self.expression(self._schema[match[1]][match[2]]))
        return self._rules[reference]

    def _literal(self, value: Any) -> str:
        return self._grammar.literal(self._spelled(value))

    def _spelled(self, value: Any) -> str:
        if isinstance(value, str):
            if self._marks.quote in value:
                raise InputError(f"a text with {self._marks.quote} cannot be written here")
            return f"{self._marks.quote}{value}{self._marks.quote}"
        if isinstance(value, Mapping):
            members = (f"{self._key(key)}:{self._spelled(each)}" for key, each in value.items())
            return "{" + ",".join(members) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(self._spelled, value))}]"
        return json.dumps(value)

    def _key(self, key: str) -> str:
        return key if _BARE_KEY.fullmatch(key) else self._spelled(key)

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties", {})
        extra = schema.get("additionalProperties", not properties)
        members = []
        for key, value in properties.items():
            member = f"{self._grammar.literal(self._key(key) + ':')} {self.expression(value)}"
            members.append((self._grammar.add(self._new_name(), member), key in schema.get("required", ())))
        if extra is not False:
            value = self._anything() if extra is True else self.expression(extra)
            free = self._grammar.add(self._new_name(), f"{self._free_key()} {value}")
            members.append((self._grammar.add(self._new_name(), f'{free} ("," {free})*'), False))
        return f'"{{" {self._members(members)} "}}"'

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Those that are required, and any of the others, in their order; rules are shared, so that none is copied."""
        rest = ""  # what may follow with a comma before it
        begin = ""  # the same, as the first
        is_optional = True
        for member, is_required in reversed(members):
            here = f"{member} {rest}".strip()
            if is_required:
                begin, rest, is_optional = here, f'"," {here}', False
            else:
                others = f" | {begin}" if begin else ""
                begin = self._grammar.add(self._new_name(), f"{here}{others}")
                more = f'"," {here}'
                rest = self._grammar.add(self._new_name(), f"{more} | {rest}" if rest else f"({more})?")
        return f"({begin})?" if begin and is_optional else begin

    def _array(self, schema: Mapping[str, Any]) -> str:
        if "prefixItems" in schema:
            items = ' "," '.join(self.expression(item) for item in schema["prefixItems"])
            return f'"[" {items} "]"'
        item = self.expression(schema["items"]) if "items" in schema else self._anything()
        item = self._grammar.add(self._new_name(), item)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        bounds = f"{{{max(least - 1, 0)},{most - 1 if most is not None else ''}}}"
        items = f'{item} ("," {item}){bounds}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _text(self, schema: Mapping[str, Any]) -> str:
        if unknown := [key for key in ("pattern", "format") if key in schema]:
            raise InputError(f"{unknown[0]!r} cannot be obeyed in this model's markup")
        quote = self._grammar.literal(self._marks.quote)
        if "minLength" not in schema and "maxLength" not in schema:
            if "text" not in self._rules:
                rest = self._grammar.until(f"{self._name}-rest", self._marks.quote)
                self._rules["text"] = self._grammar.add(f"{self._name}-text", f"{quote} {rest}")
            return self._rules["text"]
        most = schema.get("maxLength", "")
        return f"{quote} [^{self._marks.quote[0]}]{{{schema.get('minLength', 0)},{most}}} {quote}"

    def _free_key(self) -> str:
        return '[a-zA-Z0-9_] [a-zA-Z0-9_-]{0,63} ":"'

    def _anything(self) -> str:
        if "value" not in self._rules:
            value = self._rules["value"] = f"{self._name}-value"
            member = self._grammar.add(f"{self._name}-member", f"{self._free_key()} {value}")
            options = [self._text({}), *(_SCALARS[kind] for kind in ("number", "boolean", "null"))]
            options += [f'"{{" ({member} ("," {member})*)? "}}"', f'"[" ({value} ("," {value})*)? "]"']
            self._grammar.add(value, " | ".join(options))
        return self._rules["value"]
