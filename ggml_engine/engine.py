"""`Engine`: load a model and generate text, in a few lines.

The front door of the package: puts together file, weights, vocabulary, executor and chat template.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Literal

from ggml_engine.chat import ChatTemplate
from ggml_engine.control.config import GenConfig
from ggml_engine.control.conversation import Conversation, TokenHistory
from ggml_engine.control.generation import Generation, PrefillProgress
from ggml_engine.errors import ClosedError, OptionError
from ggml_engine.executor.executor import ExecutorOptions, GgmlExecutor
from ggml_engine.ggml.backends import cpu_device
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.vocab import Vocabulary
from ggml_engine.known_models import find_model
from ggml_engine.models.model import Model, load_model
from ggml_engine.models.weights import Cancel, Progress
from ggml_engine.pool.kv_pool import bytes_per_cell
from ggml_engine.pool.kv_types import KvFormat
from ggml_engine.pool.kv_types import kv_type as find_kv_type

Message = Mapping[str, object]

_MEMORY_SHARE = 0.5  # of the free memory that a default capacity may come to


class Engine:
    """A loaded model.

    `Engine.load` may run on any thread: keep it off a GUI's. All methods may be called from any thread; steps of
    generations on several threads take turns, and compute without the GIL. One generation is iterated by one thread;
    its `cancel` may be called from any.
    """

    def __init__(self, file: GGUFFile, model: Model, vocabulary: Vocabulary, executor: GgmlExecutor) -> None:
        self.file = file
        self.model = model
        self.vocabulary = vocabulary
        self.executor = executor
        self._template: ChatTemplate | None = None
        self._lock = threading.RLock()
        self._closed = False

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
        ctx: int | None = None,
        threads: int | None = None,
        device: str = "auto",
        gpu_layers: int | None = None,
        mmap: bool = True,
        kv_type: str = "f16",
        attention: Literal["auto", "flash", "matmul"] = "auto",
        max_batch_tokens: int = 512,
    ) -> Engine:
        """Load a GGUF model: `path` is a file or a known name ("smollm2", "gemma3-270m").

        `ctx` is the capacity in cells (tokens of K/V): by default the model's own context, less if that would take
        half of the free memory; storage grows as it is used. `progress(done, total)` counts bytes and is called on
        this thread; `cancel()` is asked between tensors, and true raises CancelledError. `mmap=False` copies the file
        first, for files that may change meanwhile. Raises ModelNotFoundError, GGUFError, ModelError, LibraryError,
        OptionError, AllocationError, CancelledError; nothing stays allocated.
        """
        file = GGUFFile.open(find_model(path), mmap=mmap)
        try:
            with ThreadPoolExecutor(1, "ggml-engine-vocabulary") as pool:
                # parsing the vocabulary takes longer than mapping the weights, and needs no GIL
                vocabulary = pool.submit(Vocabulary.load, file)
                model = load_model(
                    file, device=device, gpu_layers=gpu_layers, threads=threads, progress=progress, cancel=cancel
                )
                try:
                    options = ExecutorOptions(
                        capacity=_capacity(model, ctx, kv_type),
                        max_batch_tokens=max_batch_tokens,
                        attention=attention,
                        k_type=kv_type,
                        v_type=kv_type,
                    )
                    executor = GgmlExecutor(model, options)
                    return cls(file, model, vocabulary.result(), executor)
                except BaseException:
                    model.free()
                    raise
        except BaseException:
            file.close()
            raise

    # ---- text

    def generate(
        self,
        prompt: str | Sequence[int],
        config: GenConfig | None = None,
        *,
        max_tokens: int | None = None,
        parse_special: bool = False,
        on_prefill: PrefillProgress | None = None,
    ) -> Generation:
        """Continue `prompt` (text, or token ids) as it is: no chat template.

        Text that spells a control token stays text unless `parse_special`. Iterate the result for pieces of text.
        Raises InputError and ContextLengthError.
        """
        if isinstance(prompt, str):
            encoded = self.vocabulary.encode(prompt, add_special=True, parse_special=parse_special)
            tokens: Sequence[int] = encoded.tolist()
        else:
            tokens = prompt
        return self._new_owner().generate_from(tokens, _with_max_tokens(config, max_tokens), on_prefill)

    def chat(
        self,
        messages: str | Sequence[Message],
        config: GenConfig | None = None,
        *,
        max_tokens: int | None = None,
        on_prefill: PrefillProgress | None = None,
    ) -> Generation:
        """Answer `messages` (or one user message) through the model's chat template.

        Raises ChatTemplateError where the file has none or it refuses these messages.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        tokens = self.encode_chat(messages)
        return self._new_owner().generate_from(tokens, _with_max_tokens(config, max_tokens), on_prefill)

    def conversation(self, system: str | None = None) -> Conversation:
        """A chat that keeps its sequence: every turn forwards only what is new."""
        return Conversation(self._new_owner(), self.encode_chat, system)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a rendered chat, ready for the assistant's turn."""
        segments = self.template.render_segments(messages, self.vocabulary.special_tokens)
        return [int(token) for token in self.vocabulary.encode_segments(segments, add_special=True)]

    @property
    def template(self) -> ChatTemplate:
        """The file's chat template. Raises ChatTemplateError when it has none."""
        if self._template is None:
            vocabulary = self.vocabulary
            self._template = ChatTemplate.from_metadata(
                self.file.metadata,
                model_name=self.file.path,
                bos_token="" if vocabulary.bos is None else vocabulary.text(vocabulary.bos),
                eos_token="" if vocabulary.eos is None else vocabulary.text(vocabulary.eos),
            )
        return self._template

    def _new_owner(self) -> TokenHistory:
        if self._closed:
            raise ClosedError("the engine was closed")
        return TokenHistory(self.executor, self.vocabulary)

    # ---- lifecycle

    def close(self) -> None:
        """Free everything; idempotent. Waits for a running step; generations over it raise ClosedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.executor.close_all()
            self.model.free()
            self.file.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _capacity(model: Model, ctx: int | None, kv_type_name: str) -> int:
    """Cells: `ctx`, or the model's own context as far as half of the free memory goes."""
    if ctx is not None:
        if isinstance(ctx, bool) or not isinstance(ctx, int) or ctx < 1:
            raise OptionError(f"ctx must be a positive number of cells, is {ctx!r}")
        return ctx
    tensor_type = find_kv_type(kv_type_name)
    n_bytes = bytes_per_cell(model.hp.kv_layers(), KvFormat(tensor_type, tensor_type))
    affordable = int(_MEMORY_SHARE * cpu_device(model.libraries).memory_free) // n_bytes
    return max(1, min(model.hp.n_ctx_train, affordable))


def _with_max_tokens(config: GenConfig | None, max_tokens: int | None) -> GenConfig:
    config = config or GenConfig()
    return config if max_tokens is None else replace(config, max_tokens=max_tokens)
