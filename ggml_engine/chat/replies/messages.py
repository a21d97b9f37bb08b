"""`prepare_messages`: how a conversation with tools, as OpenAI's API has it, reaches a chat template.

Templates differ in what they take: most want arguments as a mapping, some one call a message, some ids of a certain
form, some know neither tools nor the role `tool`; then calls and results are written into the messages' content.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ggml_engine.chat.tools import ToolChoice, read_tool_choice, read_tools
from ggml_engine.errors import InputError

from .format import ToolFormat, Tools
from .instructions import call_text, instructions, result_text
from .json_scan import is_json_object

_ALPHANUMERIC: Final = string.digits + string.ascii_letters
_SHORT_ID: Final = 9

Message = dict[str, Any]


def prepare_messages(
    format: ToolFormat,  # noqa: A002 - the word of this package
    messages: Sequence[Mapping[str, Any]],
    tools: Tools = None,
    tool_choice: ToolChoice | Mapping[str, Any] | str | None = None,
) -> tuple[list[Message], dict[str, Any]]:
    """The messages as the format's template takes them, and the variables for it (`tools`, where it renders them).

    Content parts of text are joined; other parts stay, for the template to take or to refuse. With `tool_choice` none
    the template is told of no tools. Raises InputError for arguments that are no JSON object, for a result of a call
    that was not made, and for tools and choices that are none.
    """
    given = read_tools(tools)
    told = given if read_tool_choice(tool_choice, given).mode != "none" else ()
    prepared = [_plain(message, index, format) for index, message in enumerate(messages)]
    _check_results(prepared)
    if not format.renders_tools:
        prepared = _results_joined([_written(message, format) for message in prepared])
        return (_instructed(prepared, instructions(format.name, told), format) if told else prepared), {}
    if format.one_call_a_message:
        prepared = _one_call_each(prepared)
    if format.short_ids:
        prepared = [_with_short_ids(message) for message in prepared]
    return prepared, {"tools": [tool.as_mapping() for tool in told]} if told else {}


def _plain(message: Mapping[str, Any], index: int, format: ToolFormat) -> Message:  # noqa: A002
    """A message without absent values, its calls' arguments as mappings."""
    if not isinstance(message, Mapping):
        raise InputError(f"message {index} must be an object, not {type(message).__name__}")
    made: Message = {key: value for key, value in message.items() if value is not None}
    made["content"] = _text_of(made.get("content", ""))
    if made.get("role") == "developer" and not format.knows_developer:
        made["role"] = "system"
    reasoning = made.pop("reasoning_content", None) or made.pop("reasoning", None)
    calls = made.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
            raise InputError(f"message {index}: tool_calls must be a list, not {type(calls).__name__}")
        made["tool_calls"] = [
            _call(call, f"message {index}, tool call {i}", keeps_text=not format.renders_tools)
            for i, call in enumerate(calls)
        ]
    if reasoning:
        made[format.reasoning_key] = reasoning
        if format.one_of_content_and_reasoning and calls and made["content"]:
            made[format.reasoning_key] = f"{reasoning}\n{made['content']}"
            made["content"] = ""
    return made


def _text_of(content: Any) -> Any:
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        parts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(parts) == len(content) and all(isinstance(part.get("text"), str) for part in parts):
            return "".join(part["text"] for part in parts)
    return content


