"""ggml-engine: GGUF language models in a Python process, many sessions on one KV cache.

The public names. Importing the package loads no native library and no numpy: a name is imported when it is first used
(PEP 562). Errors are plain Python and are here at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ggml_engine.errors import (
    AbortedError,
    AllocationError,
    CacheError,
    CancelledError,
    ChatTemplateError,
    ClosedError,
    ComputeError,
    ContextLengthError,
    DeviceError,
    DownloadError,
    EngineError,
    ExecutorError,
    GGUFError,
    GraphError,
    HyperparameterError,
    InputError,
    LibraryError,
    ModelError,
    ModelNotFoundError,
    NativeError,
    OptionError,
    PoisonedError,
    PoolFullError,
    PositionError,
    QueueFullError,
    RewindError,
    SavedStateError,
    SequenceLimitError,
    SessionBusyError,
    SessionError,
    SessionLimitError,
    StepError,
    UnknownSequenceError,
    UnknownSessionError,
    UnsupportedArchitectureError,
    VocabularyError,
    WeightError,
    WouldBlockError,
)

if TYPE_CHECKING:
    from ggml_engine.control.capture import PromptCapture
    from ggml_engine.control.config import GenConfig
    from ggml_engine.control.conversation import Conversation
    from ggml_engine.control.generation import Generation, Reason, Update
    from ggml_engine.control.logprobs import TokenLogprobs
    from ggml_engine.control.options import RunnerOptions
    from ggml_engine.control.prefix_cache import PrefixCache
    from ggml_engine.control.prefix_match import Lookup, Miss, MissReason
    from ggml_engine.control.retention import (
        CacheEntry,
        LeastRecentlyUsed,
        Protecting,
        RetentionPolicy,
        UnderPressure,
    )
    from ggml_engine.control.runner import Runner
    from ggml_engine.control.session import Session
    from ggml_engine.engine import Engine
    from ggml_engine.executor.encoder import Encoder
    from ggml_engine.executor.prepared import EmbeddingInput, PreparedInput
    from ggml_engine.ggml.gguf import GGUFFile
    from ggml_engine.ggml.sampler_config import SamplerConfig
    from ggml_engine.serving.names import SessionInfo
    from ggml_engine.serving.options import ServingOptions
    from ggml_engine.serving.reply import Choice, Reply
    from ggml_engine.serving.request import ServingRequest
    from ggml_engine.serving.runtime import ServingRuntime

    __version__: str

__all__ = [
    "AbortedError",
    "AllocationError",
    "CacheEntry",
    "CacheError",
    "CancelledError",
    "ChatTemplateError",
    "Choice",
    "ClosedError",
    "ComputeError",
    "ContextLengthError",
    "Conversation",
    "DeviceError",
    "DownloadError",
    "EmbeddingInput",
    "Encoder",
    "Engine",
    "EngineError",
    "ExecutorError",
    "GGUFError",
    "GGUFFile",
    "GenConfig",
    "Generation",
    "GraphError",
    "HyperparameterError",
    "InputError",
    "LeastRecentlyUsed",
    "LibraryError",
    "Lookup",
    "Miss",
    "MissReason",
    "ModelError",
    "ModelNotFoundError",
    "NativeError",
    "OptionError",
    "PoisonedError",
    "PoolFullError",
    "PositionError",
    "PrefixCache",
    "PreparedInput",
    "PromptCapture",
    "Protecting",
    "QueueFullError",
    "Reason",
    "Reply",
    "RetentionPolicy",
    "RewindError",
    "Runner",
    "RunnerOptions",
    "SamplerConfig",
    "SavedStateError",
    "SequenceLimitError",
    "ServingOptions",
    "ServingRequest",
    "ServingRuntime",
    "Session",
    "SessionBusyError",
    "SessionError",
    "SessionInfo",
    "SessionLimitError",
    "StepError",
    "TokenLogprobs",
    "UnderPressure",
    "UnknownSequenceError",
    "UnknownSessionError",
    "UnsupportedArchitectureError",
    "Update",
    "VocabularyError",
    "WeightError",
    "WouldBlockError",
    "__version__",
]

_LAZY = {
    "CacheEntry": "ggml_engine.control.retention",
    "Choice": "ggml_engine.serving.reply",
    "Conversation": "ggml_engine.control.conversation",
    "EmbeddingInput": "ggml_engine.executor.prepared",
    "Encoder": "ggml_engine.executor.encoder",
    "Engine": "ggml_engine.engine",
    "GGUFFile": "ggml_engine.ggml.gguf",
    "GenConfig": "ggml_engine.control.config",
    "Generation": "ggml_engine.control.generation",
    "LeastRecentlyUsed": "ggml_engine.control.retention",
    "Lookup": "ggml_engine.control.prefix_match",
    "Miss": "ggml_engine.control.prefix_match",
    "MissReason": "ggml_engine.control.prefix_match",
    "PrefixCache": "ggml_engine.control.prefix_cache",
    "PreparedInput": "ggml_engine.executor.prepared",
    "PromptCapture": "ggml_engine.control.capture",
    "Protecting": "ggml_engine.control.retention",
    "Reason": "ggml_engine.control.generation",
    "Reply": "ggml_engine.serving.reply",
    "RetentionPolicy": "ggml_engine.control.retention",
    "Runner": "ggml_engine.control.runner",
    "RunnerOptions": "ggml_engine.control.options",
    "SamplerConfig": "ggml_engine.ggml.sampler_config",
    "ServingOptions": "ggml_engine.serving.options",
    "ServingRequest": "ggml_engine.serving.request",
    "ServingRuntime": "ggml_engine.serving.runtime",
    "Session": "ggml_engine.control.session",
    "SessionInfo": "ggml_engine.serving.names",
    "TokenLogprobs": "ggml_engine.control.logprobs",
    "UnderPressure": "ggml_engine.control.retention",
    "Update": "ggml_engine.control.generation",
}


def _find(name: str) -> object:
    if name == "__version__":
        value: object = _installed_version()
    elif name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


if not TYPE_CHECKING:
    # a type checker that saw it would let every name pass
    __getattr__ = _find


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - 10 ms that few programs need

    try:
        return version("ggml-engine")
    except PackageNotFoundError:  # a frozen application, or a source tree on the path
        return "0+unknown"
