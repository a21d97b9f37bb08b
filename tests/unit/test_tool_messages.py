"""How tools, calls and results reach a chat template."""

from __future__ import annotations

from typing import Any

import pytest
from replies import TOOLS, calls

from ggml_engine.chat import ChatTemplate
from ggml_engine.chat.replies import ReplyMessage, ToolFormat, detect_format, prepare_messages
from ggml_engine.chat.tools import Tool, ToolChoice, read_tool_choice, read_tools
from ggml_engine.errors import InputError

HERMES = detect_format("<tool_call>")
GENERIC = detect_format("")
GEMMA2 = detect_format("<start_of_turn> System role not supported")
GPT_OSS = detect_format("<|channel|><|message|>")
MISTRAL = detect_format("[TOOL_CALLS]")
LLAMA3 = detect_format('<|start_header_id|> "parameters"')
USER = {"role": "user", "content": "Weather?"}


def call(name: str, arguments: Any, identity: str = "call_1") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def asked(*made: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [*made], **more}


def result(content: Any, identity: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": identity}


def test_arguments_reach_the_template_as_a_mapping() -> None:
    for arguments in ('{"city": "Paris"}', {"city": "Paris"}):
        messages, variables = prepare_messages(HERMES, [USER, asked(call("get_weather", arguments))], TOOLS)
        assert messages[1]["content"] == ""
        assert messages[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
        assert [tool["function"]["name"] for tool in variables["tools"]] == ["get_weather", "now"]
        assert variables["tools"][1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert prepare_messages(HERMES, [asked(call("now", ""))])[0][0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["Paris", "[1]", '{"a": 1} x', "{", 3, ["a"], '{"a": NaN}'])
def test_arguments_that_are_no_object_are_refused_with_their_place(arguments: Any) -> None:
    with pytest.raises(InputError, match=r"message 1, tool call 0: the arguments of now are no JSON object"):
        prepare_messages(HERMES, [USER, asked(call("now", arguments))], TOOLS)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (["Hello"], "message 0 must be an object"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"name": "now"}]}], "has no function with a name"),
        ([asked(call("now", "{}", 5))], "the id must be a text"),  # type: ignore[arg-type]
        ([asked(call("now", "{}")), result("x", "call_2")], "result of 'call_2', a call that was not made"),
    ],
)
def test_messages_that_are_none_are_refused(messages: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare_messages(HERMES, messages, TOOLS)


def test_parts_of_text_are_joined_and_others_stay() -> None:
    text, image = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}
    messages, _ = prepare_messages(
        HERMES, [{"role": "user", "content": [text, text]}, {"role": "user", "content": [image]}]
    )
    assert [message["content"] for message in messages] == ["aa", [image]]


def test_a_developer_is_the_system_unless_the_template_knows_him() -> None:
    [message], _ = prepare_messages(HERMES, [{"role": "developer", "content": "x"}])
    [known], _ = prepare_messages(GPT_OSS, [{"role": "developer", "content": "x"}])
    assert (message["role"], known["role"]) == ("system", "developer")


def test_without_tools_or_with_the_choice_none_the_template_is_told_of_none() -> None:
    assert prepare_messages(HERMES, [USER]) == ([USER], {})
    assert prepare_messages(HERMES, [USER], TOOLS, "none") == ([USER], {})
    assert prepare_messages(GENERIC, [USER], TOOLS, "none") == ([USER], {})


def test_ids_for_mistral_are_nine_letters_and_digits_and_still_match() -> None:
    messages, _ = prepare_messages(
        MISTRAL, [asked(call("now", "{}", "call_abc"), call("now", "{}", "123456789")), result("x", "call_abc")], TOOLS
    )
    first, second = (made["id"] for made in messages[0]["tool_calls"])
    assert second == "123456789"
    assert messages[1]["tool_call_id"] == first
    assert len(first) == 9
    assert first.isalnum()


def test_templates_of_one_call_a_message_get_each_with_its_result() -> None:
    both = asked(call("get_weather", '{"city": "A"}', "a"), call("now", "{}", "b"), content="See.")
    for format_ in (LLAMA3, GPT_OSS):
        messages, _ = prepare_messages(format_, [both, result("2", "b"), result("1", "a"), USER], TOOLS)
        shape = [
            message["tool_calls"][0]["function"]["name"] if "tool_calls" in message else message["content"]
            for message in messages
        ]
        assert shape == ["now", "2", "get_weather", "1", "Weather?"]
    messages, _ = prepare_messages(HERMES, [both, result("2", "b"), result("1", "a")], TOOLS)
    assert len(messages) == 3


def test_reasoning_has_the_name_that_the_template_knows() -> None:
    thought = asked(call("now", "{}"), reasoning_content="hm")
    assert prepare_messages(HERMES, [thought], TOOLS)[0][0]["reasoning_content"] == "hm"
    assert prepare_messages(GPT_OSS, [thought], TOOLS)[0][0]["thinking"] == "hm"
    [message], _ = prepare_messages(GPT_OSS, [{**thought, "content": "See."}], TOOLS)
    assert (message["thinking"], message["content"]) == ("hm\nSee.", "")


