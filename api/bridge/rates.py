"""What tenants have left of their requests and tokens a minute, as the pipeline published it last.

The pipeline decides; the bridge refuses early what it would refuse, and tells clients the figures.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

import structlog
from pydantic import ValidationError

from ...config import metrics
from ...schemas.rates import MINUTE, Bucket, Kind, RateNews, exceeded
from ...streams.port import Broker
from ...streams.topology import Subjects

log = structlog.get_logger(__name__)

MOST_TENANTS = 10_000  # that are remembered


class HeardRates:
    """Keeps the newest figures of each tenant; `clock`, in seconds, tells their age."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: OrderedDict[str, tuple[RateNews, float]] = OrderedDict()  # with when each came; set by hear

    async def start(self, broker: Broker, subjects: Subjects) -> None:
        """Subscribe to the figures of all tenants."""
        await broker.listen(subjects.rates_all(), lambda message: self.hear(message.data))

    def hear(self, data: bytes) -> None:
        """Take figures from the broker; what cannot be decoded is logged and ignored."""
        try:
            news = RateNews.model_validate_json(data)
        except ValidationError:
            log.warning("invalid rates ignored")
            return
        now = self._clock()
        known, heard = self._heard.get(news.tenant, (news, now))
        # Revisions begin anew if the broker loses the account; within a minute both would be full anyway.
        if news.revision >= known.revision or now - heard > MINUTE:
            self._heard[news.tenant] = news, now
            self._heard.move_to_end(news.tenant)
            if len(self._heard) > MOST_TENANTS:
                self._heard.popitem(last=False)

    def buckets(self, tenant: str) -> Mapping[Kind, Bucket]:
        """What the tenant has left now; empty where it has no limit, or has not been heard of yet."""
        if (found := self._heard.get(tenant)) is None:
            return {}
        news, heard = found
        buckets: dict[Kind, Bucket | None] = {"requests": news.requests, "tokens": news.tokens}
        passed = self._clock() - heard
        return {kind: bucket.later(passed) for kind, bucket in buckets.items() if bucket is not None}

    def check(self, tenant: str) -> None:
        """Raises `QuotaExceeded` where the pipeline would refuse any new request of the tenant."""
        refusal = exceeded(self.buckets(tenant), {"requests": 1, "tokens": 1})
        if refusal is not None:
            metrics.RATE_REFUSALS.labels("bridge").inc()
            raise refusal
