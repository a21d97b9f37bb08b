"""How a prompt and snapshots compare: the result of a look-up, and why it found no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from ggml_engine.control.retention import CacheEntry
from ggml_engine.control.session import Session, Tokens
from ggml_engine.control.text import TextModel
from ggml_engine.errors import InputError

_N_AROUND = 8  # tokens on each side of a difference whose text is shown


class MissReason(str, Enum):
    """Why a look-up found nothing, or not more."""

    DISABLED = "disabled"  # the cache has no entries to give (max_entries 0)
    SHORT = "short"  # a prompt of one token or none: the last one is forwarded anyway
    EMPTY = "empty"  # there is no snapshot
    FOREIGN = "foreign"  # all snapshots are of another runner, or of another model, execution or adapters
    DIFFERS = "differs"  # the prompt and the nearest snapshot differ at `position`
    REFUSED = "refused"  # snapshots match, and none could be cloned: no room, or its K/V is not there any more


@dataclass(frozen=True, slots=True)
class Miss:
    """Why no more of a prompt could be reused.

    `position` is the first one at which the prompt and the nearest snapshot differ; their tokens there, and the text of
    some tokens around it, are given where the reason is that they differ.
    """

    reason: MissReason
    position: int = 0
    prompt_token: int | None = None
    snapshot_token: int | None = None
    prompt_text: str = ""
    snapshot_text: str = ""

    def __str__(self) -> str:
        if self.reason is not MissReason.DIFFERS:
            return f"nothing reused: {self.reason.value}"
        return (
            f"the prompt differs from the nearest snapshot at token {self.position}: "
            f"{self.prompt_text!r} in the prompt, {self.snapshot_text!r} in the snapshot"
        )


@dataclass(frozen=True, slots=True)
class Lookup:
    """What was found: an independent session at position `n_reused`, the caller's to continue and to close.

    `session` is None, and `n_reused` 0, where nothing was. `miss` says why no more was found: it is None where the
    snapshot was used whole, or all of the prompt but its last token.
    """

    session: Session | None = None
    n_reused: int = 0
    miss: Miss | None = None


def token_array(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Token ids as i32 [tokens], of its own. Raises InputError for what are none."""
    given = np.asarray(tokens)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InputError(f"token ids are a sequence of integers, got {tokens!r:.60}")
    if given.size and not -(1 << 31) <= int(given.min()) <= int(given.max()) < 1 << 31:
        raise InputError(f"a token id has 32 bits, {int(given.max())} was given")
    return given.astype(np.int32)


def n_shared(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """How many tokens two arrays begin with in common."""
    n = min(a.size, b.size)
    if not n:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else int(n)


def ranked(entries: Sequence[CacheEntry], tokens: npt.NDArray[np.int32]) -> list[tuple[CacheEntry, int]]:
    """Entries, least recently used first, by what can be reused of them for `tokens`: most, then most recent, first."""
    usable = tokens[:-1]
    found = [(entry, n_shared(entry.tokens, usable)) for entry in reversed(entries)]
    return sorted(found, key=lambda pair: -pair[1])


def difference(entry: CacheEntry, n: int, tokens: npt.NDArray[np.int32], text: TextModel) -> Miss | None:
    """Where `tokens` leave an entry with which they share `n` tokens; None where one of the two ends there."""
    if n >= entry.tokens.size or n >= tokens.size - 1:
        return None
    return Miss(
        MissReason.DIFFERS,
        n,
        int(tokens[n]),
        int(entry.tokens[n]),
        _text_around(text, tokens, n),
        _text_around(text, entry.tokens, n),
    )


def _text_around(text: TextModel, tokens: npt.NDArray[np.int32], position: int) -> str:
    around = tokens[max(0, position - _N_AROUND) : position + _N_AROUND].tolist()
    try:
        decoder = text.decoder()
        return "".join([*map(decoder.push, around), decoder.finish()])
    except Exception:  # ids that the model does not have: the report says less, and the generation will say it
        return ""
