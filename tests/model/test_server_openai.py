"""The official client of OpenAI, and what is built on it, against a server on a socket."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, live_server
from pydantic import BaseModel

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "model": "smol"}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
        "required": ["city"],
    },
}


class City(BaseModel):
    """An answer that has a form."""

    name: str
    is_capital: bool


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(models=["smol=smollm2"], ctx=8192, threads=1, deterministic=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def at_rest(server: LiveServer) -> bool:
    stats = server.host.loaded()[0].runtime.stats()
    return not (stats["waiting"] or stats["running"])


class TestChat:
    def test_a_stream_says_what_the_whole_answer_says_and_counts_what_was_cached(
        self, client: openai.OpenAI, server: LiveServer
    ) -> None:
        whole = client.chat.completions.create(messages=QUESTION, max_tokens=12, **GREEDY)
        content = whole.choices[0].message.content
        assert content
        assert whole.choices[0].finish_reason == "length"
        assert whole.system_fingerprint == f"fp_{server.host.loaded()[0].engine.executor.fingerprint[:10]}"
        chunks = list(
            client.chat.completions.create(
                messages=QUESTION, max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY
            )
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == content
        usage = chunks[-1].usage
        assert usage is not None
        assert whole.usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 12)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1

    def test_what_is_computed_is_what_the_engine_computes(self, client: openai.OpenAI, server: LiveServer) -> None:
        from ggml_engine.control.config import GenConfig
        from ggml_engine.ggml.sampler_config import SamplerConfig

        found = client.chat.completions.create(messages=QUESTION, max_tokens=8, **GREEDY).choices[0].message.content
        engine = server.host.loaded()[0].engine
        assert engine.chat(QUESTION, GenConfig(max_tokens=8, sampler=SamplerConfig.greedy())).result(30) == found

    def test_choices_share_their_prompt(self, client: openai.OpenAI, server: LiveServer) -> None:
        runtime = server.host.loaded()[0].runtime
        before = runtime.stats()["evaluated_tokens"]
        messages: list[Any] = [{"role": "user", "content": "Name a color, and say why it is a good one."}]
        found = client.chat.completions.create(model="smol", messages=messages, max_tokens=4, n=3, seed=7)
        assert len({choice.index for choice in found.choices}) == 3
        assert found.usage is not None
        assert found.usage.prompt_tokens > 20
        # the prompt once, and its last token for each of the other choices
        assert runtime.stats()["evaluated_tokens"] - before <= found.usage.prompt_tokens + 2
        again = client.chat.completions.create(model="smol", messages=messages, max_tokens=4, n=3, seed=7)
        assert [c.message.content for c in again.choices] == [c.message.content for c in found.choices]

    def test_an_answer_goes_on_from_what_it_is_given(self, client: openai.OpenAI) -> None:
        messages: list[Any] = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
        found = client.chat.completions.create(
            messages=messages,
            max_tokens=3,
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
            **GREEDY,
        )
        assert "Paris" in (found.choices[0].message.content or "")

    def test_a_client_of_llama_cpps_server_is_answered(self, server: LiveServer) -> None:
        given = {"max_tokens": -1, "seed": -1, "cache_prompt": True, "id_slot": -1, "return_progress": True}
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
            chunks = list(
                client.chat.completions.create(
                    messages=QUESTION, stream=True, extra_body={**given, "grammar": 'root ::= "Paris"'}, **GREEDY
                )
            )
            assert [model.id for model in client.models.list()] == ["smol"]
        progress = [chunk.model_extra["prompt_progress"] for chunk in chunks if not chunk.choices and chunk.model_extra]
        assert progress[-1]["processed"] == progress[-1]["total"]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Paris"

    def test_stop_strings_end_and_are_not_shown(self, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(messages=QUESTION, max_tokens=12, **GREEDY).choices[0].message.content
        assert whole is not None
        stop = whole[4:7]
        found = client.chat.completions.create(messages=QUESTION, max_tokens=12, stop=stop, **GREEDY).choices[0]
        assert found.finish_reason == "stop"
        assert found.message.content == whole[: whole.index(stop)].rstrip()

    def test_probabilities_have_bytes_and_are_sorted(self, client: openai.OpenAI) -> None:
        found = client.chat.completions.create(
            messages=QUESTION, max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY
        ).choices[0]
        assert found.logprobs is not None
        content = found.logprobs.content or []
        assert len(content) == 4
        assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == found.message.content
        for entry in content:
            top = [other.logprob for other in entry.top_logprobs]
            assert top == sorted(top, reverse=True)
            assert entry.token == entry.top_logprobs[0].token
            assert math.isclose(entry.logprob, top[0])

    def test_a_bias_forbids_a_token(self, client: openai.OpenAI, server: LiveServer) -> None:
        first = client.chat.completions.create(
            messages=QUESTION, max_tokens=1, logprobs=True, top_logprobs=2, **GREEDY
        ).choices[0]
        assert first.logprobs is not None
        top = (first.logprobs.content or [])[0].top_logprobs
        vocabulary = server.host.loaded()[0].engine.vocabulary
        token = int(vocabulary.encode(top[0].token, add_special=False, parse_special=False)[0])
        found = client.chat.completions.create(messages=QUESTION, max_tokens=1, logit_bias={str(token): -100}, **GREEDY)
        assert found.choices[0].message.content == top[1].token.rstrip()

    def test_a_session_goes_on_where_it_ended(self, client: openai.OpenAI) -> None:
        named = {"X-Session-ID": "talk"}
        first = client.chat.completions.create(messages=QUESTION, max_tokens=8, extra_headers=named, **GREEDY)
        turn = [*QUESTION, first.choices[0].message.model_dump(include={"role", "content"}), *QUESTION]
        second = client.chat.completions.create(messages=turn, max_tokens=4, extra_headers=named, **GREEDY)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        assert (second.usage.prompt_tokens_details.cached_tokens or 0) > first.usage.prompt_tokens

    def test_a_client_that_leaves_ends_its_answer(self, client: openai.OpenAI, server: LiveServer) -> None:
        stream = client.chat.completions.create(
            messages=QUESTION, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}, **GREEDY
        )
        next(iter(stream))
        assert not at_rest(server)
        stream.close()
        deadline = time.monotonic() + 10
        while not at_rest(server):
            assert time.monotonic() < deadline
            time.sleep(0.02)


class TestForms:
    def test_a_schema_is_obeyed(self, client: openai.OpenAI) -> None:
        found = client.chat.completions.parse(
            messages=[{"role": "user", "content": "Paris"}], response_format=City, max_tokens=60, **GREEDY
        )
        assert isinstance(found.choices[0].message.parsed, City)

    def test_a_json_object_is_one(self, client: openai.OpenAI) -> None:
        found = client.chat.completions.create(
            messages=[{"role": "user", "content": 'Say {"a": 1}'}],
            response_format={"type": "json_object"},
            max_tokens=200,
            **GREEDY,
        )
        if found.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(found.choices[0].message.content or ""), dict)
        else:
            assert (found.choices[0].message.content or "").startswith("{")

    def test_a_grammar_is_obeyed(self, client: openai.OpenAI) -> None:
        found = client.chat.completions.create(
            messages=QUESTION, max_tokens=10, extra_body={"grammar": 'root ::= "yes" | "no"'}, **GREEDY
        )
        assert found.choices[0].message.content in ("yes", "no")

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
    def test_a_call_that_is_required_is_made(self, client: openai.OpenAI, choice: Any) -> None:
        found = client.chat.completions.create(
            messages=[{"role": "user", "content": "The weather in Oslo?"}],
            tools=[{"type": "function", "function": WEATHER}],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=80,
            **GREEDY,
        ).choices[0]
        assert found.finish_reason == "tool_calls"
        (call,) = found.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Paris")

    def test_a_call_is_streamed_without_its_markup(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(
            messages=[{"role": "user", "content": "The weather in Oslo?"}],
            tools=[{"type": "function", "function": WEATHER}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=80,
            **GREEDY,
        ) as stream:
            found = stream.get_final_completion().choices[0]
        (call,) = found.message.tool_calls or []
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Paris")
        assert not found.message.content


class TestCompletions:
    def test_texts_and_token_ids_go_on_alike(self, client: openai.OpenAI, server: LiveServer) -> None:
        text = "The capital of France is"
        ids = server.host.loaded()[0].engine.vocabulary.encode(text, add_special=True, parse_special=False).tolist()
        found = client.completions.create(prompt=[text, text], max_tokens=4, logprobs=2, **GREEDY)
        by_id = client.completions.create(prompt=ids, max_tokens=4, echo=True, **GREEDY)
        assert found.choices[0].text == found.choices[1].text
        assert by_id.choices[0].text == text + found.choices[0].text
        logprobs = found.choices[0].logprobs
        assert logprobs is not None
        assert "".join(logprobs.tokens or []) == found.choices[0].text
        chunks = list(client.completions.create(prompt=text, max_tokens=4, stream=True, **GREEDY))
        assert "".join(chunk.choices[0].text for chunk in chunks) == found.choices[0].text
        assert chunks[-1].choices[0].finish_reason == "length"


class TestResponses:
    def test_a_response_is_streamed_and_goes_on(self, client: openai.OpenAI) -> None:
        first = client.responses.create(input="What is the capital of France?", max_output_tokens=8, **GREEDY)
        chat = client.chat.completions.create(messages=QUESTION, max_tokens=8, **GREEDY)
        assert first.output_text == chat.choices[0].message.content
        assert first.status == "incomplete"
        assert first.usage is not None
        assert first.usage.input_tokens == chat.usage.prompt_tokens if chat.usage else False
        with client.responses.stream(
            input="And of Norway?", previous_response_id=first.id, max_output_tokens=8, **GREEDY
        ) as stream:
            events = list(stream)
        assert events[0].type == "response.created"
        last = events[-1]
        assert last.type == "response.incomplete"
        second = last.response
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1

    def test_a_call_that_is_required_is_an_item(self, client: openai.OpenAI) -> None:
        found = client.responses.create(
            input="The weather in Oslo?",
            tools=[{"type": "function", "strict": True, **WEATHER}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=80,
            **GREEDY,
        )
        (item,) = found.output
        assert item.type == "function_call"
        assert json.loads(item.arguments)["city"] in ("Oslo", "Paris")

    def test_a_schema_is_obeyed(self, client: openai.OpenAI) -> None:
        found = client.responses.parse(input="Paris", text_format=City, max_output_tokens=60, **GREEDY)
        assert isinstance(found.output_parsed, City)


class TestOthers:
    def test_embeddings_have_length_one(self, client: openai.OpenAI) -> None:
        found = client.embeddings.create(model="smol", input=["Paris", "Oslo"])
        assert len(found.data) == 2
        assert math.isclose(sum(x * x for x in found.data[0].embedding), 1, rel_tol=1e-3)

    def test_the_model_is_listed(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["smol"]

    def test_errors_are_the_clients_own(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=QUESTION, extra_body={"flavour": "vanilla"}, **GREEDY)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "flavour")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(prompt="x " * 9000, **GREEDY)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(messages=QUESTION, model="another")

    def test_a_picture_is_refused_and_nobody_is_asked_for_it(self, client: openai.OpenAI) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.settimeout(0.2)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/x.png"
            part: Any = {"type": "image_url", "image_url": {"url": url}}
            with pytest.raises(openai.BadRequestError, match="text alone"):
                client.chat.completions.create(messages=[{"role": "user", "content": [part]}], **GREEDY)
            with pytest.raises(TimeoutError):
                listening.accept()

    def test_a_stream_is_server_sent_events_that_end(self, server: LiveServer) -> None:
        body = {"messages": QUESTION, "max_tokens": 2, "stream": True}
        found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
        assert found.headers["content-type"].startswith("text/event-stream")
        assert found.text.endswith("data: [DONE]\n\n")


class TestBuiltOnIt:
    def test_langchain_chats_and_calls(self, server: LiveServer) -> None:
        from langchain_openai import ChatOpenAI

        chat = ChatOpenAI(model="smol", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=40)  # type: ignore[arg-type,call-arg]
        short = chat.bind(max_tokens=6)
        said = short.invoke("What is the capital of France?").content
        assert said
        assert "".join(str(piece.content) for piece in short.stream("What is the capital of France?")) == said
        bound = chat.bind_tools(
            [{"type": "function", "function": WEATHER}], tool_choice="required", parallel_tool_calls=False
        )
        calls = bound.invoke("The weather in Oslo?").tool_calls
        assert calls
        assert calls[0]["name"] == "get_weather"

    def test_litellm_chats(self, server: LiveServer) -> None:
        """In a process of its own: it leaves an event loop open, and asks the network what models cost unless told not to."""
        script = (
            "import json, litellm, sys; found = litellm.completion(model='openai/smol', api_base=sys.argv[1], "
            "api_key='none', messages=json.loads(sys.argv[2]), temperature=0, max_tokens=8); "
            "print(json.dumps([found.choices[0].message.content, found.usage.prompt_tokens]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, f"{server.url}/v1", json.dumps(QUESTION)],
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        content, n_prompt = json.loads(done.stdout.splitlines()[-1])
        assert content
        assert n_prompt > 0
