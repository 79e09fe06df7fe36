"""Compares and combines the settings of a process with those that its deployment has agreed on."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..schemas.deployment import LAYOUT, SHARED, Configuration
from ..schemas.errors import ConfigurationError, StartupError
from .settings import Settings
from .sources import Loaded, flag


def shared_settings(settings: Settings) -> Configuration:
    """The configuration that a new deployment with these settings would agree on."""
    return Configuration.model_validate(settings.model_dump(include=set(SHARED)))


def explicit(loaded: Loaded) -> dict[str, object]:
    """The shared settings that were given explicitly, by name."""
    return {name: getattr(loaded.settings, name) for name in SHARED if loaded.origins[name] != "default"}


def parse(data: bytes, settings: Settings) -> Configuration:
    """Parse a stored configuration; settings unknown to the release that wrote it come from `settings`.

    Raises `StartupError` if a newer release has laid the streams out in a way that we do not know.
    """
    stored = json.loads(data)
    if stored["layout"] > LAYOUT:
        check_layout(stored["layout"])
    return Configuration.model_validate(shared_settings(settings).model_dump() | stored)


def check_layout(layout: int) -> None:
    """Raises `StartupError` if this is not the layout that our parts use."""
    if layout != LAYOUT:
        raise StartupError(
            f"this deployment has layout {layout}, but this Penstock uses layout {LAYOUT}: run the same release "
            "everywhere, or choose another --namespace"
            + ("; `penstock nats setup --apply` upgrades it once all parts have stopped" if layout < LAYOUT else "")
        )


def adopt(settings: Settings, agreed: Configuration) -> Settings:
    """The settings, with the agreed values of the shared ones."""
    return settings.model_copy(update={name: getattr(agreed, name) for name in SHARED})


def check(loaded: Loaded, agreed: Configuration) -> None:
    """Raises `ConfigurationError`, one line per shared setting that was given another value than the agreed one."""
    faults = [
        f"{name} is {shown(value)} ({loaded.origins[name]}), but this deployment (namespace "
        f"{loaded.settings.namespace}) has agreed on {shown(getattr(agreed, name))}: omit the setting, or change "
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
            return ",".join(value) or "none"
        case float():
            return str(int(value)) if value.is_integer() else str(value)
        case _:
            return str(value)
