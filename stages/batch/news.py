"""What clients hear while they wait: their position, what their model is doing, and when their turn may come. And what
operators hear: that requests wait for a model which nobody serves.
"""

from __future__ import annotations

from collections.abc import Collection

import structlog
from pydantic import ValidationError

from ...schemas.events import Accepted, Queued
from ...schemas.registry import LoadProgress
from ...streams.port import Message
from ..admission import Drain
from ..contract import Pipe
from .lanes import Lanes, Waiting

SILENT = 5.0  # seconds without a report after which a load counts as ended
STEP = 10  # per cent of progress that are worth an event
UNSERVED = 30.0  # seconds without a worker of the model, and without a load, that are worth a warning
REMINDER = 600.0  # seconds until the warning is repeated

log = structlog.get_logger(__name__)


class WaitingNews:
    """Tells each client seldom: when its position is a tenth nearer, or when its model has come further."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._loads: dict[tuple[str, int], tuple[LoadProgress, float]] = {}  # by model and revision; with when it came
        self._drains: dict[tuple[str, int], Drain] = {}
        self._warn_at: dict[tuple[str, int], float] = {}  # when it is time to warn that nobody serves a model

    def hear(self, message: Message) -> None:
        """Take a worker's report of the model that it loads."""
        try:
            load = LoadProgress.model_validate_json(message.data)
        except ValidationError:
            return  # of another release: its clients hear that the model is waited for
        self._loads[load.model, load.revision] = load, self._pipe.now()

    def keep(self, models: Collection[tuple[str, int]]) -> None:
        """Forget the models and revisions but these, and loads of which nothing has been heard for long."""
        now = self._pipe.now()
        self._drains = {key: drain for key, drain in self._drains.items() if key in models}
        self._loads = {key: load for key, load in self._loads.items() if now - load[1] <= SILENT}
        self._warn_at = {key: at for key, at in self._warn_at.items() if key in models}

    async def tell(self, model: str, revision: int, lanes: Lanes) -> None:
        """Publish what has changed for those that wait in the lanes of a model."""
        waiting = [each for each in lanes if not each.sent.done()]
        now = self._pipe.now()
        drain = self._drains.setdefault((model, revision), Drain())
        if self._pipe.registry.workers_for(model, revision):
            self._loads.pop((model, revision), None)
            self._warn_at.pop((model, revision), None)
            drain.update(now, lanes.taken, len(waiting))
            for position, each in enumerate(waiting, 1):
                await self._tell(each, Queued(each.job.id, position, wait=_seconds(position, drain.rate, 0.0)))
            return
        drain.resume(now)
        load, heard = self._loads.get((model, revision), (None, 0.0))
        if load is None or now - heard > SILENT:
            self._warn(model, revision, len(waiting), now)
            for position, each in enumerate(waiting, 1):
                await self._tell(each, Queued(each.job.id, position, "waiting"))
            return
        self._warn_at.pop((model, revision), None)
        for position, each in enumerate(waiting, 1):
            wait = _seconds(position, drain.rate, load.remaining)
            await self._tell(each, Queued(each.job.id, position, "loading", load.percent, wait))

    def _warn(self, model: str, revision: int, num_waiting: int, now: float) -> None:
        """Say now and then that requests wait for a model which no worker serves or loads."""
        if not num_waiting:
            self._warn_at.pop((model, revision), None)
        elif now >= self._warn_at.setdefault((model, revision), now + UNSERVED):
            self._warn_at[model, revision] = now + REMINDER
            hint = "start a worker that serves the model under this name, or cancel the requests"
            log.warning("no worker serves a model", model=model, revision=revision, waiting=num_waiting, hint=hint)

    async def _tell(self, waiting: Waiting, news: Queued) -> None:
        told, job = waiting.told, waiting.job
        if (
            told is None
            or told.model != news.model
            or news.position < 0.9 * told.position
            or (news.progress or 0) >= (told.progress or 0) + STEP
        ):
            waiting.told = news
            key = f"queued.{news.position}.{news.model}.{news.progress}"
            await self._pipe.open(Accepted.of(job), tenant=job.tenant, bridge=job.bridge)
            await self._pipe.emit(news, tenant=job.tenant, bridge=job.bridge, key=key)


def _seconds(position: int, rate: float, before: float | None) -> float | None:
    """Until the turn of a request, which begins to come nearer in `before` seconds; None where it cannot be known."""
    if before is None or (not rate and not before):
        return None
    return round(before + (position / rate if rate else 0.0), 1)
