"""Forms of answers, from a request to a grammar: the schema compiler is llama-cpp-python's."""

from __future__ import annotations

from dialect_fakes import fake_server, run


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
