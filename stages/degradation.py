"""What a worker still takes as its memory fills: it gives up speed first, then new work, never what is running."""

from __future__ import annotations

from typing import NamedTuple


class Slots(NamedTuple):
    """How many choices may be at a worker, for requests of high priority and for the others."""

    high: int
    others: int

    def less(self, taken: int) -> Slots:
        return Slots(self.high - taken, self.others - taken)


def slots(pressure: float, size: int, reserve: int) -> Slots:
    """`pressure` is the share of its key-value cache that running requests hold, `size` its batch, `reserve` what high
    priority has above that.

    From 0.80 on the engine evicts cached prefixes early.
    """
    if pressure < 0.70:
        return Slots(size + reserve, size)
    if pressure < 0.90:
        return Slots(size + reserve, max(1, size // 2))
    if pressure < 0.95:
        return Slots(size + reserve, 0)
    return Slots(0, 0)
