"""Finds out whether requests are answered: where no client's was lately, by a small request of its own.

It goes the way of all requests, first of all that wait. A catalogue's models are asked only while clients' requests
fail: they would stay loaded for nothing else. Otherwise the canary is a request that is refused, which shows that the
broker stores and that jobs are validated.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

import structlog

from ...config import metrics
from ...schemas.canaries import CANARY
from ...schemas.errors import BrokerUnavailable, Refusal
from ...schemas.events import Expired, Failed
from ...schemas.jobs import Endpoint, Job
from ...schemas.registry import ModelCard
from ...streams.stores.registry import Registry
from .bridge import Bridge

log = structlog.get_logger(__name__)

LEAST_PATIENCE = 5.0  # seconds for the answer of a canary
_LOOKS = 4  # in an interval
_BUSY = (429, 503, 507)  # a refusal that the pipeline has decided: it works
_ASKED: dict[Endpoint, dict[str, object]] = {
    "/v1/completions": {"prompt": "ready", "max_tokens": 1, "temperature": 0},
    "/v1/embeddings": {"input": "ready"},
    "/v1/rerank": {"query": "ready", "documents": ["ready"]},
}


class Fault(NamedTuple):
    """Why a model does not answer."""

    model: str
    reason: str


class Canary:
    """`interval` in seconds: how long no request may have been answered before one is sent; `clock` tells it."""

    def __init__(
        self, bridge: Bridge, registry: Registry, interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fault: Fault | None = None  # set by look
        self._bridge, self._registry = bridge, registry
        self._interval, self._clock = interval, clock
        self._asked = 0  # canaries so far: each goes to another model than the one before
        self._checked = clock()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        metrics.CANARY.set(1)
        while True:
            await asyncio.sleep(self._interval / _LOOKS)
            await self.look()

    async def look(self) -> None:
        """Send a canary if it is time for one, and wait for its answer."""
        proven, failed = self._bridge.last_answer, self._bridge.last_failure
        now = self._clock()
        if self.fault is not None and proven > self._checked:
            self._judge(None)
        # An outage ends at any time, and no client's request may come to show it while the bridge is not ready.
        if now - max(proven, self._checked) < (self._interval / _LOOKS if self.fault else self._interval):
            return
        has_failed = self.fault is not None or failed > proven
        cards = {card.model.name: card.model for card in self._registry.workers}
        able = [card for _, card in sorted(cards.items()) if has_failed or not card.catalogued]
        asked = able or [card for _, card in sorted(self._registry.models.items()) if card.catalogued]
        self._checked = now
        if asked:
            card = asked[self._asked % len(asked)]
            self._asked += 1
            self._judge(await self._fault(card, is_run=bool(able)))

    def _judge(self, fault: Fault | None) -> None:
        if fault and not self.fault:
            log.error("requests are not answered", model=fault.model, reason=fault.reason)
        elif self.fault and not fault:
            log.info("requests are answered again", model=self.fault.model)
        self.fault = fault
        metrics.CANARY.set(0 if fault else 1)

    async def _fault(self, card: ModelCard, *, is_run: bool) -> Fault | None:
        asked = _ASKED[card.endpoint] if is_run else {}  # refused: it asks for nothing
        patience = max(LEAST_PATIENCE, 2 * self._interval)
        job = Job(
            id=f"canary-{uuid.uuid4().hex}",
            endpoint=card.endpoint,
            bridge=self._bridge.name,
            body={"model": card.name, **asked},
        )
        try:
            deadline = self._bridge.broker.now() + patience
            reading = await self._bridge.open(job, priority="high", tenant=CANARY, deadline=deadline)
        except Refusal:
            return None  # the queue is full, or this bridge drains
        except BrokerUnavailable as error:
            return Fault(card.name, f"The broker does not answer: {error}")
        try:
            until = self._clock() + patience
            while not reading.ended and (left := until - self._clock()) > 0:
                await reading.take(left)
        finally:
            reading.leave()
        match reading.final:
            case None:
                return Fault(card.name, f"A request was not answered within {patience:g} s.")
            case Expired() as expired:
                return Fault(card.name, expired.error.message)
            case Failed() as failed if failed.error.status >= 500 and failed.error.status not in _BUSY:
                return Fault(card.name, failed.error.message)
            case _:
                return None
