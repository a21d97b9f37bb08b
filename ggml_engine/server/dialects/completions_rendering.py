"""Answers of /v1/completions, whole and as chunks."""

from __future__ import annotations

from typing import Any

from ggml_engine.chat.replies import ContentPart
from ggml_engine.server.dialects.chat_rendering import FINISH_REASONS
from ggml_engine.server.dialects.rendering import Frame, Head, openai_usage
from ggml_engine.server.events import Answer, Ended, Event, Finished, Said, TokenProbability
from ggml_engine.server.jobs import CompletionJob


def render_completion(head: Head, job: CompletionJob, answer: Answer) -> dict[str, Any]:
    """The whole answer: `n` choices for the first prompt, then those of the next."""
    choices = []
    for index, choice in enumerate(answer.choices):
        logprobs = None if job.logprobs is None else _logprobs(choice.logprobs, 0)
        reason = FINISH_REASONS[choice.reason]
        choices.append({"index": index, "text": choice.content, "logprobs": logprobs, "finish_reason": reason})
    return {**_fields(head), "choices": choices, "usage": openai_usage(answer.usage)}


class CompletionStream:
    """Chunks of one answer; the last of each choice says why it ended, and at last come the counts if asked."""

    def __init__(self, head: Head, job: CompletionJob) -> None:
        self._head = head
        self._job = job
        self._n_chars: dict[int, int] = {}

    def frames(self, event: Event) -> list[Frame]:
        """The chunks of an event."""
        match event:
            case Said(index=index, part=part, logprobs=logprobs):
                offset = self._n_chars.get(index, 0)
                text = part.text if isinstance(part, ContentPart) else ""
                self._n_chars[index] = offset + len(text)
                return [self._chunk(index, text, _logprobs(logprobs, offset) if logprobs else None, None)]
            case Ended(index=index, reason=reason):
                return [self._chunk(index, "", None, FINISH_REASONS[reason])]
            case Finished(usage=usage) if self._job.include_usage:
                return [(None, {**_fields(self._head), "choices": [], "usage": openai_usage(usage)})]
        return []

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> Frame:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self._job.include_usage else {}
        return None, {**_fields(self._head), "choices": [choice], **usage}


def _fields(head: Head) -> dict[str, Any]:
    return head.openai_fields("text_completion")


def _logprobs(probabilities: list[TokenProbability] | tuple[TokenProbability, ...], offset: int) -> dict[str, Any]:
    """The form of this API: lists side by side, and where each token's text begins."""
    offsets = []
    for each in probabilities:
        offsets.append(offset)
        offset += len(each.text)
    return {
        "tokens": [each.text for each in probabilities],
        "token_logprobs": [each.logprob for each in probabilities],
        "top_logprobs": [_by_text(each.top) for each in probabilities],
        "text_offset": offsets,
        "bytes": [None if each.bytes is None else list(each.bytes) for each in probabilities],
    }


def _by_text(top: tuple[TokenProbability, ...]) -> dict[str, float]:
    """The likeliest first; of several tokens of the same text the likeliest."""
    found: dict[str, float] = {}
    for each in top:
        found.setdefault(each.text, each.logprob)
    return found
