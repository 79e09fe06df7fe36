"""Reads a response as one request: its own events, and those of each turn where the turn was announced."""

from __future__ import annotations

from ...schemas.events import FINAL, Event, Turn
from .bridge import Bridge
from .reading import Reading


class ResponseReading:
    """Like a `Reading`, which it is given: that of the response itself."""

    def __init__(self, bridge: Bridge, root: Reading) -> None:
        self.request = root.request
        self.ended = False  # the final event was taken; set by take
        self._bridge = bridge
        self._root = root
        self._turn: Reading | None = None  # whose events `take` gives at present; set by take
        self._rest: list[Event] = []  # of the response's own events, behind that turn

    @property
    def kept(self) -> bool:
        return self._root.kept

    @property
    def is_cut(self) -> bool:
        """Whether this bridge has stopped reading, and the response may go on."""
        return self._root.is_cut

    async def take(self, patience: float) -> list[Event]:
        """The next events, in order; empty after `patience` seconds of silence."""
        if self._turn is not None:
            events = await self._turn.take(patience)
            if self._turn.ended:
                self._turn.close()
                self._turn = None
            return events
        events = self._rest or await self._root.take(patience)
        for place, event in enumerate(events, 1):
            if isinstance(event, Turn):
                self._rest = events[place:]
                self._turn = await self._bridge.turn(self._root, event.job)
                return events[:place]
        self._rest = []
        self.ended = any(isinstance(event, FINAL) for event in events)
        return events

    def leave(self) -> None:
        """The reader goes; what is not kept is cancelled."""
        if self._turn is not None:
            self._turn.close()
        self._root.leave()
