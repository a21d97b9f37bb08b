"""`PendingVocabulary`: libllama parses a vocabulary in a thread, while the process goes on.

Apart from `vocab`, and without numpy: on the way to a first token libllama's parsing takes longest, so it begins before
numpy is imported. All that `vocab_tables` checks is checked before.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ggml_engine.errors import VocabularyError
from ggml_engine.ggml.library import ffi, load
from ggml_engine.ggml.vocab_tables import Tables, log, read_tables

if TYPE_CHECKING:
    from ggml_engine.ggml.gguf import GGUFFile


class PendingVocabulary:
    """A vocabulary whose tables are checked already and which libllama parses in a thread, without Python's lock.

    The constructor raises VocabularyError when the tables are unusable. Ask for the `result`, or `wait`, before the
    process goes on without it.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._tables = read_tables(file)
        self._origin = file.path
        self._model: Any = None
        self._error: BaseException | None = None
        load()  # here: the thread would wait for Python's lock at every step of it, while this one imports
        self._thread = threading.Thread(target=self._parse, name="ggml-engine-vocabulary")
        self._thread.start()

    def _parse(self) -> None:
        try:
            self._model = _load_native(self._tables.gguf, self._origin)
        except BaseException as error:  # raised again where the result is asked for
            self._error = error

    def wait(self) -> None:
        """Until the thread has ended."""
        self._thread.join()

    def result(self) -> tuple[Tables, Any]:
        """The tables and libllama's model of them, for a `Vocabulary`. Raises what the parsing raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._tables, self._model


@contextlib.contextmanager
def _temporary_file(parts: Sequence[bytes | memoryview]) -> Iterator[str]:
    """A path under which `parts` can be read: memory where the system can, else a file that is removed."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        descriptor = os.memfd_create("ggml-engine-vocabulary")
        path = f"/proc/self/fd/{descriptor}"
        with open(descriptor, "wb", buffering=0) as file:
            _write(file, parts)
            yield path
        return
    import tempfile  # noqa: PLC0415  # slow to import, and Linux does without

    descriptor, path = tempfile.mkstemp(prefix="ggml-engine-", suffix=".gguf")
    try:
        with open(descriptor, "wb", buffering=0) as file:
            _write(file, parts)
        yield path
    finally:
        os.unlink(path)


def _write(file: Any, parts: Sequence[bytes | memoryview]) -> None:
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[file.write(view) :]


def _load_native(parts: Sequence[bytes | memoryview], origin: str) -> Any:
    llama = load().llama
    params = llama.llama_model_default_params()
    params.vocab_only = True
    begin = time.perf_counter()
    with _temporary_file(parts) as path:
        model = llama.llama_model_load_from_file(path.encode(), params)
    if model == ffi.NULL:
        raise VocabularyError(f"{origin}: libllama refuses the tokenizer's tables (the log has its reason)")
    log.debug("libllama took %.0f ms for the vocabulary of %s", 1e3 * (time.perf_counter() - begin), origin)
    return ffi.gc(model, llama.llama_model_free)
