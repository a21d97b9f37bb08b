"""One sequence kept between generations, and a chat over it.

`TokenHistory` owns a sequence and knows its tokens, so that a new prompt forwards only what differs from the last one.
`Conversation` adds messages. Both are for one thread at a time; the sequence is dropped with its last owner.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Generation, PrefillProgress
from ggml_engine.errors import ContextLengthError
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml.vocab import Vocabulary

Message = Mapping[str, object]


class TokenHistory:
    """A sequence and its committed tokens. `generation` is the one that may extend it."""

    def __init__(self, executor: GgmlExecutor, vocabulary: Vocabulary) -> None:
        self.sequence = executor.open()
        self.tokens: list[int] = []
        self._generation: weakref.ref[Generation] | None = None
        self._executor = executor
        self._vocabulary = vocabulary
        weakref.finalize(self, executor.close_later, self.sequence).atexit = False

    @property
    def generation(self) -> Generation | None:
        """The generation that may extend the sequence."""
        return None if self._generation is None else self._generation()

    @generation.setter
    def generation(self, generation: Generation | None) -> None:
        self._generation = None if generation is None else weakref.ref(generation)

    def generate_from(
        self,
        tokens: Sequence[int],
        config: GenConfig | None = None,
        *,
        max_tokens: int | None = None,
        on_prefill: PrefillProgress | None = None,
    ) -> Generation:
        """Generate after the whole history `tokens`; `max_tokens` stands for the one in `config`.

        Rewinds to the longest common prefix with what is held, at least one token short of the end, and forwards
        the rest. A generation of this sequence that has not ended yet cannot be continued afterwards. Raises
        InputError, ContextLengthError (then nothing has changed).
        """
        config = config or GenConfig()
        if max_tokens is not None:
            config = replace(config, max_tokens=max_tokens)
        wanted = self._vocabulary.check_tokens(tokens)
        kept = min(_common_prefix(self.tokens, wanted.tolist()), max(0, int(wanted.size) - 1))
        if wanted.size > self._executor.cache.capacity:
            raise ContextLengthError(int(wanted.size), self._executor.cache.capacity)
        # also drops the cells of a step that failed
        self._executor.rewind(self.sequence, kept)
        del self.tokens[kept:]
        generation = Generation(self._executor, self._vocabulary, self, wanted[kept:], config, on_prefill)
        self.generation = generation
        return generation


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for n, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return n
    return min(len(a), len(b))


class Conversation:
    """A chat: every turn forwards only what is new. `messages` are the turns so far."""

    def __init__(
        self,
        history: TokenHistory,
        encode_chat: Callable[[Sequence[Message]], list[int]],
        system: str | None = None,
    ) -> None:
        self._history = history
        self._encode_chat = encode_chat
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._reply: Generation | None = None

    @property
    def messages(self) -> list[Message]:
        """The turns so far, the running reply included as far as it has come."""
        if self._reply is None:
            return list(self._messages)
        return [*self._messages, {"role": "assistant", "content": self._reply.text}]

    def send(self, text: str, config: GenConfig | None = None, on_prefill: PrefillProgress | None = None) -> Generation:
        """Say something; iterate the result for the reply. A reply that was left unfinished counts as said so far.

        Raises ChatTemplateError, InputError, ContextLengthError: then the turn was not taken.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        reply = self._history.generate_from(self._encode_chat(messages), config, on_prefill=on_prefill)
        self._messages, self._reply = messages, reply
        return reply
