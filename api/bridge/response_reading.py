"""Reads a response as one request: its own events, and behind each `Turn` among them the events of that turn."""

from __future__ import annotations

from ...schemas.events import FINAL, Event, Turn
from .bridge import Bridge
from .reading import Reading


class ResponseReading:
    """A `Reading` of the response itself, `root`, and of its turns, with the same methods."""

    def __init__(self, bridge: Bridge, root: Reading) -> None:
        self.request = root.request
        self.ended = False  # whether `take` has returned the final event; set by take
        self._bridge = bridge
        self._root = root
        self._turn: Reading | None = None  # whose events `take` gives at present; set by take
        self._rest: list[Event] = []  # of the response's own events, behind that turn

    @property
    def kept(self) -> bool:
        return self._root.kept

    @property
    def is_cut(self) -> bool:
        """Whether this bridge has stopped reading though the response may continue."""
        return self._root.is_cut

    async def take(self, patience: float) -> list[Event]:
        """The next events, in order; none after `patience` seconds of silence."""
        if self._turn is not None:
            events = await self._turn.take(patience)
            if self._turn.ended:
                self._turn.close()
                self._turn = None
            return events
        events = self._rest or await self._root.take(patience)
        for count, event in enumerate(events, 1):
            if isinstance(event, Turn):
                self._rest = events[count:]
                self._turn = await self._bridge.turn(self._root, event.job)
                return events[:count]
        self._rest = []
        self.ended = any(isinstance(event, FINAL) for event in events)
        return events

    def close(self) -> None:
        """Stop reading; the response continues."""
        if self._turn is not None:
            self._turn.close()
        self._root.close()

    def leave(self) -> None:
        """Close the reading, and cancel the response unless it has ended or is kept."""
        if self._turn is not None:
            self._turn.close()
        self._root.leave()
