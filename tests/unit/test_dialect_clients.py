"""What programs send to the server by default, by the official clients where these can: taken as it is meant."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from dialect_fakes import FakeReply, FakeServer, fake_server, run, stream_data, transport_of

from ggml_engine.control.generation import Reason

BASE = "http://127.0.0.1"
SPOKEN = "[{{ message.role }}]{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}"
TEMPLATE = "{% for message in messages %}" + SPOKEN + "{% endfor %}[assistant]"
BASH: dict[str, Any] = {
    "name": "Bash",
    "description": "Run a command.",
    "input_schema": {"$schema": "x", "type": "object", "properties": {"command": {"type": "string"}}},
    "eager_input_streaming": True,
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
}
CACHED = {"type": "ephemeral"}
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


@asynccontextmanager
async def anthropic_client(template: str = TEMPLATE, **options: Any) -> AsyncIterator[tuple[FakeServer, Any]]:
    async with (
        fake_server(template, **options) as server,
        anthropic.AsyncAnthropic(
            api_key="none", base_url=BASE, http_client=transport_of(anthropic, server), max_retries=0
        ) as client,
    ):
        yield server, client


@asynccontextmanager
async def openai_client(template: str = TEMPLATE, **options: Any) -> AsyncIterator[tuple[FakeServer, Any]]:
    async with (
        fake_server(template, **options) as server,
        openai.AsyncOpenAI(
            api_key="none", base_url=f"{BASE}/v1", http_client=transport_of(openai, server), max_retries=0
        ) as client,
    ):
        yield server, client


def prompt_of(server: FakeServer) -> str:
    return server.runtime.replies[-1].prompt


def thoughtful(reply: FakeReply) -> None:
    for piece in ("<think>", "hm, yes", "</think>", "42"):
        reply.say(piece)
    reply.end()


def coding_agent(fingerprint: str, **more: Any) -> dict[str, Any]:
    """A turn of a coding agent, which marks what it sends for a cache and a bill."""
    return {
        "model": "m",
        "max_tokens": 8000,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={fingerprint};"},
            {"type": "text", "text": "You are an agent.", "cache_control": CACHED},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "list", "cache_control": CACHED}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I look", "signature": ""},
                    {
                        "type": "tool_use",
                        "id": "t1",
                        "name": "Bash",
                        "input": {"command": "ls"},
                        "cache_control": CACHED,
                    },
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a b", "cache_control": CACHED}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "a and b"}]},
            {"role": "user", "content": "thanks"},
        ],
        "tools": [BASH],
        "metadata": {"user_id": "u"},
        "extra_body": {"temperature": 1},
        "thinking": {"type": "adaptive"},
        "context_management": KEEP_ALL,
        "output_config": {"effort": "high"},
        "betas": ["context-management-2025-06-27", "effort-2025-11-24", "interleaved-thinking-2025-05-14"],
        **more,
    }


class TestAnthropicsAgents:
    def test_a_turn_is_answered_and_begins_as_the_one_before_whatever_its_bill_says(self) -> None:
        async def test() -> None:
            async with anthropic_client() as (server, client):
                prompts = []
                for fingerprint in ("00000", "fa690"):
                    async with client.beta.messages.stream(**coding_agent(fingerprint)) as stream:
                        found = await stream.get_final_message()
                    assert (found.content[0].text, found.stop_reason) == ("hello", "end_turn")
                    prompts.append(prompt_of(server))
                assert prompts[0] == prompts[1]
                assert "billing" not in prompts[0]
                assert "You are an agent." in prompts[0]
                assert "(I look)" in prompts[0]
                counted = coding_agent("x")
                for name in ("max_tokens", "metadata", "extra_body"):
                    del counted[name]
                assert (await client.beta.messages.count_tokens(**counted)).input_tokens == len(prompts[0])

        run(test())

    @pytest.mark.parametrize(
        "keep", [None, {"type": "thinking_turns", "value": 1}, {"type": "thinking_turns", "value": 2}]
    )
    def test_thinking_is_kept_for_as_many_turns_as_are_asked_for(self, keep: Any) -> None:
        turns = [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "A", "signature": ""}]},
            {"role": "user", "content": "2"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "B", "signature": ""},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "C", "signature": ""}]},
            {"role": "user", "content": "3"},
        ]
        edit = {"type": "clear_thinking_20251015", **({} if keep is None else {"keep": keep})}

        async def test() -> None:
            async with fake_server(TEMPLATE) as server:
                body = {"messages": turns, "max_tokens": 5}
                await server.post("/v1/messages", **body)
                whole = prompt_of(server)
                assert all(f"({each})" in whole for each in "ABC")
                for nothing in ({}, {"edits": []}, {"edits": None}, KEEP_ALL):
                    await server.post("/v1/messages", context_management=nothing, **body)
                    assert prompt_of(server) == whole
                await server.post("/v1/messages", context_management={"edits": [edit]}, **body)
                kept = "ABC" if keep and keep["value"] == 2 else "BC"  # B and C are of one turn
                assert [each for each in "ABC" if f"({each})" in prompt_of(server)] == list(kept)

        run(test())

    @pytest.mark.parametrize("edit", ["clear_tool_uses_20250919", "compact_20260112", "clear_all_20990101"])
    def test_edits_that_would_shorten_a_prompt_are_refused(self, edit: str) -> None:
        async def test() -> None:
            async with anthropic_client() as (server, client):
                with pytest.raises(anthropic.BadRequestError, match="not supported by this server") as caught:
                    await client.beta.messages.create(
                        **coding_agent("x", context_management={"edits": [{"type": edit, "trigger": None}]})
                    )
                assert edit in str(caught.value)
                assert not server.runtime.replies

        run(test())

    def test_a_model_that_does_not_think_answers_whether_it_may_or_not(self) -> None:
        async def test() -> None:
            async with anthropic_client() as (server, client):
                body: dict[str, Any] = {
                    "model": "m",
                    "messages": [{"role": "user", "content": "hi"}],
                    "max_tokens": 2000,
                }
                for thinking in (
                    {"type": "disabled"},
                    {"type": "enabled", "budget_tokens": 1024},
                    {"type": "adaptive", "display": "summarized"},
                ):
                    found = await client.messages.create(thinking=thinking, output_config={"effort": "max"}, **body)
                    assert [block.type for block in found.content] == ["text"]
                    assert prompt_of(server) == "[user]hi[assistant]"

        run(test())

    def test_a_model_that_thinks_is_told(self) -> None:
        template = TEMPLATE + "{{ enable_thinking }}<think>"

        async def test() -> None:
            async with anthropic_client(template) as (server, client):
                body: dict[str, Any] = {
                    "model": "m",
                    "messages": [{"role": "user", "content": "hi"}],
                    "max_tokens": 2000,
                }
                for kind, told in (("disabled", "False"), ("adaptive", "True")):
                    await client.messages.create(thinking={"type": kind}, **body)
                    assert prompt_of(server) == f"[user]hi[assistant]{told}<think>"

        run(test())

    def test_thinking_that_is_not_to_be_shown_is_not(self) -> None:
        async def test() -> None:
            async with anthropic_client() as (server, client):
                server.runtime.script = thoughtful
                body: dict[str, Any] = {
                    "model": "m",
                    "messages": [{"role": "user", "content": "hi"}],
                    "max_tokens": 2000,
                }
                for display, text in (("omitted", ""), ("summarized", "hm, yes")):
                    thinking = {"type": "adaptive", "display": display}
                    whole = await client.messages.create(thinking=thinking, **body)
                    async with client.messages.stream(thinking=thinking, **body) as stream:
                        streamed = await stream.get_final_message()
                    for found in (whole, streamed):
                        assert [block.type for block in found.content] == ["thinking", "text"]
                        assert (found.content[0].thinking, found.content[1].text) == (text, "42")

        run(test())

    def test_a_form_is_a_grammar_and_a_system_message_has_its_place(self) -> None:
        async def test() -> None:
            async with anthropic_client() as (server, client):
                schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
                messages = [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "yes?"},
                    {"role": "system", "content": [{"type": "text", "text": "be brief", "cache_control": CACHED}]},
                    {"role": "user", "content": "go on"},
                ]
                await client.messages.create(
                    model="m",
                    messages=messages,
                    max_tokens=9,
                    output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"},
                )
                assert '\\"a\\"' in str(server.request.config.sampler.grammar)
                assert prompt_of(server) == "[user]hi[assistant]yes?[system]be brief[user]go on[assistant]"

        run(test())

    def test_a_tool_of_the_providers_own_is_refused(self) -> None:
        async def test() -> None:
            async with anthropic_client() as (server, client):
                search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
                with pytest.raises(anthropic.BadRequestError, match=r"tools\[1\]\.type.*web_search_20250305"):
                    await client.beta.messages.create(**coding_agent("x", tools=[BASH, search]))
                assert not server.runtime.replies

        run(test())


class TestResponsesAgents:
    SENT: dict[str, Any] = {  # noqa: RUF012
        "model": "m",
        "instructions": "You are an agent.",
        "tools": [{"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "text": {"verbosity": "medium"},
        "truncation": "disabled",
        "extra_body": {"client_metadata": {"session": "s"}},
    }

    def test_reasoning_is_given_sealed_and_taken_back(self) -> None:
        async def test() -> None:
            async with openai_client() as (server, client):
                server.runtime.script = thoughtful
                question: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
                whole = await client.responses.create(input=question, **self.SENT)
                done = []
                async with client.responses.stream(input=question, **self.SENT) as stream:
                    async for event in stream:
                        if event.type == "response.output_item.done":
                            done.append(event.item)
                assert [item.type for item in whole.output] == [item.type for item in done] == ["reasoning", "message"]
                seal = whole.output[0].encrypted_content
                assert seal
                assert done[0].encrypted_content == seal
                sealed = {"type": "reasoning", "summary": [], "encrypted_content": seal}
                answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "42"}]}
                again = [*question, sealed, answer, {"role": "user", "content": "sure?"}]
                await client.responses.create(input=again, **self.SENT)
                expected = "[user]hi[assistant](hm, yes)42[user]sure?[assistant]"
                assert prompt_of(server).endswith(expected)
                as_given = [*question, *(item.to_dict() for item in whole.output), {"role": "user", "content": "sure?"}]
                await client.responses.create(input=as_given, **self.SENT)
                assert prompt_of(server).endswith(expected)
                plain = await client.responses.create(input=question, **{**self.SENT, "include": []})
                assert plain.output[0].encrypted_content is None

        run(test())

    @pytest.mark.parametrize("seal", ["gAAAAAB", "ggml-engine.1.%%%", "ggml-engine.1.gA==", "ggml-engine.1.a"])
    def test_a_seal_of_another_is_refused(self, seal: str) -> None:
        async def test() -> None:
            async with openai_client() as (server, client):
                item: Any = {"type": "reasoning", "summary": [], "encrypted_content": seal}
                with pytest.raises(openai.BadRequestError, match="none that this server made") as caught:
                    await client.responses.create(model="m", input=[{"role": "user", "content": "x"}, item])
                assert caught.value.param == "input[1].encrypted_content"
                assert not server.runtime.replies

        run(test())

    def test_a_result_may_be_a_list_of_texts(self) -> None:
        async def test() -> None:
            async with openai_client() as (server, client):
                texts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
                items: list[Any] = [
                    {"role": "user", "content": "list"},
                    {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": texts},
                ]
                await client.responses.create(input=items, **self.SENT)
                assert "a\nb" in prompt_of(server)

        run(test())

    @pytest.mark.parametrize(
        "fields",
        [
            {"text": {"verbosity": "low"}},
            {"reasoning": {"summary": "detailed"}},
            {"reasoning": {"context": "all_turns"}},
            {"reasoning": {"mode": "pro"}},
            {"truncation": "auto"},
            {"tools": [{"type": "web_search"}]},
            {"include": ["web_search_call.results"]},
        ],
        ids=str,
    )
    def test_what_would_change_the_answer_is_refused(self, fields: dict[str, Any]) -> None:
        async def test() -> None:
            async with openai_client() as (server, client):
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.responses.create(input="x", **{**self.SENT, **fields})
                assert caught.value.code == "unsupported_parameter"
                assert str(caught.value.param).startswith(next(iter(fields)))
                assert not server.runtime.replies

        run(test())


class TestLlamaCppsClients:
    def test_values_that_stand_for_nothing_are_nothing(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                await server.chat(seed=-1, max_tokens=-1, max_completion_tokens=-1, cache_prompt=True, id_slot=-1)
                config = server.request.config
                assert (config.max_tokens, config.sampler.seed) == (None, None)
                found = await server.post("/v1/completions", prompt="x", max_tokens=-1, seed=-1, cache_prompt=True)
                assert found.status_code == 200
                assert server.request.config.max_tokens is None
                given: dict[str, Any] = {"reasoning_format": "auto", "parse_tool_calls": True, "return_progress": False}
                assert (await server.chat(**given)).status_code == 200
                for name, value in (("cache_prompt", False), ("id_slot", 2), ("reasoning_format", "none")):
                    error = (await server.chat(**{name: value})).json()["error"]
                    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
                for name in ("seed", "max_tokens"):
                    error = (await server.chat(**{name: -2})).json()["error"]
                    assert (error["code"], error["param"]) == ("invalid_value", name)

        run(test())

    def test_progress_is_told_in_chunks_where_it_is_asked_for(self) -> None:
        def script(reply: FakeReply) -> None:
            reply.prefill(4, 12)
            reply.prefill(12, 12)
            reply.say("hello")
            reply.end()

        async def test() -> None:
            async with openai_client() as (server, client):
                server.runtime.script, server.runtime.cached = script, 7
                messages: list[Any] = [{"role": "user", "content": "hi"}]
                progress = []
                stream = await client.chat.completions.create(
                    model="m", messages=messages, stream=True, extra_body={"return_progress": True}
                )
                async for chunk in stream:
                    if not chunk.choices:
                        progress.append(chunk.model_extra["prompt_progress"])
                assert [(each["processed"], each["cache"], each["total"]) for each in progress] == [
                    (11, 7, 19),
                    (19, 7, 19),
                ]
                assert all(each["time_ms"] >= 0 for each in progress)
                for given in ({"return_progress": False}, {}):
                    assert "prompt_progress" not in (await server.chat(stream=True, **given)).text

        run(test())

    def test_a_last_message_is_gone_on_with_as_it_is(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say "}]
                path, body = "/v1/chat/completions", {"messages": messages}
                await server.post(path, **body)
                assert prompt_of(server) == "[user]hi[assistant]I say [assistant]"
                for prompt in ({}, {"add_generation_prompt": False}):
                    found = await server.post(path, continue_final_message=True, **prompt, **body)
                    assert found.json()["choices"][0]["message"]["content"] == "hello"
                    assert prompt_of(server) == "[user]hi[assistant]I say "
                await server.post(path, continue_final_message=False, add_generation_prompt=True, **body)
                assert prompt_of(server).endswith("[assistant]")
                n_asked = len(server.runtime.replies)
                call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                for wrong in (
                    {"add_generation_prompt": True},
                    {"messages": messages[:1]},
                    {"messages": messages[1:]},
                    {"messages": [messages[0], {**messages[1], "tool_calls": [call]}]},
                    {"messages": [messages[0], {**messages[1], "reasoning_content": "hm"}]},
                ):
                    error = (await server.post(path, **{"continue_final_message": True, **body, **wrong})).json()[
                        "error"
                    ]
                    assert error["param"] == "continue_final_message"
                assert (await server.post(path, add_generation_prompt=False, **body)).status_code == 400
                assert len(server.runtime.replies) == n_asked

        run(test())

    def test_paths_without_a_version_are_the_same(self) -> None:
        async def test() -> None:
            async with fake_server() as server:
                for path, body in (
                    ("/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                    ("/completions", {"prompt": "hi"}),
                    ("/responses", {"input": "hi"}),
                ):
                    short, long = await server.post(path, **body), await server.post(f"/v1{path}", **body)
                    assert (short.status_code, set(short.json())) == (200, set(long.json()))
                    assert (await server.post(path, flavour="x", **body)).json()["error"]["param"] == "flavour"
                kept = (await server.post("/responses", input="hi")).json()["id"]
                assert (await server.post("/v1/responses", input="so?", previous_response_id=kept)).status_code == 200
                models = await server.client.get("/models")
                assert models.json() == (await server.client.get("/v1/models")).json()

        run(test())


class TestHints:
    def test_a_prediction_changes_nothing(self) -> None:
        async def test() -> None:
            async with openai_client() as (server, client):
                messages: list[Any] = [{"role": "user", "content": "hi"}]
                for content in ("hello", [{"type": "text", "text": "hello"}]):
                    found = await client.chat.completions.create(
                        model="m", messages=messages, prediction={"type": "content", "content": content}
                    )
                    assert found.choices[0].message.content == "hello"
                    assert prompt_of(server) == "[user]hi[assistant]"
                error = (await server.chat(prediction={"type": "guess"})).json()["error"]
                assert error["param"].startswith("prediction")

        run(test())

    @pytest.mark.parametrize(
        ("template", "told"),
        [
            ("{{ reasoning_effort }}", {"minimal": "low", "low": "low", "high": "high", "xhigh": "high", "max": "high"}),
            ("{% if reasoning_effort == 'max' %}most{% else %}{{ reasoning_effort }}{% endif %}", {"max": "most", "xhigh": "high"}),
            ("{% set reasoning_effort = 'own' %}{{ reasoning_effort }}", {"low": "own"}),
            ("plain", {"low": "plain", "max": "plain"}),
        ],
    )  # fmt: skip
    def test_an_effort_reaches_a_template_that_reads_it(self, template: str, told: dict[str, str]) -> None:
        async def test() -> None:
            async with fake_server(template) as server:
                for effort, prompt in told.items():
                    assert (await server.chat(reasoning_effort=effort)).status_code == 200
                    assert prompt_of(server) == prompt

        run(test())

    def test_variables_reach_a_template_that_reads_them_and_no_other(self) -> None:
        template = (
            "{{ budget | default(1) }}|{{ date }}|{{ messages | length }}|{{ bos_token }}{% set own = 1 %}{{ own }}"
        )

        async def test() -> None:
            async with fake_server(template) as server:
                assert (await server.chat(chat_template_kwargs={"budget": 512, "date": "1 May"})).status_code == 200
                assert prompt_of(server) == "512|1 May|1|1"
                for name in (
                    "other",
                    "own",
                    "messages",
                    "bos_token",
                    "range",
                    "add_generation_prompt",
                    "tools",
                    "__class__",
                ):
                    error = (await server.chat(chat_template_kwargs={name: "x"})).json()["error"]
                    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
                    assert "reads budget, date" in error["message"]
                assert len(server.runtime.replies) == 1

        run(test())


class TestNamesOfModels:
    def test_an_unknown_name_is_told_what_there_is_and_of_the_option(self) -> None:
        async def test() -> None:
            async with openai_client() as (server, client):
                with pytest.raises(openai.NotFoundError, match=r"'gpt-4o', only m; .*any_model"):
                    await client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])
                assert (await server.client.get("/v1/models/gpt-4o")).status_code == 404

        run(test())

    def test_with_the_option_the_first_model_answers_under_its_own_name(self) -> None:
        async def test() -> None:
            async with openai_client(any_model=True, models=["m=path", "n=path"]) as (server, client):
                messages: list[Any] = [{"role": "user", "content": "x"}]
                for asked, named in (("gpt-4o", "m"), ("n", "n"), ("m", "m")):
                    found = await client.chat.completions.create(model=asked, messages=messages)
                    assert found.model == named
                    assert (await client.responses.create(model=asked, input="x")).model == named
                    assert (await client.models.retrieve(asked)).id == named
                found = await server.post("/v1/messages", model="claude-x", messages=messages, max_tokens=5)
                assert found.json()["model"] == "m"
                assert [model.id for model in (await client.models.list()).data] == ["m", "n"]

        run(test())


class TestCallsThatAreNone:
    """A call that came to no end was told already: a client sees that the answer is none, and has its text."""

    BEGUN = '<tool_call>{"name": "Bash", "arguments": {"command": "rm'

    def script(self, reply: FakeReply) -> None:
        reply.say(self.BEGUN)
        reply.end(Reason.LENGTH)

    def test_openais_client_has_arguments_that_are_no_json_and_their_text(self) -> None:
        async def test() -> None:
            async with openai_client() as (server, client):
                server.runtime.script = self.script
                function = {"name": "Bash", "parameters": BASH["input_schema"]}
                async with client.chat.completions.stream(
                    model="m",
                    messages=[{"role": "user", "content": "x"}],
                    tools=[{"type": "function", "function": function}],
                ) as stream:
                    choices = [event.snapshot.choices[0] async for event in stream if event.type == "chunk"]
                choice = choices[-1]
                assert choice.finish_reason == "length"
                assert choice.message.content == self.BEGUN
                with pytest.raises(json.JSONDecodeError):
                    json.loads(choice.message.tool_calls[0].function.arguments)

        run(test())

    def test_anthropics_client_is_not_told_to_use_a_tool(self) -> None:
        async def test() -> None:
            async with anthropic_client() as (server, client):
                server.runtime.script = self.script
                async with client.messages.stream(
                    model="m", messages=[{"role": "user", "content": "x"}], max_tokens=50, tools=[BASH]
                ) as stream:
                    found = await stream.get_final_message()
                assert found.stop_reason != "tool_use"
                assert [block.type for block in found.content] == ["tool_use", "text"]
                assert found.content[1].text == self.BEGUN
                events = stream_data(
                    await server.post(
                        "/v1/messages",
                        stream=True,
                        messages=[{"role": "user", "content": "x"}],
                        max_tokens=50,
                        tools=[BASH],
                    )
                )
                partial = "".join(event["delta"].get("partial_json", "") for event in events if "delta" in event)
                assert partial == '{"command": "rm'

        run(test())
