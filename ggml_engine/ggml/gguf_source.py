"""One model file on disk, as read-only bytes at a page-aligned address.

Owns the handle and the mapping: opens without blocking (a FIFO or a device is refused, not waited for), takes regular
files only, maps them or copies them. Knows nothing of the GGUF format.

A mapping shows later changes of the file, and reading a page that was cut off kills the process (SIGBUS);
`mapped=False` copies the file at once, for files that others may rewrite. After `close` nothing new can be taken from
it, but views that were handed out stay valid: the memory goes when the last of them does.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
import sys
from typing import Final

from ggml_engine.errors import ClosedError, GGUFError

# Some systems refuse one read of 2 GiB or more.
_READ_BYTES: Final = 1 << 28


class FileBytes:
    """The bytes of one file. `memory` is for slicing and `struct`, `view` for taking its address."""

    def __init__(self, path: str, memory: mmap.mmap | bytes) -> None:
        self.path = path
        self.n_bytes = len(memory)
        self._memory: mmap.mmap | bytes | None = memory
        self._view: memoryview | None = memoryview(memory).toreadonly()

    @classmethod
    def open(cls, path: str | bytes | os.PathLike[str], *, mapped: bool = True) -> FileBytes:
        """Map (or copy) the regular file at `path`.

        GGUFError: "not-found", "not-a-file", "unreadable", "empty", or "truncated" when it shrinks meanwhile.
        """
        name = os.fsdecode(path)
        descriptor = _open_descriptor(name)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise GGUFError("not-a-file", name, 0, "file", f"is {_kind_of(status.st_mode)}, not a regular file")
            if status.st_size == 0:
                raise GGUFError("empty", name, 0, "file", "the file is empty")
            memory = _map(name, descriptor, status.st_size) if mapped else _copy(name, descriptor, status.st_size)
        finally:
            os.close(descriptor)
        return cls(name, memory)

    @property
    def memory(self) -> mmap.mmap | bytes:
        """The bytes themselves; slices of it are copies. ClosedError after `close`."""
        if self._memory is None:
            raise ClosedError(f"{self.path} was closed")
        return self._memory

    @property
    def view(self) -> memoryview:
        """A read-only view of the whole file, starting at a page boundary. ClosedError after `close`."""
        if self._view is None:
            raise ClosedError(f"{self.path} was closed")
        return self._view

    @property
    def closed(self) -> bool:
        return self._memory is None

    def close(self) -> None:
        """Give the memory back, now or when the last view of it is gone. May be called again."""
        memory, self._memory = self._memory, None
        view, self._view = self._view, None
        try:
            if view is not None:
                view.release()
            if isinstance(memory, mmap.mmap):
                memory.close()
        except BufferError:
            # A view or an array over it is alive: dropping our references leaves the mapping to that one.
            pass


def _open_descriptor(name: str) -> int:
    # O_NONBLOCK: opening a FIFO for reading would wait for a writer.
    flags = os.O_RDONLY
    for flag in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"):
        flags |= getattr(os, flag, 0)
    try:
        return os.open(name, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise GGUFError("not-found", name, 0, "file", "there is no such file") from None
    except ValueError as error:  # a NUL in the name
        raise GGUFError("not-found", name, 0, "file", f"there can be no such file: {error}") from None
    except OSError as error:
        # Windows cannot open a directory, no system a socket.
        if os.path.exists(name) and not os.path.isfile(name):
            raise GGUFError("not-a-file", name, 0, "file", "is not a regular file") from None
        raise GGUFError("unreadable", name, 0, "file", f"cannot be opened: {error.strerror}") from None


def _kind_of(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    return next((text for test, text in kinds if test(mode)), "a device")


def _map(name: str, descriptor: int, n_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, n_bytes, access=mmap.ACCESS_READ)
    except ValueError:
        raise GGUFError("truncated", name, n_bytes, "file", f"shrank below {n_bytes} bytes while opened") from None
    except (OSError, OverflowError, MemoryError) as error:
        raise GGUFError("unreadable", name, 0, "file", f"{n_bytes} bytes cannot be mapped: {error}") from None


def _copy(name: str, descriptor: int, n_bytes: int) -> mmap.mmap:
    # Anonymous memory instead of bytes: it starts at a page boundary, as ggml's host buffers want it.
    try:
        if sys.platform == "win32":
            memory = mmap.mmap(-1, n_bytes)
        else:
            memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, MemoryError) as error:
        raise GGUFError("unreadable", name, 0, "file", f"no memory for a copy of {n_bytes} bytes: {error}") from None
    try:
        with memoryview(memory) as target:
            _fill(name, descriptor, target)
    except BaseException:
        memory.close()
        raise
    return memory


def _fill(name: str, descriptor: int, target: memoryview) -> None:
    done = 0
    with io.FileIO(descriptor, closefd=False) as file:
        while done < len(target):
            try:
                with target[done : done + _READ_BYTES] as piece:
                    n_read = file.readinto(piece)
            except OSError as error:
                raise GGUFError("unreadable", name, done, "file", f"cannot be read: {error.strerror}") from None
            if not n_read:
                reason = f"ends after {done} bytes, it had {len(target)} when it was opened"
                raise GGUFError("truncated", name, done, "file", reason)
            done += n_read
