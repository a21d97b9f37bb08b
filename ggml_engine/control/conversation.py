"""A chat over one session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Generation
from ggml_engine.control.session import Session
from ggml_engine.errors import ContextLengthError

Message = Mapping[str, object]

_CANCEL_S = 30.0  # a running step ends long before


class Conversation:
    """A chat: every turn forwards only what is new. `messages` are the turns so far. For one thread at a time."""

    def __init__(
        self,
        session: Session,
        encode_chat: Callable[[Sequence[Message]], list[int]],
        system: str | None = None,
    ) -> None:
        self.session = session
        self._encode_chat = encode_chat
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._reply: Generation | None = None

    @property
    def messages(self) -> list[Message]:
        """The turns so far, the running reply included as far as it has come; not those of a turn that failed."""
        if self._reply is None:
            return list(self._messages)
        if self._reply.error is not None:
            return self._messages[:-1]
        return [*self._messages, {"role": "assistant", "content": self._reply.text}]

    def send(self, text: str, config: GenConfig | None = None) -> Generation:
        """Say something; iterate the result for the reply.

        A reply that was left unfinished is cancelled, and counts as said so far. Raises ChatTemplateError and
        ContextLengthError: then the turn was not taken.
        """
        self._stop()
        return self._begin([*self.messages, {"role": "user", "content": text}], config)

    def edit(self, messages: Sequence[Message], config: GenConfig | None = None) -> Generation:
        """Go on from other turns, of which the last is the user's: what they share with the ones so far is kept.

        For an edited question or another try at an answer; else as `send`.
        """
        self._stop()
        return self._begin(list(messages), config)

    def _stop(self) -> None:
        if self._reply is not None and self._reply.reason is None:
            self._reply.cancel()
            self._reply.wait(_CANCEL_S)

    def _begin(self, messages: list[Message], config: GenConfig | None) -> Generation:
        tokens = self._encode_chat(messages)
        if len(tokens) > self.session.limit:
            raise ContextLengthError(len(tokens), self.session.limit)
        reply = self.session.generate_from(tokens, config)
        self._messages, self._reply = messages, reply
        return reply
