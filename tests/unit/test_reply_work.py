"""A parser's work is linear: what waits between two pieces, and is looked at again, is never more than a mark."""

from __future__ import annotations

import pytest
from replies import TOOLS

from ggml_engine.chat.replies import ReplyMessage, ToolFormat, detect_format

N = 1_000_000
HERMES = detect_format("<tool_call>")
CODER = detect_format("<tool_call><function=<parameter=")
LLAMA3 = detect_format('<|start_header_id|> "parameters"')
GEMMA = detect_format("<start_of_turn>")
GPT_OSS = detect_format("<|channel|><|message|>")
LONGEST_MARK = 40


@pytest.mark.parametrize(
    ("format_", "begin", "repeated"),
    [
        (HERMES, "", "<tool_cal"),
        (HERMES, "", "<tool_call>"),
        (HERMES, "x", " "),
        (HERMES, "<think>", "</think"),
        (HERMES, "<tool_call>", " "),
        (HERMES, "<tool_call>", '{"name":'),
        (HERMES, '<tool_call>{"name": "', "a"),
        (HERMES, '<tool_call>{"name": "now", "arguments": ', "["),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "', "<tool_call>\n"),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": ', "1"),
        (CODER, "<function=now><parameter=a>", "\n</parameter"),
        (CODER, "<function=", "a"),
        (LLAMA3, "", '{"name": '),
        (GEMMA, "", "```json\n"),
        (GEMMA, "```tool_code\nnow(a='", "\\\n\\x"),
        (GPT_OSS, "", "<|channel|>"),
        (GPT_OSS, "<|channel|>final<|message|>", "<|en"),
    ],
)
def test_what_waits_is_bounded_and_nothing_is_lost(format_: ToolFormat, begin: str, repeated: str) -> None:
    text = begin + repeated * ((N - len(begin)) // len(repeated))
    parser = format_.parser(TOOLS)
    parts = []
    size = 1024
    for at in range(0, len(text), size):
        parts += parser.feed(text[at : at + size])
        assert parser.n_waiting < LONGEST_MARK
    parts += parser.finish()
    reply = ReplyMessage.of(parts)
    assert reply.tool_calls == []
    found = begin + reply.reasoning if begin == "<think>" else reply.content
    if format_ is not GPT_OSS:
        assert found.rstrip() == text.rstrip()
