"""Requests of the four dialects: what is taken, what is refused by name, and the job that they come to."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from ggml_engine.chat.tools import ToolChoice
from ggml_engine.ggml.sampler_config import SamplerConfig
from ggml_engine.server.dialects.anthropic_request import CountRequest, MessagesRequest
from ggml_engine.server.dialects.chat_request import ChatRequest
from ggml_engine.server.dialects.completions_request import CompletionRequest
from ggml_engine.server.dialects.responses_request import ResponseRequest
from ggml_engine.server.dialects.sampling import SAMPLER_FIELDS, SamplingFields, session_of
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.jobs import ChatJob, CompletionJob
from ggml_engine.server.validation import validated

HELLO = [{"role": "user", "content": "hello"}]
BASES: dict[type, dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": HELLO},
    CompletionRequest: {"model": "m", "prompt": "hello"},
    ResponseRequest: {"model": "m", "input": "hello"},
    MessagesRequest: {"model": "m", "messages": HELLO, "max_tokens": 8},
    CountRequest: {"model": "m", "messages": HELLO},
}
GENERATING = [kind for kind in BASES if kind is not CountRequest]
FUNCTION = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}


def job(kind: type, **fields: Any) -> Any:
    request = validated(kind, {**BASES[kind], **fields})
    return request.job() if kind is CountRequest else request.job(None)


def refused(kind: type, **fields: Any) -> HttpProblem:
    with pytest.raises(HttpProblem) as caught:
        job(kind, **fields)
    assert caught.value.status == 400
    return caught.value


class TestUnknownAndUnsupported:
    @pytest.mark.parametrize("kind", BASES)
    def test_an_unknown_field_is_refused_by_name(self, kind: type) -> None:
        problem = refused(kind, flavour="vanilla")
        assert (problem.code, problem.param) == ("unsupported_parameter", "flavour")
        assert "flavour" in problem.message

    def test_an_unknown_field_deep_inside_is_refused_with_its_place(self) -> None:
        problem = refused(ChatRequest, messages=[{"role": "user", "content": "x", "weight": 1}])
        assert (problem.code, problem.param) == ("unsupported_parameter", "messages[0].weight")

    @pytest.mark.parametrize(
        ("kind", "field", "value"),
        [
            (ChatRequest, "audio", {"voice": "x"}),
            (ChatRequest, "web_search_options", {}),
            (ChatRequest, "functions", [FUNCTION]),
            (ChatRequest, "function_call", "auto"),
            (ChatRequest, "chat_template", "{{ messages }}"),
            (ChatRequest, "store", True),
            (ChatRequest, "service_tier", "priority"),
            (ChatRequest, "modalities", ["text", "audio"]),
            (ChatRequest, "verbosity", "high"),
            (ChatRequest, "moderation", {"model": "x"}),
            (CompletionRequest, "suffix", "x"),
            (CompletionRequest, "best_of", 3),
            (ResponseRequest, "background", True),
            (ResponseRequest, "conversation", "conv_1"),
            (ResponseRequest, "prompt", {"id": "x"}),
            (ResponseRequest, "truncation", "auto"),
            (ResponseRequest, "max_tool_calls", 3),
            (ResponseRequest, "include", ["file_search_call.results"]),
            (ResponseRequest, "chat_template", "x"),
            (MessagesRequest, "container", "x"),
            (MessagesRequest, "mcp_servers", []),
            (MessagesRequest, "diagnostics", {}),
            (MessagesRequest, "speed", "fast"),
        ],
    )
    def test_what_the_api_has_and_this_server_does_not_is_refused_by_name(
        self, kind: type, field: str, value: object
    ) -> None:
        problem = refused(kind, **{field: value})
        assert (problem.code, problem.param) == ("unsupported_parameter", field)
        assert field in problem.message

    @pytest.mark.parametrize(
        ("kind", "fields"),
        [
            (
                ChatRequest,
                {
                    "user": "u",
                    "metadata": {"a": "b"},
                    "store": False,
                    "service_tier": "auto",
                    "parallel_tool_calls": True,
                    "modalities": ["text"],
                    "verbosity": "medium",
                    "prompt_cache_key": "k",
                    "safety_identifier": "s",
                    "audio": None,
                    "functions": None,
                },
            ),
            (CompletionRequest, {"user": "u", "best_of": 1, "suffix": None}),
            (ResponseRequest, {"user": "u", "truncation": "disabled", "service_tier": "auto", "background": False}),
            (MessagesRequest, {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "x"}}),
        ],
    )
    def test_what_clients_send_without_meaning_anything_is_taken(self, kind: type, fields: dict[str, Any]) -> None:
        assert job(kind, **fields) == job(kind)

    @pytest.mark.parametrize(
        ("kind", "content"),
        [
            (ChatRequest, [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]),
            (ChatRequest, [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]),
            (ChatRequest, [{"type": "file", "file": {"file_id": "x"}}]),
            (MessagesRequest, [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}]),
            (MessagesRequest, [{"type": "document", "source": {"type": "text", "data": "x"}}]),
        ],
    )
    def test_pictures_sounds_and_files_are_refused_with_their_place(self, kind: type, content: list[Any]) -> None:
        problem = refused(kind, messages=[{"role": "user", "content": content}])
        assert problem.code == "unsupported_parameter"
        assert problem.param is not None
        assert problem.param.startswith("messages[0].content[0]")
        assert "text alone" in problem.message

    def test_tools_that_are_no_functions_are_refused(self) -> None:
        assert refused(ChatRequest, tools=[{"type": "custom", "custom": {"name": "x"}}]).code == "unsupported_parameter"
        assert refused(ResponseRequest, tools=[{"type": "web_search"}]).code == "unsupported_parameter"
        assert refused(MessagesRequest, tools=[{"type": "bash_20250124", "name": "bash"}]).param == "tools[0].type"

    def test_echo_beside_logprobs_is_refused(self) -> None:
        assert refused(CompletionRequest, echo=True, logprobs=1).param == "echo"

    def test_template_flags_are_taken_where_they_are_known_and_plain(self) -> None:
        assert job(ChatRequest, chat_template_kwargs={"enable_thinking": False}).variables == {"enable_thinking": False}
        given = {"enable_thinking": True, "thinking_budget": 512, "date_string": "1 May", "level": 0.5, "none": None}
        plain = {name: value for name, value in given.items() if value is not None}
        assert job(ChatRequest, chat_template_kwargs=given).variables == plain
        for value in ([], {}, ["a"], {"a": 1}):
            problem = refused(ChatRequest, chat_template_kwargs={"xml_tools": value})
            assert (problem.code, problem.param) == ("unsupported_parameter", "chat_template_kwargs")
            assert "xml_tools" in problem.message
        for name, value in (("enable_thinking", "no"), ("a", "x" * 1025), ("a", 2**53 + 1), ("a", float("nan"))):
            assert refused(ChatRequest, chat_template_kwargs={name: value}).code == "invalid_value"
        assert refused(ChatRequest, chat_template_kwargs={f"a{i}": 1 for i in range(17)}).code == "invalid_value"


class TestValues:
    @pytest.mark.parametrize("kind", BASES)
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", float("nan")),
            ("temperature", float("inf")),
            ("temperature", -1),
            ("temperature", "1"),
            ("temperature", True),
            ("top_p", 1.5),
            ("top_k", -1),
            ("top_k", 1.5),
            ("min_p", 2),
            ("repeat_penalty", 1e308),
            ("presence_penalty", 1e6),
            ("seed", 2**64),
            ("seed", -2),
            ("seed", 1.0),
            ("mirostat", 3),
            ("logit_bias", {"-1": 1}),
            ("logit_bias", {"01": 1}),
            ("logit_bias", {"1": 101}),
            ("logit_bias", {"1": "1"}),
            ("logit_bias", {"a": 1}),
            ("session_id", "a/b"),
            ("session_id", ""),
            ("session_id", ".a"),
            ("grammar", ""),
        ],
    )
    def test_what_cannot_be_is_refused_and_named(self, kind: type, field: str, value: object) -> None:
        problem = refused(kind, **{field: value})
        assert problem.code == "invalid_value"
        assert problem.param is not None
        assert problem.param.partition(".")[0] == field
        assert field in problem.message

    @pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
    @pytest.mark.parametrize("value", [0, 129, 10**30, True, 1.0, "1"])
    def test_the_number_of_choices_is_bounded(self, kind: type, value: object) -> None:
        assert refused(kind, n=value).param == "n"

    @pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
    def test_as_many_choices_as_the_bound_are_taken(self, kind: type) -> None:
        assert [job(kind, n=n).n for n in (1, 128, None)] == [1, 128, 1]

    @pytest.mark.parametrize(
        ("kind", "field", "beside"),
        [
            (ChatRequest, "top_logprobs", {"logprobs": True}),
            (CompletionRequest, "logprobs", {}),
            (ResponseRequest, "top_logprobs", {}),
        ],
    )
    def test_the_number_of_probabilities_is_bounded(self, kind: type, field: str, beside: dict[str, Any]) -> None:
        assert [job(kind, **beside, **{field: n}).logprobs for n in (0, 20)] == [0, 20]
        for value in (21, -1, 10**30, True, 1.0, "1"):
            problem = refused(kind, **beside, **{field: value})
            assert (problem.code, problem.param) == ("invalid_value", field)
            assert field in problem.message

    @pytest.mark.parametrize("n", [None, 1, 2])
    def test_the_best_of_more_than_are_shown_is_refused(self, n: int | None) -> None:
        given = {} if n is None else {"n": n}
        assert job(CompletionRequest, best_of=n or 1, **given).n == (n or 1)
        for value in (0, -1, (n or 1) + 1, 129, 10**30):
            problem = refused(CompletionRequest, best_of=value, **given)
            assert (problem.code, problem.param) == ("unsupported_parameter", "best_of")
            assert str(value) in problem.message
        for wrong in (True, 1.0, "1", []):
            assert refused(CompletionRequest, best_of=wrong, **given).code == "invalid_value"

    @pytest.mark.parametrize(
        ("kind", "field"),
        [
            (ChatRequest, "best_of"),
            *((kind, field) for kind in (ResponseRequest, MessagesRequest) for field in ("n", "best_of", "logprobs")),
            (MessagesRequest, "top_logprobs"),
            (MessagesRequest, "stop"),
            (CountRequest, "stop"),
        ],
    )
    def test_where_a_field_does_not_exist_it_is_refused_by_name(self, kind: type, field: str) -> None:
        problem = refused(kind, **{field: 1})
        assert (problem.code, problem.param) == ("unsupported_parameter", field)

    @pytest.mark.parametrize("kind", GENERATING)
    def test_the_number_of_tokens_is_at_least_one(self, kind: type) -> None:
        field = "max_output_tokens" if kind is ResponseRequest else "max_tokens"
        assert refused(kind, **{field: 0}).param == field
        assert refused(kind, **{field: 2**31}).param == field
        assert job(kind, **{field: 5}).max_tokens == 5

    @pytest.mark.parametrize("kind", GENERATING)
    def test_stop_strings_are_bounded_in_number_and_bytes(self, kind: type) -> None:
        field = "stop_sequences" if kind is MessagesRequest else "stop"
        assert job(kind, **{field: ["a", "é" * 128]}).stop == ("a", "é" * 128)
        assert len(job(kind, **{field: ["x"] * 16}).stop) == 16
        for value in ([""], ["x" * 257], ["é" * 129], ["x"] * 17, [5], 5):
            problem = refused(kind, **{field: value})
            assert problem.param is not None
            assert problem.param.startswith(field)

    @pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponseRequest])
    def test_one_stop_string_may_be_given_as_it_is(self, kind: type) -> None:
        assert job(kind, stop="END").stop == ("END",)

    @pytest.mark.parametrize("kind", BASES)
    def test_every_option_of_the_sampler_reaches_it(self, kind: type) -> None:
        given: dict[str, Any] = {
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 5,
            "min_p": 0.5,
            "typical_p": 0.5,
            "repeat_penalty": 1.5,
            "repeat_last_n": 5,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "dry_multiplier": 0.5,
            "dry_base": 1.5,
            "dry_allowed_length": 5,
            "dry_penalty_last_n": 5,
            "dry_sequence_breakers": ["x"],
            "xtc_probability": 0.5,
            "xtc_threshold": 0.5,
            "mirostat": 1,
            "mirostat_tau": 0.5,
            "mirostat_eta": 0.5,
            "top_n_sigma": 0.5,
            "dynatemp_range": 0.5,
            "dynatemp_exponent": 0.5,
            "seed": 5,
            "logit_bias": {"5": -100},
            "grammar": 'root ::= "x"',
        }
        assert set(given) == SAMPLER_FIELDS - {"json_schema"}
        expected = {**given, "logit_bias": {5: -100.0}, "dry_sequence_breakers": ("x",)}
        assert job(kind, **given).sampler == SamplerConfig(**expected)

    def test_what_is_left_out_or_null_is_the_engines_default(self) -> None:
        assert job(ChatRequest).sampler == SamplerConfig()
        assert job(ChatRequest, **dict.fromkeys(SAMPLER_FIELDS & set(SamplingFields.model_fields))) == job(ChatRequest)

    @pytest.mark.parametrize(
        "prompt",
        [[], [[]], [1, True], [1.0], [-1], [2**31], [1, "a"], ["a", 1], [[1], ["a"]], [None], {}, 5, None, ["a"] * 33],
    )
    def test_token_ids_are_integers_and_prompts_are_few(self, prompt: object) -> None:
        problem = refused(CompletionRequest, prompt=prompt)
        assert (problem.code, problem.param) == ("invalid_value", "prompt")

    def test_prompts_are_texts_or_token_ids_or_several_of_them(self) -> None:
        assert job(CompletionRequest, prompt=[1, 2]).prompts == ((1, 2),)
        assert job(CompletionRequest, prompt=[[1, 2], [3]]).prompts == ((1, 2), (3,))
        assert job(CompletionRequest, prompt=["a", "b"]).prompts == ("a", "b")
        assert isinstance(job(CompletionRequest, n=2, best_of=2, echo=True), CompletionJob)

    def test_a_missing_field_is_named(self) -> None:
        with pytest.raises(HttpProblem, match="messages is required") as caught:
            validated(ChatRequest, {"model": "m"})
        assert caught.value.param == "messages"

    def test_two_bounds_that_differ_are_refused(self) -> None:
        assert job(ChatRequest, max_tokens=5, max_completion_tokens=5).max_tokens == 5
        assert job(ChatRequest, max_completion_tokens=6).max_tokens == 6
        assert refused(ChatRequest, max_tokens=5, max_completion_tokens=6).param == "max_tokens"

    def test_options_of_a_stream_need_one(self) -> None:
        assert refused(ChatRequest, stream_options={"include_usage": True}).param == "stream_options"
        assert job(ChatRequest, stream=True, stream_options={"include_usage": True}).include_usage

    def test_probabilities_are_asked_for_in_each_dialects_way(self) -> None:
        assert job(ChatRequest).logprobs is None
        assert job(ChatRequest, logprobs=True).logprobs == 0
        assert job(ChatRequest, logprobs=True, top_logprobs=20).logprobs == 20
        assert refused(ChatRequest, logprobs=True, top_logprobs=21).param == "top_logprobs"
        assert refused(ChatRequest, top_logprobs=2).param == "top_logprobs"
        assert job(CompletionRequest, logprobs=3).logprobs == 3
        assert job(ResponseRequest, include=["message.output_text.logprobs"]).logprobs == 0
        assert job(ResponseRequest, top_logprobs=2).logprobs == 2


class TestSessions:
    def test_the_header_and_the_field_name_a_session_and_have_to_agree(self) -> None:
        assert session_of(None, {}) is None
        assert session_of("a", {}) == "a"
        assert session_of(None, {"X-Session-ID": "b"}) == "b"
        assert session_of("a", {"X-Session-ID": "a"}) == "a"
        with pytest.raises(HttpProblem, match="differ"):
            session_of("a", {"X-Session-ID": "b"})
        with pytest.raises(HttpProblem, match="X-Session-ID"):
            session_of(None, {"X-Session-ID": "a b"})

    def test_several_prompts_cannot_go_on_with_one_session(self) -> None:
        request = validated(CompletionRequest, {**BASES[CompletionRequest], "prompt": ["a", "b"]})
        with pytest.raises(HttpProblem, match="one prompt"):
            request.job("s")


class TestTools:
    def test_tools_and_the_choice_among_them_reach_the_job(self) -> None:
        expected = (TOOL,)
        named = {"type": "function", "function": {"name": "weather"}}
        for choice, wanted in (
            (None, ToolChoice("auto")),
            ("none", ToolChoice("none")),
            ("required", ToolChoice("required")),
            (named, ToolChoice("required", "weather")),
        ):
            made = job(ChatRequest, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
            assert (made.tools, made.tool_choice, made.parallel_tool_calls) == (expected, wanted, False)
        flat = {"type": "function", **FUNCTION}
        made = job(ResponseRequest, tools=[flat], tool_choice={"type": "function", "name": "weather"})
        assert (made.tools, made.tool_choice) == (expected, ToolChoice("required", "weather"))
        claude = {"name": "weather", "description": "d", "input_schema": FUNCTION["parameters"]}
        for given, wanted in (
            ({"type": "auto"}, ToolChoice("auto")),
            ({"type": "any"}, ToolChoice("required")),
            ({"type": "none"}, ToolChoice("none")),
            ({"type": "tool", "name": "weather"}, ToolChoice("required", "weather")),
        ):
            made = job(MessagesRequest, tools=[claude], tool_choice=given)
            assert (made.tools, made.tool_choice) == (expected, wanted)
        assert not job(
            MessagesRequest, tools=[claude], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        ).parallel_tool_calls

    def test_a_choice_that_cannot_be_made_is_refused(self) -> None:
        named = {"type": "function", "function": {"name": "other"}}
        assert refused(ChatRequest, tools=[TOOL], tool_choice=named).param == "tool_choice"
        assert refused(ChatRequest, tool_choice="required").param == "tool_choice"
        assert refused(ChatRequest, tools=[TOOL, TOOL]).param == "tools"
        assert refused(ChatRequest, tools=[{"type": "function", "function": {"name": "a b"}}]).param is not None

    @pytest.mark.parametrize("fields", [{"grammar": 'root ::= "x"'}, {"response_format": {"type": "json_object"}}])
    def test_a_grammar_beside_tools_is_refused_unless_none_may_be_called(self, fields: dict[str, Any]) -> None:
        assert refused(ChatRequest, tools=[TOOL], **fields).code == "unsupported_parameter"
        assert job(ChatRequest, tools=[TOOL], tool_choice="none", **fields).tools

    def test_formats_of_answers_become_schemas(self) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        chat = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        assert job(ChatRequest, response_format=chat).sampler.json_schema == schema
        assert job(ChatRequest, response_format={"type": "json_object"}).sampler.json_schema == {"type": "object"}
        assert job(ChatRequest, response_format={"type": "text"}).sampler.json_schema is None
        flat = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        assert job(ResponseRequest, text=flat).sampler.json_schema == schema
        claude = {"format": {"type": "json_schema", "schema": schema}}
        assert job(MessagesRequest, output_config=claude).sampler.json_schema == schema
        assert refused(ChatRequest, response_format=chat, grammar='root ::= "x"').code == "invalid_value"

    @pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
    def test_an_object_may_have_a_schema_beside_its_type(self, kind: type) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        wanted = {"type": "json_object", "schema": schema}
        assert job(kind, response_format=wanted).sampler.json_schema == schema
        problem = refused(kind, response_format={"type": "json_object", "schema": 123})
        assert (problem.code, problem.param) == ("invalid_value", "response_format.schema")


class TestMessages:
    CALL: ClassVar = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}

    def test_a_conversation_with_calls_is_the_same_in_three_dialects(self) -> None:
        chat = job(
            ChatRequest,
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": None, "tool_calls": [self.CALL], "reasoning_content": "hm"},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                {"role": "user", "content": "and now?"},
            ],
        )
        response = job(
            ResponseRequest,
            instructions="be\nbrief",
            input=[
                {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "rain"},
                {"type": "message", "role": "user", "content": "and now?"},
            ],
        )
        claude = job(
            MessagesRequest,
            system=[{"type": "text", "text": "be"}, {"type": "text", "text": "brief", "cache_control": {}}],
            messages=[
                {"role": "user", "content": "weather?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
                        {"type": "text", "text": "and now?"},
                    ],
                },
            ],
        )
        assert chat.messages[0] == {"role": "system", "content": "be\nbrief"}
        assert chat.messages[2]["tool_calls"] == [self.CALL]
        assert chat.messages[2]["reasoning_content"] == "hm"
        assert chat.messages == response.messages == claude.messages

    def test_the_answer_of_an_assistant_after_its_reasoning_is_one_message(self) -> None:
        made = job(
            ResponseRequest,
            input=[
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]},
                {"role": "user", "content": "more"},
            ],
        )
        assert made.messages[1] == {"role": "assistant", "content": "hello", "reasoning_content": "hm"}
        assert len(made.messages) == 3

    def test_anthropics_last_message_of_an_assistant_is_what_the_answer_begins_with(self) -> None:
        made = job(MessagesRequest, messages=[*HELLO, {"role": "assistant", "content": "I say "}])
        assert isinstance(made, ChatJob)
        assert made.opening == "I say"
        assert [each["role"] for each in made.messages] == ["user"]

    def test_an_error_of_a_tool_says_so(self) -> None:
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True}
        made = job(MessagesRequest, messages=[{"role": "user", "content": [result]}])
        assert made.messages == ({"role": "tool", "content": "Error: no", "tool_call_id": "c1"},)

    def test_a_role_that_there_is_not_is_refused(self) -> None:
        assert refused(ChatRequest, messages=[{"role": "robot", "content": "x"}]).param == "messages[0]"
        assert refused(MessagesRequest, messages=[{"role": "tool", "content": "x"}]).param == "messages[0].role"
        blocks = [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
        assert refused(MessagesRequest, messages=[{"role": "user", "content": blocks}]).param == "messages"

    def test_effort_and_thinking_reach_the_template(self) -> None:
        efforts = ("minimal", "low", "medium", "high", "xhigh", "max")
        for effort in efforts:
            for made in (job(ChatRequest, reasoning_effort=effort), job(ResponseRequest, reasoning={"effort": effort})):
                assert (made.variables, made.hints) == ({}, {"reasoning_effort": effort, "enable_thinking": True})
        for made in (job(ChatRequest, reasoning_effort="none"), job(ResponseRequest, reasoning={"effort": "none"})):
            assert (made.variables, made.hints) == ({"enable_thinking": False}, {})
        assert refused(ChatRequest, reasoning_effort="utmost").param == "reasoning_effort"
        for effort in efforts[1:]:
            made = job(MessagesRequest, output_config={"effort": effort})
            assert (made.variables, made.hints) == ({}, {"reasoning_effort": effort})
        assert refused(MessagesRequest, output_config={"effort": "minimal"}).param == "output_config.effort"
        made = job(MessagesRequest, thinking={"type": "disabled"})
        assert (made.variables, made.hints) == ({"enable_thinking": False}, {})
        for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive", "display": "omitted"}):
            made = job(MessagesRequest, thinking=thinking)
            assert (made.variables, made.hints) == ({}, {"enable_thinking": True})
        assert refused(MessagesRequest, thinking={"type": "between_tools"}).code == "unsupported_parameter"
