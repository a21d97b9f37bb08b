"""Answers of the four dialects, read by the official clients' own types."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ggml_engine.chat.replies import (
    ContentPart,
    ReasoningPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from ggml_engine.ggml.sampler_config import SamplerConfig
from ggml_engine.server.dialects.anthropic_rendering import MessageStream, render_message
from ggml_engine.server.dialects.chat_rendering import ChatStream, render_chat
from ggml_engine.server.dialects.completions_rendering import CompletionStream, render_completion
from ggml_engine.server.dialects.rendering import Frame, Head, StreamRenderer
from ggml_engine.server.dialects.responses_rendering import ResponseStream, render_response
from ggml_engine.server.dialects.responses_request import ResponseRequest
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.events import (
    Answer,
    Begun,
    Ended,
    Event,
    Failed,
    Finished,
    Progress,
    Said,
    StopReason,
    TokenProbability,
    Usage,
    collect,
)
from ggml_engine.server.jobs import ChatJob, CompletionJob

HEAD = Head("id_1", 1_700_000_000, "smol")
USAGE = Usage(prompt_tokens=20, cached_tokens=12, completion_tokens=9, reasoning_tokens=3)
PROBABILITY = TokenProbability(
    "é", "é".encode(), -0.5, (TokenProbability("é", "é".encode(), -0.5), TokenProbability("<|end|>", None, -2.0))
)
ECHOED = ResponseRequest.model_validate({"model": "smol", "input": "hi", "tools": [{"type": "function", "name": "f"}]})


def chat_job(**fields: Any) -> ChatJob:
    return ChatJob(model="smol", sampler=SamplerConfig(), messages=({"role": "user", "content": "x"},), **fields)


def completion_job(**fields: Any) -> CompletionJob:
    return CompletionJob(model="smol", sampler=SamplerConfig(), prompts=("x",), **fields)


def events(*said: Said, reason: StopReason = "end", stop: str | None = None) -> list[Event]:
    return [Progress(4, 8), Begun(USAGE), *said, Ended(0, reason, stop), Finished(USAGE)]


WORDS = [Said(0, ContentPart("Hel"), (PROBABILITY,)), Said(0, ContentPart("lo"), (PROBABILITY,))]
EVERYTHING = [
    Said(0, ReasoningPart("hm, ")),
    Said(0, ReasoningPart("yes")),
    Said(0, ContentPart("I ")),
    Said(0, ContentPart("look.")),
    Said(0, ToolCallBegin(0, "call_1", "weather")),
    Said(0, ToolCallArguments(0, '{"city": ')),
    Said(0, ToolCallArguments(0, '"Oslo"}')),
    Said(0, ToolCallEnd(0)),
    Said(0, ToolCallBegin(1, "call_2", "weather")),
    Said(0, ToolCallArguments(1, "{}")),
    Said(0, ToolCallEnd(1)),
]
CALLED = events(*EVERYTHING, reason="tool_calls")
BROKEN = events(
    Said(0, ToolCallBegin(0, "call_1", "weather")),
    Said(0, ToolCallArguments(0, '{"city"')),
    Said(0, ToolCallEnd(0, '<tool_call>{"city"')),
    reason="length",
)


def frames(renderer: StreamRenderer, happened: list[Event]) -> list[Frame]:
    return [frame for event in happened for frame in renderer.frames(event)]


def answer(happened: list[Event], n: int = 1) -> Answer:
    collected = collect(happened, n)
    assert isinstance(collected, Answer)
    return collected


class TestChat:
    def chunks(self, happened: list[Event], **fields: Any) -> list[ChatCompletionChunk]:
        found = frames(ChatStream(HEAD, chat_job(stream=True, **fields)), happened)
        assert all(name is None for name, _ in found)
        return [ChatCompletionChunk.model_validate(json.loads(json.dumps(data))) for _, data in found]

    def test_a_whole_answer_is_the_clients_type(self) -> None:
        found = ChatCompletion.model_validate(render_chat(HEAD, chat_job(), answer(CALLED)))
        choice = found.choices[0]
        assert (found.id, found.created, found.model, found.object) == ("id_1", HEAD.created, "smol", "chat.completion")
        assert choice.message.content == "I look."
        assert choice.message.model_extra == {"reasoning_content": "hm, yes"}
        calls = choice.message.tool_calls or []
        assert [(call.id, call.type) for call in calls] == [("call_1", "function"), ("call_2", "function")]
        assert calls[0].type == "function"
        assert json.loads(calls[0].function.arguments) == {"city": "Oslo"}
        assert choice.finish_reason == "tool_calls"

    def test_the_model_and_its_execution_have_a_fingerprint(self) -> None:
        head = replace(HEAD, fingerprint="0123456789abcdef")
        happened = events(*WORDS)
        written = [
            render_chat(head, chat_job(), answer(happened)),
            render_completion(head, completion_job(), answer(happened)),
            *(data for _, data in frames(ChatStream(head, chat_job(include_usage=True)), happened)),
            *(data for _, data in frames(CompletionStream(head, completion_job(include_usage=True)), happened)),
        ]
        assert {data["system_fingerprint"] for data in written} == {"fp_0123456789"}
        assert render_chat(HEAD, chat_job(), answer(happened))["system_fingerprint"] is None

    def test_usage_counts_what_was_cached(self) -> None:
        usage = ChatCompletion.model_validate(render_chat(HEAD, chat_job(), answer(CALLED))).usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 9, 29)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 12
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == 3

    def test_a_stream_says_the_same_as_the_whole_answer(self) -> None:
        chunks = self.chunks(CALLED)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "hm, yes"
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert [(call.index, call.id) for call in calls if call.id] == [(0, "call_1"), (1, "call_2")]
        first = "".join(call.function.arguments or "" for call in calls if call.index == 0 and call.function)
        assert json.loads(first) == {"city": "Oslo"}
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

    def test_counts_end_a_stream_where_they_were_asked_for(self) -> None:
        chunks = self.chunks(events(*WORDS), include_usage=True)
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens_details is not None
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 12
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert all(chunk.choices for chunk in self.chunks(events(*WORDS)))

    @pytest.mark.parametrize(
        ("reason", "expected"), [("end", "stop"), ("stop", "stop"), ("length", "length"), ("context", "length")]
    )
    def test_reasons_are_those_of_the_api(self, reason: StopReason, expected: str) -> None:
        happened = events(*WORDS, reason=reason)
        assert self.chunks(happened)[-1].choices[0].finish_reason == expected
        found = ChatCompletion.model_validate(render_chat(HEAD, chat_job(), answer(happened)))
        assert found.choices[0].finish_reason == expected

    def test_probabilities_have_bytes_and_the_likeliest_tokens(self) -> None:
        whole = ChatCompletion.model_validate(render_chat(HEAD, chat_job(logprobs=2), answer(events(*WORDS))))
        streamed = [chunk.choices[0].logprobs for chunk in self.chunks(events(*WORDS), logprobs=2)]
        assert whole.choices[0].logprobs is not None
        content = whole.choices[0].logprobs.content or []
        assert content == [entry for each in streamed if each for entry in each.content or []]
        assert (content[0].token, content[0].bytes, content[0].logprob) == ("é", [0xC3, 0xA9], -0.5)
        assert [(top.token, top.bytes) for top in content[0].top_logprobs] == [("é", [0xC3, 0xA9]), ("<|end|>", None)]

    def test_choices_are_told_apart(self) -> None:
        happened: list[Event] = [
            Begun(USAGE),
            Said(1, ContentPart("b")),
            Said(0, ContentPart("a")),
            Ended(1, "end"),
            Ended(0, "length"),
            Finished(USAGE),
        ]
        chunks = self.chunks(happened, n=2)
        for index, text, reason in ((0, "a", "length"), (1, "b", "stop")):
            own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
            assert own[0].delta.role == "assistant"
            assert "".join(choice.delta.content or "" for choice in own) == text
            assert own[-1].finish_reason == reason
        whole = ChatCompletion.model_validate(render_chat(HEAD, chat_job(n=2), answer(happened, 2)))
        assert [choice.message.content for choice in whole.choices] == ["a", "b"]

    def test_what_became_no_call_is_text_of_a_whole_answer(self) -> None:
        message = ChatCompletion.model_validate(render_chat(HEAD, chat_job(), answer(BROKEN))).choices[0].message
        assert message.content == '<tool_call>{"city"'
        assert message.tool_calls is None

    def test_a_call_alone_has_no_content(self) -> None:
        happened = events(*EVERYTHING[4:8], reason="tool_calls")
        whole = ChatCompletion.model_validate(render_chat(HEAD, chat_job(), answer(happened)))
        assert whole.choices[0].message.content is None


class TestCompletions:
    def test_whole_answer_and_chunks_are_the_clients_type(self) -> None:
        happened = events(*WORDS, reason="length")
        job = completion_job(logprobs=2, include_usage=True)
        whole = Completion.model_validate(render_completion(HEAD, job, answer(happened)))
        written = [data for _, data in frames(CompletionStream(HEAD, job), happened)]
        reasons = [choice["finish_reason"] for data in written for choice in data["choices"]]
        assert reasons == [None, None, "length"]
        for data in written:  # null on the way, as from OpenAI's own servers, which its type does not have
            for choice in data["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        chunks = [Completion.model_validate(data) for data in written]
        assert whole.choices[0].text == "Hello"
        assert whole.choices[0].finish_reason == "length"
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Hello"
        assert chunks[-1].usage == whole.usage
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 12
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["é", "é"]
        assert logprobs.token_logprobs == [-0.5, -0.5]
        assert logprobs.text_offset == [0, 1]
        assert [list(top.items()) for top in logprobs.top_logprobs] == [[("é", -0.5), ("<|end|>", -2.0)]] * 2
        assert (logprobs.model_extra or {})["bytes"] == [[0xC3, 0xA9]] * 2


class TestResponses:
    TYPES: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)

    def events(self, happened: list[Event]) -> list[Any]:
        found = frames(ResponseStream(HEAD, ECHOED.echoed()), happened)
        assert all(name == data["type"] for name, data in found)
        return [self.TYPES.validate_python(json.loads(json.dumps(data))) for _, data in found]

    def test_events_come_in_the_order_of_the_api(self) -> None:
        found = self.events(CALLED)
        assert [event.type.removeprefix("response.") for event in found] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
        assert [event.sequence_number for event in found] == list(range(len(found)))
        added = [event for event in found if event.type == "response.output_item.added"]
        assert [event.output_index for event in added] == [0, 1, 2, 3]
        assert all(event.item.status == "in_progress" for event in added)

    def test_the_whole_response_is_what_the_stream_ends_with(self) -> None:
        whole = Response.model_validate(render_response(HEAD, ECHOED.echoed(), answer(CALLED)))
        last = self.events(CALLED)[-1].response
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in last.output] == [item.type for item in whole.output]
        assert whole.output_text == last.output_text == "I look."
        call = whole.output[2]
        assert call.type == "function_call"
        assert (call.call_id, call.name, json.loads(call.arguments)) == ("call_1", "weather", {"city": "Oslo"})
        assert whole.status == last.status == "completed"
        assert whole.usage == last.usage
        assert whole.usage is not None
        assert whole.usage.input_tokens_details.cached_tokens == 12
        assert whole.usage.output_tokens_details.reasoning_tokens == 3
        assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (20, 9, 29)

    @pytest.mark.parametrize("reason", ["length", "context"])
    def test_an_answer_that_was_cut_off_is_incomplete(self, reason: StopReason) -> None:
        last = self.events(events(*WORDS, reason=reason))[-1]
        assert last.type == "response.incomplete"
        assert last.response.status == "incomplete"
        assert last.response.incomplete_details.reason == "max_output_tokens"
        assert last.response.output[0].status == "incomplete"

    def test_a_failure_is_an_event_of_its_own(self) -> None:
        stream = ResponseStream(HEAD, ECHOED.echoed())
        frames(stream, [Begun(USAGE), WORDS[0]])
        name, data = stream.failure(HttpProblem(503, "shutting_down", "the server closes"))
        event = self.TYPES.validate_python(data)
        assert (name, event.type) == ("response.failed", "response.failed")
        assert event.response.status == "failed"
        assert event.response.error is not None
        assert event.response.error.message == "the server closes"

    def test_probabilities_stand_beside_the_text(self) -> None:
        found = self.events(events(*WORDS))
        deltas = [event for event in found if event.type == "response.output_text.delta"]
        assert [[entry.token for entry in event.logprobs] for event in deltas] == [["é"], ["é"]]
        part = found[-1].response.output[0].content[0]
        assert [entry.bytes for entry in part.logprobs] == [[0xC3, 0xA9]] * 2

    def test_snapshots_of_earlier_events_do_not_change(self) -> None:
        found = frames(ResponseStream(HEAD, ECHOED.echoed()), events(*WORDS))
        added = next(data for _, data in found if data["type"] == "response.output_item.added")
        assert added["item"]["content"] == []
        part = next(data for _, data in found if data["type"] == "response.content_part.added")
        assert part["part"]["text"] == ""
        assert part["part"]["logprobs"] == []

    def test_what_became_no_call_is_text(self) -> None:
        whole = Response.model_validate(render_response(HEAD, ECHOED.echoed(), answer(BROKEN)))
        assert whole.output_text == '<tool_call>{"city"'
        assert self.events(BROKEN)[-1].response.output_text == '<tool_call>{"city"'


class TestMessages:
    TYPES: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)

    def events(self, happened: list[Event]) -> list[Any]:
        found = frames(MessageStream(HEAD), happened)
        assert all(name == data["type"] for name, data in found)
        return [self.TYPES.validate_python(data) for name, data in found if name != "ping"]

    def test_a_whole_answer_is_the_clients_type(self) -> None:
        found = Message.model_validate(render_message(HEAD, answer(CALLED)))
        assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
        call = found.content[2]
        assert call.type == "tool_use"
        assert (call.id, call.name, call.input) == ("call_1", "weather", {"city": "Oslo"})
        assert found.stop_reason == "tool_use"
        usage = found.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (8, 12, 9)

    def test_a_stream_has_blocks_one_after_the_other(self) -> None:
        found = self.events(CALLED)
        assert found[0].type == "message_start"
        assert (found[0].message.usage.input_tokens, found[0].message.usage.cache_read_input_tokens) == (8, 12)
        starts = [event for event in found if event.type == "content_block_start"]
        assert [(event.index, event.content_block.type) for event in starts] == [
            (0, "thinking"),
            (1, "text"),
            (2, "tool_use"),
            (3, "tool_use"),
        ]
        assert [event.index for event in found if event.type == "content_block_stop"] == [0, 1, 2, 3]
        open_block = None
        for event in found:
            if event.type == "content_block_start":
                assert open_block is None
                open_block = event.index
            elif event.type == "content_block_delta":
                assert event.index == open_block
            elif event.type == "content_block_stop":
                assert event.index == open_block
                open_block = None
        arguments = [
            e.delta.partial_json for e in found if getattr(getattr(e, "delta", None), "type", "") == "input_json_delta"
        ]
        assert "".join(arguments[:2]) == '{"city": "Oslo"}'
        assert [event.type for event in found[-2:]] == ["message_delta", "message_stop"]
        assert found[-2].delta.stop_reason == "tool_use"
        assert (found[-2].usage.output_tokens, found[-2].usage.cache_read_input_tokens) == (9, 12)

    @pytest.mark.parametrize(
        ("reason", "stop", "expected"),
        [
            ("end", None, "end_turn"),
            ("length", None, "max_tokens"),
            ("context", None, "model_context_window_exceeded"),
            ("stop", "END", "stop_sequence"),
        ],
    )
    def test_reasons_are_those_of_the_api(self, reason: StopReason, stop: str | None, expected: str) -> None:
        happened = events(*WORDS, reason=reason, stop=stop)
        whole = Message.model_validate(render_message(HEAD, answer(happened)))
        delta = self.events(happened)[-2].delta
        assert (whole.stop_reason, whole.stop_sequence) == (expected, stop)
        assert (delta.stop_reason, delta.stop_sequence) == (expected, stop)

    def test_what_became_no_call_is_text(self) -> None:
        whole = Message.model_validate(render_message(HEAD, answer(BROKEN)))
        assert [block.type for block in whole.content] == ["text"]


class TestCollecting:
    def test_a_failure_is_no_answer(self) -> None:
        problem = HttpProblem(503, "shutting_down", "x")
        found = collect([Begun(USAGE), *WORDS, Failed(problem)], 1)
        assert isinstance(found, Failed)
        assert found.problem is problem

    def test_an_answer_without_an_end_is_a_failure(self) -> None:
        assert isinstance(collect([Begun(USAGE), *WORDS], 1), Failed)
