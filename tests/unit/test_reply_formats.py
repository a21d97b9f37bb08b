"""Replies in the markup of Llama 3, Mistral, Gemma and gpt-oss, however they are cut into pieces."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replies import TOOLS, calls, message, read

from ggml_engine.chat.replies import ReplyMessage, ReplyParser, ToolCallArguments, ToolFormat, detect_format

FORMATS = {
    "hermes": detect_format("<tool_call>"),
    "qwen3-coder": detect_format("<tool_call><function=<parameter="),
    "llama3": detect_format('<|start_header_id|> "parameters"'),
    "mistral": detect_format("[TOOL_CALLS]"),
    "mistral-thinks": detect_format("[TOOL_CALLS][ARGS][THINK]"),
    "gemma": detect_format("<start_of_turn>"),
    "gemma4": detect_format("<|tool_call><|channel>"),
    "functiongemma": detect_format("<start_of_turn><start_function_call>"),
    "gpt-oss": detect_format("<|channel|><|message|>"),
    "generic": detect_format("{{ messages }}"),
}
PARIS = '{"city": "Paris"}'
WEATHER, NOW = ("get_weather", PARIS), ("now", "{}")


def read_as(name: str, text: str) -> ReplyMessage:
    return message(lambda: FORMATS[name].parser(TOOLS), text)


# what a model writes, and what it is: content, reasoning, calls
GOOD: list[tuple[str, str, str, str, list[tuple[str, str]]]] = [
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", "", [WEATHER]),
    ("llama3", ' \n{"type": "function", "name": "now", "parameters": {}}\n', "", "", [NOW]),
    ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', "", "", [NOW]),
    (
        "llama3",
        '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}};{"name": "now"}',
        "",
        "",
        [NOW] * 3,
    ),
    ("llama3", '<|python_tag|>now.call(a="x\\"y", b=[1, True])', "", "", [("now", '{"a": "x\\"y", "b": [1,true]}')]),
    ("llama3", 'Look: <|python_tag|>{"name": "now"}', "Look:", "", [NOW]),
    ("llama3", '{"name": "now"}; then', "; then", "", [NOW]),
    ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]', "", "", [WEATHER]),
    (
        "mistral",
        f'A. [TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}, "id": "abcdefghi"}},'
        ' {"id": "123456789", "name": "now", "arguments": {}}] ',
        *("A.", "", [WEATHER, NOW]),
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}", "", "", [WEATHER, NOW]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{PARIS}", "", "", [WEATHER]),
    ("mistral", f"[TOOL_CALLS]get_weather{PARIS}", "", "", [WEATHER]),
    ("mistral-thinks", f"[THINK]hm[/THINK]Hi.[TOOL_CALLS]get_weather[ARGS]{PARIS}", "Hi.", "hm", [WEATHER]),
    ("gemma", '```tool_code\nget_weather(city="Paris")\n```', "", "", [WEATHER]),
    ("gemma", "Sure.\n```tool_code\nprint(get_weather(city='Paris'))\nnow()\n```\n", "Sure.", "", [WEATHER, NOW]),
    ("gemma", '```json\n{"name": "get_weather", "parameters": {"city": "Paris"}}\n```', "", "", [WEATHER]),
    ("gemma", '```tool_call\n{"name": "now", "parameters": {}}\n{"name": "now"}\n```', "", "", [NOW, NOW]),
    ("gemma", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", "", [WEATHER]),
    ("gemma", '[get_weather(city="Paris"), now()]', "", "", [WEATHER, NOW]),
    (
        "gemma",
        "```tool_code\nnow(a={'k': [None, -1.5]}, b='\\u00e9\\n')```",
        "",
        "",
        [("now", '{"a": {"k":[null,-1.5]}, "b": "é\\n"}')],
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
        "",
        "",
        [("get_weather", '{"city":"Paris"}')],
    ),
    (
        "gemma4",
        '<|channel>thought\nhm\n<channel|>Hi.<|tool_call>call:now{a:[1,{b:<|"|>"\n{}<|"|>}],<|"|>c d<|"|>:true}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        *("Hi.", "hm", [("now", '{"a":[1,{"b":"\\"\\n{}"}],"c d":true}'), NOW]),
    ),
    ("gemma4", "Hello<|channel>thought\n<channel|><channel|>", "Hello", "", []),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        "",
        "",
        [("get_weather", '{"city":"Paris"}')],
    ),
    ("gpt-oss", "<|channel|>final<|message|>Hello\nyou", "Hello\nyou", "", []),
    ("gpt-oss", "<|channel|>commentary<|message|>Hello", "Hello", "", []),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant<|channel|>final<|message|>Hello",
        *("Hello", "hm", []),
    ),
    ("gpt-oss", "<|channel|>analysis<|message|>hm", "", "hm", []),
    ("gpt-oss", f" to=functions.get_weather<|channel|>commentary json<|message|>{PARIS}", "", "", [WEATHER]),
    (
        "gpt-oss",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>",
        *("", "", [WEATHER]),
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        f"<|start|>assistant<|channel|>commentary<|message|>See.<|end|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>analysis<|message|> {PARIS}<|call|>",
        *("See.", "a\nb", [WEATHER]),
    ),
    (
        "gpt-oss",
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}",
        *("{}", "hm", []),
    ),
    ("gpt-oss", "Hello", "Hello", "", []),
    ("generic", '<tool_call>{"name": "now"}</tool_call>', "", "", [NOW]),
]


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "made"), GOOD)
def test_what_models_write_is_read(
    name: str, text: str, content: str, reasoning: str, made: list[tuple[str, str]]
) -> None:
    reply = read_as(name, text)
    assert (reply.content, reply.reasoning, calls(reply)) == (content, reasoning, made)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", '{"name": "Alice", "age": 3}'),
        ("llama3", '{"answer": {"name": "now"}}'),
        ("llama3", '{"name": "unknown", "parameters": {}}'),
        ("llama3", 'Use {"name": "now", "parameters": {}}'),
        ("llama3", '{"name": "now", "parameters": {"a": 1'),
        ("llama3", '{"name": "now", "parameters": {"a": }}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", "<|python_tag|>now.call(a=b.c)"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] and text"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS][{"name": "unknown"}]'),
        ("mistral", "[TOOL_CALLS]now[ARGS][]"),
        ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("mistral", '[TOOL_CALLS]now[ARGS]{"a": 1'),
        ("gemma", "```tool_code\nprint(1)\n```"),
        ("gemma", '```json\n{"a": 1}\n```\n'),
        ("gemma", "```tool_code\nnow(a=b + 1)\n```"),
        ("gemma", "[1, 2]"),
        ("gemma", '[now, "a"]'),
        ("gemma", '{"name": "Alice"}'),
        ("gemma4", "<|tool_call>call:unknown{}<tool_call|>"),
        ("gemma4", '<|tool_call>call:now{a:<|"|>b<tool_call|>'),
        ("gemma4", "<|tool_call>call:now[]<tool_call|>"),
        ("functiongemma", "<start_function_call>now()<end_function_call>"),
        ("gpt-oss", "<|channel|>commentary to=functions.unknown<|message|>{}"),
        ("gpt-oss", "<|channel|>commentary to=functions.now<|message|>print(1)"),
        ("gpt-oss", '<|channel|>commentary to=functions.now<|message|>{"a": 1'),
        ("gpt-oss", "<|channel|>" + 300 * "a"),
        ("gpt-oss", "<|channel|>final"),
    ],
)
def test_what_is_no_call_is_text_and_nothing_of_it_is_lost(name: str, text: str) -> None:
    assert read_as(name, text) == ReplyMessage(text)


HALF, HUGE = '{"a": "\\ud800"}', '{"a": [1, -1e999]}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            (name, f'<tool_call>{{"name": "now", "arguments": {value}}}</tool_call>')
            for name in ("hermes", "generic", "qwen3-coder")
            for value in (HALF, HUGE)
        ),
        *(("hermes", f'<tool_call>{{"arguments": {value}, "name": "now"}}</tool_call>') for value in (HALF, HUGE)),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}</tool_call>'),
        *(
            ("qwen3-coder", f"<function=get_weather><parameter=days>{value}</parameter></function>")
            for value in ('"\\ud800"', "1e999")
        ),
        *(("llama3", f'{{"name": "now", "parameters": {value}}}') for value in (HALF, HUGE)),
        ("llama3", "<|python_tag|>now.call(a=1e999)"),
        *(("mistral", f'[TOOL_CALLS][{{"name": "now", "arguments": {value}}}]') for value in (HALF, HUGE)),
        *(("mistral", f"[TOOL_CALLS]now[ARGS]{value}") for value in (HALF, HUGE)),
        *(("gemma", f'{{"name": "now", "parameters": {value}}}') for value in (HALF, HUGE)),
        ("gemma", "```tool_code\nnow(a=1e999)\n```"),
        ("gemma4", "<|tool_call>call:now{a:1e999}<tool_call|>"),
        ("functiongemma", "<start_function_call>call:now{a:-1e999}<end_function_call>"),
        *(("gpt-oss", f" to=functions.now<|channel|>commentary json<|message|>{value}") for value in (HALF, HUGE)),
    ],
)
def test_arguments_that_json_cannot_hold_are_no_call_and_not_lost(name: str, text: str) -> None:
    assert read_as(name, text) == ReplyMessage(text)


def test_a_pair_of_surrogates_is_a_character() -> None:
    [call] = read_as(
        "hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\ud83d\\ude00"}}</tool_call>'
    ).tool_calls
    assert json.loads(call.arguments) == {"a": "\U0001f600"}


def test_arguments_stream_in_every_format() -> None:
    for name, text in {
        "llama3": '{"name": "now", "parameters": {"a": "bcdefghi"}}',
        "mistral": '[TOOL_CALLS]now[ARGS]{"a": "bcdefghi"}',
        "gemma": '```tool_code\nnow(a="bcdefghi")\n```',
        "gemma4": '<|tool_call>call:now{a:<|"|>bcdefghi<|"|>}<tool_call|>',
        "qwen3-coder": "<function=get_weather><parameter=city>bcdefghi</parameter></function>",
        "gpt-oss": ' to=functions.now<|channel|>commentary json<|message|>{"a": "bcdefghi"}<|call|>',
    }.items():
        parser = FORMATS[name].parser(TOOLS)
        at_end_of_text = [part for piece in text[: text.index("hi") + 1] for part in parser.feed(piece)]
        streamed = "".join(part.text for part in at_end_of_text if isinstance(part, ToolCallArguments))
        assert streamed.endswith("bcdefgh"), name


def test_ids_have_the_form_that_the_format_wants() -> None:
    allowed = set(string.ascii_letters + string.digits)
    for name, length, prefix in (("mistral", 9, ""), ("hermes", 29, "call_")):
        text = '[TOOL_CALLS]now[ARGS]{}<tool_call>{"name": "now"}</tool_call>'
        [call] = ReplyMessage.of((parser := FORMATS[name].parser(TOOLS)).feed(text) + parser.finish()).tool_calls
        assert len(call.id) == length
        assert call.id.startswith(prefix)
        assert set(call.id.removeprefix(prefix)) <= allowed


def test_a_prompt_may_have_opened_the_analysis() -> None:
    def new() -> ReplyParser:
        return FORMATS["gpt-oss"].parser(TOOLS, prompt_end="<|start|>assistant<|channel|>analysis<|message|>")

    reply = message(new, "hm<|end|><|start|>assistant<|channel|>final<|message|>Hello")
    assert reply == ReplyMessage("Hello", "hm")


def test_what_parsers_have_to_see_are_the_control_tokens_of_the_vocabulary() -> None:
    special = {"<tool_call>": 3, "</tool_call>": 4, "<think>": 5, "<|im_end|>": 6}
    assert FORMATS["hermes"].shown_tokens(special) == {3, 4, 5}
    assert FORMATS["gpt-oss"].shown_tokens({"<|channel|>": 1, "<|end|>": 2, "<|return|>": 3}) == {1, 2}
    assert FORMATS["gemma4"].shown_tokens({'<|"|>': 1, "<|channel>": 2, "<channel|>": 3}) == {1, 2, 3}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<|im_start|> <tool_call> {{ tools }}", "hermes"),
        ("<tool_call> <function=example> <parameter=example>", "qwen3-coder"),
        ("<|start_header_id|> <|eot_id|>", "generic"),
        ("<tool_call> <arg_key>", "generic"),
        ("<tool_call> <invoke name=", "generic"),
        ('<|start_header_id|> "parameters" <function=NAME>', "generic"),
        ("<|START_OF_TURN_TOKEN|>", "generic"),
        (None, "generic"),
    ],
)
def test_a_template_tells_its_format(source: str | None, name: str) -> None:
    assert detect_format(source).name == name


def test_control_tokens_tell_where_there_is_no_template() -> None:
    assert detect_format(None, {"[TOOL_CALLS]": 5, "[ARGS]": 6}) == detect_format("[TOOL_CALLS][ARGS]")


# ---- all cuts of all texts

MARKS = """
    <|channel|> <|message|> <|end|> <|start|> [TOOL_CALLS] [ARGS] [THINK] [/THINK] ``` ```tool_code ```json <|tool_call>
    <tool_call|> <|"|> <|channel>thought <channel|> <|python_tag|> .call( <start_function_call> <escape>
    now call:now get_weather "name": "parameters": final analysis assistant
"""
TEXTS = [" to=functions.now", PARIS, *(row[1] for row in GOOD)]
WORDS = st.sampled_from([*"{}[]()<>:,;=\"'\\ \n1a", *MARKS.split(), *TEXTS])


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
@given(words=st.lists(WORDS, max_size=10), data=st.data())
def test_no_cut_changes_what_is_read(format_: ToolFormat, words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]
    whole = read(lambda: format_.parser(TOOLS), [text])
    assert read(lambda: format_.parser(TOOLS), cut) == whole
    assert read(lambda: format_.parser(TOOLS), [*text]) == whole
    for made in ReplyMessage.of(whole).tool_calls:
        assert isinstance(json.loads(made.arguments), dict)
        assert made.name in ("now", "get_weather")