def _call(call: Any, where: str, *, keeps_text: bool) -> Message:
    """A call, its arguments as a mapping; as the text that they came as where that can be written as it is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{where} has no function with a name: {call!r:.80}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        if not is_json_object(arguments):
            raise InputError(f"{where}: the arguments of {function['name']} are no JSON object: {arguments!r:.80}")
        arguments = arguments if keeps_text else json.loads(arguments)
    elif not isinstance(arguments, Mapping):
        raise InputError(f"{where}: the arguments of {function['name']} are no JSON object: {arguments!r:.80}")
    else:
        arguments = dict(arguments)
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    identity = call.get("id")
    if identity is not None and not isinstance(identity, str):
        raise InputError(f"{where}: the id must be a text, not {identity!r:.40}")
    return {"id": identity, **made} if identity else made


def _check_results(messages: Sequence[Message]) -> None:
    made: dict[str, str] = {}
    for index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            made[call.get("id", "")] = call["function"]["name"]
        identity = message.get("tool_call_id")
        if message.get("role") == "tool" and identity is not None:
            if identity not in made:
                raise InputError(f"message {index} is the result of {identity!r:.60}, a call that was not made before")
            message.setdefault("name", made[identity])


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Every call in a message of its own, its result behind it."""
    split: list[Message] = []
    waiting: list[Message] = []  # calls of one message whose results are still to come
    for message in [*messages, {"role": ""}]:
        if message["role"] == "tool" and waiting:
            place = _place_of(message, waiting)
            split += [waiting.pop(place), message]
            continue
        split += waiting
        waiting = []
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split += [message] if message["role"] else []
            continue
        rest = {key: value for key, value in message.items() if key not in ("tool_calls", "content")}
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": rest["role"], "content": ""}
            waiting.append({**first, "tool_calls": [call]})
    return split


def _place_of(result: Message, waiting: Sequence[Message]) -> int:
    for place, message in enumerate(waiting):
        if message["tool_calls"][0].get("id") == result.get("tool_call_id"):
            return place
    return 0


def _with_short_ids(message: Message) -> Message:
    made = dict(message)
    if "tool_call_id" in made:
        made["tool_call_id"] = short_id(str(made["tool_call_id"]))
    if "tool_calls" in made:
        made["tool_calls"] = [{**call, "id": short_id(call.get("id", ""))} for call in made["tool_calls"]]
    return made


def short_id(identity: str) -> str:
    """The id, if it is nine letters and digits; else such a one, always the same for the same id."""
    if len(identity) == _SHORT_ID and all(character in _ALPHANUMERIC for character in identity):
        return identity
    number = int.from_bytes(hashlib.sha256(identity.encode("utf-8", "replace")).digest()[:8], "big")
    characters = []
    for _ in range(_SHORT_ID):
        number, digit = divmod(number, len(_ALPHANUMERIC))
        characters.append(_ALPHANUMERIC[digit])
    return "".join(characters)


def _written(message: Message, format: ToolFormat) -> Message:  # noqa: A002
    """A message whose calls, or result, are part of its text, for a template that knows neither."""
    made = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        text = result_text(made.get("name", ""), message["content"])
        return {"role": "user", "content": text, "is_result": True}
    if "tool_calls" in message:
        texts = [call_text(format.name, call["function"]) for call in message["tool_calls"]]
        made["content"] = "\n".join(filter(None, [made["content"], *texts]))
    return made


def _results_joined(messages: list[Message]) -> list[Message]:
    """Results in a row as one message, since templates want roles to take turns."""
    joined: list[Message] = []
    for message in messages:
        if joined and message.get("is_result") and joined[-1].get("is_result"):
            joined[-1]["content"] += f"\n{message['content']}"
        else:
            joined.append(message)
    for message in joined:
        message.pop("is_result", None)
    return joined


def _instructed(messages: list[Message], text: str, format: ToolFormat) -> list[Message]:  # noqa: A002
    """The messages with the instructions in the system message, or in the first one where the template has none."""
    first = messages[0] if messages else {"role": "user", "content": ""}
    is_fit = first.get("role") == "system" or (first.get("role") == "user" and not format.knows_system)
    if is_fit and isinstance(first["content"], str):
        content = f"{first['content']}\n\n{text}" if first["role"] == "system" else f"{text}\n\n{first['content']}"
        return [{**first, "content": content.strip()}, *messages[1:]]
    return [{"role": "system" if format.knows_system else "user", "content": text}, *messages]
