"""`Encoder`: embeddings by models that read whole texts at once (BERT and its kin), computed by libllama.

They have no K/V and generate nothing, so that they are no `Executor`: a text goes in whole, and nothing is kept. Owns
the file, the model and a context, made anew when a longer text comes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import ClosedError, ComputeError, ContextLengthError, InputError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.inputs import check_tokens
from ggml_engine.ggml.abort import AbortFlag
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.llama_context import LlamaContext, LlamaContextOptions
from ggml_engine.ggml.llama_model import LlamaModel
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.ggml.threads import ThreadCounts
from ggml_engine.known_models import find_model
from ggml_engine.models.pooling import Rows, choose_pooling, pool, unit_rows

_LEAST_TOKENS: Final = 512  # of a forward; a longer text gets a context of its own size
_MAX_TEXTS: Final = 64  # of a forward

Ids = npt.NDArray[np.int32]


class Encoder:
    """A loaded encoder. Close it, or use it as a context manager; callers on several threads take turns."""

    def __init__(self, file: GGUFFile, model: LlamaModel, threads: ThreadCounts) -> None:
        self.file = file
        self.model = model
        self._threads = threads
        self._abort = AbortFlag(model.libraries)
        self._turn = threading.Lock()
        self._closed = False
        self._n_tokens = _LEAST_TOKENS  # that the context takes at once
        self._context = self._new_context(_LEAST_TOKENS)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        device: str = "auto",
        gpu_layers: int | None = None,
        mmap: bool = True,
    ) -> Encoder:
        """Load an encoder; the arguments are those of `Engine.load`.

        Raises as that, and UnsupportedArchitectureError for a decoder, which an `Engine` embeds with.
        """
        with ExitStack() as undo:
            counts = ThreadCounts.choose(threads)
            file = GGUFFile.open(find_model(path), mmap=mmap)
            undo.callback(file.close)
            model = LlamaModel.load(file, device=device, gpu_layers=gpu_layers, mmap=mmap, encodes=True)
            undo.callback(model.free)
            encoder = cls(file, model, counts)
            undo.pop_all()
        return encoder

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text: what the model was trained on, and has positions for."""
        n_train = self.model.n_ctx_train
        return min(n_train, self.model.max_positions or n_train)

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        pooling: Literal["auto", "mean", "last", "cls", "none"] = "auto",
        *,
        normalize: bool = True,
    ) -> Rows | list[Rows]:
        """Embeddings of texts, as `Engine.embed`.

        Raises InputError, ContextLengthError, OptionError, AllocationError and ClosedError.
        """
        if isinstance(texts, str):
            raise InputError("embed takes a list of texts, and got one text")
        kind = choose_pooling(self.file, pooling)
        ids = [self._encoded(number, text) for number, text in enumerate(texts)]
        if not ids:
            raise InputError("there is nothing to embed: no texts")
        with self._turn:
            if self._closed:
                raise ClosedError("the encoder was closed")
            found = [pool(rows, kind) for rows in self._hidden(ids)]
        finished = [unit_rows(rows) for rows in found] if normalize else found
        return finished if kind == "none" else np.concatenate(finished)

    def _encoded(self, number: int, text: str | Sequence[int]) -> Ids:
        if isinstance(text, str):
            ids = self.model.tokenize(text)
        elif len(text):
            ids = Batch.of_sequence(0, text).tokens
            check_tokens(ids, self.model.n_vocab)
        else:
            ids = np.empty(0, np.int32)
        if not ids.size:
            raise InputError(f"there is nothing to embed: text {number} has no tokens")
        if ids.size > self.max_tokens:
            raise ContextLengthError(int(ids.size), self.max_tokens, f"text {number}")
        return ids

    def _hidden(self, texts: Sequence[Ids]) -> Iterator[Rows]:
        """Hidden states f32 [tokens, width] of each text."""
        longest = max(ids.size for ids in texts)
        if longest > self._n_tokens:
            self._context.free()
            self._n_tokens = 0  # until there is another one
            n_tokens = max(longest, _LEAST_TOKENS)
            self._context = self._new_context(n_tokens)
            self._n_tokens = n_tokens
        for group in _groups(texts, self._n_tokens):
            tokens = np.concatenate(group)
            positions = np.concatenate([np.arange(ids.size, dtype=np.int32) for ids in group])
            slots = np.repeat(np.arange(len(group), dtype=np.int32), [ids.size for ids in group])
            wanted = np.ones(tokens.size, np.bool_)
            if not self._context.decode(tokens, None, positions, slots, wanted, gives_hidden=True):
                raise ComputeError(f"libllama has no room for {tokens.size} tokens of {len(group)} texts")
            yield from np.split(self._context.hidden(), np.cumsum([ids.size for ids in group])[:-1])

    def _new_context(self, n_tokens: int) -> LlamaContext:
        options = LlamaContextOptions(
            n_tokens, n_tokens, _MAX_TEXTS, self._threads, "auto", TensorType.F16, TensorType.F16,
            reads_whole_texts=True,
        )  # fmt: skip
        return LlamaContext(self.model, options, self._abort)

    def close(self) -> None:
        """Free everything; idempotent. Waits for a running `embed`."""
        with self._turn:
            self._closed = True
            self._context.free()
            self.model.free()
            self.file.close()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _groups(texts: Iterable[Ids], most: int) -> Iterator[list[Ids]]:
    """Texts in their order, of at most so many tokens together."""
    group: list[Ids] = []
    for ids in texts:
        if group and (len(group) == _MAX_TEXTS or sum(each.size for each in group) + ids.size > most):
            yield group
            group = []
        group.append(ids)
    yield group
