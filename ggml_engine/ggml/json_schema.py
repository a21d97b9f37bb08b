"""JSON schemas to GBNF grammars, through llama-cpp-python's converter, and closed where that one is open.

The converter ignores what it does not know (`minimum`, most formats), names rules after properties so that two may
meet, and does not bound its work. Here only the keywords that it obeys are let through, each where it obeys them;
whatever else, an InputError names. An absent `additionalProperties` means none, as in llama.cpp.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from ggml_engine.errors import InputError
from ggml_engine.ggml.library import restore_log

MAX_SCHEMA_BYTES: Final = 65_536
MAX_DEPTH: Final = 32
MAX_NODES: Final = 2_000
MAX_PROPERTIES: Final = 128
MAX_LENGTH: Final = 1_000  # of a string or an array, when a bound is given
MAX_SPAN: Final = 100  # between the bounds; the converter nests as many brackets

_NOTES: Final = frozenset(
    ("title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly")
)
_DEFINITIONS: Final = ("$defs", "definitions")
_FORMATS: Final = frozenset(("date", "time", "date-time", "uuid", "uuid1", "uuid2", "uuid3", "uuid4", "uuid5"))
_SIMPLE: Final = frozenset(("string", "number", "integer", "boolean", "null"))
_TYPES: Final = _SIMPLE | {"object", "array"}
_UNSAFE: Final = re.compile(r'[\x00-\x1f"\\\ud800-\udfff\U00010000-\U0010ffff]')
_REFERENCE: Final = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")


def schema_to_grammar(schema: str | dict[str, Any]) -> str:
    """The GBNF grammar of the JSON texts that a schema allows; InputError for one that cannot be obeyed exactly."""
    try:
        checked = _Checker(_parsed(schema)).checked()
        from llama_cpp.llama_grammar import json_schema_to_gbnf  # noqa: PLC0415  # a tenth of a second, and it logs

        return str(json_schema_to_gbnf(json.dumps(checked)))
    except (AssertionError, KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"the JSON schema cannot be made a grammar: {error or type(error).__name__}") from error
    finally:
        restore_log()


def _parsed(schema: str | dict[str, Any]) -> dict[str, Any]:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        if len(text) > MAX_SCHEMA_BYTES:
            raise InputError(f"the JSON schema has {len(text)} characters, the limit is {MAX_SCHEMA_BYTES}")
        parsed = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the JSON schema is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InputError(f"a JSON schema must be an object, not {type(parsed).__name__}")
    return parsed


class _Checker:
    """Copies a schema keyword by keyword; what it does not know how to copy, it refuses."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema
        self.n_nodes = 0
        self.names: dict[tuple[str, str], str] = {}
        self.definitions: dict[str, Any] = {}

    def checked(self) -> dict[str, Any]:
        result = self.copy({k: v for k, v in self.schema.items() if k not in _DEFINITIONS}, "the schema", 0)
        for keyword in _DEFINITIONS:
            if not isinstance(self.schema.get(keyword, {}), dict):
                raise InputError(f"{keyword} of the JSON schema must be an object")
        done: set[tuple[str, str]] = set()
        while todo := [key for key in self.names if key not in done]:
            for keyword, name in todo:
                done.add((keyword, name))
                source = self.schema.get(keyword, {})
                if name not in source:
                    raise InputError(f"the JSON schema refers to #/{keyword}/{name}, which it does not define")
                self.definitions[self.names[keyword, name]] = self.copy(source[name], f"#/{keyword}/{name}", 1)
        return {**result, "$defs": self.definitions} if self.definitions else result

    def copy(self, schema: Any, where: str, depth: int) -> dict[str, Any]:
        self.n_nodes += 1
        if depth > MAX_DEPTH or self.n_nodes > MAX_NODES:
            raise InputError(f"the JSON schema is over {MAX_DEPTH} deep or has over {MAX_NODES} parts")
        if not isinstance(schema, dict):
            raise InputError(f"{where} must be an object, not {json.dumps(schema)[:40]}")
        schema = {key: value for key, value in schema.items() if key not in _NOTES}
        kind = schema.get("type")
        result: dict[str, Any] = schema
        if "$ref" in schema:
            result = self.reference(schema, where)
        elif "oneOf" in schema or "anyOf" in schema:
            result = self.union(schema, where, depth)
        elif "const" in schema or "enum" in schema:
            result = self.constant(schema, where)
        elif kind == "object" or (kind is None and "properties" in schema):
            result = self.object(schema, where, depth)
        elif kind == "array" or (kind is None and ("items" in schema or "prefixItems" in schema)):
            result = self.array(schema, where, depth)
        elif kind == "string":
            result = self.string(schema, where)
        elif not schema:
            result = {"type": sorted(_TYPES)}
        else:
            self.check_type(schema, where)
        return result

    def check_type(self, schema: dict[str, Any], where: str) -> None:
        _only(schema, where, "type")
        kind = schema.get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        if not kinds or not all(isinstance(k, str) and k in _TYPES for k in kinds):
            raise InputError(f"{where}: type {kind!r} is none of {', '.join(sorted(_TYPES))}, nor a list of them")

    def reference(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        _only(schema, where, "$ref")
        match = _REFERENCE.fullmatch(schema["$ref"]) if isinstance(schema["$ref"], str) else None
        if match is None:
            raise InputError(f"{where}: $ref {schema['$ref']!r} is not of the form #/$defs/NAME")
        # rules are named after the last part of a reference and after properties: make it a name that none has
        name = self.names.setdefault((match[1], match[2]), f"reference--{len(self.names)}--")
        return {"$ref": f"#/$defs/{name}"}

    def union(self, schema: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        keyword = "oneOf" if "oneOf" in schema else "anyOf"
        _only(schema, where, keyword)
        options = schema[keyword]
        if not isinstance(options, list) or not options:
            raise InputError(f"{where}: {keyword} must be a list of schemas")
        return {keyword: [self.copy(o, f"{where}, {keyword} {i}", depth + 1) for i, o in enumerate(options)]}

    def constant(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        _only(schema, where, "const", "enum", "type")
        if ("const" in schema) == ("enum" in schema):
            raise InputError(f"{where}: const and enum exclude each other")
        if "const" in schema:
            _check_literal(schema["const"], where)
            return {"const": schema["const"]}
        if not isinstance(schema["enum"], list) or not schema["enum"]:
            raise InputError(f"{where}: enum must be a list of values")
        self.n_nodes += len(schema["enum"])
        _check_literal(schema["enum"], where)
        return {"enum": schema["enum"]}

    def object(self, schema: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        _only(schema, where, "type", "properties", "required", "additionalProperties")
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        extra = schema.get("additionalProperties", not properties)
        if not isinstance(properties, dict) or len(properties) > MAX_PROPERTIES:
            raise InputError(f"{where}: properties must be an object of at most {MAX_PROPERTIES}")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise InputError(f"{where}: required must be a list of names")
        if missing := [name for name in required if name not in properties]:
            raise InputError(f"{where}: {missing[0]!r} is required but not among the properties")
        _check_literal(list(properties), where)
        result: dict[str, Any] = {"type": "object"}
        if properties:
            result["properties"] = {
                name: self.copy(value, f"{where}, property {name!r}", depth + 1) for name, value in properties.items()
            }
            result["required"] = required
        if not isinstance(extra, bool):
            extra = self.copy(extra, f"{where}, additionalProperties", depth + 1)
        if extra is not True or properties:
            result["additionalProperties"] = extra if extra is not True else {"type": sorted(_TYPES)}
        return result

    def array(self, schema: dict[str, Any], where: str, depth: int) -> dict[str, Any]:
        if "prefixItems" in schema:
            _only(schema, where, "type", "prefixItems")
            items = schema["prefixItems"]
            if not isinstance(items, list) or not items:
                raise InputError(f"{where}: prefixItems must be a list of schemas")
            copies = [self.copy(item, f"{where}, item {i}", depth + 1) for i, item in enumerate(items)]
            return {"type": "array", "prefixItems": copies}
        _only(schema, where, "type", "items", "minItems", "maxItems")
        bounds = _bounds(schema, where, "minItems", "maxItems")
        if "items" not in schema and not bounds:
            return {"type": "array"}
        return {"type": "array", "items": self.copy(schema.get("items", {}), f"{where}, items", depth + 1), **bounds}

    def string(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        if "pattern" in schema:
            _only(schema, where, "type", "pattern")
            pattern = schema["pattern"]
            if not isinstance(pattern, str) or not (pattern.startswith("^") and pattern.endswith("$")):
                raise InputError(f"{where}: pattern must be a text from ^ to $")
            return {"type": "string", "pattern": f"^({pattern[1:-1]})$"}  # a bare | would escape the quotes
        if "format" in schema:
            _only(schema, where, "type", "format")
            if schema["format"] not in _FORMATS:
                raise InputError(f"{where}: format {schema['format']!r} is none of {', '.join(sorted(_FORMATS))}")
            return schema
        _only(schema, where, "type", "minLength", "maxLength")
        return {"type": "string", **_bounds(schema, where, "minLength", "maxLength")}


def _only(schema: dict[str, Any], where: str, *allowed: str) -> None:
    if unknown := [key for key in schema if key not in allowed]:
        raise InputError(f"{where}: {unknown[0]!r} cannot be obeyed here (can be: {', '.join(allowed)})")


def _check_literal(value: Any, where: str) -> None:
    """The converter writes these into the grammar without the escapes that they would need."""
    if isinstance(value, str) and _UNSAFE.search(value):
        raise InputError(f"{where}: {value[:40]!r} has a quote, a backslash, a control character or one above U+FFFF")
    for part in value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else ():
        _check_literal(part, where)


def _bounds(schema: dict[str, Any], where: str, least: str, most: str) -> dict[str, int]:
    bounds = {key: schema[key] for key in (least, most) if key in schema}
    for key, value in bounds.items():
        if type(value) is not int or not 0 <= value <= MAX_LENGTH:
            raise InputError(f"{where}: {key} must be an integer from 0 to {MAX_LENGTH}, not {value!r}")
    if most in bounds and not 0 <= bounds[most] - bounds.get(least, 0) <= MAX_SPAN:
        raise InputError(f"{where}: {most} must be {least} to {least} + {MAX_SPAN}, not {bounds[most]}")
    return bounds
