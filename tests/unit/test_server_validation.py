"""Bodies as models: one fault is enough, however many there are, and it is the caller's own words that name it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ggml_engine.server.dialects.anthropic_request import CountRequest, MessagesRequest
from ggml_engine.server.dialects.chat_request import ChatRequest
from ggml_engine.server.dialects.completions_request import CompletionRequest
from ggml_engine.server.dialects.responses_request import ResponseRequest
from ggml_engine.server.embeddings import Embeddings
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.sessions import Fork, Rewind, Stored
from ggml_engine.server.strict_json import MAX_NAMES, parse_object
from ggml_engine.server.tokens import Detokenize, Tokenize
from ggml_engine.server.validation import validated

DIALECTS: list[type[BaseModel]] = [ChatRequest, CompletionRequest, ResponseRequest, MessagesRequest, CountRequest]
BODIES: list[type[BaseModel]] = [*DIALECTS, Embeddings, Tokenize, Detokenize, Fork, Rewind, Stored]


def lists_of(schema: Any) -> Iterator[dict[str, Any]]:
    """All lists of a core schema whose items are checked."""
    if isinstance(schema, dict):
        if schema.get("type") == "list" and schema.get("items_schema", {}).get("type", "any") != "any":
            yield schema
        for part in schema.values():
            yield from lists_of(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            yield from lists_of(part)


class TestOneFaultIsEnough:
    @pytest.mark.parametrize("kind", BODIES)
    def test_every_list_of_a_body_is_read_up_to_its_first_fault(self, kind: type[BaseModel]) -> None:
        assert all(each.get("fail_fast") for each in lists_of(kind.__pydantic_core_schema__))

    @pytest.mark.parametrize(
        ("kind", "field", "bad"),
        [
            (ChatRequest, "messages", 1),
            (ChatRequest, "messages", {"role": "nobody"}),
            (ChatRequest, "stop", 1),
            (ResponseRequest, "input", {}),
            (MessagesRequest, "messages", {}),
            (Detokenize, "tokens", "1"),
        ],
    )
    def test_a_thousand_faults_are_not_a_thousand_errors(self, kind: type[BaseModel], field: str, bad: Any) -> None:
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({field: [bad] * 1000})
        assert caught.value.error_count() < 10

    def test_parts_of_a_message_are_read_up_to_the_first_fault(self) -> None:
        with pytest.raises(ValidationError) as caught:
            ChatRequest.model_validate({"messages": [{"role": "user", "content": [1] * 1000}] * 2})
        assert caught.value.error_count() < 10

    def test_an_object_has_no_more_names_than_can_be_refused_one_by_one(self) -> None:
        body = {f"f{i}": 1 for i in range(MAX_NAMES)}
        assert len(parse_object(json.dumps(body).encode())) == MAX_NAMES
        with pytest.raises(HttpProblem, match=f"{MAX_NAMES + 1} names, at most {MAX_NAMES}") as caught:
            parse_object(json.dumps({**body, "more": 1}).encode())
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")


class TestEveryEndpointNamesTheField:
    @pytest.mark.parametrize("kind", [Embeddings, Tokenize, Detokenize, Fork, Rewind, Stored])
    def test_a_field_that_there_is_not_is_an_unsupported_parameter(self, kind: type[BaseModel]) -> None:
        with pytest.raises(HttpProblem) as caught:
            validated(kind, {"flavour": 1})
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_parameter", "flavour")

    def test_a_member_of_a_union_is_not_part_of_the_place(self) -> None:
        with pytest.raises(HttpProblem) as caught:
            validated(Embeddings, {"model": "m", "input": 3})
        assert caught.value.param == "input"
