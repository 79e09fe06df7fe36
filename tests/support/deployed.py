"""What the files of `deploy/` say, judged by Penstock's own command line and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from penstock.__main__ import app
from penstock.api.terminal.over_nats.nats import role_permissions
from penstock.config.settings import Settings
from penstock.config.sources import variable
from penstock.streams.nats.administration.deployment import layout
from penstock.streams.permissions import Grants

USAGE_ERROR: Any = typer.BadParameter.__base__  # of the click that this Typer has


def command_fault(words: Sequence[str]) -> str:
    """What is wrong with the arguments of `penstock`; empty if nothing is."""
    command: Any = typer.main.get_command(app)
    left = list(words)
    while isinstance(command, TyperGroup):
        found = command.get_command(typer.Context(command), left[0]) if left else None
        if found is None:
            return f"there is no command {left[:1]}"
        command, left = found, left[1:]
    try:
        command.make_context("penstock", left, resilient_parsing=False)
    except USAGE_ERROR as error:
        return str(error.format_message())
    return ""


def settings_fault(environment: Mapping[str, str]) -> str:
    """What is wrong with the variables that begin with PENSTOCK_; empty if nothing is."""
    fields = {variable(name): name for name in Settings.model_fields}
    given = {name: value for name, value in environment.items() if name.startswith("PENSTOCK_")}
    if unknown := given.keys() - fields.keys():
        return f"no settings: {', '.join(sorted(unknown))}"
    if odd := [name for name, value in given.items() if not isinstance(value, str)]:
        return f"not quoted: {', '.join(odd)}"
    try:
        Settings.model_validate({fields[name]: value for name, value in given.items()})
    except ValidationError as error:
        return str(error)
    return ""


def environment_file(text: str) -> dict[str, str]:
    """The variables of a file of lines NAME=VALUE."""
    lines = (line.strip() for line in text.splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def role_files() -> set[str]:
    """The files with the seeds of the users, as `penstock nats config` names them."""
    settings = Settings()
    users = role_permissions(Grants(settings.namespace, layout(settings)), settings.pipeline, [])
    return {f"{name}.nk" for name in users}
