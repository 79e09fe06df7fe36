"""What every way in does with a request before it is published: its model, its priority, its time."""

from __future__ import annotations

from typing import Any, NamedTuple, cast, get_args

from ...config.settings import Settings
from ...schemas.errors import Forbidden, InvalidRequest
from ...schemas.jobs import Priority
from ...schemas.openai.completions import TIERS
from ...streams.stores.registry import Registry

TENANT = "default"


class Caller(NamedTuple):
    """Who asks, by the API key; without keys, one that may do everything."""

    tenant: str = TENANT
    max_priority: Priority | None = None
    admin: bool = True


async def complete_body(registry: Registry, body: dict[str, Any], caller: Caller) -> list[str]:
    """Name the only model where the body names none, and drop a `keep_alive` that the caller may not set, or that has
    no effect; returns the names of what was dropped."""
    if body.get("model") is None and (name := await registry.only()) is not None:
        body["model"] = name
    elif isinstance(body.get("model"), str):
        body["model"] = await registry.untagged(body["model"])  # programs list models as Ollama's, and ask as OpenAI's
    if "keep_alive" in body:
        model = body.get("model")
        card = await registry.find(model) if isinstance(model, str) else None
        if card is None or not card.catalogued or not caller.admin:
            del body["keep_alive"]
            return ["keep_alive"]
    return []


def check_timeout(given: Any, param: str, settings: Settings) -> float:
    """Seconds that the request may take: those given, or those of the settings. Raises `InvalidRequest`."""
    longest = settings.longest_timeout
    if given is None:
        return min(settings.default_timeout, longest)
    if type(given) not in (int, float) or not 0 < given <= longest:
        raise InvalidRequest(
            f"{param} must be a number of seconds above 0, at most {longest:g} (the setting events_ttl).",
            param=param,
        )
    return float(given)


def priority_of(body: dict[str, Any], caller: Caller, settings: Settings) -> Priority:
    """The lane of a request: the one it asks for, or `normal`, or `low` if its key allows no more.

    Raises `Forbidden` for a priority that its key does not allow. The stage `validate` refuses invalid values.
    """
    order = get_args(Priority)
    most = caller.max_priority or settings.max_priority
    priority, tier = body.get("priority"), body.get("service_tier")
    asked: Priority | None = None
    if isinstance(priority, str) and priority in order:
        asked, param = cast(Priority, priority), "priority"
    elif isinstance(tier, str) and tier != "auto":
        asked, param = TIERS.get(tier), "service_tier"
    if asked is not None and order.index(asked) < order.index(most):
        raise Forbidden(
            f"This key allows at most the priority {most}; ask for that, or leave {param} out.",
            code="priority_not_allowed",
            param=param,
        )
    if asked is None:
        return "low" if most == "low" else "normal"
    return asked
