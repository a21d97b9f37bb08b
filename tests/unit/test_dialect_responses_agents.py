"""What coding agents send to `/v1/responses`, by OpenAI's own client: taken as it is meant."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from dialect_clients import openai_client, prompt_of, thoughtful
from dialect_fakes import FakeReply, run

from ggml_engine.control.generation import Reason


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


class TestNamespaces:
    """Functions that stand in a namespace, as OpenAI's agents have them."""

    TOOLS: list[Any] = [  # noqa: RUF012
        {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
        {
            "type": "namespace",
            "name": "agents",
            "description": "Others.",
            "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}],
        },
    ]

    @pytest.mark.parametrize("name", ["shell", "agents.spawn"])
    def test_a_call_has_both_names_and_is_taken_back(self, name: str) -> None:
        namespace, _, inner = name.rpartition(".")
        expected = (inner, namespace or None)

        def call(reply: FakeReply) -> None:
            reply.say('<tool_call>\n{"name": "' + name + '", "arguments": {"a": 1}}\n</tool_call>')
            reply.end(Reason.FINISHED)

        async def test() -> None:
            async with openai_client() as (server, client):
                server.runtime.script = call
                whole = await client.responses.create(input="hi", model="m", tools=self.TOOLS)
                added, done = [], []
                async with client.responses.stream(input="hi", model="m", tools=self.TOOLS) as stream:
                    async for event in stream:
                        if event.type == "response.output_item.added":
                            added.append(event.item)
                        elif event.type == "response.output_item.done":
                            done.append(event.item)
                for (item,) in (whole.output, added, done):
                    assert (item.name, getattr(item, "namespace", None)) == expected
                assert json.loads(whole.output[0].arguments) == {"a": 1}
                assert [tool.type for tool in whole.tools] == ["function", "namespace"]
                assert '"agents.spawn"' in prompt_of(server)

                output = {"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "done"}
                given = [{"role": "user", "content": "hi"}, whole.output[0].to_dict(), output]
                for again in (
                    {"input": given},
                    {"input": [output], "previous_response_id": whole.id},
                ):
                    await client.responses.create(model="m", tools=self.TOOLS, **again)
                    assert prompt_of(server).count(f'"{name}"') >= 2, "where it is described, and where it was called"

        run(test())

    def test_two_of_the_same_name_are_refused_and_what_is_no_function_too(self) -> None:
        twice = {"type": "function", "name": "agents.spawn", "parameters": {"type": "object"}}
        custom = {"type": "namespace", "name": "n", "description": "", "tools": [{"type": "custom", "name": "c"}]}

        async def test() -> None:
            async with openai_client() as (server, client):
                for tools in ([*self.TOOLS, twice], [custom], [{"type": "web_search"}]):
                    with pytest.raises(openai.BadRequestError) as caught:
                        await client.responses.create(input="x", model="m", tools=tools)
                    assert str(caught.value.param).startswith("tools")
                assert caught.value.code == "unsupported_parameter"
                assert not server.runtime.replies

        run(test())
