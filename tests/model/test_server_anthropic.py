"""The official client of Anthropic against a server on a socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from live_server import LiveServer, live_server
from pydantic import BaseModel

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": "smol", "extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
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
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


class TestMessages:
    def test_a_stream_says_what_the_whole_answer_says_and_counts_what_was_cached(
        self, client: anthropic.Anthropic
    ) -> None:
        whole = client.messages.create(messages=QUESTION, max_tokens=3, system="Be brief.", **GREEDY)
        assert whole.content[0].type == "text"
        assert whole.stop_reason == "max_tokens"
        assert (whole._request_id or "").startswith("req_")
        with client.messages.stream(messages=QUESTION, max_tokens=3, system="Be brief.", **GREEDY) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole.content[0].text
        assert final.stop_reason == "max_tokens"
        n_prompt = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (1, n_prompt - 1)
        assert final.usage.output_tokens == 3
        counted = client.messages.count_tokens(messages=QUESTION, system="Be brief.", model="smol")
        assert counted.input_tokens == n_prompt

    def test_a_stop_sequence_is_named(self, client: anthropic.Anthropic) -> None:
        whole = client.messages.create(messages=QUESTION, max_tokens=12, **GREEDY).content[0]
        assert whole.type == "text"
        stop = whole.text[4:7]
        found = client.messages.create(messages=QUESTION, max_tokens=12, stop_sequences=["zzz", stop], **GREEDY)
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)

    def test_an_answer_goes_on_from_what_it_is_given(self, client: anthropic.Anthropic) -> None:
        messages = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
        found = client.messages.create(messages=messages, max_tokens=3, **GREEDY).content[0]
        assert found.type == "text"
        assert "Paris" in found.text

    def test_a_schema_is_obeyed(self, client: anthropic.Anthropic) -> None:
        asked: list[Any] = [{"role": "user", "content": "Paris"}]
        found = client.messages.parse(messages=asked, output_format=City, max_tokens=60, **GREEDY)
        assert isinstance(found.parsed_output, City)
        with client.messages.stream(messages=asked, output_format=City, max_tokens=60, **GREEDY) as stream:
            assert stream.get_final_message().parsed_output == found.parsed_output

    def test_what_an_agent_sends_changes_nothing_here(self, client: anthropic.Anthropic) -> None:
        plain = client.messages.create(messages=QUESTION, max_tokens=6, **GREEDY).content[0]
        assert plain.type == "text"
        marked: list[Any] = [{"type": "text", "text": QUESTION[0]["content"], "cache_control": {"type": "ephemeral"}}]
        found = client.beta.messages.create(
            messages=[{"role": "user", "content": marked}],
            max_tokens=6,
            thinking={"type": "adaptive"},
            output_config={"effort": "high"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            metadata={"user_id": "u"},
            betas=["context-management-2025-06-27"],
            **GREEDY,
        ).content[0]
        assert found.type == "text"
        assert found.text == plain.text

    def test_a_call_that_is_required_is_made_and_its_result_is_taken(self, client: anthropic.Anthropic) -> None:
        asked: list[Any] = [{"role": "user", "content": "The weather in Oslo?"}]
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        with client.messages.stream(
            messages=asked, tools=[WEATHER], tool_choice=choice, max_tokens=80, **GREEDY
        ) as stream:
            found = stream.get_final_message()
        (block,) = found.content
        assert found.stop_reason == "tool_use"
        assert block.type == "tool_use"
        assert block.name == "get_weather"
        assert isinstance(block.input, dict)
        assert block.input["city"] in ("Oslo", "Paris")
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
        messages = [*asked, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
        answer = client.messages.create(
            messages=messages, tools=[WEATHER], tool_choice={"type": "none"}, max_tokens=5, **GREEDY
        )
        assert answer.content
        assert answer.content[0].type == "text"

    def test_errors_are_the_clients_own(self, client: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.BadRequestError, match="flavour"):
            client.messages.create(messages=QUESTION, max_tokens=5, model="smol", extra_body={"flavour": "vanilla"})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(messages=QUESTION, max_tokens=5, model="another")
        source: Any = {"type": "url", "url": "http://127.0.0.1:9/x.png"}
        picture: Any = {"type": "image", "source": source}
        with pytest.raises(anthropic.BadRequestError, match="text alone"):
            client.messages.create(messages=[{"role": "user", "content": [picture]}], max_tokens=5, **GREEDY)
