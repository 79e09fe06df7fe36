"""What a part says while the broker is away."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.schemas.errors import BrokerUnavailable
from penstock.streams import outages


async def test_a_long_outage_is_logged_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "RETRY_PAUSE", 0.0)
    left = iter(range(1000))

    async def call() -> str:
        if next(left, None) is not None:
            raise BrokerUnavailable("no answer")
        return "stored"

    with capture_logs() as lines:
        assert await outages.through_outages(call, "penstock.jobs") == "stored"
    assert [line["attempt"] for line in lines] == [1 << power for power in range(10)]
    assert {(line["event"], line["target"]) for line in lines} == {("broker unavailable, retrying", "penstock.jobs")}
