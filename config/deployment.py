"""A process's settings beside those that its deployment has agreed on."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..schemas.deployment import LAYOUT, SHARED, Configuration
from ..schemas.errors import ConfigurationError, StartupError
from .settings import Settings
from .sources import Loaded, flag


def shared_settings(settings: Settings) -> Configuration:
    """What a deployment would agree on that is set up with these settings."""
    return Configuration.model_validate(settings.model_dump(include=set(SHARED)))


def explicit(loaded: Loaded) -> dict[str, object]:
    """The shared settings that somebody gave, by name."""
    return {name: getattr(loaded.settings, name) for name in SHARED if loaded.origins[name] != "default"}


def parse(data: bytes, settings: Settings) -> Configuration:
    """An agreed configuration as it was stored; what a release before did not know is as in `settings`.

    Raises `StartupError` for a layout that is not ours.
    """
    stored = json.loads(data)
    if stored["layout"] != LAYOUT:
        raise StartupError(
            f"this deployment has layout {stored['layout']}, and this Penstock works with layout {LAYOUT}: "
            "run the same release everywhere, or choose another --namespace"
        )
    return Configuration.model_validate(shared_settings(settings).model_dump() | stored)


def adopt(settings: Settings, agreed: Configuration) -> Settings:
    """The settings with the agreed ones in place of their own."""
    return settings.model_copy(update={name: getattr(agreed, name) for name in SHARED})


def check(loaded: Loaded, agreed: Configuration) -> None:
    """Raises `ConfigurationError`, a line each, where somebody gave a shared setting another value than the agreed."""
    faults = [
        f"{name} is {shown(value)} ({loaded.origins[name]}), and this deployment (namespace "
        f"{loaded.settings.namespace}) has agreed on {shown(getattr(agreed, name))}: leave the setting out, or change "
        f"it for all parts with `penstock config apply {flag(name)} {shown(value)}`"
        for name, value in explicit(loaded).items()
        if value != getattr(agreed, name)
    ]
    if faults:
        raise ConfigurationError(faults)


def changes(before: Configuration, after: Configuration) -> Mapping[str, tuple[object, object]]:
    """The settings that differ, by name."""
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in SHARED}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def shown(value: object) -> str:
    match value:
        case None:
            return "none"
        case tuple():
            return ",".join(value)
        case float():
            return str(int(value)) if value.is_integer() else str(value)
        case _:
            return str(value)
