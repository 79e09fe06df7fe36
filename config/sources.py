"""Loads settings: the command line overrides the environment, then the file, then the defaults; records origins."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..schemas.errors import ConfigurationError
from ..schemas.sources import join_pair, parts_of
from .files import read_toml
from .settings import Settings

DEFAULT_FILE = Path("penstock.toml")
SECRET = frozenset({"nats_url", "api_keys", "secret_key"})  # may contain a token or a password: never shown in messages


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and, for each field, the flag, variable or file that set it, or "default"."""

    settings: Settings
    origins: Mapping[str, str]


def with_projector(settings: Settings) -> Settings:
    """The settings with one name for both files of a model, in place of `mmproj`. Raises `ConfigurationError`."""
    if settings.mmproj is None:
        return settings
    pair = None if settings.model is None else join_pair(Path(settings.model), settings.mmproj)
    if pair is None or parts_of(pair) is None:
        fault = "name MODEL, too" if pair is None else f"{settings.model} is no GGUF file; it goes with one"
        raise ConfigurationError([f"mmproj={settings.mmproj!r}: {fault}"])
    return settings.model_copy(update={"model": str(pair), "mmproj": None})


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def variable(field: str) -> str:
    return "PENSTOCK_" + field.upper()


def load(command_line: Mapping[str, Any] | None = None, *, config: Path | None = None) -> Loaded:
    """Merge the sources and validate the result once.

    `command_line` has the given flags, by field name. `config` is the file of `--config`; the alternatives are
    `PENSTOCK_CONFIG` and `./penstock.toml`, if it exists. Raises `ConfigurationError` with every fault of every source
    and where it was set.
    """
    faults: list[str] = []
    file, named = _file(config)
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    for values, origin in (
        (_from_file(file, named, faults), lambda field: str(file)),
        (_from_environment(), variable),
        (dict(command_line or {}), flag),
    ):
        for field, value in values.items():
            if field not in Settings.model_fields:
                faults.append(f"{field} in {origin(field)}: no such setting{_suggestion(field)}")
            else:
                merged[field] = value
                origins[field] = origin(field)
    settings: Settings | None = None
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_context=False):
            field = str(fault["loc"][0]) if fault["loc"] else ""
            given = "" if field in SECRET else f", got {fault['input']!r}"
            faults.append(
                f"{field} ({origins.get(field, 'default')}): {fault['msg'].removeprefix('Value error, ')}{given}"
            )
    if settings is None or faults:
        raise ConfigurationError(faults)
    return Loaded(settings, origins)


def _file(config: Path | None) -> tuple[Path, bool]:
    if config is not None:
        return config, True
    if from_environment := os.environ.get("PENSTOCK_CONFIG"):
        return Path(from_environment), True
    return DEFAULT_FILE, False


def _from_file(path: Path, named: bool, faults: list[str]) -> dict[str, Any]:
    try:
        return read_toml(path)
    except FileNotFoundError:
        if named:
            faults.append(f"{path}: no such file; give an existing one with --config or PENSTOCK_CONFIG")
    except ConfigurationError as error:
        faults += error.faults
    return {}


def _from_environment() -> dict[str, str]:
    # Unknown variables are ignored: Kubernetes adds some, such as PENSTOCK_SERVICE_HOST.
    fields = {variable(field): field for field in Settings.model_fields}
    return {fields[name.upper()]: value for name, value in os.environ.items() if name.upper() in fields}


def _suggestion(field: str) -> str:
    close = difflib.get_close_matches(field, Settings.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""
