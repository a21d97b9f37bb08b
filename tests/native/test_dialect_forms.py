"""Forms of answers, from a request to a grammar: the schema compiler is llama-cpp-python's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dialect_fakes import fake_server, run

from ggml_engine.errors import InputError
from ggml_engine.ggml.gbnf import check_grammar
from ggml_engine.ggml.sampler_config import SamplerConfig


def test_schemas_become_grammars_and_bad_ones_are_refused_before_anything_runs() -> None:
    async def test() -> None:
        async with fake_server() as server:
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            await server.chat(response_format=wanted)
            assert "root ::=" in (server.request.config.sampler.grammar or "")
            wanted["json_schema"] = {"name": "x", "schema": {"type": "integer", "minimum": 5}}
            found = await server.chat(response_format=wanted, stream=True)
            assert (found.status_code, found.json()["error"]["param"]) == (400, "response_format")
            assert len(server.runtime.replies) == 1

    run(test())


def checking(
    sampler: Callable[[SamplerConfig], Any], threads: list[threading.Thread]
) -> Callable[[SamplerConfig], Any]:
    """Samplers of a real vocabulary check their grammar; `threads` are those that had it done."""

    def checked(config: SamplerConfig) -> Any:
        threads.append(threading.current_thread())
        check_grammar(config.grammar)  # type: ignore[arg-type]
        return sampler(config)

    return checked


def test_a_pattern_that_is_too_ambiguous_is_refused_before_the_stream_and_beside_the_loop() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^([a-z]*[a-z]*)*$"}},
        "required": ["a"],
    }
    named = {"name": "x", "schema": schema}
    forms = {
        "/v1/chat/completions": ("response_format", {"type": "json_schema", "json_schema": named}),
        "/v1/responses": ("text", {"format": {"type": "json_schema", **named}}),
        "/v1/messages": ("output_config", {"format": {"type": "json_schema", "schema": schema}}),
    }

    async def test() -> None:
        async with fake_server() as server:
            text, threads = server.runtime.runner.text, list[threading.Thread]()
            text.sampler = checking(text.sampler, threads)
            for path, (name, form) in forms.items():
                asked = {"input": "hi"} if "responses" in path else {"messages": [{"role": "user", "content": "hi"}]}
                bound = {"max_tokens": 9} if "messages" in path else {}
                found = await server.post(path, model="m", stream=True, **asked, **bound, **{name: form})
                assert found.status_code == 400, found.text
                message = found.json()["error"]["message"]
                assert message.startswith(name)
                assert "ambiguous" in message
            assert len(threads) == len(forms)
            assert threading.current_thread() not in threads
            assert not server.runtime.replies

    run(test())


def test_tools_whose_grammar_cannot_be_are_named_as_what_is_wrong() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

    async def test() -> None:
        async with fake_server() as server:
            server.runtime.runner.text.sampler_error = InputError("too much of it")
            found = await server.chat(tools=[tool], tool_choice="required", stream=True)
            assert (found.status_code, found.json()["error"]["param"]) == (400, "tools")
            assert found.json()["error"]["message"] == "tools: too much of it"
            assert not server.runtime.replies

    run(test())
