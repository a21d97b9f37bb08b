"""A conversation of many turns over a serving runtime: what is evaluated is what was never captured. `R`: rules.

The client sends whole histories, as agents do. `known` is what the runtime holds of them: the session's own tokens, and
the prompts that were captured.
"""

from __future__ import annotations

from typing import Literal

import pytest
from control_bench import PROMPT
from fake_executor import WAIT_S
from prefix_bench import reusable
from serving_bench import Serving, serving

REPLY = 5

End = Literal["initial", "every"]


class Client:
    """Sends turns, and knows how many tokens each has to evaluate."""

    def __init__(self, s: Serving, end: End) -> None:
        self.s = s
        self.end = end
        self.captured: list[list[int]] = []
        self.own: dict[str, list[int]] = {}  # committed in each session
        self.n_turns = 0

    def ask(self, session: str, history: list[int]) -> list[int]:
        self.n_turns += 1
        prompt = [*history, 60 + self.n_turns % 30, 1, 2]
        begins = session not in self.own
        own = self.own.get(session, [])
        known = [*self.captured, own]
        reply = self.s.ask(prompt, REPLY, session=session)
        assert reply.stats.evaluated_tokens == len(prompt) - reusable(prompt, known)
        assert reply.stats.cached_tokens == reusable(prompt, known)
        # a session that another one's snapshot serves better begins again, and so does a branch
        n_own = reusable(prompt, [own])
        if self.end == "every" or begins or n_own < len(own) or reusable(prompt, self.captured) > n_own:
            self.captured.append(prompt)
        whole = [*prompt, *reply.choices[0].tokens]
        self.own[session] = whole[:-1]
        return whole


@pytest.mark.parametrize("end", ["initial", "every"])
def test_every_turn_evaluates_what_is_new(end: End) -> None:  # R75 R85
    with serving(prefix_cache_entries=32, prefix_checkpoint_prompt_end=end, session_idle_s=60.0) as s:
        client = Client(s, end)
        turns = [list(PROMPT)]
        for _ in range(6):
            turns.append(client.ask("a", turns[-1]))
        client.ask("a", turns[3])  # a branch
        client.ask("b", turns[-1])  # another session goes on with it
        history = client.ask("a", turns[-1])
        with s.b.executor.holding_forward() as gate:  # cancelled before its first token, and sent again
            reply = s.submit([*history, 3, 4, 5, 6], 20, session="a")
            gate.wait_held()
            reply.cancel()
        assert reply.wait(WAIT_S)
        history = client.ask("a", history)
        s.clock.now += 100
        assert s.runtime.expire() == 2
        client.own.clear()
        client.ask("a", history)
        assert client.n_turns == 11
