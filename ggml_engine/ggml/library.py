"""Finds, opens and checks the native libraries, and wires their logs and aborts to Python.

Owns the three library handles of the process. `load()` opens them once; nothing is opened at import. What is opened is
what was checked: `CHECKED_VERSIONS` names the ggml releases whose headers our declarations were compared with, and the
size of ggml's own tensor must equal ours, since a wrong struct would be read as garbage, not refused.
Native log lines go to the logger `ggml_engine.native`; ggml's abort message goes there too, with the name of the graph
that was running, before the process dies.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggml_engine.errors import LibraryError
from ggml_engine.ggml import amx
from ggml_engine.ggml._bindings import ffi

__all__ = ["CHECKED_VERSIONS", "Libraries", "captured_log", "ffi", "load", "restore_log", "running_graph"]

# ggml release -> the llama-cpp-python that ships it
CHECKED_VERSIONS = {"0.25.3": "0.3.36"}

_OBJECT_HEADER_BYTES = 32  # sizeof(struct ggml_object), which ggml_tensor_overhead() includes
_LOG_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_LOG_CONTINUES = 5
_LOG_ANY, _LOG_WARN = 0, 3

log = logging.getLogger("ggml_engine.native")


@dataclass(frozen=True, slots=True)
class Libraries:
    """The open libraries. `base`, `registry` and `llama` are cffi libraries: their functions are attributes."""

    base: Any
    registry: Any
    llama: Any
    directory: Path
    version: str


def library_file(name: str, platform: str = sys.platform) -> str:
    """File name of a shared library (`ggml-base`, `ggml`, `llama`) on a platform (`sys.platform`'s words)."""
    if platform == "win32":
        return f"{name}.dll"
    if platform == "darwin":
        return f"lib{name}.dylib"
    return f"lib{name}.so"


def library_directories() -> list[Path]:
    """Where the libraries may lie, best first.

    The folder named by `GGML_ENGINE_LIBRARIES`; the folder inside the installed `llama_cpp`; inside a frozen
    application (PyInstaller, cx_Freeze, py2app, Nuitka), the places that these give to package data.
    """
    found = []
    if override := os.environ.get("GGML_ENGINE_LIBRARIES"):
        found.append(Path(override))
    spec = importlib.util.find_spec("llama_cpp")
    for location in (spec.submodule_search_locations or []) if spec else []:
        found.append(Path(location) / "lib")
    if getattr(sys, "frozen", False) or "__compiled__" in globals():
        bundle = Path(getattr(sys, "_MEIPASS", Path(sys.executable).parent))
        found += [bundle / "llama_cpp" / "lib", bundle / "lib" / "llama_cpp" / "lib", bundle]
        found += [bundle.parent / "Resources" / "lib" / "llama_cpp" / "lib", bundle.parent / "Frameworks"]
    return found


def find_directory() -> Path:
    """The first folder that holds all three libraries."""
    tried = library_directories()
    names = [library_file(name) for name in ("ggml-base", "ggml", "llama")]
    for directory in tried:
        if all((directory / name).is_file() for name in names):
            return directory
    looked = ", ".join(str(directory) for directory in tried) or "nowhere: llama_cpp is not installed"
    raise LibraryError(
        f"the ggml libraries ({', '.join(names)}) were not found (looked in: {looked}). "
        f"Install them with: pip install llama-cpp-python=={_wanted()}"
    )


def _wanted() -> str:
    return list(CHECKED_VERSIONS.values())[-1]


def _open(directory: Path) -> Libraries:
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort would else start a debugger and take seconds
    if sys.platform == "win32":
        os.add_dll_directory(str(directory))
    opened = []
    for name in ("ggml-base", "ggml", "llama"):
        path = directory / library_file(name)
        try:
            opened.append(ffi.dlopen(str(path)))
        except OSError as error:
            raise LibraryError(f"cannot open {path}: {error}. Reinstall llama-cpp-python=={_wanted()}") from error
    base, registry, llama = opened
    return Libraries(base, registry, llama, directory, _checked_version(base, directory))


def _checked_version(base: Any, directory: Path) -> str:
    try:
        version: str = ffi.string(base.ggml_version()).decode("ascii", "replace")
        overhead = int(base.ggml_tensor_overhead())
    except (AttributeError, ffi.error) as error:  # cffi's for a symbol that is not there
        raise LibraryError(f"{directory} holds a ggml without a version. {_install_advice()}") from error
    if version not in CHECKED_VERSIONS:
        raise LibraryError(
            f"{directory} holds ggml {version}, checked are {', '.join(CHECKED_VERSIONS)}. {_install_advice()}"
        )
    ours = _OBJECT_HEADER_BYTES + ffi.sizeof("struct ggml_tensor")
    if overhead != ours:
        raise LibraryError(
            f"a tensor of ggml {version} takes {overhead} bytes, ours {ours}: the library was built with other "
            f"limits. {_install_advice()}"
        )
    return version


def _install_advice() -> str:
    return f"Install the checked one with: pip install llama-cpp-python=={_wanted()}"


class _NativeLog:
    """Joins the pieces of a native log line and hands whole lines to `logging`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending = ""
        self._level = logging.INFO

    def __call__(self, level: int, text: str) -> None:
        with self._lock:
            if level != _LOG_CONTINUES:
                self._flush()
                self._level = _LOG_LEVELS.get(level, logging.INFO)
            self._pending += text
            if self._pending.endswith("\n"):
                self._flush()

    def _flush(self) -> None:
        # ggml's "info" is a library's chatter, an application's debug
        level = logging.DEBUG if self._level == logging.INFO else self._level
        if line := self._pending.rstrip():
            log.log(level, "%s", line)
        self._pending = ""


class _Capture(logging.Filter):
    """Takes what one thread's native calls complain of out of the log; `reason` is the first error among it."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.reason = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread or record.levelno < logging.WARNING:
            return True
        message = record.getMessage()
        if record.levelno >= logging.ERROR:
            self.reason = self.reason or message
        log.debug("%s", message)
        return False


@contextlib.contextmanager
def captured_log() -> Iterator[_Capture]:
    """For calls whose failure becomes an error of ours: what they log on this thread is that error's reason."""
    capture = _Capture()
    log.addFilter(capture)
    try:
        yield capture
    finally:
        log.removeFilter(capture)


_native_log = _NativeLog()
_running = ""


@ffi.callback("ggml_log_callback")  # type: ignore[untyped-decorator]
def _on_log(level: int, text: Any, _user_data: Any) -> None:
    _native_log(level, ffi.string(text).decode("utf-8", "replace"))


@ffi.callback("ggml_abort_callback_t")  # type: ignore[untyped-decorator]
def _on_abort(message: Any) -> None:
    text = ffi.string(message).decode("utf-8", "replace").strip()
    log.critical("ggml aborts the process while running %s: %s", _running or "no graph", text)
    sys.stderr.write(f"ggml-engine: ggml aborts the process while running {_running or 'no graph'}: {text}\n")
    for handler in [*log.handlers, *logging.getLogger().handlers]:
        handler.flush()
    sys.stderr.flush()


class running_graph:  # noqa: N801  # used as `contextlib.suppress` is
    """Says which graph runs, for the message of an abort inside it."""

    __slots__ = ("_before", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        global _running  # read by a callback that the library calls without arguments of ours
        self._before, _running = _running, self._name

    def __exit__(self, *_error: object) -> None:
        global _running  # noqa: PLW0603
        _running = self._before


def _silence_at_exit(libraries: Libraries) -> None:
    # Static destructors may log after Python is gone. ggml has no "no log" setting (null prints to stderr), so give it
    # a native function that ignores its arguments.
    nothing = ffi.cast("ggml_log_callback", ffi.addressof(libraries.base, "ggml_version"))
    libraries.llama.llama_log_set(nothing, ffi.NULL)
    libraries.base.ggml_set_abort_callback(ffi.NULL)


def _log_callback() -> Any:
    """What the libraries' lines go to: `_on_log`, behind the compiled filter where there is one.

    A line waits for Python's lock, which others hold while a model is loaded. The filter drops what the level of the
    log hides now.
    """
    try:
        from ggml_engine.native import _kernels as native  # noqa: PLC0415  # absent where nothing was built
    except ImportError:
        return _on_log
    least = _LOG_ANY if log.isEnabledFor(logging.DEBUG) else _LOG_WARN
    address = native.filter_log(least, int(ffi.cast("uintptr_t", _on_log)))
    return _on_log if address is None else ffi.cast("ggml_log_callback", address)


_lock = threading.Lock()
_loaded: Libraries | None = None


def load() -> Libraries:
    """The native libraries, opened at the first call; safe from any thread.

    Their log follows the level that `ggml_engine.native` has at the latest call. Raises LibraryError when they are
    missing or not a checked version, saying what to install.
    """
    global _loaded  # noqa: PLW0603  # one process has one set of libraries
    with _lock:
        if _loaded is None:
            libraries = _open(find_directory())
            libraries.llama.llama_log_set(_log_callback(), ffi.NULL)  # sets ggml's, too
            libraries.base.ggml_set_abort_callback(_on_abort)
            if not libraries.registry.ggml_backend_dev_count():
                # a build whose backends are separate files
                libraries.registry.ggml_backend_load_all_from_path(str(libraries.directory).encode())
            amx.guard(libraries.base, libraries.registry)
            atexit.register(_silence_at_exit, libraries)
            _loaded = libraries
        else:
            _log_callback()
        return _loaded


def restore_log() -> None:
    """Take the native log back after something else took it, as importing `llama_cpp` does. Nothing before `load()`."""
    with _lock:
        if _loaded is not None:
            _loaded.llama.llama_log_set(_log_callback(), ffi.NULL)
