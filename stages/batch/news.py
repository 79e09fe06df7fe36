"""What clients hear while they wait: their position, what their model is doing, and when their turn may come."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import ValidationError

from ...schemas.events import Accepted, Queued
from ...schemas.registry import LoadProgress
from ...streams.port import Message
from ..admission import Drain
from ..contract import Pipe
from .lanes import Lanes, Waiting

SILENT = 5.0  # seconds without a report after which a load counts as ended
STEP = 10  # per cent of progress that are worth an event


class WaitingNews:
    """Tells each client seldom: when its position is a tenth nearer, or when its model has come further."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._loads: dict[tuple[str, int], tuple[LoadProgress, float]] = {}  # by model and revision; with when it came
        self._drains: dict[tuple[str, int], Drain] = {}

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

    async def tell(self, model: str, revision: int, lanes: Lanes) -> None:
        """Publish what has changed for those that wait in the lanes of a model."""
        waiting = [each for each in lanes if not each.sent.done()]
        now = self._pipe.now()
        drain = self._drains.setdefault((model, revision), Drain())
        if self._pipe.registry.workers_for(model, revision):
            self._loads.pop((model, revision), None)
            drain.update(now, lanes.taken, len(waiting))
            for position, each in enumerate(waiting, 1):
                await self._tell(each, Queued(each.job.id, position, wait=_seconds(position, drain.rate, 0.0)))
            return
        drain.resume(now)
        load, heard = self._loads.get((model, revision), (None, 0.0))
        if load is None or now - heard > SILENT:
            for position, each in enumerate(waiting, 1):
                await self._tell(each, Queued(each.job.id, position, "waiting"))
            return
        for position, each in enumerate(waiting, 1):
            wait = _seconds(position, drain.rate, load.remaining)
            await self._tell(each, Queued(each.job.id, position, "loading", load.percent, wait))

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
