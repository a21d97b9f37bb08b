"""A coding agent's conversation, made by a script: nobody ever had it, and every run of it is the same.

A system prompt with tool definitions, then turns: what is asked, the agent's call of a tool, what the tool found (source
code, the output of tests), and then the agent's own reply, which the model makes up. The text is cut into pieces that
begin and end at control tokens, so that their tokens can be put together: `opening`, then for each turn a `request` and
a reply. In the ChatML form of SmolLM2 ("<|im_start|>role").
"""

from __future__ import annotations

import json
import random

N_TURNS = 12

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
    tools = [
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
    rules = "\n".join(f"{number}. {rule}" for number, rule in enumerate(_RULES, 1))
    text = f"You are a careful programmer who works on a small library in Python.\n\n{rules}"
    if has_tools:
        text += f"\n\nYou can call these tools:\n{json.dumps(tools, indent=1)}"
    return f"<|im_start|>system\n{text}<|im_end|>\n"


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
    rng = random.Random(1000 * turn + attempt)
    part, verb = _PARTS[turn % len(_PARTS)], rng.choice(_VERBS)
    noun, other = rng.sample(_NOUNS, 2)
    path = f"library/{part}.py"
    asked = rng.choice(_ASKED).format(part=part, path=path, verb=verb, noun=noun, other=other)
    if attempt:
        asked = f"No, something else first. {asked}"
    end = "<|im_end|>\n" if turn else ""  # of the reply before
    begin = f"{end}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    if not n_functions:
        return begin
    call = json.dumps({"name": "read_file", "arguments": {"path": path, "first": "1"}})
    found = "\n\n".join(_function(rng) for _ in range(n_functions))
    n_failed = rng.randint(0, 3)
    tests = f"{rng.randint(20, 90)} passed, {n_failed} failed in {rng.randint(1, 9)}.{rng.randint(10, 99)} s"
    return f"{begin}{call}<|im_end|>\n<|im_start|>tool\n```python\n{found}\n```\n{tests}<|im_end|>\n<|im_start|>assistant\n"


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
