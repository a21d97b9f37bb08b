"""Hermes' markup, which Qwen, SmolLM and many others share: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

Also Qwen3-Coder's: `<tool_call><function=NAME><parameter=NAME>value</parameter>...</function></tool_call>`, whose
values are text, and JSON where the tool's schema has another type than a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from ggml_engine.chat.tools import Grammar, Tool

from .json_scan import JsonScanner
from .parser import ReplyParser
from .reader import MalformedError, Marks, Reading

CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
FUNCTION: Final = "<function="
_VALUE_END: Final = Marks("\n</parameter>", "</parameter>")
_VALUE_CLOSED: Final = "\n</parameter>\n"
_NAME: Final = re.compile(r"[^<>\s]+")
_MAX_NAME: Final = 256
_KEY: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MAX_KEYS: Final = 16  # all of them are optional: libllama walks all choices of what comes next


class HermesParser(ReplyParser):
    """Content and calls in any order."""

    begins = Marks(CALL_BEGIN)

    def body(self) -> Reading[None]:
        """Calls begin with a mark, anywhere."""
        while (mark := (yield from self.pass_text(self.begins, self.content))) is not None:
            yield from self.attempt(self._read(mark), mark)

    def _read(self, mark: str) -> Reading[None]:
        if mark == CALL_BEGIN:
            yield from self.skip_space()
        yield from self._read_inside(mark)
        yield from self.skip_space()
        yield from self.take(CALL_END)

    def _read_inside(self, mark: str) -> Reading[None]:  # noqa: ARG002 - for subclasses with several marks
        yield from self.expect("{")
        yield from self.read_call()


class Qwen3CoderParser(HermesParser):
    """Reads Hermes' markup as well.

    `schemas` has the JSON schemas of the tools' parameters by name, for the types of values.
    """

    begins = Marks(CALL_BEGIN, FUNCTION)

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
        self._schemas = schemas
        super().__init__(schemas, **options)

    def _read_inside(self, mark: str) -> Reading[None]:
        if mark == CALL_BEGIN and (yield from self.expect("{", FUNCTION)) == "{":
            yield from self.read_call()
        else:
            yield from self._read_function()

    def _read_function(self) -> Reading[None]:
        name = yield from self.take_run(_NAME, _MAX_NAME)
        yield from self.expect(">")
        self.begin_call(name)
        properties = self._schemas.get(name, {}).get("properties", {})
        seen: set[str] = set()
        self.put_arguments("{")
        while True:
            yield from self.skip_space()
            if (yield from self.expect("<parameter=", "</function>")) == "</function>":
                break
            key = yield from self.take_run(_NAME, _MAX_NAME)
            yield from self.expect(">")
            if key in seen:
                raise MalformedError
            self.put_arguments(f"{', ' if seen else ''}{json.dumps(key, ensure_ascii=False)}: ")
            seen.add(key)
            yield from self.take("\n")
            yield from self._read_value(properties.get(key, {}))
        self.put_arguments("}")
        self.end_call()

    def _read_value(self, schema: Any) -> Reading[None]:
        if _is_text(schema):
            self.put_arguments('"')
            end = yield from self.pass_text(_VALUE_END, lambda text: self.put_arguments(_escaped(text)))
            if end is None:
                raise MalformedError
            self.put_arguments('"')
            return
        pieces: list[str] = []
        if (yield from self.pass_text(_VALUE_END, pieces.append)) is None:
            raise MalformedError
        self.put_arguments(_as_json("".join(pieces)))


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """The value as it is where it is JSON, with Python's names for constants, too; else a JSON string."""
    text = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    scanner = JsonScanner()
    out, end = scanner.feed(text, 0)
    out += scanner.finish()
    is_json = scanner.is_done and not text[end:].strip(" \t\n\r")
    return out.strip() if is_json else f'"{_escaped(text)}"'


def coder_rule(grammar: Grammar, tool: Tool, name: str) -> str:
    """A rule for what follows `<function=` of a call; InputError for a schema that cannot be obeyed."""
    if tool.parameters:
        grammar.arguments(tool, f"{name}-json")  # refuses what cannot be obeyed, as for the other formats
    required = tool.parameters.get("required", ())
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    values = []
    for index, (key, schema) in enumerate(tool.parameters.get("properties", {}).items()):
        begin = grammar.literal(f"<parameter={key}>\n")
        value = f"{name}-{index}"
        if _is_text(schema) and set(schema) <= {"type", "description", "title", "default"}:
            body = f'{grammar.until(value, "</parameter>")} "\\n"'
        else:
            # an enum of texts stands without quotes, as any text does
            expression = _bare(grammar, schema) or grammar.schema({**schema, **definitions}, value)
            body = f"{expression} {grammar.literal(_VALUE_CLOSED)}"
        values.append(f"{begin} {body}" if key in required else f"({begin} {body})?")
    begin, end = f"{tool.name}>\n", f"</function>\n{CALL_END}"
    return grammar.add(name, " ".join([grammar.literal(begin), *values, grammar.literal(end)]))


def coder_keys(tool: Tool) -> list[str]:
    """The names of parameters that can be written in the markup, whatever else is wrong with their schema."""
    properties = tool.parameters.get("properties")
    names = properties if isinstance(properties, Mapping) else ()
    return [key for key in names if isinstance(key, str) and _KEY.fullmatch(key)][:_MAX_KEYS]


def _bare(grammar: Grammar, schema: Any) -> str | None:
    """The alternatives of an enum of texts."""
    texts = schema.get("enum") if isinstance(schema, Mapping) and schema.get("type") == "string" else None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        return None
    return f"({' | '.join(grammar.literal(text) for text in texts)})"
