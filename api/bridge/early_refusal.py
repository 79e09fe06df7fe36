"""Refuses requests that the queue would refuse, before they cost anything: by the admission state it last published."""

from __future__ import annotations

import time
from collections.abc import Callable

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
    """Keeps the newest admission state of each model; `clock`, in seconds, tells its age."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: dict[str, tuple[Admission, float]] = {}  # by model, with when each came; set by hear

    async def start(self, broker: Broker, subjects: Subjects) -> None:
        """Read the admission states that the queue has stored, and subscribe to the newer ones."""
        for kept in await (await broker.bucket("state")).entries("admission."):
            self.hear(kept.value)
        await broker.listen(subjects.admission(), lambda message: self.hear(message.data))

    def hear(self, data: bytes) -> None:
        """Take an admission state from the broker; one that cannot be decoded is logged and ignored."""
        try:
            state = Admission.model_validate_json(data)
        except ValidationError:
            log.warning("invalid admission state ignored")
            return
        now = self._clock()
        known, heard = self._states.get(state.model, (state, now))
        if state.revision >= known.revision or now - heard > STALE:
            self._states[state.model] = state, now

    def check(self, model: object, priority: Priority, tenant: str) -> None:
        """Raise `Overloaded` where the queue refuses a tenant's requests of this priority for a model, by its client's
        name for it."""
        state, heard = self._states.get(model, (None, 0.0)) if isinstance(model, str) else (None, 0.0)
        if state is None or self._clock() - heard > STALE or state.accepts(priority, tenant):
            return
        raise Overloaded(
            f"The queue takes no more requests of {priority} priority for now; try again later.",
            code="queue_full",
            retry_after=state.retry_after.get(priority, 1.0),
        )
