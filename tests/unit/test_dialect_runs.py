"""From a request by HTTP to its answer, over a runtime that says what the test has it say."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from dialect_fakes import FakeReply, FakeServer, fake_server, run, stream_data

from ggml_engine.control.generation import Reason, Update
from ggml_engine.control.logprobs import TokenLogprobs
from ggml_engine.errors import EngineError, InputError, QueueFullError
from ggml_engine.ggml.lazy_grammar import LazyGrammar

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
ANTHROPIC: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}


class TestCounts:
    def test_cached_tokens_are_those_of_the_runtime_in_every_dialect(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                server.runtime.cached = 7
                usage = (await server.chat()).json()["usage"]
                n_prompt = len("[user]hi[assistant]")
                assert usage["prompt_tokens"] == n_prompt
                assert usage["prompt_tokens_details"]["cached_tokens"] == 7
                assert (usage["completion_tokens"], usage["total_tokens"]) == (5, n_prompt + 5)
                usage = (await server.post("/v1/completions", prompt="a longer prompt")).json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] == 7
                usage = (await server.post("/v1/responses", input="hi")).json()["usage"]
                assert usage["input_tokens_details"]["cached_tokens"] == 7
                usage = (await server.post("/v1/messages", **ANTHROPIC)).json()["usage"]
                assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (7, n_prompt - 7)
                streamed = stream_data(await server.chat(stream=True, stream_options={"include_usage": True}))
                assert streamed[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
                started = stream_data(await server.post("/v1/messages", stream=True, **ANTHROPIC))[0]
                assert started["message"]["usage"]["cache_read_input_tokens"] == 7

        run(test())

    def test_tokens_before_the_answer_are_those_of_reasoning(self) -> None:
        def script(reply: FakeReply) -> None:
            for piece in ("<think>", "hm", "</think>", "yes"):
                reply.say(piece)
            reply.end()

        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = script
                found = (await server.chat()).json()
                message = found["choices"][0]["message"]
                assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
                assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<think>hm</think>")

        run(test())

    def test_counting_needs_no_answer(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                body = {"messages": ANTHROPIC["messages"], "system": "be brief"}
                found = (await server.post("/v1/messages/count_tokens", **body)).json()
                assert found == {"input_tokens": len("[system]be brief[user]hi[assistant]")}
                assert not server.runtime.replies

        run(test())


class TestWhatReachesTheRuntime:
    def test_choices_are_asked_for_at_once_so_that_they_share_their_prompt(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                found = (await server.chat(n=3, seed=5)).json()
                assert [choice["message"]["content"] for choice in found["choices"]] == ["hello"] * 3
                assert [reply.request.n for reply in server.runtime.replies] == [3]
                assert found["usage"]["prompt_tokens"] == len("[user]hi[assistant]")
                assert found["usage"]["completion_tokens"] == 15

        run(test())

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", {"messages": ANTHROPIC["messages"]}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/completions", {"prompt": "x", "best_of": 3}),
        ],
    )
    def test_more_choices_than_the_option_are_refused(self, path: str, body: dict[str, Any], stream: bool) -> None:
        async def test() -> None:
            async with fake_server(max_choices=2) as server:
                found = await server.post(path, n=3, stream=stream, **body)
                assert (found.status_code, found.json()["error"]["param"]) == (400, "n")
                assert not server.runtime.replies
                within = {name: value for name, value in body.items() if name != "best_of"}
                assert len((await server.post(path, n=2, **within)).json()["choices"]) == 2

        run(test())

    def test_a_choice_among_tools_is_held_to_a_call_at_once_or_once_it_has_begun_one(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                await server.chat(tools=[TOOL], tool_choice="required")
                assert isinstance(server.request.config.sampler.grammar, str)
                await server.chat(tools=[TOOL])
                lazy = server.request.config.sampler.grammar
                assert isinstance(lazy, LazyGrammar)
                assert [trigger.words for trigger in lazy.triggers] == [("<tool_call>",)]
                await server.chat(tools=[TOOL], tool_choice="none")
                assert server.request.config.sampler.grammar is None
                # one that no grammar can be made of leaves the model free, where it may choose
                server.runtime.runner.text.sampler_error = InputError("over 512 ways to go on at one place")
                found = await server.chat(tools=[TOOL])
                assert found.status_code == 200
                assert server.request.config.sampler.grammar is None

        run(test())

    def test_a_session_is_named_by_the_header_or_by_the_field(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                await server.chat(headers={"X-Session-ID": "a"})
                assert server.request.session == "a"
                for path, body in (
                    ("/v1/chat/completions", {"messages": ANTHROPIC["messages"]}),
                    ("/v1/completions", {"prompt": "x"}),
                    ("/v1/responses", {"input": "x"}),
                    ("/v1/messages", ANTHROPIC),
                ):
                    await server.post(path, {"X-Session-ID": "h"}, **body)
                    assert server.request.session == "h"
                    await server.post(path, session_id="f", **body)
                    assert server.request.session == "f"
                    await server.post(path, **body)
                    assert server.request.session is None
                found = await server.chat(headers={"X-Session-ID": "a"}, session_id="b")
                assert (found.status_code, found.json()["error"]["param"]) == (400, "session_id")

        run(test())

    def test_an_unknown_parameter_reaches_nobody(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                found = await server.chat(flavour="vanilla")
                assert found.status_code == 400
                assert found.json()["error"]["code"] == "unsupported_parameter"
                assert found.json()["error"]["param"] == "flavour"
                found = await server.post("/v1/messages", flavour="vanilla", **ANTHROPIC)
                assert found.status_code == 400
                assert found.json()["type"] == "error"
                assert "flavour" in found.json()["error"]["message"]
                assert not server.runtime.replies

        run(test())

    def test_bounds_and_stops_reach_the_generation(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                await server.chat(max_tokens=5, stop=["a", "b"], ignore_eos=True, temperature=0, logprobs=True)
                config = server.request.config
                assert (config.max_tokens, config.stop, config.ignore_eos, config.logprobs) == (5, ("a", "b"), True, 0)
                assert config.sampler.is_greedy

        run(test())

    def test_prompts_of_token_ids_are_what_they_are(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                await server.post("/v1/completions", prompt=[104, 105])
                assert list(server.request.tokens) == [104, 105]
                found = await server.post("/v1/completions", prompt=[257])
                assert (found.status_code, found.json()["error"]["param"]) == (400, "prompt")
                found = await server.chat(logit_bias={"257": 1})
                assert (found.status_code, found.json()["error"]["param"]) == (400, "logit_bias")

        run(test())

    def test_several_prompts_are_answered_in_their_order_and_echoed(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                found = (await server.post("/v1/completions", prompt=["a", [98]], n=2, echo=True)).json()
                assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
                assert [choice["text"] for choice in found["choices"]] == ["ahello"] * 2 + ["bhello"] * 2
                streamed = stream_data(
                    await server.post("/v1/completions", prompt=["a", [98]], n=2, echo=True, stream=True)
                )
                texts = [""] * 4
                for data in streamed[:-1]:
                    texts[data["choices"][0]["index"]] += data["choices"][0]["text"]
                assert texts == [choice["text"] for choice in found["choices"]]

        run(test())

    def test_a_prompt_that_is_refused_ends_those_before_it(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                server.runtime.error = QueueFullError(5, 3.0)
                server.runtime.script = lambda reply: reply.prefill(1, 2)
                found = await server.post("/v1/completions", prompt=["a", "b"])
                assert (found.status_code, found.headers["retry-after"]) == (429, "3")
                assert server.runtime.replies[0].n_cancels

        run(test())


class TestTemplates:
    def test_a_model_without_one_says_so(self) -> None:
        async def test() -> None:
            async with fake_server(template=None) as server:
                found = await server.chat()
                assert found.status_code == 400
                assert found.json()["error"]["code"] == "no_chat_template"
                assert "/v1/completions" in found.json()["error"]["message"]
                assert (await server.post("/v1/completions", prompt="a")).status_code == 200

        run(test())

    def test_what_a_template_refuses_is_a_400_with_its_words(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                found = await server.chat("refuse me")
                assert (found.status_code, found.json()["error"]["code"]) == (400, "chat_template_error")
                assert "no such talk" in found.json()["error"]["message"]

        run(test())

    def test_too_long_a_prompt_is_a_400_with_both_counts(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                error = (await server.chat("x" * 3000)).json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert (error["n_prompt_tokens"], error["n_ctx"]) == (3000 + len("[user][assistant]"), 2000)
                assert str(error["n_prompt_tokens"]) in error["message"]
                assert "2000" in error["message"]
                assert not server.runtime.replies

        run(test())

    def test_a_prompt_that_is_too_long_by_its_bytes_is_refused_before_it_is_tokenised(self) -> None:
        text = "\u20ac" * 2700  # 8100 bytes, where a token stands for at most 4, and there may be 2000
        user = {"role": "user", "content": text}

        async def test() -> None:
            async with fake_server() as server:
                server.runtime.session_limit = 1990
                for path, body in (
                    ("/v1/chat/completions", {"messages": [user]}),
                    ("/v1/completions", {"prompt": ["a", text]}),
                    ("/v1/responses", {"input": text}),
                ):
                    server.vocabulary.read.clear()
                    error = (await server.post(path, **body)).json()["error"]
                    n_bytes = 8100 if path == "/v1/completions" else 8100 + len("[user][assistant]")
                    assert error["code"] == "context_length_exceeded"
                    assert (error["n_prompt_bytes"], error["max_prompt_bytes"], error["n_ctx"]) == (n_bytes, 7960, 1990)
                    assert f"{n_bytes} bytes" in error["message"]
                    assert "7960" in error["message"]
                    assert not any(text in read for read in server.vocabulary.read)
                found = await server.post("/v1/messages", messages=[user], max_tokens=5)
                assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")
                found = await server.post("/v1/embeddings", input=["a", text])
                assert found.json()["error"]["message"].startswith("text 1 has 8100 bytes, the 2000 tokens")
                assert not any(text in read for read in server.vocabulary.read)
                assert not server.runtime.replies

        run(test())

    def test_what_only_counts_tokens_counts_them_of_any_prompt(self) -> None:
        text = "x" * 9000

        async def test() -> None:
            async with fake_server() as server:
                found = await server.post("/v1/messages/count_tokens", messages=[{"role": "user", "content": text}])
                assert found.json() == {"input_tokens": 9000 + len("[user][assistant]")}
                assert len((await server.post("/tokenize", content=text)).json()["tokens"]) == 9000

        run(test())

    def test_what_a_template_does_not_look_at_is_refused(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                assert (await server.chat(chat_template_kwargs={"enable_thinking": True})).status_code == 400
                assert (await server.chat(chat_template_kwargs={"enable_thinking": False})).status_code == 200
            async with fake_server(template="{{ enable_thinking }}|{{ reasoning_effort }}") as server:
                await server.chat(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="low")
                assert server.runtime.replies[-1].prompt == "True|low"

        run(test())

    def test_what_the_answer_begins_with_is_part_of_the_prompt(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                messages = [*ANTHROPIC["messages"], {"role": "assistant", "content": "I say"}]
                await server.post("/v1/messages", messages=messages, max_tokens=5)
                assert server.runtime.replies[-1].prompt == "[user]hi[assistant]I say"

        run(test())


class TestEnds:
    @staticmethod
    def ending(*args: Any, **kwargs: Any) -> Any:
        def script(reply: FakeReply) -> None:
            reply.say("hello")
            reply.end(*args, **kwargs)

        return script

    @pytest.mark.parametrize(
        ("reason", "stop", "chat", "anthropic"),
        [
            (Reason.FINISHED, None, "stop", "end_turn"),
            (Reason.STOP, "END", "stop", "stop_sequence"),
            (Reason.STOP, None, "stop", "end_turn"),
        ],
    )
    def test_reasons_are_true(self, reason: Reason, stop: str | None, chat: str, anthropic: str) -> None:
        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = self.ending(reason, stop=stop)
                assert (await server.chat()).json()["choices"][0]["finish_reason"] == chat
                found = (await server.post("/v1/messages", **ANTHROPIC)).json()
                assert (found["stop_reason"], found["stop_sequence"]) == (anthropic, stop)

        run(test())

    def test_a_full_context_is_told_from_the_bound_that_was_asked_for(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = self.ending(Reason.LENGTH)
                body = {"messages": ANTHROPIC["messages"]}
                assert (await server.post("/v1/messages", max_tokens=5, **body)).json()["stop_reason"] == "max_tokens"
                found = (await server.post("/v1/messages", max_tokens=6, **body)).json()
                assert found["stop_reason"] == "model_context_window_exceeded"
                assert (await server.chat(max_tokens=5)).json()["choices"][0]["finish_reason"] == "length"
                found = (await server.post("/v1/responses", input="x", max_output_tokens=5)).json()
                assert found["status"] == "incomplete"

        run(test())

    @pytest.mark.parametrize(
        ("reason", "error", "status"),
        [
            (Reason.FAILED, EngineError("it broke"), 500),
            (Reason.FAILED, InputError("what was that"), 400),
            (Reason.SHUTDOWN, None, 503),
            (Reason.CANCELLED, None, 409),
        ],
    )
    def test_what_failed_is_an_error_and_never_a_stop(
        self, reason: Reason, error: Exception | None, status: int
    ) -> None:
        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = self.ending(reason, error=error)
                found = await server.chat()
                assert found.status_code == status
                assert "choices" not in found.json()
                streamed = stream_data(await server.chat(stream=True))
                assert streamed[-1] == "[DONE]"
                assert streamed[-2]["error"]["message"]
                assert all(data["choices"][0]["finish_reason"] is None for data in streamed[:-2])
                streamed = stream_data(await server.post("/v1/completions", prompt="x", stream=True))
                assert streamed[-1] == "[DONE]"
                assert "error" in streamed[-2]
                streamed = stream_data(await server.post("/v1/messages", stream=True, **ANTHROPIC))
                assert streamed[-1]["type"] == "error"
                assert not [data for data in streamed if data["type"] in ("message_delta", "message_stop")]
                streamed = stream_data(await server.post("/v1/responses", input="x", stream=True))
                assert streamed[-1]["type"] == "response.failed"
                assert streamed[-1]["response"]["status"] == "failed"

        run(test())

    def test_one_choice_that_fails_ends_all(self) -> None:
        def script(reply: FakeReply) -> None:
            reply.say("a", 0)
            reply.end(index=0)
            reply.end(Reason.FAILED, 1, error=EngineError("it broke"))

        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = script
                assert (await server.chat(n=2)).status_code == 500
                assert server.runtime.replies[-1].n_cancels

        run(test())

    def test_progress_of_the_prefill_is_a_comment(self) -> None:
        def script(reply: FakeReply) -> None:
            reply.prefill(512, 2048)
            reply.prefill(2048, 2048)
            reply.say("hello")
            reply.end()

        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = script
                text = (await server.chat(stream=True)).text
                assert text.index(": prefill 512/2048\n") < text.index(": prefill 2048/2048\n") < text.index("hello")

        run(test())


class TestProbabilities:
    def test_they_have_texts_and_bytes_and_none_of_the_end(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                found = (await server.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
                assert "".join(entry["token"] for entry in found) == "hello"
                assert found[0]["bytes"] == [104]
                assert [(top["token"], top["bytes"]) for top in found[0]["top_logprobs"]] == [
                    ("h", [104]),
                    ("<|end|>", None),
                ]
                streamed = stream_data(await server.chat(logprobs=True, top_logprobs=2, stream=True))
                entries = [
                    entry
                    for data in streamed[:-1]
                    for entry in (data["choices"][0]["logprobs"] or {"content": []})["content"]
                ]
                assert entries == found

        run(test())

    def test_what_is_impossible_is_a_number(self) -> None:
        def script(reply: FakeReply) -> None:
            impossible = TokenLogprobs(104, -0.5, ((104, -0.5), (105, -math.inf)))
            reply._listener.on_update(0, Update(tokens=(104,), text="h", logprobs=(impossible,)))
            reply.end()

        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = script
                found = (await server.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
                assert [top["logprob"] for top in found[0]["top_logprobs"]] == [-0.5, -9999.0]

        run(test())

    def test_those_of_text_that_a_stop_string_took_away_are_not_shown(self) -> None:
        def script(reply: FakeReply) -> None:
            reply.say("he", logprobs=True)
            reply._listener.on_update(0, _held("llo"))
            reply.end(Reason.STOP, stop="llo")

        def _held(text: str) -> Any:
            tokens = tuple(text.encode())
            return Update(tokens=tokens, logprobs=tuple(TokenLogprobs(token, -0.5, ()) for token in tokens))

        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = script
                choice = (await server.chat(logprobs=True)).json()["choices"][0]
                assert choice["message"]["content"] == "he"
                assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["h", "e"]

        run(test())


class TestTools:
    @staticmethod
    def calling(reply: FakeReply) -> None:
        for piece in ("I look. ", CALL[:20], CALL[20:], CALL):
            reply.say(piece)
        reply.end()

    def test_calls_are_read_and_end_the_answer_truly(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = self.calling
                choice = (await server.chat(tools=[TOOL])).json()["choices"][0]
                assert choice["finish_reason"] == "tool_calls"
                assert choice["message"]["content"] == "I look."
                calls = choice["message"]["tool_calls"]
                assert [call["function"]["name"] for call in calls] == ["weather", "weather"]
                assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Oslo"}
                tools = [{"name": "weather", "input_schema": {"type": "object"}}]
                found = (await server.post("/v1/messages", tools=tools, **ANTHROPIC)).json()
                assert found["stop_reason"] == "tool_use"
                assert found["content"][1]["input"] == {"city": "Oslo"}
                flat = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
                found = (await server.post("/v1/responses", tools=flat, input="x")).json()
                assert [item["type"] for item in found["output"]] == ["message", "function_call", "function_call"]

        run(test())

    def test_markup_does_not_leak_into_a_stream(self) -> None:
        def script(reply: FakeReply) -> None:
            for character in CALL:
                reply.say(character)
            reply.end()

        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = script
                streamed = stream_data(await server.chat(tools=[TOOL], stream=True))[:-1]
                assert not any(data["choices"][0]["delta"].get("content") for data in streamed)
                assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"

        run(test())

    def test_one_call_ends_the_answer_where_calls_may_not_be_parallel(self) -> None:
        def script(reply: FakeReply) -> None:
            reply.say(CALL + CALL)
            reply.say("more")
            reply.end(Reason.CANCELLED)

        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = script
                choice = (await server.chat(tools=[TOOL], parallel_tool_calls=False)).json()["choices"][0]
                assert len(choice["message"]["tool_calls"]) == 1
                assert choice["message"]["content"] is None
                assert choice["finish_reason"] == "tool_calls"
                assert server.runtime.replies[-1].choices[0].n_cancels == 1

        run(test())

    @pytest.mark.parametrize("value", ['{"a": "\\ud800"}', '{"a": 1e999}'])
    def test_a_call_whose_arguments_json_cannot_hold_is_text_in_every_dialect(self, value: str) -> None:
        written = f'<tool_call>{{"name": "weather", "arguments": {value}}}</tool_call>'

        def script(reply: FakeReply) -> None:
            reply.say(written)
            reply.end()

        claude = {**ANTHROPIC, "tools": [{"name": "weather", "input_schema": {"type": "object"}}]}
        flat = {"tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}], "input": "x"}

        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = script
                found = await server.post("/v1/messages", **claude)
                assert found.status_code == 200
                assert found.json()["content"] == [{"type": "text", "text": written}]
                assert found.json()["stop_reason"] == "end_turn"
                choice = (await server.chat(tools=[TOOL])).json()["choices"][0]
                assert (choice["message"]["content"], choice["finish_reason"]) == (written, "stop")
                assert "tool_calls" not in choice["message"]
                [item] = (await server.post("/v1/responses", **flat)).json()["output"]
                assert item["content"][0]["text"] == written

                streamed = stream_data(await server.post("/v1/messages", stream=True, **claude))
                assert [data["delta"]["stop_reason"] for data in streamed if data["type"] == "message_delta"] == [
                    "end_turn"
                ]
                deltas = [data["delta"] for data in streamed if data["type"] == "content_block_delta"]
                assert "".join(delta.get("text", "") for delta in deltas) == written
                streamed = stream_data(await server.chat(tools=[TOOL], stream=True))[:-1]
                assert "".join(data["choices"][0]["delta"].get("content") or "" for data in streamed) == written
                assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
                streamed = stream_data(await server.post("/v1/responses", stream=True, **flat))
                [call, item] = streamed[-1]["response"]["output"]
                assert (call["type"], call["status"]) == ("function_call", "incomplete")
                assert item["content"][0]["text"] == written

        run(test())

    def test_a_call_that_was_cut_off_is_no_call(self) -> None:
        def script(reply: FakeReply) -> None:
            reply.say(CALL[:60])
            reply.end(Reason.LENGTH)

        async def test() -> None:
            async with fake_server() as server:
                server.runtime.script = script
                choice = (await server.chat(tools=[TOOL], max_tokens=60)).json()["choices"][0]
                assert choice["finish_reason"] == "length"
                assert "tool_calls" not in choice["message"]
                assert choice["message"]["content"] == CALL[:60]

        run(test())


class TestResponses:
    def test_a_response_goes_on_from_an_earlier_one(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                first = (await server.post("/v1/responses", input="one", instructions="be brief")).json()
                body = {"input": "two", "previous_response_id": first["id"]}
                second = stream_data(await server.post("/v1/responses", stream=True, **body))[-1]["response"]
                assert server.runtime.replies[-1].prompt == "[user]one[assistant]hello[user]two[assistant]"
                assert second["previous_response_id"] == first["id"]
                await server.post("/v1/responses", input="three", previous_response_id=second["id"])
                assert server.runtime.replies[-1].prompt.endswith("[user]two[assistant]hello[user]three[assistant]")

        run(test())

    def test_one_that_was_not_stored_is_an_error(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                first = (await server.post("/v1/responses", input="one", store=False)).json()
                assert first["store"] is False
                for identifier in (first["id"], "resp_nothing"):
                    found = await server.post("/v1/responses", input="two", previous_response_id=identifier)
                    assert found.status_code == 404
                    assert found.json()["error"]["param"] == "previous_response_id"

        run(test())


def test_every_path_of_the_dialects_is_there() -> None:
    async def test(server: FakeServer) -> None:
        for path in ("chat/completions", "completions", "responses", "messages", "messages/count_tokens"):
            assert (await server.client.get(f"/v1/{path}")).status_code == 405
            assert (await server.post(f"/v1/{path}")).status_code == 400

    async def both() -> None:
        async with fake_server() as server:
            await test(server)

    run(both())
