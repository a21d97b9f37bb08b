"""`Engine`: load a model, generate text and embed it, in a few lines.

The front door of the package: puts together file, weights, vocabulary, executor and chat template. What the vocabulary
does not need is imported while libllama parses it (`ggml_engine.loading`): that hides some tens of milliseconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

from ggml_engine.errors import (
    ClosedError,
    ContextLengthError,
    EngineError,
    InputError,
    OptionError,
    UnsupportedArchitectureError,
)
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.llama_architectures import is_encoder
from ggml_engine.ggml.vocab import PendingVocabulary, Vocabulary
from ggml_engine.known_models import find_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ggml_engine.chat import ChatTemplate
    from ggml_engine.control.config import GenConfig
    from ggml_engine.control.conversation import Conversation
    from ggml_engine.control.generation import Generation
    from ggml_engine.control.options import RunnerOptions
    from ggml_engine.control.runner import Adapters, Runner
    from ggml_engine.control.session import Session
    from ggml_engine.executor.executor import GgmlExecutor
    from ggml_engine.loading import EngineKind, LoadedExecutor
    from ggml_engine.models.adapter import Adapter
    from ggml_engine.models.attention import AttentionOption
    from ggml_engine.models.prefill_weights import PrefillLayout
    from ggml_engine.models.weights import Cancel, Progress

Message = Mapping[str, object]


class Engine:
    """A loaded model. `kind` is what computes it, "native" or "llama", and `reason` says why.

    `Engine.load` may run on any thread: keep it off a GUI's. All methods may be called from any thread. Generations
    are computed by a thread of the engine, without the GIL, several of them in one step. One generation is iterated by
    one thread; its `cancel` may be called from any.
    """

    def __init__(self, file: GGUFFile, vocabulary: Vocabulary, loaded: LoadedExecutor) -> None:
        self.file = file
        self.vocabulary = vocabulary
        self.executor = loaded.executor
        self.model = loaded.executor.model
        self.kind: EngineKind = loaded.kind
        self._adapters = list(loaded.adapters)
        self.reason = loaded.reason
        self._template: ChatTemplate | None = None
        self._runner: Runner | None = None
        self._lock = threading.RLock()
        self._is_closing = False
        self._closed = False

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        engine: Literal["auto", "native", "llama"] = "auto",
        progress: Progress | None = None,
        cancel: Cancel | None = None,
        ctx: int | None = None,
        threads: int | None = None,
        threads_batch: int | None = None,
        leave_cores: int = 0,
        device: str = "auto",
        gpu_layers: int | None = None,
        mmap: bool = True,
        kv_type: str = "f16",
        cache_kind: str = "batched_cell",
        attention: AttentionOption = "auto",
        max_batch_tokens: int = 512,
        deterministic: bool = False,
        calibrate: bool = False,
        adapters: Sequence[tuple[str | os.PathLike[str], float]] = (),
        prefill_weights: PrefillLayout = "off",
    ) -> Engine:
        """Load a GGUF model: `path` is a file or a known name ("smollm2", "gemma3-270m").

        `ctx` is the capacity in cells (tokens of K/V): by default the model's own context, less if that would take
        half of the free memory; storage grows as it is used. `threads` compute steps of one token, `threads_batch`
        (by default as many) those of more; by default there is one for each physical, fast core that this process may
        run on, less `leave_cores`, at least one. `progress(done, total)` counts bytes and is called on
        this thread; `cancel()` is asked between tensors, and true raises CancelledError. `mmap=False` copies the file
        first, for files that may change meanwhile. `cache_kind` "batched_cell" holds many sessions, "sequence" one at a
        time, which cannot be cloned. `deterministic` makes logits independent of what runs beside a sequence and of how
        its tokens were cut into steps (docs/determinism.md). `calibrate` lets attention "auto" choose by times measured
        on this machine, and measures them once, while the engine has nothing to do after its first answer: engines that
        are loaded with it later know of them (docs/performance.md). `adapters` are LoRA files with their scales: what
        is generated is computed with them, but for sessions that are given others. `prefill_weights` keeps the layers'
        quantised matrices a second time, in a type whose products are faster for many tokens, and computes steps of 16
        tokens and more with these: other last digits, and more memory (docs/performance.md).

        `engine` "native" computes with the graphs of this package, "llama" with libllama's own context, "auto" natively
        where there is a graph for the file's architecture; `kind` and `reason` say what that came to, and so does the
        log. In libllama all of `ctx` takes its memory at once: its default is 8192 at most, and there are no
        deterministic mode, no kinds of caches, no adapters and no `prefill_weights`. It reads the file itself: one that
        changes meanwhile is no longer the one that was checked, whatever `mmap` is.

        Raises ModelNotFoundError, GGUFError, ModelError, LibraryError, OptionError, AllocationError, CancelledError;
        nothing stays allocated.
        """
        with ExitStack() as undo:
            file = GGUFFile.open(find_model(path), mmap=mmap)
            undo.callback(file.close)
            if is_encoder(file):
                name = file.metadata.get("general.architecture")
                raise UnsupportedArchitectureError(
                    f"{file.path} holds a {name!r} model, an encoder that generates nothing: Encoder.load takes it"
                )
            # parsing the vocabulary takes longest and needs no lock of Python's: all else is done beside it
            pending = PendingVocabulary(file)
            undo.callback(pending.wait)
            from ggml_engine.loading import load_executor  # noqa: PLC0415  # beside the parsing, see above

            loaded = load_executor(
                file,
                engine=engine,
                progress=progress,
                cancel=cancel,
                ctx=ctx,
                threads=threads,
                threads_batch=threads_batch,
                leave_cores=leave_cores,
                device=device,
                gpu_layers=gpu_layers,
                mmap=mmap,
                kv_type=kv_type,
                cache_kind=cache_kind,
                attention=attention,
                max_batch_tokens=max_batch_tokens,
                deterministic=deterministic,
                calibrate=calibrate,
                adapters=adapters,
                prefill_weights=prefill_weights,
            )
            undo.callback(loaded.executor.model.free)
            for adapter in loaded.adapters:
                undo.callback(adapter.free)
            undo.callback(loaded.executor.close_all)
            import_module("ggml_engine.control.runner")  # the first generation needs it, and here it costs nothing
            opened = cls(file, pending.result(), loaded)
            undo.pop_all()
        return opened

    # ---- text

    def generate(
        self,
        prompt: str | Sequence[int],
        config: GenConfig | None = None,
        *,
        max_tokens: int | None = None,
        parse_special: bool = False,
    ) -> Generation:
        """Continue `prompt` (text, or token ids) as it is: no chat template.

        Begins at once, in a session of its own, closed when the generation has ended: a result that is kept holds no
        cells. Text that spells a control token stays text unless `parse_special`. Iterate the result for pieces of
        text. Raises InputError and ContextLengthError.
        """
        if isinstance(prompt, str):
            encoded = self.vocabulary.encode(prompt, add_special=True, parse_special=parse_special)
            tokens: Sequence[int] = encoded.tolist()
        else:
            tokens = prompt
        return self._generate_alone(tokens, config, max_tokens)

    def chat(
        self,
        messages: str | Sequence[Message],
        config: GenConfig | None = None,
        *,
        max_tokens: int | None = None,
    ) -> Generation:
        """Answer `messages` (or one user message) through the model's chat template.

        Raises ChatTemplateError where the file has none or it refuses these messages.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._generate_alone(self.encode_chat(messages), config, max_tokens)

    def _generate_alone(self, tokens: Sequence[int], config: GenConfig | None, max_tokens: int | None) -> Generation:
        runner = self.runner()
        wanted = self.vocabulary.check_tokens(tokens)
        if not wanted.size:
            raise InputError("there is nothing to generate from: the prompt has no tokens")
        if wanted.size > self.executor.max_positions:
            raise ContextLengthError(int(wanted.size), self.executor.max_positions)
        return runner.open_session().generate_alone(wanted, config, max_tokens=max_tokens)

    # ---- embeddings

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        pooling: Literal["auto", "mean", "last", "cls", "none"] = "auto",
        *,
        normalize: bool = True,
    ) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Embeddings of texts (or of their token ids): f32 [texts, n_embd], or with "none" a list of [tokens, n_embd].

        They are the hidden states after the final norm: averaged over a text, or of its last or first token, or all
        of them. "auto" is what the file says (its key `pooling_type`), else the mean. `normalize` gives rows of length
        1. Texts share steps with each other, and take turns with generations. Waits for the result; no session is
        opened and no cell kept. Raises InputError, ContextLengthError, OptionError, PoolFullError, ClosedError,
        HyperparameterError for a file whose key means nothing, and WouldBlockError in a callback.
        """
        from ggml_engine.control.embedding import Embedding  # noqa: PLC0415  # few need it
        from ggml_engine.models.pooling import choose_pooling  # noqa: PLC0415

        if isinstance(texts, str):
            raise InputError("embed takes a list of texts, and got one text")
        kind = choose_pooling(self.file, pooling)
        work = Embedding([self._encoded(text) for text in texts], kind, normalize=normalize)
        work.check_length(self.executor.max_positions)
        runner = self.runner()
        try:
            while runner.compute_async(work.step).result():
                pass
        except BaseException:
            runner.compute_async(work.abandon)
            raise
        return work.result()

    def _encoded(self, text: str | Sequence[int]) -> NDArray[np.int32]:
        if isinstance(text, str):
            return self.vocabulary.encode(text, add_special=True, parse_special=False)
        return self.vocabulary.check_tokens(text)

    # ---- sessions

    def session(self, *, adapters: Adapters | None = None) -> Session:
        """A new, empty session, to be continued, cloned and rewound.

        `adapters` are loaded ones with their scales; by default those of `load`, () is none. Raises SessionLimitError,
        OptionError and ClosedError.
        """
        return self.runner().open_session(adapters=adapters)

    def load_adapter(self, path: str | os.PathLike[str]) -> Adapter:
        """Load a LoRA file for sessions of this engine; it goes with the engine, or with `drop_adapter`.

        Raises GGUFError, ModelError (HyperparameterError for a file that is no such adapter, or one of another
        architecture, WeightError for matrices that do not fit), AllocationError, OptionError in libllama's engine,
        ClosedError.
        """
        from ggml_engine.models.adapter import load_adapter  # noqa: PLC0415  # few programs need it

        with self._lock:
            if self._is_closing:
                raise ClosedError("the engine was closed")
            adapter = load_adapter(self._native.model, path)
            self._adapters.append(adapter)
            return adapter

    @property
    def _native(self) -> GgmlExecutor:
        if self.kind != "native":
            raise OptionError(f"adapters are taken by the native engine alone, and {self.reason}")
        return cast("GgmlExecutor", self.executor)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free an adapter; idempotent. Waits for a running step. Raises OptionError while sessions have it."""
        with self._lock:
            self._native.drop_adapter(adapter)
            if adapter in self._adapters:
                self._adapters.remove(adapter)

    def runner(self, options: RunnerOptions | None = None) -> Runner:
        """The engine's thread, started at the first call; `options` bound it, and can be given then only.

        Raises OptionError for options that cannot be, or that come too late, and ClosedError.
        """
        with self._lock:
            if self._is_closing:
                raise ClosedError("the engine was closed")
            if self._runner is None:
                from ggml_engine.control.runner import Runner  # noqa: PLC0415  # see above
                from ggml_engine.control.text import VocabularyText  # noqa: PLC0415

                self._runner = Runner(self.executor, VocabularyText(self.vocabulary), options)
            elif options is not None:
                raise OptionError("the runner has started: give its options at the first call of runner()")
            return self._runner

    def conversation(self, system: str | None = None) -> Conversation:
        """A chat that keeps its session: every turn forwards only what is new."""
        from ggml_engine.control.conversation import Conversation  # noqa: PLC0415  # see above

        return Conversation(self.session(), self.encode_chat, system)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The tokens of a rendered chat, ready for the assistant's turn.

        `variables` reach the template as they are named: `tools`, `enable_thinking`, ...
        """
        segments = self.template.render_segments(messages, self.vocabulary.special_tokens, **variables)
        return [int(token) for token in self.vocabulary.encode_segments(segments, add_special=True)]

    @property
    def template(self) -> ChatTemplate:
        """The file's chat template. Raises ChatTemplateError when it has none."""
        from ggml_engine.chat import ChatTemplate  # noqa: PLC0415  # see above

        if self._template is None:
            vocabulary = self.vocabulary
            self._template = ChatTemplate.from_metadata(
                self.file.metadata,
                model_name=self.file.path,
                bos_token="" if vocabulary.bos is None else vocabulary.text(vocabulary.bos),
                eos_token="" if vocabulary.eos is None else vocabulary.text(vocabulary.eos),
            )
        return self._template

    def calibrate(self) -> None:
        """Measure now, between other work, what `calibrate` of `load` would measure later: some seconds, or nothing.

        Nothing where it is known already, or where nothing is chosen by it. This engine's forms stay; engines that are
        loaded with `calibrate=True` from now on know the times. Not in a callback (WouldBlockError).
        """
        runner = self.runner()
        runner.compute_async(lambda executor: executor.want_idle_work()).result()
        while runner.compute_async(lambda executor: executor.do_idle_work()).result():
            pass

    # ---- lifecycle

    def close(self) -> None:
        """Free everything; idempotent. Stops a running step; generations over it raise ClosedError.

        Raises EngineError, with nothing freed, in a callback and when a step or a callback does not end in 5 seconds:
        the engine has stopped then, and may be closed once more.
        """
        with self._lock:
            self._is_closing = True
            runner = self._runner
        # without the lock: a callback that is told of the end may ask for it, and the thread waits for its callbacks
        if runner is not None and not runner.shutdown():
            raise EngineError("nothing was freed: the engine's thread is busy, with this callback or a long step")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.executor.close_all()
            for adapter in self._adapters:
                adapter.free()
            self.model.free()
            self.file.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
