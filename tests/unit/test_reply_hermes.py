"""Replies in Hermes' markup and in Qwen3-Coder's, however they are cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replies import TOOLS, calls, message, read

from ggml_engine.chat.replies import (
    ContentPart,
    ReplyMessage,
    ReplyParser,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    detect_format,
)

HERMES = detect_format("{{ '<tool_call>' }}")
PARIS = '{"city": "Paris"}'


def parser() -> ReplyParser:
    return HERMES.parser(TOOLS)


def call(arguments: str = PARIS, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_text_alone_is_content() -> None:
    for text in ("", "Hello", " Hello\n", "a < b <tool> <tool_cal", "{}", "\n\n"):
        assert message(parser, text) == ReplyMessage(text)


def test_a_call_is_its_name_and_its_arguments() -> None:
    assert read(parser, [call()]) == [
        ToolCallBegin(0, "id0", "get_weather"),
        ToolCallArguments(0, PARIS),
        ToolCallEnd(0),
    ]
    assert message(parser, call()).content == ""


def test_content_before_a_call_comes_without_the_space_between() -> None:
    reply = message(parser, f"Let me see.\n\n{call()}\n")
    assert (reply.content, calls(reply)) == ("Let me see.", [("get_weather", PARIS)])


def test_calls_in_a_row_are_calls_with_nothing_between() -> None:
    reply = message(parser, f"{call()}\n{call('{}', 'now')}\n\n{call()}")
    assert (reply.content, calls(reply)) == ("", [("get_weather", PARIS), ("now", "{}"), ("get_weather", PARIS)])
    assert len({each.id for each in ReplyMessage.of(parser().feed(call() + call())).tool_calls}) == 2


def test_content_after_a_call_is_kept() -> None:
    reply = message(parser, f"One. {call()}\nTwo.\nThree. ")
    assert (reply.content, len(reply.tool_calls)) == ("One.Two.\nThree. ", 1)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "now"}', "{}"),
        ('{"name": "now", "arguments": null}', "{}"),
        ('{"name": "now", "parameters": {"a": [1, {"b": "}"}]}}', '{"a": [1, {"b": "}"}]}'),
        ('{"arguments": {"a": 1}, "name": "now"}', '{"a": 1}'),
        ('{"id": 7, "name": "now", "arguments": {"a": -1.5e3}, "x": [true, null]}', '{"a": -1.5e3}'),
        ('{"name": "now", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{ "name" : "n\\u006fw" , "arguments" : { } }', "{ }"),
        ('{"name": "now", "arguments": {"a": "</tool_call>"}}', '{"a": "</tool_call>"}'),
        ('{"name": "now", "arguments": {"a": "one\ntwo"}}', '{"a": "one\\u000atwo"}'),
    ],
)
def test_what_models_write_for_a_call_is_read(body: str, arguments: str) -> None:
    for text in (f"<tool_call>{body}</tool_call>", f"<tool_call>\n{body}\n</tool_call>", f"<tool_call>{body}"):
        reply = message(parser, text)
        assert (reply.content, calls(reply)) == ("", [("now", arguments)])
        json.loads(arguments)


def test_arguments_stream_as_they_come() -> None:
    reading = parser()
    shown = [reading.feed(character) for character in call()]
    pieces = [part.text for parts in shown for part in parts if isinstance(part, ToolCallArguments)]
    assert len(pieces) == len(PARIS)
    assert isinstance(shown[call().index('{"city')][0], ToolCallBegin)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "a <tool_call> is a mark",
        "<tool_call>\n{}\n</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "now"',
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "now", "name": "now"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "no JSON"}</tool_call>',
        '<tool_call>{"name": "now" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call> and text',
        '<tool_call>{"name": "now", "arguments": {"a": "b\\x"}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": {"b": 1}',
        '<tool_call>{"name": "now", "arguments": {"a": 1}',
        '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 70,
    ],
)
def test_what_is_no_call_is_text_and_nothing_of_it_is_lost(text: str) -> None:
    assert message(parser, text) == ReplyMessage(text)
    assert message(parser, f"Before {text}").content == f"Before {text}"


def test_a_call_after_one_that_is_none_is_read() -> None:
    reply = message(parser, f"<tool_call>{{oops}} {call()}")
    assert (reply.content, calls(reply)) == ("<tool_call>{oops}", [("get_weather", PARIS)])


def test_a_call_that_broke_after_its_begin_says_its_whole_text() -> None:
    text = call('{"city": Paris}')
    *_, end, content = read(parser, [text])
    assert isinstance(end, ToolCallEnd)
    assert isinstance(content, ContentPart)
    assert end.malformed + content.text == text


def test_without_tools_all_markup_is_text() -> None:
    assert message(HERMES.parser, call()) == ReplyMessage(call())


# ---- Qwen3-Coder


def coder() -> ReplyParser:
    return detect_format("<tool_call> <function=NAME> <parameter=NAME>").parser(TOOLS)


def test_coder_calls_have_values_by_the_types_of_the_schema() -> None:
    text = (
        'Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nA\n"B" </param>\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=units>\n5\n</parameter>\n</function>\n</tool_call>"
    )
    for reply in (message(coder, text), message(coder, text.replace("<tool_call>\n", ""))):
        assert reply.content == "Sure."
        [made] = reply.tool_calls
        assert json.loads(made.arguments) == {"city": 'A\n"B" </param>', "days": 3, "units": "5"}


def test_coder_values_of_no_known_type_are_json_or_text() -> None:
    values = {"a": "[1, 2]", "b": "True", "c": "some text", "d": "", "e": "1 2"}
    inner = "".join(f"<parameter={name}>{value}</parameter>" for name, value in values.items())
    reply = message(coder, f"<tool_call><function=now>{inner}</function></tool_call>")
    assert json.loads(reply.tool_calls[0].arguments) == {"a": [1, 2], "b": True, "c": "some text", "d": "", "e": "1 2"}


@pytest.mark.parametrize(
    "text",
    [
        "<function=unknown></function>",
        "<function=now",
        "<function=now>text</function>",
        "<function=now><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        "<tool_call><function=get_weather><parameter=city>Par",
        "<tool_call><function=now><parameter=city>Par",
    ],
)
def test_coder_markup_that_is_no_call_is_text(text: str) -> None:
    assert message(coder, text) == ReplyMessage(text)


# ---- all cuts of all texts

MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=now>", "<parameter=city>", "</parameter>"]
PIECES = st.sampled_from([*MARKS, *'\n "{}<\\1,é', "</function>", "text", '{"name": "now", "arguments": {}}', call()])


@given(st.lists(PIECES, max_size=12), st.data())
def test_no_cut_changes_what_is_read(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]
    for new in (parser, coder):
        whole = read(new, [text])
        assert read(new, cut) == whole
        for made in ReplyMessage.of(whole).tool_calls:
            assert isinstance(json.loads(made.arguments), dict)