# ---- templates that have no place for tools


@pytest.mark.parametrize("format_", [GENERIC, GEMMA2], ids=["generic", "gemma"])
def test_tools_calls_and_results_are_written_into_messages(format_: ToolFormat) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        USER,
        asked(call("get_weather", '{"city": "Paris"}'), call("now", "{}", "b"), content="See."),
        result("sunny"),
        result([{"type": "text", "text": "noon"}], "b"),
    ]
    messages, variables = prepare_messages(format_, conversation, TOOLS)
    assert variables == {}
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert all(set(message) == {"role", "content"} for message in messages if message["role"] != "user")
    system, _, said, got = (message["content"] for message in messages)
    assert system.startswith("Be brief.\n\n")
    assert '"name": "get_weather"' in system
    assert "sunny" in got
    assert "noon" in got
    parser = format_.parser(TOOLS)
    read = ReplyMessage.of(parser.feed(said) + parser.finish())
    assert (read.content, calls(read)) == ("See.", [("get_weather", '{"city": "Paris"}'), ("now", "{}")])


@pytest.mark.parametrize("format_", [GENERIC, GEMMA2], ids=lambda format_: format_.name)
def test_a_call_that_comes_back_is_written_as_the_model_wrote_it(format_: ToolFormat) -> None:
    begin, end, key = {
        "generic": ("<tool_call>", "</tool_call>", "arguments"),
        "gemma": ("```tool_call", "```", "parameters"),
    }[format_.name]
    said = f'{begin}\n{{"name": "get_weather", "{key}": {{"city":"Pa\\u0072is" , "days": 1.0e0}}}}\n{end}'
    parser = format_.parser(TOOLS)
    (made,) = ReplyMessage.of(parser.feed(said) + parser.finish()).tool_calls
    messages, _ = prepare_messages(format_, [USER, asked(call(made.name, made.arguments))])
    assert messages[1]["content"] == said


def test_instructions_are_the_users_where_there_is_no_system() -> None:
    assert [message["role"] for message in prepare_messages(GENERIC, [USER], TOOLS)[0]] == ["system", "user"]
    [message], _ = prepare_messages(GEMMA2, [USER], TOOLS)
    assert message["content"].endswith("Weather?")
    assert "get_weather" in message["content"]


def test_a_call_as_instructed_is_read() -> None:
    for format_ in (GENERIC, GEMMA2):
        text = prepare_messages(format_, [USER], TOOLS)[0][0]["content"]
        example = next(part for part in [*text.split("\n\n"), text] if "NAME" in part)
        begin = example.index("<tool_call>" if format_ is GENERIC else "```")
        parser = format_.parser([{"type": "function", "function": {"name": "NAME"}}])
        read = ReplyMessage.of(parser.feed(example[begin:]) + parser.finish())
        assert calls(read) == [("NAME", '{"ARGUMENT": "VALUE"}')]


def test_a_template_of_hermes_kind_renders_what_is_prepared() -> None:
    template = ChatTemplate(
        "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"
    )
    conversation = [USER, asked(call("get_weather", '{"city": "Paris"}')), result("sunny")]
    messages, variables = prepare_messages(detect_format(template.source), conversation, TOOLS)
    text = template.render(messages, **variables)
    assert text.endswith(
        '<|user|>Weather?<|assistant|><tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
        "<|tool|>sunny"
    )


# ---- tools and choices


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("x", "tools must be a list"),
        ([3], "a tool must be an object"),
        ([{"type": "web_search"}], "of the type 'function'"),
        ([{"type": "function", "function": {"name": "a b"}}], "a tool's name"),
        ([{"type": "function", "function": {}}], "a tool's name"),
        ([{"type": "function", "function": {"name": "a", "parameters": [1]}}], "parameters must be a JSON schema"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}], "schema of an object"),
        ([{"type": "function", "function": {"name": "a", "description": 3}}], "description must be a text"),
        ([Tool("a"), Tool("a")], "two tools have the name 'a'"),
        ([Tool(f"a{n}") for n in range(129)], "at most 128 tools"),
    ],
)
def test_tools_that_are_none_are_refused(tools: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_tools(tools)


def test_a_choice_is_a_mode_or_a_tool() -> None:
    tools = read_tools(TOOLS)
    now = {"type": "function", "function": {"name": "now"}}
    assert read_tool_choice(None, tools) == read_tool_choice("auto", tools) == ToolChoice()
    assert read_tool_choice(now, tools) == read_tool_choice("now", tools) == ToolChoice("required", "now")
    assert [tool.name for tool in read_tool_choice(now, tools).allowed(tools)] == ["now"]
    assert read_tool_choice("required", tools).allowed(tools) == tools
    assert read_tool_choice("none", tools).allowed(tools) == ()
    for bad in ("nope", {"type": "function", "function": {"name": "nope"}}, 3, {}):
        with pytest.raises(InputError):
            read_tool_choice(bad, tools)  # type: ignore[arg-type]
