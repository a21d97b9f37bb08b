"""`ServerOptions`, and the one place where all options of a server come together.

An option has one name: `max_body_bytes` in Python and in the configuration file is `--max-body-bytes` on the command
line. Where it is given twice, the command line wins over the file; where it is not given, the default is that of its
dataclass, which help shows. What cannot go together is refused here, before anything is opened or loaded.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from ggml_engine.errors import OptionError
from ggml_engine.serving.options import DEFAULT_SERVER_ENTRIES, ServingOptions

DEFAULT_API_KEY_ENV: Final = "GGML_ENGINE_API_KEY"
MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s?([KMGT]?)(?:i?B)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server listens, what it takes from strangers, and which models it has.

    `models` are pairs of a name and a path, or what `find_model` knows; the first is loaded at once, and answers where
    a request names none, and with `any_model` where it names one that there is not. A key comes from the environment
    variable `api_key_env` or the lines of `api_key_file`. Sizes are in bytes and may be text ("8G"); times are in
    seconds. `memory_budget` bounds what all loaded models may take: None is no bound for one model, and nine tenths of
    the free memory for several. `max_bodies_bytes` bounds the bodies of all requests that run (None: eight of
    `max_body_bytes`). Raises OptionError.
    """

    models: tuple[tuple[str, str], ...] = ()
    any_model: bool = False
    host: str = "127.0.0.1"
    port: int = 8080
    api_key_env: str | None = DEFAULT_API_KEY_ENV
    api_key_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    public_without_key: bool = False
    memory_budget: int | None = None
    model_idle_s: float | None = None
    session_directory: str | None = None
    session_quota: int = 1 << 30
    max_choices: int = 8
    max_body_bytes: int = 8 << 20
    max_bodies_bytes: int | None = None
    max_connections: int = 2048
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 10.0
    keep_alive_s: float = 5.0
    shutdown_grace_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("memory_budget", "session_quota", "max_body_bytes", "max_bodies_bytes"):
            object.__setattr__(self, name, n_bytes_of(name, getattr(self, name)))
        object.__setattr__(self, "models", named_models(self.models))
        object.__setattr__(self, "allowed_hosts", _texts("allowed_hosts", self.allowed_hosts))
        for name in ("host", "api_key_env", "api_key_file", "session_directory"):
            _check_text(name, getattr(self, name), optional=name != "host")
        for name, low, high in _INTEGERS:
            _check_integer(name, getattr(self, name), low, high)
        for name, low_s, high_s in _SECONDS:
            _check_seconds(name, getattr(self, name), low_s, high_s, optional=name == "model_idle_s")
        for name in ("any_model", "public_without_key"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is true or false, is {getattr(self, name)!r}")
        if self.max_bodies_bytes is not None and self.max_bodies_bytes < self.max_body_bytes:
            raise OptionError(
                f"max_bodies_bytes={self.max_bodies_bytes} has no room for one body of "
                f"max_body_bytes={self.max_body_bytes}"
            )

    @property
    def bodies_bytes(self) -> int:
        """What the bodies of all requests that run may take."""
        return _BODIES * self.max_body_bytes if self.max_bodies_bytes is None else self.max_bodies_bytes


_BODIES: Final = 8  # of the longest, at once, where nothing else is said
_INTEGERS: Final = (("port", 0, 65535), ("max_choices", 1, 128), ("max_connections", 1, 1 << 20))
_SECONDS: Final = (
    ("model_idle_s", 1, 10**9),
    ("header_timeout_s", 0.05, 3600),
    ("body_timeout_s", 0.05, 3600),
    ("write_timeout_s", 0.05, 3600),
    ("keep_alive_s", 0.05, 3600),
    ("shutdown_grace_s", 0, 2.5),  # what is left of five seconds is for the engines
)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All options of a server: its own, those of `ServingRuntime`, and the keywords of `Engine.load`."""

    server: ServerOptions
    serving: ServingOptions
    load: Mapping[str, Any] = field(default_factory=dict)


SERVER_NAMES: Final = tuple(option.name for option in fields(ServerOptions))
SERVING_NAMES: Final = tuple(option.name for option in fields(ServingOptions))
LOAD_NAMES: Final = (
    "engine", "ctx", "threads", "threads_batch", "leave_cores", "device", "gpu_layers", "mmap", "kv_type", "cache_kind",
    "attention", "max_batch_tokens", "deterministic", "adapters", "prefill_weights", "calibrate",
)  # fmt: skip
PYTHON_ONLY: Final = frozenset({"prefix_checkpoint_policy"})  # a function: no text can give it


def resolve(given: Mapping[str, Any], config: str | os.PathLike[str] | None = None) -> ServeOptions:
    """The options of a server: `given` by name (from Python or a command line), over those of a configuration file.

    Raises OptionError for a name that there is not, a value that cannot be, and a combination that is refused.
    """
    values = {**({} if config is None else read_config(config)), **given}
    known = {*SERVER_NAMES, *SERVING_NAMES, *LOAD_NAMES}
    for name in values:
        if name not in known:
            raise OptionError(f"there is no option {name!r}")
    _refuse_pairs(values)
    server = ServerOptions(**_chosen(values, SERVER_NAMES))
    if not server.models:
        raise OptionError("there is no model to serve: give one as MODEL, with models, or in the configuration file")
    serving = _chosen(values, SERVING_NAMES)
    if values.get("cache_kind", "batched_cell") == "batched_cell":
        serving.setdefault("prefix_cache_entries", DEFAULT_SERVER_ENTRIES)
    return ServeOptions(server, ServingOptions(**serving), _chosen(values, LOAD_NAMES))


def _chosen(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _refuse_pairs(values: Mapping[str, Any]) -> None:
    """Raise OptionError for two options that cannot go together, naming both."""
    for first, is_first, second, is_second, reason in _REFUSED:
        if first in values and second in values and is_first(values[first]) and is_second(values[second]):
            raise OptionError(f"{first}={values[first]!r} cannot go with {second}={values[second]!r}: {reason}")
    if "session_quota" in values and values.get("session_directory") is None:
        raise OptionError("session_quota needs session_directory: without it no session is saved")


_REFUSED: Final = (
    ("cache_kind", lambda v: v == "sequence", "prefix_cache_entries", bool, "one sequence leaves nothing to share"),
    ("deterministic", bool, "prefill_weights", lambda v: v != "off", "other weights give other bits"),
    ("engine", lambda v: v == "llama", "deterministic", bool, "that mode is the native engine's"),
    ("engine", lambda v: v == "llama", "adapters", bool, "adapters are taken by the native engine"),
    ("engine", lambda v: v == "llama", "prefill_weights", lambda v: v != "off", "they are the native engine's"),
    ("engine", lambda v: v == "llama", "cache_kind", lambda v: v == "sequence", "that kind is the native engine's"),
)


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options of a TOML file. Raises OptionError where it cannot be read, and for what is no option."""
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        with Path(path).open("rb") as file:
            values: dict[str, Any] = toml.load(file)
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise OptionError(f"config {os.fspath(path)!r} cannot be read: {error}") from error
    for name in values:
        if name in PYTHON_ONLY:
            raise OptionError(f"{name} is a function and can be given in Python only")
    if isinstance(values.get("models"), dict):
        values["models"] = tuple(values["models"].items())
    if "adapters" in values:
        values["adapters"] = tuple(scaled_adapter(text) for text in _texts("adapters", values["adapters"]))
    return values


def scaled_adapter(text: str) -> tuple[str, float]:
    """File and scale of `FILE` or `FILE:SCALE`; a colon that is part of a file that is there is no scale."""
    path, colon, after = text.rpartition(":")
    if not colon or os.path.exists(text):
        return text, 1.0
    try:
        return path, float(after)
    except ValueError:
        return text, 1.0


def named_model(text: str) -> tuple[str, str]:
    """Name and path of `NAME=PATH`, or of a path or a known name alone, whose name is the file's without its ending."""
    name, equals, path = text.partition("=")
    if equals and not os.path.exists(text):
        return name, path
    return Path(text).name.removesuffix(".gguf") or text, text


def named_models(models: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of name and path, checked. Raises OptionError."""
    if isinstance(models, str) or not isinstance(models, Sequence):
        raise OptionError(f"models are pairs of a name and a path, asked for {models!r}")
    pairs = [named_model(model) if isinstance(model, str) else tuple(model) for model in models]
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise OptionError(f"models are pairs of a name and a path, one is {pair!r}")
        if not MODEL_NAME.fullmatch(pair[0]):
            raise OptionError(
                f"a model's name is 1 to 128 of letters, digits, '.', '_', ':', '/' and '-', one is {pair[0]!r}: "
                "give it another one, NAME=PATH"
            )
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"two models have the name {name!r}: give one of them another, NAME=PATH")
    return tuple((name, path) for name, path in pairs)


def n_bytes_of(name: str, value: Any) -> int | None:
    """A number of bytes from an integer, or a text such as "8G" or "512 MiB" (powers of 1024)."""
    if value is None and name in ("memory_budget", "max_bodies_bytes"):
        return None
    if isinstance(value, str) and (match := _BYTES.fullmatch(value.strip())):
        value = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 62:
        raise OptionError(f"{name} is a number of bytes, such as 8G or 500M, is {value!r}")
    return value


def shown_bytes(n_bytes: int) -> str:
    """A number of bytes as `n_bytes_of` takes it, as short as it can be."""
    for unit in ("T", "G", "M", "K"):
        if n_bytes % _UNITS[unit] == 0:
            return f"{n_bytes // _UNITS[unit]}{unit}"
    return str(n_bytes)


def _texts(name: str, values: Any) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(v, str) for v in values):
        raise OptionError(f"{name} is a list of texts, is {values!r}")
    return tuple(values)


def _check_text(name: str, value: Any, *, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise OptionError(f"{name} is a text, is {value!r}")


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(f"{name} must be {low} to {high}, is {value!r}")


def _check_seconds(name: str, value: Any, low: float, high: float, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise OptionError(f"{name} must be {low:g} to {high:g} seconds, is {value!r}")
