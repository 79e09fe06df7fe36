"""Which jobs of a long lane this copy has in hand, where one tenant's might hide another's.

A lane is first in, first out, and a copy has only its first jobs in hand. While several tenants wait in a lane that is
longer than that, a copy keeps only so many jobs of each in hand and sets further ones aside: it renews their leases,
but forgets their data, and the lane goes on to the next. When one of a tenant's jobs in hand leaves, the oldest of
those aside is given back to the broker, which delivers it again at once. So what is in hand are the oldest jobs of each
tenant, and the lane's stream remains the queue: what a copy that dies had set aside comes again like all that it had.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from ...schemas.errors import NotYet
from ...streams.outages import outage_logged
from ...streams.port import DEADLINE, MESSAGE_ID, Delivery, Message
from ...streams.topology import batch_stream
from ..contract import Pipe
from .lanes import Waiting

LOOK = 0.25  # seconds between two looks at who waits in long lanes

CROWDED = 60.0  # seconds for which a lane is treated so after several tenants were seen in it
LEAVING = 0.1  # seconds for which a copy that leaves gives back what is set aside: others may take it
LATE = 4  # looks, after which a job that was given back and has not come is another copy's, or was deleted
_FEW = 1_000  # deadlines of jobs that are no longer aside


class LaneWindows:
    """Those of all lanes, `size` jobs in hand of each, whose leases are of `lease` seconds."""

    def __init__(self, pipe: Pipe, size: int, lease: float) -> None:
        self._pipe = pipe
        self._size = size
        self._renewal = lease / 3
        self._windows: dict[tuple[str, str], LaneWindow] = {}  # by the token of the lanes, and priority
        self._returning: deque[Delivery] = deque()  # to be given back to the broker
        self._has_some = asyncio.Event()
        self._has_windows = asyncio.Event()

    def of(self, subject: str) -> LaneWindow:
        """The window of the lane with this subject of a tenant."""
        *_, lanes, priority, _ = subject.split(".")
        window = self._windows.get((lanes, priority))
        if window is None:
            window = self._windows[lanes, priority] = LaneWindow(self._size, self._return, self._is_cancelled)
            self._has_windows.set()
        return window

    def is_shared(self, subject: str) -> bool:
        """Whether jobs of this lane are set aside so that other tenants go first."""
        return self.of(subject).share is not None

    async def run(self) -> None:
        """Give back what is to come again, renew leases, and see who waits in long lanes; runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._give_back())
            while True:
                if not self._windows:
                    self._has_windows.clear()
                    await self._has_windows.wait()
                await asyncio.sleep(LOOK)
                for (lanes, priority), window in list(self._windows.items()):
                    if window.is_watched:
                        with outage_logged("lanes cannot be read"):
                            held = await self._pipe.broker.held(batch_stream(lanes, priority))
                            window.look(len(held.by_subject), self._pipe.now())
                        for delivery in window.to_renew(self._pipe.now(), self._renewal):
                            await delivery.in_progress()
                    elif window.is_empty:
                        del self._windows[lanes, priority]

    async def leave(self) -> None:
        """Give back all that is set aside: it is another copy's from now on."""
        for window in self._windows.values():
            window.clear()
        while self._returning:
            await self._returning.popleft().nak(LEAVING)

    def _is_cancelled(self, message: Message) -> bool:
        tenant = _tenant(message)
        request = message.headers.get(MESSAGE_ID, "").removeprefix(f"{tenant}.")
        return self._pipe.cancellations.include(tenant, request)

    def _return(self, delivery: Delivery) -> None:
        self._returning.append(delivery)
        self._has_some.set()

    async def _give_back(self) -> None:
        while True:
            await self._has_some.wait()
            self._has_some.clear()
            while self._returning:
                await self._returning.popleft().nak()


@dataclass(slots=True, eq=False)
class Place:
    """Of a job in hand, or of one that was given back to come into hand; `waiting` once it waits for a worker."""

    look: int  # how many there had been when it was made
    waiting: Waiting | None = None
    is_taken: bool = False  # it is in hand; set by LaneWindow.holding


