"""A bug in what reads or writes an answer: the client is told, nothing hangs, and the generation ends."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from dialect_fakes import FakeReply, fake_server, run, stream_data

from ggml_engine.chat.replies import ReplyParser
from ggml_engine.control.generation import Reason
from ggml_engine.server.choice_reader import ChoiceReader
from ggml_engine.server.dialects.anthropic_rendering import MessageStream
from ggml_engine.server.dialects.chat_rendering import ChatStream
from ggml_engine.server.dialects.completions_rendering import CompletionStream
from ggml_engine.server.dialects.response_store import ResponseStore
from ggml_engine.server.dialects.responses_rendering import ResponseStream
from ggml_engine.server.events import Begun, Finished

HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 50},
}
STREAMS = {
    "/v1/chat/completions": ChatStream,
    "/v1/completions": CompletionStream,
    "/v1/responses": ResponseStream,
    "/v1/messages": MessageStream,
}
HANGS_S = 10.0
SECRET = "what the request said"


def broken(*_arguments: object, **_options: object) -> Any:
    raise ValueError(SECRET)


def talking(reply: FakeReply) -> None:
    """Goes on until it is cancelled: it never ends by itself."""
    reply.say("hello")
    reply.say("more")


def whole(reply: FakeReply) -> None:
    reply.say("hello")
    reply.end()


def assert_failed(path: str, events: list[Any]) -> None:
    """A stream ends with an error of its dialect, and with what ends any stream."""
    if path == "/v1/messages":
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "api_error"
        assert not [each for each in events if each["type"] in ("message_delta", "message_stop")]
    elif path == "/v1/responses":
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
    else:
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "internal_error"
    assert SECRET not in repr(events)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("method", ["read", "finish"])
def test_a_reader_that_raises_ends_the_request_and_its_generation(
    path: str, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ChoiceReader, method, broken)

    async def test() -> None:
        async with fake_server() as server:
            server.runtime.script = talking if method == "read" else whole
            found = await server.post(path, **BODIES[path])
            assert found.status_code == 500
            assert found.json()["error"]["type"] == ("api_error" if path == "/v1/messages" else "server_error")
            assert SECRET not in found.text
            assert server.runtime.replies[-1].n_cancels
            assert_failed(path, stream_data(await server.post(path, stream=True, **BODIES[path])))
            assert server.runtime.replies[-1].n_cancels

    with caplog.at_level(logging.ERROR, "ggml_engine.server"):
        run(test(), HANGS_S)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "reading or writing an answer failed"
    ] * 2
    assert SECRET not in caplog.text


def test_after_a_parser_that_raises_the_next_request_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with fake_server() as server:
            server.runtime.script = talking
            with monkeypatch.context() as patched:
                patched.setattr(ReplyParser, "feed", broken)
                assert (await server.chat()).status_code == 500
            assert server.runtime.replies[-1].n_cancels
            server.runtime.script = whole
            assert (await server.chat()).json()["choices"][0]["message"]["content"] == "hello"

    run(test(), HANGS_S)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("kind", [Begun, Finished])
def test_a_renderer_that_raises_ends_its_stream_and_the_generation(
    path: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = STREAMS[path].frames

    def breaking(self: Any, event: Any) -> Any:
        return broken() if isinstance(event, kind) else frames(self, event)

    monkeypatch.setattr(STREAMS[path], "frames", breaking)

    async def test() -> None:
        async with fake_server() as server:
            server.runtime.script = talking if kind is Begun else whole
            assert_failed(path, stream_data(await server.post(path, stream=True, **BODIES[path])))
            assert server.runtime.replies[-1].n_cancels

    run(test(), HANGS_S)


def test_a_store_that_raises_is_an_error_of_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResponseStore, "put", broken)

    async def test() -> None:
        async with fake_server() as server:
            assert (await server.post("/v1/responses", input="hi")).status_code == 500
            assert_failed("/v1/responses", stream_data(await server.post("/v1/responses", input="hi", stream=True)))

    run(test(), HANGS_S)


def test_a_generation_that_fails_for_an_unknown_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with fake_server() as server:
            server.runtime.script = lambda reply: reply.end(Reason.FAILED, error=ValueError(SECRET))
            assert (await server.chat()).json()["error"]["code"] == "internal_error"
            assert_failed("/v1/chat/completions", stream_data(await server.chat(stream=True)))

    with caplog.at_level(logging.ERROR, "ggml_engine.server"):
        run(test(), HANGS_S)
    assert [record.message.strip() for record in caplog.records] == ["a generation failed: ValueError"] * 2


def test_a_failure_that_cannot_be_written_ends_the_stream_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChoiceReader, "read", broken)
    monkeypatch.setattr(ResponseStream, "failure", broken)

    async def test() -> None:
        async with fake_server() as server:
            server.runtime.script = talking
            events = stream_data(await server.post("/v1/responses", input="hi", stream=True))
            assert events[-1]["error"]["code"] == "internal_error"
            assert server.runtime.replies[-1].n_cancels

    run(test(), HANGS_S)
