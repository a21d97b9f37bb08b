"""`Job`: one request from its submission to its end.

Every step is the control thread's, and none waits: what the engine has to do first posts the next step when it has
settled. Callbacks of a generation run on the engine's thread; they pass on what is new, and ask for clones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Generation, Reason, Update, failure
from ggml_engine.control.session import Session
from ggml_engine.errors import ClosedError, SessionError
from ggml_engine.serving.beginning import Beginning
from ggml_engine.serving.checkpoints import PromptCheckpoints, checkpoint_positions
from ggml_engine.serving.names import NamedSession
from ggml_engine.serving.reply import Listener, Reply
from ggml_engine.serving.request import ServingRequest
from ggml_engine.serving.shared import Shared

log = logging.getLogger("ggml_engine.serving")

_MOST_TRIES = 3  # of a request whose session is lost before it has begun


class Job:
    """A request on its way. `finish` is called once, when all that it held was given back.

    `tokens` is the checked prompt, `most` how many tokens each choice may have (None: what its configuration says).
    """

    def __init__(
        self,
        shared: Shared,
        request: ServingRequest,
        tokens: list[int],
        most: int,
        reply: Reply,
        listener: Listener | None,
        named: NamedSession | None,
        finish: Callable[[Job], None],
    ) -> None:
        self._shared = shared
        self.request = request
        self.reply = reply
        self.named = named
        self._tokens = tokens
        self._most = most
        self._listener = listener
        self._finish = finish
        self._sessions: list[Session | None] = [None] * request.n
        self._beginning = Beginning(
            shared,
            self._scope,
            tokens,
            named,
            request.cache_prompt,
            lambda: self.is_cancelled,
            self._begin_in,
            self._not_begun,
        )
        self._checkpoints: PromptCheckpoints | None = None
        self._left = set(range(request.n))  # choices that have not ended
        self._forks_asked = False  # whether the other choices are on their way
        self._n_tries = 0
        self.is_cancelled = False
        self.is_shut = False  # cancelled since the runtime ends
        reply.bind(self.cancel)

    # ---- anybody's

    def cancel(self) -> None:
        """End it. Any thread; waits for nothing."""
        self.is_cancelled = True
        for choice in self.reply.choices:
            choice.cancel()
        self._shared.post(self._drop_unbegun)

    def discard_checkpoints(self) -> None:
        """Keep no snapshot that has not been kept yet. Any thread."""
        if (checkpoints := self._checkpoints) is not None:
            checkpoints.discard()

    # ---- beginning

    @property
    def _scope(self) -> str:
        return self.request.partition

    def begin(self, now: float) -> None:
        """Find a session to begin in."""
        if self._left:
            self.reply.note_begun(now)
            self._beginning.find()

    def _begin_in(self, session: Session, is_new: bool) -> None:
        self._start(0, session, is_new=is_new)

    def _not_begun(self, error: BaseException | None) -> None:
        """No session was found: for an error, or since it was cancelled."""
        if error is None:
            self._drop_unbegun()
        else:
            self._end_left(*_end_by(error))

    # ---- generating

    def _start(self, index: int, session: Session, *, is_new: bool) -> None:
        self._sessions[index] = session
        config = self._bounded(self.request.config_of(index))
        if index:
            config = replace(config, prompt_logprobs=None)
            generation = session.generate_from(
                self._tokens, config, partial(self._tell, index), on_settled=partial(self._settle, index)
            )
        else:
            generation = self._start_first(session, config, begins=self.named is None or is_new)
        self.reply.choices[index].begin(generation)
        if self.is_cancelled:
            generation.cancel()

    def _bounded(self, config: GenConfig) -> GenConfig:
        if config.max_tokens is not None and config.max_tokens <= self._most:
            return config
        return replace(config, max_tokens=self._most)

    def _start_first(self, session: Session, config: GenConfig, *, begins: bool) -> Generation:
        shared, request, start = self._shared, self.request, session.position
        positions = checkpoint_positions(shared.options, start, request.opening, self._tokens, begins=begins)
        checkpoints = self._checkpoints = PromptCheckpoints(
            shared.cache,
            shared.lanes,
            shared.post,
            session,
            self._tokens,
            positions,
            scope=self._scope,
            metadata=request.session,
        )
        if checkpoints.breakpoints:
            points = {*config.prefill_breakpoints, *checkpoints.breakpoints}
            config = replace(config, prefill_breakpoints=tuple(points))

        def on_update(update: Update) -> None:
            checkpoints.on_update(update)
            if update.tokens and not self._forks_asked:
                self.reply.state = "decode"
                self._fork(session)
            self._tell(0, update)

        return session.generate_from(
            self._tokens,
            config,
            on_update,
            on_breakpoint=checkpoints.on_breakpoint,
            on_settled=partial(self._settle, 0),
        )

    def _tell(self, index: int, update: Update) -> None:
        if self._listener is not None and (not index or update.tokens or update.text):
            self._listener.on_update(index, update)

    def _fork(self, session: Session) -> None:
        """Clone the prompt for the other choices, but for its last token, of which each needs a row of its own."""
        self._forks_asked = True
        for index in range(1, self.request.n):
            future = session.clone_async(len(self._tokens) - 1)
            future.add_done_callback(partial(self._forked, index))

    def _forked(self, index: int, future: Future[Session | None]) -> None:
        self._shared.post(partial(self._start_fork, index, future.result()))

    def _start_fork(self, index: int, session: Session | None) -> None:
        if self.is_cancelled:
            if session is not None:
                session.close()
            self._end(index, Reason.CANCELLED)
        elif session is not None:
            self._start(index, session, is_new=True)
        else:  # its prompt is evaluated again
            self._shared.runner.open_session_async().add_done_callback(
                lambda done: self._shared.post(partial(self._start_apart, index, done))
            )

    def _start_apart(self, index: int, future: Future[Session]) -> None:
        error = future.exception()
        if error is None:
            self._start_fork(index, future.result())
        else:
            self._end(index, *_end_by(error))

    # ---- the end

    def _settle(self, index: int, generation: Generation) -> None:
        self._shared.post(partial(self._settled, index, generation))

    def _settled(self, index: int, generation: Generation) -> None:
        if index not in self._left:
            return
        if index == 0 and self._begins_again(generation):
            self._sessions[0] = None
            self._beginning.find()
            return
        session, self._sessions[index] = self._sessions[index], None
        if session is not None and (index or self.named is None):
            session.close()
        if generation.reason is Reason.CANCELLED and self.is_shut:
            self.reply.choices[index].end(Reason.SHUTDOWN)
        if index == 0 and not self._forks_asked:  # it never came to its first token
            reason = generation.reason or Reason.FAILED
            for other in sorted(self._left - {0}):
                self._end(other, reason, generation.error)
        self._ended(index)

    def _begins_again(self, generation: Generation) -> bool:
        """Whether the session's cells were given to others just before, so that another one is needed."""
        session = self._sessions[0]
        was_lost = isinstance(generation.error, SessionError) and session is not None and session.status == "evicted"
        self._n_tries += 1
        return was_lost and not generation.tokens and self._n_tries < _MOST_TRIES

    def abandon(self) -> None:
        """The engine does not come back: end what is left, and let go of what there is. On the control thread."""
        self.discard_checkpoints()
        for i, session in enumerate(self._sessions):
            if session is not None:
                self._sessions[i] = None
                session.close()
        self._end_left(Reason.SHUTDOWN)

    def _drop_unbegun(self) -> None:
        """After a cancel: end what no generation will end."""
        if self.reply.state == "queued" or (
            not self._beginning.cancel_pending() and not any(self._sessions) and not self._forks_asked
        ):
            self._end_left(Reason.CANCELLED)

    def _end_left(self, reason: Reason, error: BaseException | None = None) -> None:
        for index in sorted(self._left):
            self._end(index, reason, error)

    def _end(self, index: int, reason: Reason, error: BaseException | None = None) -> None:
        """End a choice that never began."""
        if index not in self._left:
            return
        if reason is Reason.CANCELLED and self.is_shut:
            reason = Reason.SHUTDOWN
        self.reply.choices[index].end(reason, error if reason is Reason.FAILED else None)
        self._ended(index)

    def _ended(self, index: int) -> None:
        self._left.discard(index)
        if not self._left:
            self._finish(self)
        if self._listener is not None:
            try:
                self._listener.on_settled(index, self.reply.choices[index])
            except Exception:
                log.exception("a listener's on_settled raised")
        if not self._left:
            self.reply.note_done()


def _end_by(error: BaseException) -> tuple[Reason, BaseException]:
    """How a choice ends that has no session, by what the runner said."""
    return Reason.SHUTDOWN if isinstance(error, ClosedError) else Reason.FAILED, failure(error)
