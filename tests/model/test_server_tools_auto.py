"""A model that may call a tool, and has a template without a place for tools, writes text or a whole call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer, live_server

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {what} of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
    for name, what in (("get_weather", "weather"), ("get_time", "time"))
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(models=["smol=smollm2"], ctx=4096, threads=1) as server:
        yield server


def ask(server: LiveServer, begin: int, text: str, **options: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return client.chat.completions.create(
            model="smol",
            messages=[{"role": "user", "content": text}],
            tools=TOOLS,
            temperature=1.0,
            n=4,
            seed=begin,
            **options,
        ).choices


def test_twenty_seeds_give_text_or_whole_calls(server: LiveServer) -> None:
    """A bias makes the model begin a call about as often as not; what it writes then is its own."""
    vocabulary = server.host.loaded()[0].engine.vocabulary
    begin = vocabulary.encode("<tool_call>", add_special=False, parse_special=False).tolist()
    bias = {str(begin[0]): 12.0, **{str(token): 9.0 for token in begin[1:]}}
    n_calls = 0
    for seed in range(5):
        # twice: as the model likes, and where it is pushed towards a mark
        for found in (
            *ask(server, 10 * seed, "What is the weather in Oslo?", max_tokens=48),
            *ask(server, 10 * seed, "What is the weather in Oslo?", max_tokens=120, extra_body={"logit_bias": bias}),
        ):
            content = found.message.content or ""
            if found.finish_reason != "length":
                assert "<tool_call>" not in content, content
            for call in found.message.tool_calls or []:
                n_calls += 1
                assert call.function.name in ("get_weather", "get_time")
                arguments = json.loads(call.function.arguments)
                assert arguments["city"] in ("Oslo", "Paris")
                assert type(arguments.get("days", 1)) is int
    assert n_calls > 0
