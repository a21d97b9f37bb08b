"""`prepare`: a job's prompts as tokens, and how its answers are generated and read. May take long: not for the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ggml_engine.chat.replies import ReplyParser, ToolFormat, detect_format, prepare_messages
from ggml_engine.chat.template import METADATA_KEY, ChatTemplate
from ggml_engine.chat.text import Segment
from ggml_engine.control.config import GenConfig
from ggml_engine.errors import ContextLengthError, InputError, OptionError
from ggml_engine.ggml.json_schema import schema_to_grammar
from ggml_engine.ggml.sampler_config import SamplerConfig
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.hosted_model import HostedModel
from ggml_engine.server.jobs import ChatJob, CompletionJob, GenerationJob
from ggml_engine.server.prompt_bytes import check_bytes
from ggml_engine.server.retained import Spelling, with_retained
from ggml_engine.server.template_variables import told_variables


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Tokens to go on after; `echo` is text that comes before the answer."""

    tokens: list[int]
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run needs. Choice `i` answers prompt `i // n`.

    `new_parser` makes the reader of one answer, None where it is plain text.
    """

    prompts: tuple[PreparedPrompt, ...]
    n: int
    config: GenConfig
    new_parser: Callable[[], ReplyParser] | None
    parallel_tool_calls: bool = True

    @property
    def n_choices(self) -> int:
        """Answers, of all prompts."""
        return self.n * len(self.prompts)


def prepare(model: HostedModel, job: ChatJob | CompletionJob, partition: str = "") -> Prepared:
    """Render, tokenise and check. Raises HttpProblem, and what the engine raises for bad input.

    A text that goes on in a named session is in the tokens of what is kept of it, in its `partition`.
    """
    _check_biases(model, job.sampler)
    if isinstance(job, CompletionJob):
        return _completion(model, job, partition)
    return _chat(model, job, partition)


def count_prompt(model: HostedModel, job: ChatJob) -> int:
    """How many tokens a chat's prompt has. Raises as `prepare`."""
    return len(_encoded(model, _rendered(model, job)))


def _in_retained_tokens(model: HostedModel, tokens: list[int], job: GenerationJob, partition: str) -> list[int]:
    """The tokens of a text, as its named session has them; where nothing of one is reused, as the text alone has."""
    if job.session is None or not job.cache_prompt:
        return tokens
    spelling = model.fact("spelling", lambda: Spelling(model.engine.vocabulary))
    return with_retained(tokens, model.runtime.retained_tokens(partition, job.session), spelling)


def _completion(model: HostedModel, job: CompletionJob, partition: str) -> Prepared:
    vocabulary = model.engine.vocabulary
    prompts = []
    for prompt in job.prompts:
        if isinstance(prompt, str):
            check_bytes(model, prompt, _limit(model))
            tokens = vocabulary.encode(prompt, add_special=True, parse_special=False).tolist()
            tokens = _in_retained_tokens(model, tokens, job, partition)
            echo = prompt
        else:
            tokens = _checked_ids(vocabulary, prompt)
            echo = vocabulary.decode(tokens) if job.echo else ""
        if not tokens:
            raise HttpProblem(400, "invalid_value", "prompt: there is nothing to go on from, no tokens", "prompt")
        _check_length(model, tokens)
        prompts.append(PreparedPrompt(tokens, echo if job.echo else ""))
    config = _config(model, job, job.sampler, frozenset(), frozenset())
    return Prepared(tuple(prompts), job.n, config, None)


def _checked_ids(vocabulary: Any, prompt: tuple[int, ...]) -> list[int]:
    try:
        tokens: list[int] = vocabulary.check_tokens(prompt).tolist()
    except InputError as error:
        raise HttpProblem(400, "invalid_value", f"prompt: {error}", "prompt") from None
    return tokens


def _chat(model: HostedModel, job: ChatJob, partition: str) -> Prepared:
    segments = _rendered(model, job)
    prompt_end = "".join(text for text, _ in segments)
    check_bytes(model, prompt_end, _limit(model))
    tokens = _in_retained_tokens(model, _encoded(model, segments), job, partition)
    _check_length(model, tokens)
    reply_format = _format(model)
    special = model.engine.vocabulary.special_tokens
    may_call = bool(job.tools) and job.tool_choice.mode != "none"
    sampler = job.sampler
    if job.tool_choice.is_forced:
        try:
            grammar = reply_format.grammar(
                job.tools, job.tool_choice, parallel=job.parallel_tool_calls, prompt_end=prompt_end
            )
        except InputError as error:
            raise HttpProblem(400, "invalid_value", f"tools: {error}", "tools") from None
        sampler = replace(sampler, grammar=grammar)
    elif may_call:
        sampler = _held_once_it_calls(model, job, reply_format, prompt_end)
    shown = reply_format.shown_tokens(special) if may_call else _shown_reasoning(reply_format, special)
    ends = frozenset(special[text] for text in reply_format.end_texts if may_call and text in special)
    config = _config(model, job, sampler, shown, ends, "tools" if job.tool_choice.is_forced else "grammar")

    def new_parser() -> ReplyParser:
        return reply_format.parser(job.tools if may_call else None, prompt_end=prompt_end)

    return Prepared((PreparedPrompt(tokens),), job.n, config, new_parser, job.parallel_tool_calls)


