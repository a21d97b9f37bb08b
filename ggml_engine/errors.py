"""Every error that ggml-engine raises on purpose, in one tree.

EngineError
├── LibraryError                     the native libraries are missing, or not a checked version
├── NativeError                      a native call refused (null pointer, bad status)
│   ├── AllocationError              a buffer or context could not be had
│   ├── GraphError                   a graph operation was about to be built from unfit tensors
│   └── ComputeError                 a graph did not run to its end
│       └── AbortedError             because it was told to stop
├── GGUFError                        a file is not a well-formed GGUF (code, path, offset, field)
├── ModelError                       a well-formed GGUF that is not a model we can run
│   ├── UnsupportedArchitectureError
│   ├── HyperparameterError          a metadata value is missing, of a wrong type or out of range
│   ├── WeightError                  a tensor is missing, misshapen or of an unusable type
│   └── VocabularyError              the tokenizer's tables are inconsistent
├── ModelNotFoundError               no such file, and no known model of that name
├── DownloadError                    a model file could not be fetched
├── DeviceError                      no such device
├── ChatTemplateError                the template is absent, forbidden, too expensive, or raised
├── InputError                       a request holds something unusable (a token id, a prompt, a grammar)
│   └── ContextLengthError           more tokens than the context holds (requested, limit)
├── OptionError                      an option, or a combination of options, is not possible
├── CacheError                       the cell cache refused; nothing was changed
│   ├── PoolFullError                not enough free cells (needed, free, capacity)
│   │   └── SequenceLimitError       not enough sequences that may have tokens at once
│   ├── RewindError                  the memory of this model cannot go back to that position
│   ├── UnknownSequenceError         no open sequence has this id
│   ├── PositionError                positions do not continue their sequence
│   └── StepError                    a step was used out of order (not declared, placed twice, stale)
├── SessionError                     a session cannot do what was asked; nothing was changed
│   ├── SessionBusyError             it has a generation already
│   ├── SessionLimitError            no more sessions fit
│   ├── UnknownSessionError          no session has this name
│   └── PoisonedError                an executor failed under it: only closing it is left
├── QueueFullError                   as many requests wait as may (retry_after_s)
├── SavedStateError                  a session or prefix cache cannot be saved or loaded (code, path)
├── ExecutorError                    an executor returned what it must not
├── WouldBlockError                  a callback waits for the thread that it runs on
├── CancelledError                   the caller asked to stop
└── ClosedError                      the object was closed before
"""

from __future__ import annotations

import os


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class LibraryError(EngineError):
    """The native libraries are missing, or their version is not one that was checked."""


class NativeError(EngineError):
    """A native call refused: it returned a null pointer or a bad status."""


class AllocationError(NativeError):
    """A buffer or a context could not be allocated."""


class GraphError(NativeError):
    """A graph operation was about to be built from tensors that it cannot take."""


class ComputeError(NativeError):
    """A graph did not run to its end."""


class AbortedError(ComputeError):
    """A graph was told to stop, and did."""


class GGUFError(EngineError):
    """A file is not a well-formed GGUF.

    `code` is a short stable name ("truncated", "bad-magic", ...), `offset` the byte at which the fault
    lies, `field` what was being read there.
    """

    def __init__(self, code: str, path: str | os.PathLike[str], offset: int, field: str, reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason} ({code}: {field} at byte {offset})")
        self.code = code
        self.path = os.fspath(path)
        self.offset = offset
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type[GGUFError], tuple[str, str, int, str, str]]:
        return type(self), (self.code, self.path, self.offset, self.field, self.reason)


class ModelError(EngineError):
    """A well-formed GGUF that does not hold a model which can be run."""


class UnsupportedArchitectureError(ModelError):
    """The file's `general.architecture` has no graph here."""


class HyperparameterError(ModelError):
    """A metadata value is missing, of a wrong type or out of range. `key` is its GGUF key."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason

    def __reduce__(self) -> tuple[type[HyperparameterError], tuple[str, str]]:
        return type(self), (self.key, self.reason)


class WeightError(ModelError):
    """A tensor is missing, misshapen or of an unusable type. `tensor` is its name."""

    def __init__(self, tensor: str, reason: str) -> None:
        super().__init__(f"tensor {tensor!r}: {reason}")
        self.tensor = tensor
        self.reason = reason

    def __reduce__(self) -> tuple[type[WeightError], tuple[str, str]]:
        return type(self), (self.tensor, self.reason)


class VocabularyError(ModelError):
    """The tokenizer's tables are missing or inconsistent."""


