"""A coding agent's conversation, made by a script: nobody ever had it, and every run of it is the same.

A system prompt with tool definitions, then turns: what is asked, the agent's call of a tool, what the tool found (source
code, the output of tests), and then the agent's own reply, which the model makes up. The text is cut into pieces that
begin and end at control tokens, so that their tokens can be put together: `opening`, then for each turn a `request` and
a reply. In the ChatML form of SmolLM2 ("<|im_start|>role").
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prefix_bench import reusable

N_TURNS = 12
BRANCH = 6  # the turn that is asked again, as another question
CANCELLED = 9  # the turn that is cancelled once

Known = Literal["session", "initial", "every", "end"]  # what is kept: all that was read, or the ends of prompts


@dataclass(frozen=True)
class Size:
    """How long the conversation is: functions of source code in each tool's result, tokens of each reply."""

    n_functions: int
    n_reply: int


SHORT, WHOLE = Size(0, 4), Size(1, 32)


class Agent(Protocol):
    """Who asks; `evaluated` has how many tokens of each prompt were."""

    evaluated: list[int]

    def ask(self, prompt: list[int]) -> list[int]:
        """The reply to a history."""

    def ask_and_cancel(self, prompt: list[int]) -> None:
        """As `ask`, cancelled when the reply has begun."""


_TOOLS = {
    "read_file": ("Read a text file of the project.", {"path": "Path below the root.", "first": "First line, from 1."}),
    "write_file": ("Replace a file by other text.", {"path": "Path below the root.", "text": "All of the new text."}),
    "apply_patch": ("Change some lines of a file.", {"path": "Path below the root.", "patch": "A unified diff."}),
    "search": ("Find a regular expression.", {"pattern": "The expression.", "folder": "Where to look."}),
    "run_tests": ("Run some tests, and give what they print.", {"names": "Which ones, all when empty."}),
}
_RULES = (
    "Read a file before you change it.",
    "Keep changes small, and say in one sentence why each of them is there.",
    "Run the tests after every change; when one fails, say which and why before you go on.",
    "Never invent the content of a file: when you need to know it, call the tool that reads it.",
    "Answer in plain sentences. Code goes into fenced blocks, with the name of the language.",
)
_PARTS = (
    "parser",
    "cache",
    "queue",
    "ledger",
    "router",
    "clock",
    "index",
    "report",
    "mailer",
    "filter",
    "planner",
    "store",
)
_VERBS = ("load", "merge", "check", "sort", "split", "count", "close", "render", "update", "match")
_NOUNS = ("entry", "line", "record", "window", "total", "header", "token", "chunk", "limit", "owner")
_ASKED = (
    "The tests of the {part} fail since yesterday. Look into {path} and tell me what is wrong.",
    "Please add a function to {path} that can {verb} a {noun}, and a test for it.",
    "Why does {verb}_{noun} of the {part} take so long on large files? Measure before you change anything.",
    "Rename {noun} to {other} everywhere in the {part}, its tests included.",
    "There is a warning about {noun} in {path}. Find out where it comes from and remove its cause.",
)


def opening(*, has_tools: bool) -> str:
    """The system prompt, with the definitions of the tools where there are some."""
    text = system_text()
    if has_tools:
        text += f"\n\nYou can call these tools:\n{json.dumps(tools(), indent=1)}"
    return f"<|im_start|>system\n{text}<|im_end|>\n"


def system_text() -> str:
    """What the agent is told to be."""
    rules = "\n".join(f"{number}. {rule}" for number, rule in enumerate(_RULES, 1))
    return f"You are a careful programmer who works on a small library in Python.\n\n{rules}"


def tools() -> list[dict[str, Any]]:
    """The tools, as OpenAI's API has them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": what,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": "string", "description": text} for key, text in parameters.items()},
                    "required": [next(iter(parameters))],
                },
            },
        }
        for name, (what, parameters) in (_TOOLS | _tools_of_parts()).items()
    ]


def _tools_of_parts() -> dict[str, tuple[str, dict[str, str]]]:
    """Three more tools for every part of the project: agents carry many."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for part in _PARTS:
        found[f"outline_of_{part}"] = (f"List what the {part} defines.", {"depth": "How many levels, from 1."})
        found[f"history_of_{part}"] = (f"Show the last changes of the {part}.", {"n": "How many.", "since": "A day."})
        found[f"profile_of_{part}"] = (f"Measure where the {part} spends its time.", {"path": "The file to run it on."})
    return found


