"""Reasoning is split from the answer, also where the prompt has opened it."""

from __future__ import annotations

import pytest
from replies import TOOLS, calls, message

from ggml_engine.chat.replies import ReplyMessage, ReplyParser, detect_format

FORMAT = detect_format("<tool_call>")
CALL = '<tool_call>{"name": "now"}</tool_call>'


def parser() -> ReplyParser:
    return FORMAT.parser(TOOLS)


def opened() -> ReplyParser:
    return FORMAT.parser(TOOLS, prompt_end="<|im_start|>assistant\n<think>\n")


def unsplit() -> ReplyParser:
    return FORMAT.parser(TOOLS, reasoning=False)


@pytest.mark.parametrize("text", ["<think>\nI see.\n</think>\n\nHello\n", " <think>I see.</think>Hello\n"])
def test_what_the_model_thinks_is_reasoning(text: str) -> None:
    assert message(parser, text) == ReplyMessage("Hello\n", "I see.")


def test_a_prompt_may_have_opened_it() -> None:
    assert message(opened, "I\nsee.\n</think>\n\nHello") == ReplyMessage("Hello", "I\nsee.")
    assert message(opened, "</think>Hello") == ReplyMessage("Hello")
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert message(lambda: FORMAT.parser(TOOLS, prompt_end=closed), "Hello") == ReplyMessage("Hello")


def test_it_need_not_end() -> None:
    assert message(parser, "<think>I see. </thin") == ReplyMessage("", "I see. </thin")


def test_only_the_beginning_of_a_reply_is_reasoning() -> None:
    assert message(parser, "Use <think>this</think>") == ReplyMessage("Use <think>this</think>")
    reply = message(parser, "<think>a</think> b <think>c</think>")
    assert reply == ReplyMessage("b <think>c</think>", "a")
    assert message(parser, "<thinking>") == ReplyMessage("<thinking>")


def test_calls_come_after_it_and_not_inside() -> None:
    reply = message(parser, f"<think>{CALL}</think>\n{CALL}")
    assert (reply.content, reply.reasoning, calls(reply)) == ("", CALL, [("now", "{}")])


def test_unsplit_reasoning_stays_in_the_content() -> None:
    reply = message(unsplit, f"<think>\na\n</think>\n\nb {CALL}")
    assert (reply.content, reply.reasoning, len(reply.tool_calls)) == ("<think>\na\n</think>\n\nb", "", 1)