class ModelNotFoundError(EngineError):
    """There is no such file, and no known model of that name."""


class DownloadError(EngineError):
    """A model file could not be fetched."""


class DeviceError(EngineError):
    """There is no such device."""


class ChatTemplateError(EngineError):
    """The chat template is absent, forbidden, too expensive, or raised."""


class InputError(EngineError, ValueError):
    """A request holds something unusable: a token id, a prompt, a grammar."""


class ContextLengthError(InputError):
    """More tokens were asked for than the context holds."""

    def __init__(self, requested: int, limit: int, what: str = "the prompt") -> None:
        super().__init__(f"{what} needs {requested} tokens, the context holds {limit}")
        self.requested = requested
        self.limit = limit
        self.what = what

    def __reduce__(self) -> tuple[type[ContextLengthError], tuple[int, int, str]]:
        return type(self), (self.requested, self.limit, self.what)


class OptionError(EngineError, ValueError):
    """An option, or a combination of options, is not possible."""


class CacheError(EngineError):
    """The cell cache refused; nothing was changed."""


class PoolFullError(CacheError):
    """Not enough free cells. All three figures are in cells."""

    def __init__(self, needed: int, free: int, capacity: int, what: str = "the step") -> None:
        super().__init__(f"{what} needs {needed} more cells, {free} of {capacity} can be had")
        self.needed = needed
        self.free = free
        self.capacity = capacity
        self.what = what

    def __reduce__(self) -> tuple[type[PoolFullError], tuple[int, int, int, str]]:
        return type(self), (self.needed, self.free, self.capacity, self.what)


class SequenceLimitError(PoolFullError):
    """No more sequences may have tokens at once. All three figures are in sequences."""

    def __init__(self, needed: int, free: int, capacity: int) -> None:
        super().__init__(needed, free, capacity)
        self.args = (f"the step needs {needed} more sequences, {free} of {capacity} can be had",)


class RewindError(CacheError):
    """The memory of this model cannot go back to that position: a recurrent state is that of the last token alone."""


class UnknownSequenceError(CacheError):
    """No open sequence has this id."""


class PositionError(CacheError):
    """Positions do not continue their sequence."""


class StepError(CacheError):
    """A step was used out of order: not declared, placed twice, or stale."""


class SessionError(EngineError):
    """A session cannot do what was asked; nothing was changed."""


class SessionBusyError(SessionError):
    """The session has a generation already."""


class SessionLimitError(SessionError):
    """No more sessions fit: the number of them, or the cells reserved for them, is used up."""


class UnknownSessionError(SessionError):
    """No session has this name, or it has ended."""


class PoisonedError(SessionError):
    """An executor failed under this session, so what it holds is not known: only closing it is left."""


class QueueFullError(EngineError):
    """As many requests wait as may. `retry_after_s` is when one of them may have begun, by how long the last took."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests wait already, try again in {retry_after_s:.0f} s")
        self.waiting = waiting
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[QueueFullError], tuple[int, float]]:
        return type(self), (self.waiting, self.retry_after_s)


class SavedStateError(EngineError):
    """A session or a prefix cache cannot be saved to a file, or loaded from it; nothing that lives was changed.

    `code` is a short stable name: "name" (not an allowed one), "missing" (no such file), "io" (the system refused),
    "foreign" (no file of ours), "version", "damaged" (truncated or altered), "other-model" (also: another execution),
    "other-kind" (a prefix cache for a session, or the reverse), "unsavable" (what cannot be kept in a file).
    """

    def __init__(self, code: str, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason} ({code})")
        self.code = code
        self.path = os.fspath(path)
        self.reason = reason

    def __reduce__(self) -> tuple[type[SavedStateError], tuple[str, str, str]]:
        return type(self), (self.code, self.path, self.reason)


class ExecutorError(EngineError):
    """An executor returned something else than it was asked for."""


class WouldBlockError(EngineError):
    """A callback of the engine thread waits for something that this thread has to do."""


class CancelledError(EngineError):
    """The caller asked to stop."""


class ClosedError(EngineError):
    """The object was closed before this call."""
