"""What coding agents send to `/v1/messages`, by Anthropic's own client where that can: taken as it is meant."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import pytest
from dialect_clients import BASH, TEMPLATE, anthropic_client, prompt_of, thoughtful
from dialect_fakes import fake_server, run

CACHED = {"type": "ephemeral"}
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


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


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_look_for() -> None:
    """They make the conversation shorter then; the type of the error is that of any other bad request."""

    async def test() -> None:
        async with fake_server() as server:
            asked = {"model": "m", "max_tokens": 8}
            for n_words in (1_000, 200_000):
                content = "word " * n_words
                response = await server.post("/v1/messages", messages=[{"role": "user", "content": content}], **asked)
                error = response.json()["error"]
                assert (response.status_code, error["type"]) == (400, "invalid_request_error")
                assert error["message"].startswith("prompt is too long: ")
                if n_words == 1_000:
                    assert re.fullmatch(r"prompt is too long: \d+ tokens > \d+ maximum", error["message"])

    run(test())
