"""Whether a request would be answered now: what `/health/ready` and gRPC's health say."""

from __future__ import annotations

from typing import Any

from ...config.settings import BUILT_IN_STAGES, Settings
from ...streams.port import Broker
from ...streams.stores.registry import Registry
from .bridge import Bridge
from .canary import Canary


class Readiness:
    def __init__(
        self, bridge: Bridge, broker: Broker, registry: Registry, settings: Settings, canary: Canary | None = None
    ) -> None:
        self._bridge = bridge
        self._broker = broker
        self._registry = registry
        self._settings = settings
        self._canary = canary

    @property
    def is_ready(self) -> bool:
        return bool(self.answer()["status"] == "ready")

    def answer(self) -> dict[str, Any]:
        """The `status`, what is `missing`, the `fault`, the number of `workers`, and their `slow_paths`."""
        settings, registry = self._settings, self._registry
        if self._bridge.stopping:
            return {"status": "stopping"}
        absent = registry.missing(settings.pipeline) if self._broker.connected else ["broker"]
        if "stream" not in absent:  # which runs only while every filter does
            absent = [part for part in absent if part not in settings.filters]
        unseen = [stage for stage in absent if stage in settings.job_stages and stage not in BUILT_IN_STAGES]
        missing = [part for part in absent if part not in unseen]
        answer: dict[str, Any] = {"status": "waiting", "missing": missing} if missing else {"status": "ready"}
        if self._canary and self._canary.fault and not missing:
            answer = {"status": "failing", "fault": self._canary.fault._asdict()}
        slow = {card.id: card.slow_paths for card in registry.workers if card.slow_paths}
        answer |= {"workers": len(registry.workers)}
        return answer | ({"unseen": unseen} if unseen else {}) | ({"slow_paths": slow} if slow else {})