class LaneWindow:
    """Of one lane, `size` jobs in hand at most. Knows no broker: `give_back` gets what is to be delivered again.

    What was cancelled goes first, wherever it is: it ends here, or has been deleted from the lane.
    """

    def __init__(
        self, size: int, give_back: Callable[[Delivery], None], is_cancelled: Callable[[Message], bool]
    ) -> None:
        self.share: int | None = None  # jobs of one tenant in hand; None: as many as there are; set by look
        self._size = size
        self._give_back = give_back
        self._is_cancelled = is_cancelled
        self._held: dict[str, dict[int, Place]] = {}  # by tenant and sequence
        self._count = 0  # of places that are taken
        self._looks = 0
        self._until = 0.0  # when the lane is no longer crowded; set by look
        self._aside = _Aside()

    @property
    def is_watched(self) -> bool:
        """Whether it has to be known who waits in the lane: something may be hidden."""
        return self.share is not None or self._count >= self._size

    @property
    def is_empty(self) -> bool:
        return not self._held and self.share is None

    @contextmanager
    def holding(self, message: Message) -> Iterator[Place]:
        """Hold a job that was admitted, until it has been sent, or has ended here."""
        tenant, sequence = _tenant(message), message.sequence
        place = self._held.get(tenant, {}).get(sequence)
        if place is None or place.is_taken:
            place = self._place(tenant, sequence)
        place.is_taken = True
        self._count += 1
        try:
            yield place
        finally:
            self._count -= 1
            if self._held.get(tenant, {}).get(sequence) is place:  # else its lease had expired, or others go first
                self._drop(tenant, sequence)
                self._fill(tenant)

    def admit(self, delivery: Delivery, now: float) -> bool:
        """Whether a job is to be held now. Else it is set aside, as older ones of its tenant go first.

        Looks at the subject and headers alone: in a long lane that happens often.
        """
        if self.share is None:
            return True
        tenant, sequence = _tenant(delivery.message), delivery.message.sequence
        self._aside.forget(tenant, sequence)
        own, deadline = self._held.get(tenant, {}), _deadline(delivery.message)
        ends = deadline <= now or self._is_cancelled(delivery.message)
        if sequence not in own and len(own) >= self.share and not ends:
            if (newest := max(own)) < sequence:
                self._aside.add(tenant, delivery, deadline, now)
                return False
            self._displace(tenant, newest)
        if sequence not in own or own[sequence].is_taken:
            self._place(tenant, sequence)
        return True

    def look(self, tenants: int, now: float) -> None:
        """So many tenants wait in the lane."""
        self._looks += 1
        if tenants > 1:
            self.share = max(1, self._size // (tenants + 1))
            self._until = now + CROWDED
        elif now >= self._until:
            self.share = None
            self.clear()
        if self.share is None:
            return
        for tenant, sequence in self._aside.expired(now):
            self._recall(tenant, sequence)
        for tenant, own in list(self._held.items()):
            for sequence, place in list(own.items()):
                if not place.is_taken and self._looks - place.look > LATE:
                    self._drop(tenant, sequence)
            for sequence in sorted(own)[self.share :]:
                self._displace(tenant, sequence)
        for tenant in self._aside.tenants():
            self._fill(tenant)

    def to_renew(self, now: float, interval: float) -> list[Delivery]:
        """What is set aside and was renewed so many seconds ago."""
        return self._aside.to_renew(now, interval)

    def clear(self) -> None:
        """Give back all that is set aside."""
        for tenant in self._aside.tenants():
            while (sequence := self._aside.oldest(tenant)) is not None:
                self._give_back(self._aside.take(tenant, sequence))

    def _fill(self, tenant: str) -> None:
        """Have as many in hand as there may be, if there are so many."""
        while self.share is not None and len(self._held.get(tenant, ())) < self.share:
            if (sequence := self._aside.oldest(tenant)) is None:
                return
            self._recall(tenant, sequence)

    def _recall(self, tenant: str, sequence: int) -> None:
        delivery = self._aside.take(tenant, sequence)
        if not self._is_cancelled(delivery.message):
            self._place(tenant, sequence)
        self._give_back(delivery)

    def _displace(self, tenant: str, sequence: int) -> None:
        """Have a job in hand come again, unless it is on its way to a worker."""
        waiting = self._held[tenant][sequence].waiting
        if waiting is None or not (waiting.number or waiting.sent.done()):
            self._drop(tenant, sequence)
            if waiting is not None:
                waiting.sent.set_exception(NotYet(0.0))

    def _place(self, tenant: str, sequence: int) -> Place:
        place = self._held.setdefault(tenant, {})[sequence] = Place(self._looks)
        return place

    def _drop(self, tenant: str, sequence: int) -> None:
        own = self._held[tenant]
        del own[sequence]
        if not own:
            del self._held[tenant]


class _Aside:
    """The deliveries that were set aside. What their heaps and orders name may be there no more."""

    def __init__(self) -> None:
        self._deliveries: dict[tuple[str, int], Delivery] = {}  # by tenant and sequence
        self._orders: dict[str, list[int]] = {}  # heaps of sequences, by tenant
        self._deadlines: list[tuple[float, str, int]] = []  # a heap
        self._renewed: OrderedDict[tuple[str, int], float] = OrderedDict()  # when; the longest ago first

    def add(self, tenant: str, delivery: Delivery, deadline: float, now: float) -> None:
        sequence = delivery.message.sequence
        delivery.shed()
        self._deliveries[tenant, sequence] = delivery
        self._renewed[tenant, sequence] = now
        heapq.heappush(self._orders.setdefault(tenant, []), sequence)
        heapq.heappush(self._deadlines, (deadline, tenant, sequence))

    def take(self, tenant: str, sequence: int) -> Delivery:
        del self._renewed[tenant, sequence]
        return self._deliveries.pop((tenant, sequence))

    def forget(self, tenant: str, sequence: int) -> None:
        """It has come again, as its lease had expired."""
        if (tenant, sequence) in self._deliveries:
            self.take(tenant, sequence)

    def tenants(self) -> list[str]:
        return list(self._orders)

    def oldest(self, tenant: str) -> int | None:
        """Its sequence."""
        order = self._orders.get(tenant, [])
        while order:
            if (tenant, order[0]) in self._deliveries:
                return order[0]
            heapq.heappop(order)
        self._orders.pop(tenant, None)
        return None

    def expired(self, now: float) -> Iterator[tuple[str, int]]:
        """Those whose deadlines have passed."""
        if len(self._deadlines) > 2 * len(self._deliveries) + _FEW:  # or they would name what has long gone
            self._deadlines = list({each for each in self._deadlines if each[1:] in self._deliveries})
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, tenant, sequence = heapq.heappop(self._deadlines)
            if (tenant, sequence) in self._deliveries:
                yield tenant, sequence

    def to_renew(self, now: float, interval: float) -> list[Delivery]:
        due: list[Delivery] = []
        while self._renewed and next(iter(self._renewed.values())) <= now - interval:
            key, _ = self._renewed.popitem(last=False)
            self._renewed[key] = now
            due.append(self._deliveries[key])
        return due


def _tenant(message: Message) -> str:
    return message.subject.rpartition(".")[2]


def _deadline(message: Message) -> float:
    """In Unix seconds; custom stages need not send it along."""
    try:
        return float(message.headers[DEADLINE])
    except (KeyError, ValueError):
        return inf
