"""Refuses requests that the queue would refuse, before they cost anything: by the admission state it last published."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

import structlog
from pydantic import ValidationError

from ...schemas.errors import Overloaded
from ...schemas.jobs import Priority
from ...schemas.registry import Admission
from ...streams.port import Broker
from ...streams.topology import Subjects

log = structlog.get_logger(__name__)

STALE = 5.0  # seconds after which an admission state expires: the queue may have died while it was full


class EarlyRefusal:
    """Keeps the queue's newest admission state; `clock`, in seconds, tells its age."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state: Admission | None = None  # set by hear
        self._heard = -inf  # set by hear

    async def start(self, broker: Broker, subjects: Subjects) -> None:
        """Subscribe to the queue's admission state, and read the one that it stored."""
        await broker.listen(subjects.admission(), lambda message: self.hear(message.data))
        kept = await (await broker.bucket("state")).get("admission")
        if kept is not None and self._state is None:
            self.hear(kept.value)

    def hear(self, data: bytes) -> None:
        """Take an admission state from the broker; one that cannot be decoded is logged and ignored."""
        try:
            self._state = Admission.model_validate_json(data)
        except ValidationError:
            log.warning("invalid admission state ignored")
        else:
            self._heard = self._clock()

    def check(self, priority: Priority) -> None:
        """Raise `Overloaded` where the queue refuses this priority."""
        state = self._state
        if state is None or self._clock() - self._heard > STALE or state.accepting.get(priority, True):
            return
        raise Overloaded(
            f"The queue takes no more requests of {priority} priority for now; try again later.",
            code="queue_full",
            retry_after=state.retry_after.get(priority, 1.0),
        )
