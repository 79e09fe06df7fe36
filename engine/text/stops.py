"""Stop strings in a text that arrives in pieces. How it is cut into pieces never changes the result."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several stop strings.

    The first is the one that would be complete first if the text came character by character; of several that end at
    the same place, the longest. `held` characters at the end of what was pushed may be the beginning of a stop string
    and must not be shown yet.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._tail = ""  # the held characters
        self.found: str | None = None  # the stop string that was complete; set by push

    @property
    def held(self) -> int:
        return len(self._tail)

    def push(self, text: str) -> int | None:
        """Take the next piece; where a stop string is complete, the number of characters that it takes off the end.

        They are counted from the end of all text pushed so far, what follows the stop string included.
        """
        text = self._tail + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._tail = ""
            _, start, self.found = min(found)
            return len(text) - start
        self._tail = text[len(text) - self._possible_beginning(text) :]
        return None

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
