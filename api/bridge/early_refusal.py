"""Early refusal: what the queue said last that it takes, so that a request too many costs nothing but its reading."""

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

STALE = 5.0  # seconds after which what the queue said counts no more: it may have died full


class EarlyRefusal:
    """`clock` in seconds; it stamps what is heard."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state: Admission | None = None  # set by hear
        self._heard = -inf  # set by hear

    async def start(self, broker: Broker, subjects: Subjects) -> None:
        await broker.listen(subjects.admission(), lambda message: self.hear(message.data))
        kept = await (await broker.bucket("state")).get("admission")
        if kept is not None and self._state is None:
            self.hear(kept.value)

    def hear(self, data: bytes) -> None:
        try:
            self._state = Admission.model_validate_json(data)
        except ValidationError:
            log.warning("what the queue says of its room cannot be read")
        else:
            self._heard = self._clock()

    def check(self, priority: Priority) -> None:
        """Raises `Overloaded`."""
        state = self._state
        if state is None or self._clock() - self._heard > STALE or state.accepting.get(priority, True):
            return
        raise Overloaded(
            f"The queue takes no more requests of {priority} priority for now.",
            code="queue_full",
            retry_after=state.retry_after.get(priority, 1.0),
        )
