"""Names of saved states, and their files: which names there may be, and how a file is written.

A file appears under its name when it is whole and on the disk, or not at all; one that was there before stays until
then. Does not know: what is in a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ggml_engine.errors import SavedStateError

Directory = str | os.PathLike[str]

SUFFIX = ".ggkv"
_ALLOWED = re.compile(r"[a-z0-9_][a-z0-9._-]{0,63}", re.ASCII)
_OF_WINDOWS = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.ASCII)


def path_of(directory: Directory, name: str) -> Path:
    """The file of a name. Raises SavedStateError (name) for one that is not on the allow-list."""
    if not isinstance(name, str) or not _ALLOWED.fullmatch(name) or _OF_WINDOWS.fullmatch(name):
        raise SavedStateError(
            "name",
            directory,
            f"a name is 1 to 64 of a-z, 0-9, '.', '_' and '-', begins with a letter, a digit or '_', and is no device "
            f"of Windows; {name!r:.100} was given",
        )
    return Path(directory) / f"{name}{SUFFIX}"


def names_in(directory: Directory) -> list[str]:
    """The names that are saved in a directory, in alphabetical order; none where there is no directory.

    Their files are not looked into. Raises SavedStateError (io).
    """
    try:
        found = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SavedStateError("io", directory, f"it cannot be listed: {error}") from error
    names = [file.removesuffix(SUFFIX) for file in found if file.endswith(SUFFIX)]
    return sorted(name for name in names if _ALLOWED.fullmatch(name) and not _OF_WINDOWS.fullmatch(name))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` at the end; where the writing fails it is taken away.

    Makes the directory where there is none. Directory and file are for their owner only: K/V and tokens are what was
    said. Raises SavedStateError (io).
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        import tempfile  # noqa: PLC0415  # a start needs none of it

        # begins with a dot, which no name does; made with mode 0600 and never over another file
        number, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with open(number, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_directory(path.parent)
    except TimeoutError:  # an OSError too
        raise
    except OSError as error:
        raise SavedStateError("io", path, f"it cannot be written: {error}") from error


def _sync_directory(directory: Path) -> None:
    """Let the new name outlive a loss of power, where a directory can be synced."""
    with suppress(OSError):
        number = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
