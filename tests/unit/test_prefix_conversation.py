"""A conversation of twelve turns over a prefix cache, each turn in a session of its own. `R`: rules of the contract.

The caller keeps no session between turns, as a server for anonymous requests does: all that is not forwarded again
comes out of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from control_bench import Bench, bench, greedy
from fake_executor import WAIT_S
from prefix_bench import keys, look, reusable

from ggml_engine.control.prefix_cache import PrefixCache

SYSTEM = [(11 * i) % 97 for i in range(20)]
REPLY = 5

Captures = Literal["initial", "every", "end"]


@dataclass
class Client:
    """Sends whole histories, and knows what must be evaluated: what no snapshot begins with."""

    b: Bench
    cache: PrefixCache
    captures: Captures
    known: list[list[int]] = field(default_factory=list)  # what is in the cache, if nothing was evicted
    n_turns: int = 0

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """The reply to a history, and how many tokens were evaluated for it."""
        found = look(self.b, self.cache, prompt)
        session = found.session or self.b.open()
        capture = self.cache.capture_prompt(session, prompt)
        takes_prompt = self.captures == "every" or (self.captures == "initial" and not self.n_turns)
        generation = session.generate_async(
            prompt[found.n_reused :],
            greedy(max_tokens=REPLY),
            capture.wrap() if takes_prompt else None,
            on_settled=capture.at_end() if self.captures == "end" else None,
        )
        assert generation.result(WAIT_S)
        assert generation.tokens == self.b.expected(prompt, REPLY), "the reply is not that of a cold run"
        assert generation.stats.evaluated_tokens == len(prompt) - reusable(prompt, self.known)
        assert capture.collect("conversation", WAIT_S) == (takes_prompt or self.captures == "end")
        session.close()
        if takes_prompt:
            self.known.append(list(prompt))
        if self.captures == "end":
            self.known.append([*prompt, *generation.tokens[:-1]])
        self.n_turns += 1
        return generation.tokens, generation.stats.evaluated_tokens


def user(turn: int) -> list[int]:
    return [(turn * 13 + i * 7 + 1) % 97 for i in range(3 + turn % 3)]


@pytest.mark.parametrize("captures", ["initial", "every", "end"])
@pytest.mark.parametrize("replaces", [False, True])
def test_twelve_turns_evaluate_what_is_new(captures: Captures, replaces: bool) -> None:  # R40 R75
    with bench(capacity=4096) as b:
        client = Client(b, PrefixCache(64, replace_extended=replaces), captures)
        history, evaluated, branch_point = list(SYSTEM), [], []
        for turn in range(12):
            if turn == 5:
                branch_point = list(history)
            history += user(turn)
            reply, n = client.ask(history)
            evaluated.append(n)
            history += reply
        for turn in range(1, 12):
            new = len(user(turn))
            # under `every` the reply is read again, under `end` its last token, under `initial` all since the first
            since_first = sum(len(user(i)) for i in range(1, turn + 1)) + turn * REPLY
            assert evaluated[turn] == {"initial": since_first, "every": REPLY + new, "end": 1 + new}[captures]
        # another question instead of the sixth one
        branch = [*branch_point, 96, 95, 94]
        reply, n = client.ask(branch)
        assert n == {"initial": len(branch) - len(SYSTEM) - len(user(0)), "every": 3, "end": 3}[captures]
        # the same one once more: another try
        again, n = client.ask(branch)
        assert again == reply
        assert n == {"initial": len(branch) - len(SYSTEM) - len(user(0)), "every": 1, "end": 1}[captures]
        # and the first conversation goes on
        _, n = client.ask([*history, 50, 51])
        assert n == {"initial": len(history) + 2 - len(SYSTEM) - len(user(0)), "every": REPLY + 2, "end": 3}[captures]
        b.drain()
        assert b.executor.n_opened - b.executor.n_closed == len(client.cache)


def test_of_one_conversation_the_longest_snapshot_is_kept() -> None:  # R88
    with bench(capacity=4096) as b:
        client = Client(b, PrefixCache(2, replace_extended=True), "end")
        assert client.cache.insert(_snapshot(b, [1, 2, 3]), [1, 2, 3], "another conversation", WAIT_S)
        history = list(SYSTEM)
        for turn in range(6):
            history += user(turn)
            reply, _ = client.ask(history)
            history += reply
        assert keys(client.cache) == [[1, 2, 3], history[:-1]]


def test_without_replacing_one_conversation_pushes_out_the_others() -> None:  # R88
    with bench(capacity=4096) as b:
        client = Client(b, PrefixCache(4), "end")
        assert client.cache.insert(_snapshot(b, [1, 2, 3]), [1, 2, 3], "another conversation", WAIT_S)
        history = list(SYSTEM)
        for turn in range(4):
            history += user(turn)
            reply, _ = client.ask(history)
            history += reply
        assert look(b, client.cache, [1, 2, 3, 4]).session is None


def _snapshot(b: Bench, tokens: list[int]):  # type: ignore[no-untyped-def]
    with b.session_at(tokens) as session:
        return session.snapshot_async().result(WAIT_S)
