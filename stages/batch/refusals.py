"""Ends the jobs of models that cannot be loaded, and those that have waited for their model long enough."""

from __future__ import annotations

from collections.abc import Mapping

from ...schemas.errors import Overloaded
from ...streams.stores.registry import Registry
from ...streams.topology import lanes_of
from .lanes import Lanes


def refuse_unloaded(registry: Registry, waiting: Mapping[tuple[str, int], Lanes], now: float) -> None:
    """Refuse those of the jobs, by model and revision, whose model will not come in time; `now` is in Unix seconds."""
    for (model, revision), lanes in waiting.items():
        refusal = registry.refusals.get(lanes_of(model, revision))
        card = registry.models.get(model)
        limit = card.wait_limit if card and not registry.workers_for(model, revision) else None
        for each in [each for each in lanes if not each.sent.done()]:
            if refusal is not None and each.job.created <= refusal.at:
                each.sent.set_exception(refusal.error(now))
            elif limit is not None and not each.may_wait and each.job.created + limit <= now:
                each.sent.set_exception(
                    Overloaded(
                        f"The model {model!r} was not loaded within {limit:g} s; try again later. Streams wait longer.",
                        retry_after=5.0,
                    )
                )
