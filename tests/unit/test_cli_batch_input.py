"""The prompts of a batch, and what is wrong with a file of them."""

from __future__ import annotations

from typing import Any

import pytest

from ggml_engine.cli.batch_input import BatchPrompt, Defaults, from_arguments, from_lines
from ggml_engine.control.config import GenConfig
from ggml_engine.errors import InputError
from ggml_engine.ggml.sampler_config import SamplerConfig

CONFIG = GenConfig(max_tokens=7, stop=("x",), sampler=SamplerConfig(seed=3, top_k=5))
CHAT = Defaults(CONFIG)
RAW = Defaults(CONFIG, is_raw=True)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def one(line: str, defaults: Defaults = CHAT) -> BatchPrompt:
    (prompt,) = from_lines(line, "f", defaults)
    return prompt


def test_arguments_are_chats_or_texts() -> None:
    assert [prompt.messages for prompt in from_arguments(("a", ""), CHAT)] == [(user("a"),), (user(""),)]
    assert from_arguments(("a",), Defaults(CONFIG, "s"))[0].messages == (system("s"), user("a"))
    assert from_arguments(("a",), RAW) == [BatchPrompt(CONFIG, "a")]


def test_lines_are_prompts_in_their_order() -> None:
    text = '{"prompt": "a"}\n\n  \r\n{"prompt": "b\u2028c"}\r\n{"messages": [{"role": "user", "content": "d"}]}'
    assert [prompt.messages for prompt in from_lines(text, "f", CHAT)] == [
        (user("a"),),
        (user("b\u2028c"),),
        (user("d"),),
    ]
    assert one('{"prompt": "a"}', RAW) == BatchPrompt(CONFIG, "a")


def test_a_system_message_is_that_of_the_object_then_that_of_the_command() -> None:
    both = Defaults(CONFIG, "command")
    assert one('{"prompt": "a"}', both).messages == (system("command"), user("a"))
    assert one('{"prompt": "a", "system": "own"}', both).messages == (system("own"), user("a"))
    assert one('{"messages": [{"role": "user", "content": "a"}]}', both).messages == (system("command"), user("a"))
    line = '{"system": "own", "messages": [{"role": "user", "content": "a"}]}'
    assert one(line, both).messages == (system("own"), user("a"))
    line = '{"messages": [{"role": "system", "content": "first"}, {"role": "user", "content": "a"}]}'
    assert one(line, both).messages == (system("first"), user("a"))


def test_an_object_goes_before_the_commands_options_and_leaves_the_others() -> None:
    prompt = one('{"prompt": "a", "id": "q", "max_tokens": 2, "temperature": 0.5, "seed": 9}')
    assert prompt.id == "q"
    assert prompt.config == GenConfig(2, ("x",), sampler=SamplerConfig(temperature=0.5, seed=9, top_k=5))
    assert one('{"prompt": "a"}').config == CONFIG
    assert one('{"prompt": "a", "id": 4, "temperature": 0}').config.sampler.is_greedy


BAD: list[tuple[str, str]] = [
    ("{", "line 2: this is no JSON"),
    ('{"prompt": "a"} {}', "line 2: this is no JSON"),
    ("[" * 100_000, "line 2: this is no JSON"),
    ('{"prompt": "a", "seed": ' + "1" * 5000 + "}", "line 2: this is no JSON"),
    ('{"prompt": "a", "temperature": NaN}', "line 2: this is no JSON: NaN"),
    ('{"prompt": "a", "prompt": "b"}', "line 2: this is no JSON: key 'prompt' is there twice"),
    ('["a"]', "line 2: a JSON object is wanted, this is a list"),
    ('"a"', "line 2: a JSON object is wanted, this is a text"),
    ('{"prompt": "a", "max_token": 3}', "line 2: there is no key 'max_token'; there are: prompt, messages"),
    ("{}", "line 2: one of 'prompt' and 'messages' is wanted, and not both"),
    ('{"prompt": "a", "messages": []}', "line 2: one of 'prompt' and 'messages' is wanted, and not both"),
    ('{"prompt": 3}', "line 2: 'prompt' is a text, not a number"),
    ('{"prompt": null}', "line 2: 'prompt' is a text, not null"),
    ('{"prompt": "\\ud800"}', "line 2: 'prompt' holds half a character"),
    ('{"prompt": "a", "system": true}', "line 2: 'system' is a text, not a truth value"),
    ('{"messages": []}', "line 2: 'messages' is a list of at least one message"),
    ('{"messages": "a"}', "line 2: 'messages' is a list of at least one message, not a text"),
    ('{"messages": [1]}', "line 2: 'messages': message 1 is an object, not a number"),
    ('{"messages": [{"role": "user"}]}', "line 2: 'messages: content of message 1' is a text, not null"),
    ('{"messages": [{"content": "a"}]}', "line 2: 'messages: role of message 1' is a text, not null"),
    (
        '{"system": "a", "messages": [{"role": "system", "content": "b"}]}',
        "line 2: 'system' and a first message of the role system",
    ),
    ('{"prompt": "a", "id": {}}', "line 2: 'id' is a text or a whole number, not an object"),
    ('{"prompt": "a", "id": 1.5}', "line 2: 'id' is a text or a whole number, not a number"),
    ('{"prompt": "a", "id": true}', "line 2: 'id' is a text or a whole number, not a truth value"),
    ('{"prompt": "a", "id": "first"}', "line 2: 'id' 'first' is that of line 1 too"),
    ('{"prompt": "a", "max_tokens": 0}', "line 2: bad value: max_tokens must be a positive integer"),
    ('{"prompt": "a", "max_tokens": 1.5}', "line 2: bad value: max_tokens must be a positive integer"),
    ('{"prompt": "a", "max_tokens": true}', "line 2: 'max_tokens' is a number, not a truth value"),
    ('{"prompt": "a", "temperature": "hot"}', "line 2: 'temperature' is a number, not a text"),
    ('{"prompt": "a", "temperature": -1}', "line 2: bad value: temperature must be a number from 0"),
    ('{"prompt": "a", "temperature": 1e400}', "line 2: bad value: temperature must be a number from 0"),
    ('{"prompt": "a", "seed": -1}', "line 2: bad value: seed must be None or an integer"),
    ('{"prompt": "a", "seed": null}', "line 2: 'seed' is a number, not null"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[f"{message[8:40]} {i}" for i, (_, message) in enumerate(BAD)])
def test_a_bad_line_is_an_error_that_names_file_line_and_key(line: str, message: str) -> None:
    text = '{"prompt": "a", "id": "first"}\n' + line + '\n{"prompt": "b"}'
    with pytest.raises(InputError) as raised:
        from_lines(text, "prompts.jsonl", CHAT)
    assert str(raised.value).startswith(f"prompts.jsonl, {message}"), raised.value


@pytest.mark.parametrize("extra", ['"prompt": "a", "system": "b"', '"messages": [{"role": "user", "content": "a"}]'])
def test_a_raw_batch_refuses_what_needs_a_template(extra: str) -> None:
    with pytest.raises(InputError, match=r"line 1: '(system|messages)' needs a chat template"):
        from_lines("{" + extra + "}", "f", RAW)


@pytest.mark.parametrize("text", ["", "\n\n", "  \r\n"])
def test_a_file_without_prompts_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match="f holds no prompts"):
        from_lines(text, "f", CHAT)


def test_the_messages_of_errors_do_not_grow_with_what_is_wrong() -> None:
    unknown: Any = "k" * 10_000
    with pytest.raises(InputError) as raised:
        from_lines('{"' + unknown + '": 1}', "f", CHAT)
    assert len(str(raised.value)) < 300
