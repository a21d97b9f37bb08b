"""The four dialects over a real `ServingRuntime` and runner, whose executor is a fake and whose tokens are bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from dialect_fakes import ScriptedText, fake_server, run, stream_data
from serving_bench import Serving, serving

from ggml_engine.chat.replies import ReplyParser

HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hi", "max_tokens": 500},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 500},
}
WIDE = "A\u00e9\u20ac\U0001f600 \U0001f469\u200d\U0001f467\ufe0f!\U0001f1eb\U0001f1f7"  # of one to four bytes


def bytes_serving(said: str, **options: Any) -> Any:
    """A runtime whose every answer is this text."""
    text = ScriptedText(said)
    return serving(text=text, n_vocab=text.n_vocab, **options)


def cached_tokens(path: str, answer: dict[str, Any]) -> int:
    """What an answer says of how much of its prompt was cached."""
    usage = answer["usage"]
    if path == "/v1/messages":
        return int(usage["cache_read_input_tokens"])
    details = "input_tokens_details" if path == "/v1/responses" else "prompt_tokens_details"
    return int(usage[details]["cached_tokens"])


def deltas(path: str, events: list[Any]) -> list[str]:
    """The pieces of a stream's text, one for each event that has one."""
    if path == "/v1/messages":
        return [each["delta"]["text"] for each in events if each["type"] == "content_block_delta"]
    if path == "/v1/responses":
        return [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
    choices = [each["choices"][0] for each in events if each != "[DONE]"]
    if path == "/v1/completions":
        return [choice["text"] for choice in choices if choice["text"]]
    return [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]


@pytest.mark.parametrize("path", BODIES)
def test_a_character_of_several_tokens_is_in_one_event(path: str) -> None:
    async def test(s: Serving) -> None:
        async with fake_server(runtime=s.runtime) as server:
            pieces = deltas(path, stream_data(await server.post(path, stream=True, **BODIES[path])))
            assert "".join(pieces) == WIDE
            assert 1 < len(pieces) <= len(WIDE)
            assert all(set(piece) <= set(WIDE) for piece in pieces)

    with bytes_serving(WIDE) as s:
        run(test(s))


def test_a_character_that_is_cut_off_by_the_bound_is_marked_at_the_end() -> None:
    async def test(s: Serving) -> None:
        async with fake_server(runtime=s.runtime) as server:
            pieces = deltas(
                "/v1/completions",
                stream_data(await server.post("/v1/completions", prompt="hi", max_tokens=8, stream=True)),
            )
            assert "".join(pieces) == "A\u00e9\u20ac\ufffd"

    with bytes_serving(WIDE) as s:
        run(test(s))


def test_the_bytes_of_probabilities_are_those_of_the_characters() -> None:
    async def test(s: Serving) -> None:
        async with fake_server(runtime=s.runtime) as server:
            events = stream_data(await server.chat(stream=True, logprobs=True))[:-1]
            named = [
                entry for each in events for entry in (each["choices"][0]["logprobs"] or {"content": []})["content"]
            ]
            assert bytes(byte for entry in named for byte in entry["bytes"]) == WIDE.encode()
            assert "".join(deltas("/v1/chat/completions", events)) == WIDE

    with bytes_serving(WIDE) as s:
        run(test(s))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_session_in_use_is_a_conflict_in_the_dialects_words(path: str, stream: bool) -> None:
    body = {**BODIES[path], "stream": stream}

    async def test(s: Serving) -> None:
        async with fake_server(runtime=s.runtime) as server:
            with s.b.executor.holding_forward() as gate:
                first = asyncio.create_task(server.post(path, session_id="a", **body))
                await asyncio.to_thread(gate.wait_held)
                second = await server.post(path, {"X-Session-ID": "a"}, **body)
                assert not first.done()
                assert second.status_code == 409
                assert second.headers["content-type"] == "application/json"
                error = second.json()["error"]
                assert "'a' is in use" in error["message"]
                if path == "/v1/messages":
                    assert second.json()["type"] == "error"
                    assert error["type"] == "invalid_request_error"
                else:
                    assert (error["type"], error["code"]) == ("conflict_error", "session_busy")
                other = asyncio.create_task(server.post(path, session_id="b", **body))  # others are not in its way
            assert (await first).status_code == (await other).status_code == 200
            again = await server.post(path, session_id="a", **body)
            assert again.status_code == 200
            assert "hello" in again.text or "".join(deltas(path, stream_data(again))) == "hello"

    with bytes_serving("hello") as s:
        run(test(s))


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_in_reading_an_answer_cancels_its_generation_and_gives_the_cells_back(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object) -> Any:
        raise ValueError("a bug")

    async def test(s: Serving) -> None:
        async with fake_server(runtime=s.runtime) as server:
            monkeypatch.setattr(ReplyParser, "feed", broken)
            gate = s.b.executor.forward_gate
            gate.close(after=3)  # it cannot end before it is cancelled
            try:
                found = await asyncio.wait_for(server.chat(stream=stream), 10)
            finally:
                gate.release()
            error = stream_data(found)[-2] if stream else found.json()
            assert error["error"]["code"] == "internal_error"

    with bytes_serving("a long answer" * 20) as s:
        run(test(s))
        s.check_at_rest()
        stats = s.runtime.stats()
        assert (stats["cancelled"], stats["finished"]) == (1, 0)


@pytest.mark.parametrize("path", BODIES)
def test_nothing_is_cached_for_who_wants_nothing_cached(path: str) -> None:
    async def test(s: Serving) -> None:
        async with fake_server(runtime=s.runtime) as server:

            async def n_cached(**more: Any) -> int:
                answer = (await server.post(path, **BODIES[path], **more)).json()
                await asyncio.to_thread(s.drain)
                return cached_tokens(path, answer)

            assert await n_cached() == 0
            whole = await n_cached(cache_prompt=True)
            assert whole > 0
            assert await n_cached(cache_prompt=False) == 0
            assert await n_cached(cache_prompt=False, session_id="a") == 0
            assert await n_cached(cache_prompt=False, session_id="a") == 0, "its session begins anew"
            assert await n_cached(cache_prompt=None) == whole
            error = (await server.post(path, cache_prompt="no", **BODIES[path])).json()["error"]
            assert "cache_prompt" in error["message"]

    with bytes_serving("hello", prefix_cache_entries=8) as s:
        run(test(s))


def test_choices_that_outgrow_the_context_together_end_as_one_does_that_outgrows_it() -> None:
    async def test(s: Serving) -> None:
        async with fake_server(runtime=s.runtime) as server:
            for n, each in ((1, 31), (3, 10)):
                found = await server.post("/v1/completions", prompt="hi", max_tokens=100, n=n)
                choices = found.json()["choices"]
                assert [choice["finish_reason"] for choice in choices] == ["length"] * n
                assert [choice["text"] for choice in choices] == ["x" * each] * n
            error = (await server.post("/v1/completions", prompt="x" * 31, n=3)).json()["error"]
            assert error["code"] == "invalid_value"
            assert "n is 3: the 32 cells of the context have no room for a prompt of 31 tokens" in error["message"]

    with bytes_serving("x" * 200, capacity=32) as s:
        run(test(s))
