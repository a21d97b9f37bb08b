"""What programs send to the server by default, by the official clients where these can: taken as it is meant.

Coding agents are in `test_dialect_anthropic_agents.py` and `test_dialect_responses_agents.py`.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from dialect_clients import BASH, anthropic_client, openai_client, prompt_of
from dialect_fakes import FakeReply, fake_server, run, stream_data

from ggml_engine.control.generation import Reason


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
                for name, value in (("id_slot", 2), ("reasoning_format", "none")):
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
