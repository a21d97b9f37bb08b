"""Gemma's calls have arguments by the schema of their tool, in a syntax that is not JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from replies import calls, read
from tool_grammars import FORMATS, tool
from vocab_files import spm, write

from ggml_engine.chat.replies import ReplyMessage
from ggml_engine.errors import InputError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.sampler import Sampler, SamplerConfig
from ggml_engine.ggml.vocab import Vocabulary

Q = '<|"|>'
STRING, INTEGER = {"type": "string"}, {"type": "integer"}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path: Path = tmp_path_factory.mktemp("v") / "v.gguf"
    with GGUFFile.open(write(path, spm(add_space=False))) as file:
        return Vocabulary.load(file)


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


# a schema, what it allows (with the JSON that is read), and what it does not
CASES: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (
        {**object_of(a=STRING, b=INTEGER, c={"type": "boolean"}), "required": ["b"]},
        {
            f"{{a:{Q}x{Q},b:1,c:true}}": {"a": "x", "b": 1, "c": True},
            "{b:-20}": {"b": -20},
            "{b:1,c:false}": {"b": 1, "c": False},
            f"{{a:{Q}a {{<|}}{Q},b:0}}": {"a": "a {<|}", "b": 0},
        },
        [
            "{}",
            "{b:1.5}",
            "{b:1,}",
            "{,b:1}",
            "{c:true,b:1}",
            f"{{b:{Q}1{Q}}}",
            "{b:1,d:2}",
            f"{{a:{Q}x{Q}}}",
            "{b:01}",
        ],
    ),
    (
        object_of(a=INTEGER, b=INTEGER, c=INTEGER),
        {"{}": {}, "{a:1,c:2}": {"a": 1, "c": 2}, "{b:1}": {"b": 1}, "{a:1,b:1,c:1}": {"a": 1, "b": 1, "c": 1}},
        ["{a:1b:1}", "{a:1,,c:1}", "{c:1,}"],
    ),
    (
        {**object_of(unit={"enum": ["C", "F", 3, None]}, same={"const": [1, "x"]}), "required": ["unit"]},
        {f"{{unit:{Q}C{Q}}}": {"unit": "C"}, f"{{unit:null,same:[1,{Q}x{Q}]}}": {"unit": None, "same": [1, "x"]}},
        [f"{{unit:{Q}K{Q}}}", "{unit:C}", "{unit:4}"],
    ),
    (
        {**object_of(at={**object_of(x={"type": "number"}), "required": ["x"]}), "required": ["at"]},
        {"{at:{x:-1.25}}": {"at": {"x": -1.25}}},
        ["{at:{}}", "{at:1}", f"{{at:{{x:{Q}1{Q}}}}}"],
    ),
    (
        object_of(few={"type": "array", "items": STRING, "minItems": 1, "maxItems": 2}, any={"type": "array"}),
        {
            f"{{few:[{Q}a{Q},{Q}b{Q}]}}": {"few": ["a", "b"]},
            f"{{any:[1,{Q}a{Q},[],{{k:null}}]}}": {"any": [1, "a", [], {"k": None}]},
            "{any:[]}": {"any": []},
        },
        ["{few:[]}", "{few:[1]}", f"{{few:[{Q}a{Q},{Q}a{Q},{Q}a{Q}]}}", f"{{few:[{Q}a{Q},]}}"],
    ),
    (
        object_of(
            p={"type": "array", "prefixItems": [STRING, INTEGER]}, u={"anyOf": [STRING, {"type": ["integer", "null"]}]}
        ),
        {f"{{p:[{Q}a{Q},2]}}": {"p": ["a", 2]}, "{u:null}": {"u": None}, f"{{u:{Q}{Q}}}": {"u": ""}},
        ["{p:[2]}", "{u:true}", "{u:1.5}"],
    ),
    (
        {
            **object_of(tree={"$ref": "#/$defs/node"}),
            "$defs": {"node": object_of(n=INTEGER, below={"type": "array", "items": {"$ref": "#/$defs/node"}})},
        },
        {"{tree:{n:1,below:[{n:2},{}]}}": {"tree": {"n": 1, "below": [{"n": 2}, {}]}}},
        ["{tree:{n:1,below:[3]}}"],
    ),
    (
        object_of(short={"type": "string", "minLength": 2, "maxLength": 3}, free={"type": "object"}),
        {f"{{short:{Q}ab{Q}}}": {"short": "ab"}, "{free:{a:1,b-c:[true]}}": {"free": {"a": 1, "b-c": [True]}}},
        [f"{{short:{Q}a{Q}}}", f"{{short:{Q}abcd{Q}}}", "{free:1}"],
    ),
    (
        {**object_of(a=INTEGER), "additionalProperties": {"type": "boolean"}},
        {"{a:1,x:true,y:false}": {"a": 1, "x": True, "y": False}, "{x:true}": {"x": True}},
        ["{x:1}"],
    ),
    (
        object_of(**{"two words": INTEGER}),
        {f"{{{Q}two words{Q}:1}}": {"two words": 1}},
        ["{two words:1}"],
    ),
]


def allows(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    sampler = Sampler(vocabulary, SamplerConfig(grammar=grammar))
    try:
        for byte in text.encode():
            sampler.accept(3 + byte)
        sampler.accept(2)
    except InputError:
        return False
    return True


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=range(len(CASES)))
def test_arguments_follow_the_schema_in_gemmas_syntax(
    vocabulary: Vocabulary, schema: dict[str, Any], good: dict[str, Any], bad: list[str]
) -> None:
    grammar = FORMATS["gemma4"].grammar(tool(schema))
    for text, meant in good.items():
        whole = f"<|tool_call>call:f{text}<tool_call|>"
        assert allows(vocabulary, grammar, whole), text
        made = ReplyMessage.of(read(lambda: FORMATS["gemma4"].parser(tool(schema)), [whole]))
        assert [json.loads(arguments) for _, arguments in calls(made)] == [meant]
    for text in bad:
        assert not allows(vocabulary, grammar, f"<|tool_call>call:f{text}<tool_call|>"), text


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (object_of(a={"type": "string", "pattern": "^a+$"}), "tool f: 'pattern' cannot be obeyed"),
        (object_of(a={"type": "string", "format": "date"}), "tool f: 'format' cannot be obeyed"),
        (object_of(a={"type": "integer", "minimum": 3}), "tool f: .*'minimum' cannot be obeyed"),
    ],
)
def test_what_the_syntax_cannot_say_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FORMATS["gemma4"].grammar(tool(schema))


def test_a_constant_with_the_mark_of_texts_is_refused_where_it_is_one() -> None:
    schema = object_of(a={"const": "<escape>"})
    FORMATS["gemma4"].grammar(tool(schema))
    with pytest.raises(InputError, match="tool f: a text with <escape>"):
        FORMATS["functiongemma"].grammar(tool(schema))
