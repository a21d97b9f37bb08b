"""JSON schemas become grammars that hold the output to them, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vocab_files import in_child, spm, write

from ggml_engine.errors import InputError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.sampler import Sampler, SamplerConfig
from ggml_engine.ggml.vocab import Vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    with GGUFFile.open(write(tmp_path_factory.mktemp("v") / "v.gguf", spm(add_space=False))) as file:
        return Vocabulary.load(file)


def allows(vocabulary: Vocabulary, schema: Any, text: str) -> bool:
    sampler = Sampler(vocabulary, SamplerConfig(json_schema=schema))
    try:
        for token in vocabulary.encode(text, add_special=False, parse_special=False).tolist():
            sampler.accept(token)
        sampler.accept(2)
    except InputError:
        return False
    return True


PERSON = {
    "type": "object",
    "title": "A person",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "of": {"$ref": "#/$defs/name"},
    },
    "required": ["name"],
    "$defs": {"name": {"type": "array", "items": {"$ref": "#/$defs/name"}, "maxItems": 2}},
}
CASES: list[tuple[Any, list[str], list[str]]] = [
    (PERSON, ['{"name":"é"}', '{"name": "a", "age": 3, "of": [[], [[]]]}'], ["{}", '{"name":3}', '{"name":"123456789"}', "[]"]),
    ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "a", "2"]),
    ({"const": {"a": [1, "x"]}}, ['{"a": [1, "x"]}'], ['{"a": [1, "y"]}']),
    ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, ["true", "null"], ["1"]),
    ({"type": ["string", "null"]}, ['"x"', "null"], ["1"]),
    ({"type": "string", "pattern": "^ab|c$"}, ['"ab"', '"c"'], ['"ab', '"abc"', 'c"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"x"']),
    ({"type": "array", "prefixItems": [{"type": "null"}, {"type": "null"}]}, ["[null, null]"], ["[null]", "[]"]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2}, ["[null, null, null]"], ["[null]"]),
    ({"type": "object", "additionalProperties": {"type": "null"}}, ['{"x": null}'], ['{"x": 1}']),
    ({"properties": {"name": {"const": 1}, "x": {"$ref": "#/$defs/name"}}, "$defs": {"name": {"const": 2}}},
     ['{"name": 1, "x": 2}'], ['{"name": 2}', '{"x": 1}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=range(len(CASES)))
def test_only_what_the_schema_allows_is_accepted(
    vocabulary: Vocabulary, schema: Any, good: list[str], bad: list[str]
) -> None:
    for form in (schema, json.dumps(schema)):
        assert [text for text in good if not allows(vocabulary, form, text)] == []
        assert [text for text in bad if allows(vocabulary, form, text)] == []


REFUSED: list[tuple[Any, str]] = [
    ({"type": "integer", "minimum": 3}, "'minimum' cannot be obeyed"),
    ({"type": "string", "format": "email"}, "email"),
    ({"type": "string", "pattern": "a"}, "pattern"),
    ({"type": "string", "pattern": "^\\d$"}, "grammar"),
    ({"type": "string", "pattern": "^a$", "maxLength": 3}, "maxLength"),
    ({"type": "string", "maxLength": 10**6}, "maxLength"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "maxLength"),
    ({"type": "string", "minLength": True}, "minLength"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "properties": {"a": True}}, "must be an object"),
    ({"type": "object", "required": ["a"]}, "required"),
    ({"allOf": [{"type": "string"}]}, "allOf"),
    ({"not": {"type": "string"}}, "not"),
    ({"type": "strin"}, "strin"),
    ({"type": []}, "type"),
    ({"enum": []}, "enum"),
    ({"enum": ['a"b']}, "quote"),
    ({"const": "a\\b"}, "backslash"),
    ({"properties": {"a\nb": {}}}, "control"),
    ({"anyOf": []}, "anyOf"),
    ({"$ref": "https://example.com/x"}, r"\$ref"),
    ({"$ref": "#"}, r"\$ref"),
    ({"$ref": "#/$defs/nope"}, "does not define"),
    ({"properties": {f"p{i}": {} for i in range(129)}}, "128"),
    ({"enum": list(range(3000))}, "ways"),
    ("[]", "must be an object"),
    ("{", "no JSON"),
    ("[" * 100_000, "limit"),
    ("[" * 5_000, "JSON"),
    ('{"const": ' + "[" * 900 + "]" * 900 + "}", "JSON|deep"),
    ({"a": float("nan")}, "JSON"),
    ({"a": object()}, "JSON"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_obeyed_is_refused(vocabulary: Vocabulary, schema: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Sampler(vocabulary, SamplerConfig(json_schema=schema))


def test_a_schema_that_contains_itself_deeply_is_refused(vocabulary: Vocabulary) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InputError, match="deep"):
        Sampler(vocabulary, SamplerConfig(json_schema=schema))


def test_references_in_a_circle_are_refused(vocabulary: Vocabulary) -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    with pytest.raises(InputError):
        Sampler(vocabulary, SamplerConfig(json_schema=schema))


def test_the_native_log_stays_ours(tmp_path: Path) -> None:
    code = """
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stdout)
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.sampler import Sampler, SamplerConfig
from ggml_engine.ggml.vocab import Vocabulary
assert "llama_cpp" not in sys.modules
vocabulary = Vocabulary.load(GGUFFile.open(sys.argv[1]))
Sampler(vocabulary, SamplerConfig(json_schema="{}"))
assert "llama_cpp" in sys.modules
Vocabulary.load(GGUFFile.open(sys.argv[2]))
"""
    good = write(tmp_path / "a.gguf", spm())
    noisy = write(tmp_path / "b.gguf", spm(tokens=[*spm()["tokens"], b"<|channel|>"], types=None, scores=None))
    child = in_child(code, good, noisy)
    assert child.returncode == 0, child.stderr
    assert "ggml_engine.native: load: setting token '<|channel|>'" in child.stdout
    assert "<|channel|>" not in child.stderr
