"""Stop strings: the answer is cut where the first of them begins."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back text that may be the start of a stop string, until it is one or cannot be."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the string that matched is shown too."""
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched = False

    def push(self, text: str, may_match: bool = True) -> str:
        """The text that may be shown now. After a match: what it leaves, and `matched`. Without `may_match` a stop
        string that ends in `text` is text like any other."""
        num_held, text = len(self._held), self._held + text
        # A match ends in the new text: what is held had its chance.
        starts = [(text.find(stop, max(0, num_held + 1 - len(stop))), len(stop)) for stop in self._stops]
        found = [(at, length) for at, length in starts if at >= 0]
        if found and may_match:
            self._held, self.matched = "", True
            at, length = min(found)
            return text[: at + length] if self._include else text[:at]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        shown = len(text) - keep
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
