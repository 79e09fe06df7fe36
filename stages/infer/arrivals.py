"""Which messages of each sender have arrived, by the numbers that the sender gives them: pure.

A number is added however often its message comes, and forgotten once the sender says that it has heard of it, so what
a sender still counts as on its way and what has arrived can be compared at any time.
"""

from __future__ import annotations

from collections import OrderedDict

MOST_SENDERS = 64  # copies of the batch stage; those heard of longest ago have gone


class Arrivals:
    def __init__(self) -> None:
        self._numbers: OrderedDict[str, set[int]] = OrderedDict()  # by sender, the one heard of last at the end

    def add(self, sender: str, number: int, oldest: int) -> None:
        """Note a message; the sender waits for news of none with a number below `oldest`."""
        known = self._numbers.get(sender, set())
        self._numbers[sender] = {other for other in known if other >= oldest} | {number}
        self._numbers.move_to_end(sender)
        if len(self._numbers) > MOST_SENDERS:
            self._numbers.popitem(last=False)

    @property
    def numbers(self) -> dict[str, list[int]]:
        return {sender: sorted(numbers) for sender, numbers in self._numbers.items()}
