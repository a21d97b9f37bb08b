"""API keys: where they come from, and how one is compared.

Only SHA-256 digests are kept. A presented key is compared with all of them, in constant time and without an early exit,
so that the time of an answer tells nothing of how much of a key was right. Keys never come from the command line, which
every user of the machine can read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from ggml_engine.errors import OptionError
from ggml_engine.server.options import DEFAULT_API_KEY_ENV

_PARTITION_DIGITS: Final = 32
_MAX_FILE: Final = 1 << 20


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ApiKeys:
    """The keys that are accepted; none: everything is."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def partition_of(self, presented: bytes) -> str | None:
        """A name for the owner of a key, made of its digest; None for a key that is not accepted."""
        wanted = _digest(presented)
        found = None
        for digest in self._digests:
            if hmac.compare_digest(digest, wanted):
                found = digest.hex()[:_PARTITION_DIGITS]  # the others are compared all the same
        return found


def presented_key(headers: Mapping[str, str]) -> bytes | None:
    """The key of a request: OpenAI's `Authorization: Bearer`, or Anthropic's `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
    return key.encode("latin-1") if key else None  # as headers are decoded: the bytes that came


def load_keys(
    api_key_env: str | None, api_key_file: str | os.PathLike[str] | None, environment: Mapping[str, str] = os.environ
) -> ApiKeys:
    """The keys of an environment variable and of a file, one a line.

    The default variable may be unset: then there is no key. Raises OptionError for another one that is unset, and for a
    source that has no key in it.
    """
    found: list[str] = []
    if api_key_env is not None and (api_key_env in environment or api_key_env != DEFAULT_API_KEY_ENV):
        found += _checked(environment.get(api_key_env, "").split(), f"the environment variable {api_key_env}")
    if api_key_file is not None:
        try:
            with Path(api_key_file).open("rb") as file:
                text = file.read(_MAX_FILE).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"api_key_file {os.fspath(api_key_file)!r} cannot be read: {error}") from error
        lines = (line.strip() for line in text.splitlines())
        keys = [line for line in lines if line and not line.startswith("#")]
        found += _checked(keys, f"api_key_file {os.fspath(api_key_file)!r}")
    return ApiKeys(found)


def _checked(keys: list[str], source: str) -> list[str]:
    if not keys:
        raise OptionError(f"{source} has no key in it")
    if any(not key.isprintable() or " " in key for key in keys):
        raise OptionError(f"{source} has a key with a space or a control character in it")
    return keys
