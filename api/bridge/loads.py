"""Which models workers are loading, as they publish it: for models that no agent places, nothing else tells."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from pydantic import ValidationError

from ...schemas.registry import LoadProgress
from ...streams.port import Broker
from ...streams.topology import Subjects

log = structlog.get_logger(__name__)

STALE = 5.0  # seconds without a report, of which there is one a second, after which nobody loads a model any more


class HeardLoads:
    """Keeps when a report of each model came last; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[tuple[str, int], float] = {}  # set by hear

    async def start(self, broker: Broker, subjects: Subjects) -> None:
        """Subscribe to the reports of all workers."""
        await broker.listen(subjects.loading(), lambda message: self.hear(message.data))

    def hear(self, data: bytes) -> None:
        """Take a report from the broker; one that cannot be decoded is logged and ignored."""
        try:
            load = LoadProgress.model_validate_json(data)
        except ValidationError:
            log.warning("invalid report of a load ignored")
            return
        now = self._clock()
        self._heard[load.model, load.revision] = now
        for key in [key for key, heard in self._heard.items() if now - heard > STALE]:
            del self._heard[key]

    def is_loading(self, model: str, revision: int) -> bool:
        """Whether a worker has said lately that it loads this revision of a model."""
        return self._clock() - self._heard.get((model, revision), float("-inf")) <= STALE
