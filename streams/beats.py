"""When what a process does now and then is due: together, so that one which has nothing to do seldom wakes up."""

from __future__ import annotations

import asyncio

_GRID = 0.5  # seconds between two beats for whatever comes once a second or more seldom
_EARLY = 0.01  # seconds by which a timer may fire too soon


def until_beat(interval: float) -> float:
    """How long to sleep, in seconds, before something that comes about every `interval` seconds: until the last common
    beat within that time.

    All that sleeps so wakes in one turn of the event loop, and what it sends and hears comes together.
    """
    grid = min(_GRID, interval / 2)
    now = asyncio.get_running_loop().time()
    return (now + interval + min(_EARLY, grid / 2)) // grid * grid - now