def _held_once_it_calls(model: HostedModel, job: ChatJob, reply_format: ToolFormat, prompt_end: str) -> SamplerConfig:
    """A sampler that is free until the model begins a call, and lets it write nothing but a call from there on."""
    try:
        grammar = reply_format.lazy_grammar(job.tools, parallel=job.parallel_tool_calls, prompt_end=prompt_end)
        sampler = replace(job.sampler, grammar=grammar)
        model.runtime.runner.text.sampler(sampler).close()
    except (InputError, OptionError):  # too many tools, or too large ones: what the model writes is read all the same
        return job.sampler
    return sampler


def _shown_reasoning(reply_format: ToolFormat, special: Mapping[str, int]) -> frozenset[int]:
    return frozenset(special[text] for text in reply_format.reasoning or () if text in special)


# ---- chat templates


def _template(model: HostedModel) -> ChatTemplate:
    if METADATA_KEY not in model.engine.file.metadata:
        raise HttpProblem(
            400,
            "no_chat_template",
            f"the model {model.name!r} has no chat template: give /v1/completions a prompt instead",
            "messages",
        )
    template: ChatTemplate = model.engine.template
    return template


def _format(model: HostedModel) -> ToolFormat:
    vocabulary = model.engine.vocabulary
    return model.fact("format", lambda: detect_format(_template(model).source, vocabulary.special_tokens))


def _rendered(model: HostedModel, job: ChatJob) -> list[Segment]:
    """The prompt as text."""
    template, vocabulary = _template(model), model.engine.vocabulary
    reply_format = _format(model)
    told = told_variables(template, reply_format, job.variables, job.hints)
    try:
        messages, variables = prepare_messages(reply_format, job.messages, job.tools, job.tool_choice)
    except InputError as error:
        raise HttpProblem(400, "invalid_value", str(error), "messages") from None
    segments = template.render_segments(messages, vocabulary.special_tokens, **variables, **told)
    return [*segments, Segment(job.opening, False)] if job.opening else segments


def _encoded(model: HostedModel, segments: list[Segment]) -> list[int]:
    return [int(token) for token in model.engine.vocabulary.encode_segments(segments, add_special=True)]


# ---- how it is generated


def _config(
    model: HostedModel,
    job: GenerationJob,
    sampler: SamplerConfig,
    shown_tokens: frozenset[int],
    stop_tokens: frozenset[int],
    grammar_field: str = "grammar",
) -> GenConfig:
    if sampler.json_schema is not None:
        sampler = replace(sampler, grammar=_grammar_of(sampler.json_schema, job.schema_field), json_schema=None)
        _check_grammar(model, sampler, job.schema_field)
    elif isinstance(sampler.grammar, str):
        _check_grammar(model, sampler, grammar_field)
    return GenConfig(
        max_tokens=job.max_tokens,
        stop=job.stop,
        stop_tokens=stop_tokens,
        ignore_eos=job.ignore_eos,
        sampler=sampler,
        logprobs=job.logprobs,
        shown_tokens=shown_tokens,
    )


def _grammar_of(schema: str | dict[str, Any], field: str) -> str:
    try:
        return schema_to_grammar(schema)
    except InputError as error:
        raise HttpProblem(400, "invalid_value", f"{field}: {error}", field) from None


def _check_grammar(model: HostedModel, sampler: SamplerConfig, field: str) -> None:
    """A grammar that cannot be is said before a stream begins, with the field that it comes from."""
    try:
        model.runtime.runner.text.sampler(sampler).close()
    except (InputError, OptionError) as error:
        raise HttpProblem(400, "invalid_value", f"{field}: {error}", field) from None


def _check_biases(model: HostedModel, sampler: SamplerConfig) -> None:
    n_tokens = model.engine.vocabulary.n_tokens
    for token in sampler.logit_bias:
        if token >= n_tokens:
            raise HttpProblem(
                400,
                "invalid_value",
                f"logit_bias: token id {token} is out of range: the vocabulary has 0 to {n_tokens - 1}",
                "logit_bias",
            )


def _limit(model: HostedModel) -> int:
    """The most tokens that a prompt may ever have."""
    return int(min(model.engine.executor.max_positions, model.runtime.session_limit))


def _check_length(model: HostedModel, tokens: list[int]) -> None:
    limit = _limit(model)
    if len(tokens) > limit:
        raise ContextLengthError(len(tokens), limit)
