"""The prompts of a batch: from arguments, or from a file with one JSON object a line.

Everything is checked before a model is loaded. A message names the file, the line and the key.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ggml_engine.cli.text_input import from_argument
from ggml_engine.control.config import GenConfig
from ggml_engine.errors import EngineError, InputError, OptionError

Message = Mapping[str, object]

KEYS: Final = ("prompt", "messages", "system", "id", "max_tokens", "temperature", "seed")


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """A prompt and its options. Just one of `text`, to be continued as it is, and `messages`, of a chat, is there."""

    config: GenConfig
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    id: str | int | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the command's options say about every prompt."""

    config: GenConfig
    system: str | None = None
    is_raw: bool = False

    def prompt(self, text: str, system: str | None = None) -> BatchPrompt:
        """A prompt without options of its own; `system` stands for the command's."""
        if self.is_raw:
            return BatchPrompt(self.config, text)
        return BatchPrompt(self.config, messages=(*_system(self.system if system is None else system), _user(text)))


def from_arguments(texts: tuple[str, ...], defaults: Defaults) -> list[BatchPrompt]:
    """The prompts of a command line. Raises InputError for what is not UTF-8."""
    return [defaults.prompt(from_argument(text)) for text in texts]


def from_lines(text: str, name: str, defaults: Defaults) -> list[BatchPrompt]:
    """The prompts of a file called `name`; empty lines are left out. Raises InputError."""
    prompts: list[BatchPrompt] = []
    lines: dict[str | int, int] = {}
    for number, line in enumerate(text.split("\n"), 1):  # only these end a line: JSON strings may hold others
        if not line.strip():
            continue
        try:
            prompt = _prompt(_object(line), defaults)
            if prompt.id is not None and prompt.id in lines:
                raise InputError(f"'id' {prompt.id!r} is that of line {lines[prompt.id]} too")
        except EngineError as error:
            raise InputError(f"{name}, line {number}: {error}") from error
        if prompt.id is not None:
            lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"{name} holds no prompts: it has one JSON object a line")
    return prompts


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"a JSON object is wanted, this is {_kind(value)}")
    unknown = [key for key in value if key not in KEYS]
    if unknown:
        raise InputError(f"there is no key {unknown[0]!r:.60}; there are: {', '.join(KEYS)}")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r:.60} is there twice")
        found[key] = value
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's")


def _prompt(given: dict[str, Any], defaults: Defaults) -> BatchPrompt:
    if ("prompt" in given) == ("messages" in given):
        raise InputError("one of 'prompt' and 'messages' is wanted, and not both")
    if defaults.is_raw:
        for key in ("messages", "system"):
            if key in given:
                raise InputError(f"{key!r} needs a chat template, --raw takes none")
    system = _text("system", given["system"]) if "system" in given else None
    if "prompt" in given:
        made = defaults.prompt(_text("prompt", given["prompt"]), system)
    else:
        messages = tuple(_messages(given["messages"]))
        if messages[0]["role"] != "system":
            messages = (*_system(defaults.system if system is None else system), *messages)
        elif system is not None:
            raise InputError("'system' and a first message of the role system are one too many")
        made = BatchPrompt(defaults.config, messages=messages)
    return dataclasses.replace(made, id=_id(given.get("id")), config=_config(given, defaults.config))


def _messages(given: object) -> Iterator[Message]:
    if not isinstance(given, list) or not given:
        raise InputError(f"'messages' is a list of at least one message, not {_kind(given)}")
    for number, message in enumerate(given, 1):
        if not isinstance(message, dict):
            raise InputError(f"'messages': message {number} is an object, not {_kind(message)}")
        for key in ("role", "content"):
            _text(f"messages: {key} of message {number}", message.get(key))
        yield message


def _system(text: str | None) -> tuple[Message, ...]:
    return () if text is None else ({"role": "system", "content": text},)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name!r} is a text, not {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name!r} holds half a character (a lone surrogate) at {error.start}") from error
    return value


def _id(value: object) -> str | int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if not isinstance(value, str):
        raise InputError(f"'id' is a text or a whole number, not {_kind(value)}")
    return _text("id", value)


def _config(given: dict[str, Any], config: GenConfig) -> GenConfig:
    """The command's options with those of the object in their place."""
    for key in ("max_tokens", "temperature", "seed"):
        if key in given and (isinstance(given[key], bool) or not isinstance(given[key], (int, float))):
            raise InputError(f"{key!r} is a number, not {_kind(given[key])}")
    of_sampler = {key: given[key] for key in ("temperature", "seed") if key in given}
    try:
        sampler = dataclasses.replace(config.sampler, **of_sampler)
        return dataclasses.replace(config, sampler=sampler, max_tokens=given.get("max_tokens", config.max_tokens))
    except OptionError as error:
        raise InputError(f"bad value: {error}") from error


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")