def request(turn: int, n_functions: int, attempt: int = 0) -> str:
    """What comes between two replies, `turn` from 0: a question, the call of a tool, and what it found.

    The tool's result has `n_functions` functions of source code; without any there is neither call nor result. Another
    `attempt` is another question at the same point.
    """
    asked, call, found = _turn(turn, n_functions, attempt)
    end = "<|im_end|>\n" if turn else ""  # of the reply before
    begin = f"{end}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    if not n_functions:
        return begin
    text = json.dumps(call)
    return f"{begin}{text}<|im_end|>\n<|im_start|>tool\n{found}<|im_end|>\n<|im_start|>assistant\n"


def request_messages(turn: int, n_functions: int, attempt: int = 0) -> list[dict[str, Any]]:
    """The same as messages of OpenAI's API."""
    asked, call, found = _turn(turn, n_functions, attempt)
    question = {"role": "user", "content": asked}
    if not n_functions:
        return [question]
    identity = f"call_{turn}_{attempt}"
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    calls = [{"id": identity, "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": identity, "content": found}
    return [question, {"role": "assistant", "content": None, "tool_calls": calls}, result]


def _turn(turn: int, n_functions: int, attempt: int) -> tuple[str, dict[str, Any], str]:
    """A question, a call, and what it returned."""
    rng = random.Random(1000 * turn + attempt)
    part, verb = _PARTS[turn % len(_PARTS)], rng.choice(_VERBS)
    noun, other = rng.sample(_NOUNS, 2)
    path = f"library/{part}.py"
    asked = rng.choice(_ASKED).format(part=part, path=path, verb=verb, noun=noun, other=other)
    if attempt:
        asked = f"No, something else first. {asked}"
    call = {"name": "read_file", "arguments": {"path": path, "first": "1"}}
    if not n_functions:
        return asked, call, ""
    found = "\n\n".join(_function(rng) for _ in range(n_functions))
    n_failed = rng.randint(0, 3)
    tests = f"{rng.randint(20, 90)} passed, {n_failed} failed in {rng.randint(1, 9)}.{rng.randint(10, 99)} s"
    return asked, call, f"```python\n{found}\n```\n{tests}"


def _function(rng: random.Random) -> str:
    verb, (noun, other) = rng.choice(_VERBS), rng.sample(_NOUNS, 2)
    n = rng.randint(2, 99)
    return (
        f"def {verb}_{noun}({noun}s, {other}={n}):\n"
        f'    """{verb.capitalize()} every {noun} that has no {other} yet; how many there were."""\n'
        f"    found = 0\n"
        f"    for number, {noun} in enumerate({noun}s):\n"
        f"        if {noun}.{other} is None or number % {other} == {rng.randint(0, 9)}:\n"
        f'            raise ValueError(f"{noun} {{number}} has no {other}")\n'
        f"        found += {noun}.size - {rng.randint(1, 500)}\n"
        f"    return found"
    )


def converse(agent: Agent, encode: Callable[[str], list[int]], known: Known, size: Size) -> list[int]:
    """The whole conversation, and its tokens; what each request evaluated is what is new in it."""
    requests = [encode(request(turn, size.n_functions)) for turn in range(N_TURNS)]
    other = encode(request(BRANCH, size.n_functions, attempt=1))
    begin = encode(opening(has_tools=size.n_functions > 0))
    history = [*begin]
    for turn, asked in enumerate(requests):
        if turn == BRANCH:
            agent.ask([*history, *asked])
            history += other
        else:
            history += asked
        if turn == CANCELLED:
            agent.ask_and_cancel(history)
        history += agent.ask(history)
    assert agent.evaluated == expected(known, size.n_reply, len(begin), [*map(len, requests)], requests[BRANCH], other)
    return history


def expected(
    known: Known, n_reply: int, n_opening: int, n_asked: list[int], asked: list[int], other: list[int]
) -> list[int]:
    """What every request has to evaluate. The last token of a reply was sampled, and never forwarded."""
    # what a question adds to what was read before: the reply, or only its last token where the reply was captured
    before = n_reply if known == "every" else 1
    in_common = reusable([*other, -1], [asked])
    new = [n_opening + n_asked[0]]
    since_first = 0  # tokens after the first prompt
    for turn, n in enumerate(n_asked[1:], 1):
        since_first += n_reply
        new.append(since_first + n if known == "initial" else before + n)
        if turn == BRANCH:
            since_first += len(other)
            new.append(since_first if known == "initial" else len(other) - in_common)
        else:
            since_first += n
        if turn == CANCELLED:
            new.append(since_first if known == "initial" else 1)  # the prompt has been read
    return new
