"""Which tokens the next step takes: a pure choice.

Decode rows come first, so that nobody's stream waits; prefills share what is left evenly. While anyone streams, the
prefills' share is held to what keeps a step short, by what steps were measured to cost. Sequences of different
adapters share no step: their groups take turns.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Group = TypeVar("Group", bound=Hashable)

_SMOOTHING = 0.3  # weight of the newest measurement
_SOLO_STEPS = 8  # a mixed step may take as long as so many steps that only decode,
_LEAST_TARGET_S = 0.12  # or this long, where steps are quick
_UNMEASURED_BUDGET = 32
_LEAST_BUDGET = 8
_GRAIN = 8  # budgets are multiples of it: kernels work on so many rows at once


@dataclass(frozen=True, slots=True)
class Want:
    """What one generation could forward now: `n` tokens, of which at most `limit` in one step."""

    n: int
    limit: int
    is_decode: bool


def plan_step(
    wants: Sequence[Want],
    max_tokens: int,
    prefill_budget: int,
    turn: int,
    max_decodes: int | None = None,
    others_stream: bool = False,
) -> list[int]:
    """How many tokens of each of `wants` the step takes, 0 for none; their sum is at most `max_tokens`.

    At most `max_decodes` of those that decode are served (None: all). `turn` counts steps: where not everybody can have
    a token, the first served moves on with it. `others_stream` says that somebody waits for a step of another group to
    decode.
    """
    taken = [0] * len(wants)
    decodes = [i for i, want in enumerate(wants) if want.is_decode]
    prefills = _rotated([i for i, want in enumerate(wants) if not want.is_decode], turn)
    # so many streams that they fill a step would keep a prompt waiting for as long as they run
    kept = min(_LEAST_BUDGET, max_tokens // 2) if prefills else 0
    places = max_tokens - kept if max_decodes is None else min(max_tokens - kept, max_decodes)
    for i in _rotated(decodes, turn)[:places]:
        taken[i] = 1
    room = min(max_tokens - sum(taken), prefill_budget if decodes or others_stream else max_tokens)
    prefills.sort(key=lambda i: _most(wants[i]))  # stable: who needs little leaves more to the others
    for served, i in enumerate(prefills):
        waiting = len(prefills) - served
        share = -(-room // waiting)
        taken[i] = min(_most(wants[i]), share)
        room -= taken[i]
    return taken


def _most(want: Want) -> int:
    return min(want.n, want.limit)


def _rotated(items: list[int], turn: int) -> list[int]:
    if not items:
        return items
    at = turn % len(items)
    return items[at:] + items[:at]


class GroupTurns:
    """Whose step is next among groups that cannot share one: the one that has waited for the most steps.

    A group that comes anew waits behind those that have waited already.
    """

    def __init__(self) -> None:
        self._since: dict[Hashable, int] = {}  # the step after which a group waits
        self._n_steps = 0

    def clear(self) -> None:
        """After a step of the only group: nobody waits."""
        self._since.clear()

    def next(self, groups: Sequence[Group]) -> Group:
        """One of `groups`, which may name a group more than once, the first of equals; none of them is an error."""
        self._since = {group: self._since.get(group, self._n_steps) for group in groups}
        chosen = min(dict.fromkeys(groups), key=lambda group: self._since[group])
        self._n_steps += 1
        self._since[chosen] = self._n_steps
        return chosen


class StepCost:
    """Learns what steps cost, and how many tokens of prefill keep a mixed step short."""

    def __init__(self) -> None:
        self.decode_s: float | None = None
        self.prefill_token_s: float | None = None
        self.mixed_token_s: float | None = None

    def note(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """Take a step of so many rows into account."""
        if not n_prefill:
            self.decode_s = _smoothed(self.decode_s, seconds)
        elif not n_decode:
            self.prefill_token_s = _smoothed(self.prefill_token_s, seconds / n_prefill)
        else:
            rest = max(0.0, seconds - (self.decode_s or 0.0))
            self.mixed_token_s = _smoothed(self.mixed_token_s, rest / n_prefill)

    def prefill_budget(self) -> int:
        """Tokens of prefill for a step beside decode rows."""
        per_token = self.mixed_token_s
        if per_token is None and self.prefill_token_s is not None:
            per_token = 1.5 * self.prefill_token_s  # small pieces cost more each
        if not per_token:
            return _UNMEASURED_BUDGET
        decode_s = self.decode_s or 0.0
        spare_s = max(_SOLO_STEPS * decode_s, _LEAST_TARGET_S) - decode_s
        return max(_LEAST_BUDGET, int(spare_s / per_token) // _GRAIN * _GRAIN)


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + _SMOOTHING * (now - before)
