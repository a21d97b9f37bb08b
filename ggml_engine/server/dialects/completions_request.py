"""The request of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ggml_engine.server.dialects.chat_request import ResponseFormat, StreamOptions, check_stream_options, schema_of
from ggml_engine.server.dialects.sampling import ChoicesField, OpenCountField, SamplingFields, StopField
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.jobs import MAX_PROMPTS, MAX_TOP_LOGPROBS, CompletionJob, Prompt
from ggml_engine.server.validation import NoEffect, Refused, invalid


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Prompts by what was given for them: a text, token ids, or a list of either."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise invalid("a prompt is a text or a list of token ids, or there is a list of these that is not empty")
    if not isinstance(value[0], (str, list)):
        return (_token_ids(value),)
    if len(value) > MAX_PROMPTS:
        raise invalid(f"at most {MAX_PROMPTS} prompts are possible, {len(value)} were given")
    return tuple(each if isinstance(each, str) else _token_ids(each) for each in value)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise invalid(f"a prompt is a text or a list of token ids that is not empty, one is {value!r:.40}")
    for each in value:
        if type(each) is not int or not 0 <= each < 2**31:
            raise invalid(f"a token id must be an integer of at least 0, one is {each!r:.40}")
    return tuple(value)


class CompletionRequest(SamplingFields):
    """What a client may say. A prompt is a text or token ids; there may be several."""

    model: str | None = None
    prompt: Annotated[Any, AfterValidator(_prompts)]
    max_tokens: OpenCountField = None
    stop: StopField = None
    n: ChoicesField = None
    best_of: int | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    echo: bool | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: NoEffect = None
    suffix: Refused = None

    def job(self, session: str | None) -> CompletionJob:
        """What is asked for. Raises HttpProblem (400) where fields do not go together."""
        n = self.n or 1
        if self.best_of not in (None, n):
            raise HttpProblem(
                400, "unsupported_parameter", f"best_of of {self.best_of} is not supported, only that of n", "best_of"
            )
        if self.echo and self.logprobs is not None:
            raise HttpProblem(
                400,
                "unsupported_parameter",
                "echo beside logprobs is not supported by this server: prompts that are cached have no probabilities",
                "echo",
            )
        check_stream_options(self.stream, self.stream_options)
        prompts: tuple[Prompt, ...] = self.prompt
        if session is not None and len(prompts) > 1:
            raise HttpProblem(400, "invalid_value", "a session goes on with one prompt, not with several", "session_id")
        return CompletionJob(
            model=self.model,
            sampler=self.sampler(schema_of(self.response_format)),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
            n=n,
            logprobs=self.logprobs,
            session=session,
            cache_prompt=self.reads_cache,
            stream=bool(self.stream),
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            prompts=prompts,
            echo=bool(self.echo),
        )
