"""`Work`: one generation as the scheduler runs it, from its first token to its end.

Knows what is to be forwarded next, samples from the rows that come back, and turns tokens into updates. Touches no
cache: the scheduler moves the session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ggml_engine.control.generation import GenerationState, Prefill, Reason, Update
from ggml_engine.control.logprobs import TokenLogprobs, candidate_logprobs, need_with_logprobs, token_logprobs
from ggml_engine.control.stop import StopMatcher
from ggml_engine.control.text import CandidateSampler, TextModel, TokenSampler
from ggml_engine.errors import InputError
from ggml_engine.executor.outputs import Outputs
from ggml_engine.executor.prepared import OPAQUE, PreparedInput
from ggml_engine.ggml.candidates import WHOLE_ROW, RowNeed

log = logging.getLogger("ggml_engine.control")

_MAX_LOGIT_BYTES = 64 << 20  # rows of logits that one step may return for one prompt's log-probabilities


class Drawn(NamedTuple):
    """A token that was chosen, and its log-probabilities where they were asked for."""

    token: int
    logprobs: tuple[TokenLogprobs, ...]


class Work:
    """A generation in progress. `lead` are tokens to be committed before the request's own (the pending one)."""

    def __init__(self, state: GenerationState, sampler: TokenSampler, text: TextModel) -> None:
        self.state = state
        self.request = state.request
        self.sampler = sampler
        self._from_candidates = sampler.sample_from if isinstance(sampler, CandidateSampler) else None
        self._need = sampler.need if isinstance(sampler, CandidateSampler) else WHOLE_ROW
        self._text = text
        self._decoder = text.decoder(self.request.config.shown_tokens)
        self._matcher = StopMatcher(self.request.config.stop)
        self._max_tokens = (
            self.request.max_tokens if self.request.max_tokens is not None else (self.request.config.max_tokens)
        )
        self._lead: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._delta: npt.NDArray[np.int32] | PreparedInput = np.empty(0, np.int32)
        self._n_delta = 0
        self._done = 0
        self.n_prompt = 0  # positions to be evaluated before the first token
        self.is_decode = True  # whether the prompt is done
        self._begun_at = 0.0
        self._row_before: npt.NDArray[np.float32] | None = None  # logits at the last prompt token that was forwarded
        self.first_position = 0
        self.next_token: int | None = None  # sampled, to be forwarded next

    # ---- what is to be forwarded

    def begin(
        self,
        history: Sequence[int],
        lead: Sequence[int],
        delta: npt.NDArray[np.int32] | PreparedInput,
        n_delta: int,
        now: float,
    ) -> None:
        """Start after `history`, the session's committed tokens. `n_delta` positions are in `delta`."""
        self._lead = np.asarray(lead, np.int32)
        self._delta = delta
        self._n_delta = n_delta
        self.n_prompt = int(self._lead.size) + n_delta
        self.is_decode = not self.n_prompt
        self.first_position = len(history)
        self.admit(now)
        stats = self.state.stats
        stats.prompt_tokens = len(history) + self.n_prompt
        stats.reused_tokens = len(history)
        seen = [*history, *self._lead.tolist()]
        if not isinstance(delta, PreparedInput):
            seen += delta.tolist()
        self.sampler.accept_prompt([token for token in seen if token != OPAQUE])
        self._publish(Update(prefill=Prefill(0, self.n_prompt, 0.0)))

    @property
    def lead_token(self) -> int | None:
        """The pending token that it was to commit first."""
        return int(self._lead[-1]) if self._lead.size else None

    @property
    def uncommitted_token(self) -> int | None:
        """The token that stays pending when it ends now: the last one sampled, or the one it never came to commit."""
        return self.lead_token if self._lead.size and not self._done else self.next_token

    def admit(self, now: float) -> None:
        """Its prompt may be read from now on: what it waited for room is time in the queue."""
        self._begun_at = now
        self.state.stats.queued_s = now - self.state.asked_at

    @property
    def n_wanted(self) -> int:
        """How many tokens it could forward now."""
        return 1 if self.is_decode else self.n_prompt - self._done

    def limit(self, n_vocab: int) -> int:
        """How many of these one step may take: no chunk crosses a breakpoint, or returns too many rows."""
        most = self.n_wanted
        if self.is_decode:
            return most
        at = self.first_position + self._done
        for point in self.request.config.prefill_breakpoints:
            if point > at:
                most = min(most, point - at)
                break
        if self._done < self._lead.size:  # tokens and prepared rows do not share a chunk
            most = min(most, int(self._lead.size) - self._done) if self._is_prepared else most
        if self.request.config.prompt_logprobs is not None:
            most = min(most, max(1, _MAX_LOGIT_BYTES // (4 * n_vocab)))
        return most

    @property
    def _is_prepared(self) -> bool:
        return isinstance(self._delta, PreparedInput)

    def tokens(self, n: int) -> npt.NDArray[np.int32]:
        """The next `n` tokens, OPAQUE for positions of a prepared input."""
        if self.next_token is not None:
            return np.array([self.next_token], np.int32)
        start, n_lead = self._done, int(self._lead.size)
        if start < n_lead and start + n <= n_lead:
            return self._lead[start : start + n]
        if isinstance(self._delta, PreparedInput):
            return np.full(n, OPAQUE, np.int32)
        return np.concatenate((self._lead, self._delta))[start : start + n]

    def prepared(self, n: int) -> tuple[PreparedInput, int, int] | None:
        """The prepared input and its positions that the next `n` tokens are, if they are."""
        start = self._done - int(self._lead.size)
        if self.is_decode or start < 0 or not isinstance(self._delta, PreparedInput):
            return None
        if self._delta.size() != self._n_delta:
            raise InputError(
                f"a prepared input of {self._n_delta} positions has {self._delta.size()} now: it must not change"
            )
        return self._delta, start, start + n

    def n_outputs(self, n: int) -> int:
        """Of how many of the next `n` tokens it wants the rows; these are the last ones."""
        if not self.is_decode and self.request.config.prompt_logprobs is not None:
            return n
        return int(self._done + n >= self.n_prompt)

    def need(self, n_vocab: int) -> RowNeed:
        """What it needs of each of these rows."""
        if not self.is_decode and self.request.config.prompt_logprobs is not None:
            return WHOLE_ROW
        n_top = self.request.config.logprobs
        return self._need if n_top is None else need_with_logprobs(self._need, n_top, n_vocab)

    def draws_apart(self, n_vocab: int) -> bool:
        """Whether choosing its next token takes long, and may be done on another thread."""
        return self._from_candidates is not None and self.is_decode and not self.need(n_vocab).n_best

    # ---- what came back

    def advance(
        self,
        n: int,
        tokens: npt.NDArray[np.int32],
        outputs: Outputs,
        rows: range,
        now: float,
        drawn: Drawn | BaseException | None = None,
    ) -> Reason | None:
        """`n` tokens were committed; `rows` of `outputs` are those that it wanted. Publishes what is new.

        `drawn` is what `draw` gave or raised, where that was called before.

        The reason when the generation is over with that. Raises what a callback or the sampler raised.
        """
        if self.is_decode:
            self.next_token = None
            if isinstance(drawn, BaseException):
                raise drawn
            return self._take(drawn or self.draw(outputs, rows[-1]), now)
        self._note_prompt(tokens, outputs, rows)
        self._done += n
        self.is_decode = self._done == self.n_prompt
        stats = self.state.stats
        stats.evaluated_tokens = self._done
        stats.prefill_s = now - self._begun_at
        speed = self._done / stats.prefill_s if stats.prefill_s > 0 else 0.0
        self._publish(Update(prefill=Prefill(self._done, self.n_prompt, speed)))
        at = self.first_position + self._done
        # a generation that is to end shows no checkpoint of its own any more
        if at in self.request.config.prefill_breakpoints and not self.state.cancel_requested:
            self._call(self.request.on_breakpoint, at)
        if self._done < self.n_prompt or self.state.cancel_requested:
            return None
        return self._take(self.draw(outputs, rows[-1]), now)

    def _note_prompt(self, tokens: npt.NDArray[np.int32], outputs: Outputs, wanted: range) -> None:
        n_top = self.request.config.prompt_logprobs
        if n_top is None:
            return
        rows, before = outputs.rows(wanted.start, wanted.stop), self._row_before
        for i, token in enumerate(tokens.tolist()):
            found = None if before is None or token == OPAQUE else token_logprobs(before, token, n_top)
            self.state.prompt_logprobs.append(found)
            before = rows[i]
        # a copy: a view would keep all rows of its step; after the prompt nobody asks for it
        is_last = self._done + tokens.size >= self.n_prompt
        self._row_before = None if is_last or before is None else before.copy()

    def draw(self, outputs: Outputs, row: int) -> Drawn:
        """Choose a token by a row. Any thread, while nothing else happens to this generation."""
        n_top = self.request.config.logprobs
        best = outputs.candidates(row)
        if self._from_candidates is None:
            token = self.sampler.sample(outputs.row(row))
        else:
            token = self._from_candidates(best, partial(outputs.row, row))
        if n_top is None:
            return Drawn(token, ())
        found = None if best is None else candidate_logprobs(best, token, n_top)
        return Drawn(token, (found or token_logprobs(outputs.row(row), token, n_top),))

    def _take(self, drawn: Drawn, now: float) -> Reason | None:
        """Go on with a token that was chosen."""
        token, logprobs = drawn
        self.sampler.accept(token)
        self.next_token = token
        self._count(now - self._begun_at)
        ends = self._ends(token)
        shown = self._matcher.push("" if ends else self._decoder.push(token))
        reason = ends or self._bounded()
        if reason is not None:
            shown += self.rest()
        self._publish(Update((token,), shown, logprobs))
        return reason

    def publish_rest(self) -> None:
        """Show what was held back, when it ends early. What a callback raises then changes nothing."""
        try:
            if text := self.rest():
                self._publish(Update(text=text))
        except BaseException:
            log.exception("the last piece of text could not be shown")

    def rest(self) -> str:
        """The text that was held back."""
        return self._matcher.push(self._decoder.finish()) + self._matcher.finish()

    def _count(self, since_begun: float) -> None:
        stats = self.state.stats
        stats.generated_tokens += 1
        stats.token_times_s.append(since_begun)
        if stats.first_token_s is None:
            stats.first_token_s = since_begun
        stats.decode_s = since_begun - stats.first_token_s

    def _ends(self, token: int) -> Reason | None:
        if token in self.request.config.stop_tokens:
            return Reason.STOP
        if not self.request.config.ignore_eos and self._text.is_end(token):
            return Reason.FINISHED
        return None

    def _bounded(self) -> Reason | None:
        if self._matcher.matched is not None:
            self.state.stats.stopped_by = self._matcher.matched
            return Reason.STOP
        if self._max_tokens is not None and self.state.stats.generated_tokens >= self._max_tokens:
            return Reason.LENGTH
        return None

    # ---- the end

    def finish(self, reason: Reason, error: BaseException | None = None) -> bool:
        """End the generation and free what it holds. Whether this call ended it."""
        try:
            self.sampler.close()
        except Exception:
            log.exception("a sampler could not be closed")
        return self.state.end(reason, error)

    def _publish(self, update: Update) -> None:
        self.state.publish(update)
        self._call(self.request.on_update, update)

    @staticmethod
    def _call(callback: Callable[..., object] | None, value: object) -> None:
        if callback is not None:
            callback(value)
