"""Official clients as coding agents use them: calls, results, next turns, streamed, with ever more of the prompt cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from live_server import LiveServer, live_server

SYSTEM = "You are a careful programmer. You can read files and run tests."
ASKED = ("Why do the tests of the parser fail?", "And those of the cache?", "Now run all of them.", "Thank you. Go on.")
READ: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string", "enum": ["library/parser.py", "library/cache.py"]}},
    "required": ["path"],
}
RUN: dict[str, Any] = {"type": "object", "properties": {"all": {"type": "boolean"}}, "required": ["all"]}
FUNCTIONS = {"read_file": ("Read a file.", READ), "run_tests": ("Run tests.", RUN)}
FOUND = (
    'def load(lines):\n    """Naïve: <tool_call> and <|im_end|> stay text."""\n    return [line for line in lines]\n'
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(models=["smol=smollm2"], ctx=8192, threads=1, prefix_checkpoint_prompt_end="every") as server:
        yield server


class Counts:
    """Of turns so far: prompts grow, and so does what is cached of each."""

    def __init__(self) -> None:
        self.prompt = 0
        self.cached = -1

    def add(self, prompt: int, cached: int) -> None:
        assert prompt > self.prompt
        assert self.cached < cached < prompt
        assert cached >= self.prompt - 1, "the prompt of the turn before was not found"
        self.prompt, self.cached = prompt, cached


def accumulated(stream: Any) -> tuple[dict[str, Any], str | None, Any]:
    """The message of a stream's chunks, why it ended, and its counts."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    reason, usage = None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(piece.index, {"id": piece.id, "type": "function"})
                function = call.setdefault("function", {"name": piece.function.name, "arguments": ""})
                function["arguments"] += piece.function.arguments
    return {**message, "tool_calls": [*calls.values()]} if calls else message, reason, usage


@pytest.mark.parametrize("named", [{}, {"X-Session-ID": "openai"}], ids=["anonymous", "named"])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_openais_client_calls_and_goes_on_with_results(server: LiveServer, named: Any, choice: Any) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}
        for name, (what, parameters) in FUNCTIONS.items()
    ]
    counts = Counts()
    messages: list[Any] = [{"role": "system", "content": f"{SYSTEM} {choice} {named}"}]
    named = {key: f"{value}-{choice}" for key, value in named.items()}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        for turn, asked in enumerate(ASKED):
            messages.append({"role": "user", "content": asked})
            stream = client.chat.completions.create(
                model="smol",
                messages=messages,
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=choice == "auto",
                temperature=0,
                seed=turn,
                max_tokens=60,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers=named,
            )
            message, reason, usage = accumulated(stream)
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            counts.add(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0)
            calls = message.get("tool_calls", [])
            if choice == "required":
                assert (len(calls), reason, message["content"]) == (1, "tool_calls", "")
            messages.append(message)
            for call in calls:
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": FOUND})


@pytest.mark.parametrize("named", [{}, {"X-Session-ID": "anthropic"}], ids=["anonymous", "named"])
@pytest.mark.parametrize("choice", ["any", "auto"])
def test_anthropics_client_calls_and_goes_on_with_results(server: LiveServer, named: Any, choice: Any) -> None:
    tools: Any = [
        {"name": name, "description": what, "input_schema": schema} for name, (what, schema) in FUNCTIONS.items()
    ]
    counts = Counts()
    system = f"{SYSTEM} {choice} {named} (Anthropic)"
    named = {key: f"{value}-{choice}" for key, value in named.items()}
    messages: list[Any] = []
    results: list[Any] = []
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as client:
        for asked in ASKED:
            messages.append({"role": "user", "content": [*results, {"type": "text", "text": asked}]})
            with client.messages.stream(
                model="smol",
                system=system,
                messages=messages,
                tools=tools,
                tool_choice={"type": choice, "disable_parallel_tool_use": choice == "any"},
                max_tokens=60,
                extra_body={"temperature": 0},
                extra_headers=named,
            ) as stream:
                found = stream.get_final_message()
            usage = found.usage
            cached = usage.cache_read_input_tokens or 0
            counts.add(usage.input_tokens + cached, cached)
            calls = [block for block in found.content if block.type == "tool_use"]
            if choice == "any":
                assert (len(calls), len(found.content), found.stop_reason) == (1, 1, "tool_use")
            messages.append({"role": "assistant", "content": [block.to_dict() for block in found.content]})
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": FOUND} for call in calls]
