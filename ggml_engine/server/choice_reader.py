"""`ChoiceReader`: what a generation's updates say, as parts of an answer, with the probabilities of their tokens."""

from __future__ import annotations

from typing import Any, Final

from ggml_engine.chat.replies import ContentPart, ReasoningPart, ReplyParser, ReplyPart, ToolCallEnd
from ggml_engine.control.generation import Update
from ggml_engine.control.logprobs import TokenLogprobs
from ggml_engine.server.events import Said, TokenProbability

LEAST_LOGPROB: Final = -9999.0  # OpenAI's stand-in for what is impossible: JSON has no infinity


class ChoiceReader:
    """Reads one answer: its text as parts, beside them the probabilities of the tokens that were read for them."""

    def __init__(self, index: int, parser: ReplyParser | None, vocabulary: Any, *, skips_ends: bool = True) -> None:
        self._index = index
        self._parser = parser
        self._vocabulary = vocabulary
        self._skips_ends = skips_ends
        self._held: list[TokenProbability] = []
        self._has_answered = False
        self._n_before_answer = 0
        self._has_reasoned = False
        self.n_calls = 0

    @property
    def n_reasoning(self) -> int:
        """Tokens before the answer, where there was reasoning."""
        return self._n_before_answer if self._has_reasoned else 0

    def read(self, update: Update) -> list[Said]:
        """What an update comes to."""
        self._held += [self._named(each) for each in update.logprobs if not self._is_end(each.token)]
        if self._parser is not None:
            parts = self._parser.feed(update.text)
        else:
            parts = [ContentPart(update.text)] if update.text else []
        said = self._said(parts)
        if not self._has_answered:
            self._n_before_answer += len(update.tokens)
        return said

    def finish(self, *, was_stopped: bool) -> list[Said]:
        """The rest. After a stop string what is held was never shown, and its probabilities are not either."""
        said = self._said(self._parser.finish() if self._parser is not None else [])
        if self._held and not was_stopped:
            said.append(Said(self._index, None, tuple(self._held)))
        self._held = []
        return said

    def _said(self, parts: list[ReplyPart]) -> list[Said]:
        said = []
        for part in parts:
            self._note(part)
            said.append(Said(self._index, part, tuple(self._held)))
            self._held = []
        return said

    def _note(self, part: ReplyPart) -> None:
        if isinstance(part, ReasoningPart):
            self._has_reasoned = True
        else:
            self._has_answered = True
        if isinstance(part, ToolCallEnd) and not part.malformed:
            self.n_calls += 1

    def _is_end(self, token: int) -> bool:
        return self._skips_ends and bool(self._vocabulary.is_end(token))

    def _named(self, found: TokenLogprobs) -> TokenProbability:
        top = tuple(self._probability(token, logprob) for token, logprob in found.top)
        return self._probability(found.token, found.logprob, top)

    def _probability(self, token: int, logprob: float, top: tuple[TokenProbability, ...] = ()) -> TokenProbability:
        logprob = max(logprob, LEAST_LOGPROB)
        piece = self._vocabulary.piece(token)
        if not piece:  # a control token
            return TokenProbability(self._vocabulary.text(token), None, logprob, top)
        return TokenProbability(piece.decode("utf-8", "replace"), piece, logprob, top)
