"""Grammars leave a model nothing but to call a tool, in markup that the format's parser reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replies import TOOLS, calls, read
from tool_grammars import CALL, CALL_NOW, ENDS, FORMATS, PARIS, followers, tool
from vocab_files import CONTROL, spm, write

from ggml_engine.chat.replies import ReplyMessage, ToolFormat
from ggml_engine.errors import InputError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.sampler import Sampler, SamplerConfig
from ggml_engine.ggml.vocab import StreamDecoder, Vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    parts = spm(add_space=False)
    for text in (b"<tool_call>", b"</tool_call>", b"<think>"):
        parts["tokens"].append(text)
        parts["types"].append(CONTROL)
        parts["scores"].append(0.0)
    with GGUFFile.open(write(tmp_path_factory.mktemp("v") / "v.gguf", parts)) as file:
        return Vocabulary.load(file)


def allows(vocabulary: Vocabulary, grammar: str, text: str, *, parse_special: bool = False) -> bool:
    sampler = Sampler(vocabulary, SamplerConfig(grammar=grammar))
    try:
        for token in vocabulary.encode(text, add_special=False, parse_special=parse_special).tolist():
            sampler.accept(token)
        sampler.accept(2)
    except InputError:
        return False
    return True


# ---- what is let through


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("hermes", [CALL, CALL_NOW, f"<think>a < </thin b</think>\n\n{CALL}"]),
        ("generic", [CALL, CALL_NOW]),
        (
            "qwen3-coder",
            [
                "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n\n</parameters>\n</parameter>\n"
                "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
                "<tool_call>\n<function=now>\n</function>\n</tool_call>",
            ],
        ),
        ("llama3", [f'{{"name": "get_weather", "parameters": {PARIS}}}', '{"name": "now", "parameters": {}}']),
        ("mistral", [f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}, "id": "a1b2c3d4e"}}]']),
        ("mistral-args", [f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", "[TOOL_CALLS]now[ARGS]{}"]),
        ("mistral-ids", [f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}"]),
        ("gemma", [f'```tool_call\n{{"name": "get_weather", "parameters": {PARIS}}}\n```']),
        ("gemma4", ['<|tool_call>call:get_weather{city:<|"|>a<b"}<|"|>,days:3}<tool_call|>']),
        ("functiongemma", ["<start_function_call>call:get_weather{city:<escape>a<escape>}<end_function_call>"]),
        (
            "gpt-oss",
            [
                f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}",
                "<|channel|>analysis<|message|>hm <|e<|end|><|start|>assistant"
                "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
            ],
        ),
    ],
)
def test_calls_of_the_tools_are_allowed_and_nothing_else(vocabulary: Vocabulary, name: str, good: list[str]) -> None:
    format_ = FORMATS[name]
    grammar = format_.grammar(TOOLS)
    for text in good:
        assert allows(vocabulary, grammar, text), text
        made = ReplyMessage.of(read(lambda: format_.parser(TOOLS), [text]))
        assert (made.content, len(made.tool_calls)) == ("", 1), text
    for bad in ("Hello", good[0] + "x", good[0].replace("get_weather", "get_w"), good[0][:-1], ""):
        assert not allows(vocabulary, grammar, bad), bad


def test_arguments_follow_the_schema_of_their_tool(vocabulary: Vocabulary) -> None:
    grammar = FORMATS["hermes"].grammar(TOOLS)
    for arguments in ("{}", '{"city": 3}', '{"city": "a", "days": 1.5}', '{"city": "a", "x": 1}', '{"days": 1}'):
        assert not allows(vocabulary, grammar, CALL.replace(PARIS, arguments)), arguments
    assert not allows(vocabulary, grammar, CALL_NOW.replace("{}", '{"a": 1}'))
    assert allows(vocabulary, grammar, CALL.replace(PARIS, '{"city":"a", "days":1}'))


def test_a_named_tool_is_the_only_one(vocabulary: Vocabulary) -> None:
    for choice in ("now", {"type": "function", "function": {"name": "now"}}):
        grammar = FORMATS["hermes"].grammar(TOOLS, choice)
        assert (allows(vocabulary, grammar, CALL), allows(vocabulary, grammar, CALL_NOW)) == (False, True)


def test_several_calls_are_allowed_where_they_are_asked_for(vocabulary: Vocabulary) -> None:
    two = f"{CALL}\n{CALL_NOW}"
    assert not allows(vocabulary, FORMATS["hermes"].grammar(TOOLS), two)
    assert allows(vocabulary, FORMATS["hermes"].grammar(TOOLS, parallel=True), two)


def test_markup_may_be_control_tokens_or_their_text(vocabulary: Vocabulary) -> None:
    grammar = FORMATS["hermes"].grammar(TOOLS)
    begin = vocabulary.special_tokens["<tool_call>"]
    assert vocabulary.encode(CALL, add_special=False, parse_special=True)[0] == begin
    assert allows(vocabulary, grammar, CALL, parse_special=True)


def test_thoughts_come_before_a_call_where_they_may_and_end_where_they_have_begun(vocabulary: Vocabulary) -> None:
    hermes = FORMATS["hermes"]
    assert not allows(vocabulary, hermes.grammar(TOOLS, reasoning=False), f"<think>a</think>{CALL}")
    for reasoning in (False, True):
        opened = hermes.grammar(TOOLS, reasoning=reasoning, prompt_end="<think>\n")
        assert allows(vocabulary, opened, f"a<</think>\n\n{CALL}")
        assert not allows(vocabulary, opened, CALL)


# ---- whatever is let through is read


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [False, True])
def test_whatever_a_grammar_lets_through_is_read_as_calls(vocabulary: Vocabulary, name: str, parallel: bool) -> None:
    format_ = FORMATS[name]
    grammar = format_.grammar(TOOLS, parallel=parallel, reasoning=False)
    for seed in range(12):
        text = walk(vocabulary, grammar, seed, ENDS.get(name, ""))
        made = ReplyMessage.of(read(lambda: format_.parser(TOOLS), [text]))
        assert (made.content, made.reasoning) == ("", ""), text
        assert made.tool_calls, text
        for called, arguments in calls(made):
            assert set(json.loads(arguments)) <= {"city", "days", "units"}
            assert called in ("get_weather", "now")


def walk(vocabulary: Vocabulary, grammar: str, seed: int, mark: str) -> str:
    """A random text of the grammar: what ends something is likelier than what goes on."""
    random = np.random.default_rng(seed)
    sampler = Sampler(vocabulary, SamplerConfig(grammar=grammar, seed=seed, top_k=0, top_p=1.0, min_p=0.0))
    decoder = StreamDecoder(vocabulary, continues=True, shown=frozenset(vocabulary.special_tokens.values()))
    bias = np.zeros(vocabulary.n_rows, np.float32)
    bias[2] = 6.0
    bias[[3 + ord(character) for character in '"}],|<>\n/']] = 5.0
    pieces: list[str] = []
    for _ in range(4_000):
        likelier = bias.copy()
        for following in followers("".join(pieces[-20:]), mark):
            likelier[3 + ord(following)] += 12.0
        token = sampler.sample(random.normal(0, 1, vocabulary.n_rows).astype(np.float32) + likelier)
        if token == 2:
            return "".join(pieces) + decoder.finish()
        sampler.accept(token)
        pieces.append(decoder.push(token))
    raise AssertionError(f"the walk does not end: {''.join(pieces)[-200:]!r}")


# ---- what cannot be obeyed


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_that_cannot_be_obeyed_is_refused_with_the_name_of_the_tool(name: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}}
    with pytest.raises(InputError, match=r"tool f: .*'minimum' cannot be obeyed"):
        FORMATS[name].grammar(tool(schema))


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], "required", "the tools are: none"),
        (TOOLS, "nope", "'nope'.*get_weather, now"),
        (TOOLS, "none", "no tool may be called"),
        (TOOLS, {"type": "function"}, "tool_choice must be"),
    ],
)
def test_a_choice_that_the_tools_do_not_allow_is_refused(tools: Any, choice: Any, message: str) -> None:
    format_: ToolFormat = FORMATS["hermes"]
    with pytest.raises(InputError, match=message):
        format_.grammar(tools, choice)


def test_tools_of_equal_schemas_and_keys_like_rules_stay_apart(vocabulary: Vocabulary, tmp_path: Path) -> None:
    keys = ["root", "space", "call", "string", "0", "char", "tool-0"]
    schema = {"type": "object", "properties": {key: {"type": "null"} for key in keys}, "required": keys}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    arguments = json.dumps(dict.fromkeys(keys))
    for name in ("f", "g"):
        text = CALL.replace("get_weather", name).replace(PARIS, arguments)
        assert allows(vocabulary, FORMATS["hermes"].grammar(tools), text)
