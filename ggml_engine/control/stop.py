"""Stop strings in a stream, also across the borders of pieces. A pure state machine."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back what may be the beginning of a stop string, and lets the rest through."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What can be shown after `text` arrived. After a match (`matched`) nothing more comes."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            # of two that begin at one place the longer one was meant; it cannot be told later
            at, self.matched = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._possible_start()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back, at the end of the stream."""
        shown, self._held = self._held, ""
        return "" if self.matched is not None else shown

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for n in range(min(len(self._held), self._longest - 1), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stops):
                return n
        return 0
