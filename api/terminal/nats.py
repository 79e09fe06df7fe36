"""`penstock nats`: create and change the streams of a deployment, and write the users of a NATS server."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from pathlib import Path
from typing import Annotated

import nkeys
import typer

from ...config.sources import Loaded
from ...schemas.errors import StartupError
from ...streams.nats.deployment import layout
from ...streams.permissions import Grants, Permissions
from .deployment import apply
from .options import with_settings

CONFIGURATION = "penstock.conf"

nats = typer.Typer(no_args_is_help=True, help="Create and change streams, and write the users of a NATS server.")


@nats.command()
@with_settings
def setup(
    loaded: Loaded,
    model: Annotated[str | None, typer.Argument(help="Also declare this model, as `penstock worker` names it.")] = None,
    apply_: Annotated[bool, typer.Option("--apply", help="Make the changes.")] = False,
) -> None:
    """Print what would be created and changed in the streams of the deployment; with --apply, do it.

    No other command does that on a NATS server of your own. A declared model, MODEL or those of --models and
    --model-dir, is known though no worker runs: its requests wait until one has started. Where models are named, they
    are all that are declared from then on.
    """
    asyncio.run(apply(loaded, [], apply_, declares=True))


@nats.command()
@with_settings
def config(
    loaded: Loaded,
    directory: Annotated[Path, typer.Argument(help="Where the files go; it must not exist yet.")],
    tenant: Annotated[list[str] | None, typer.Option(help="Also a user for this tenant; may be repeated.")] = None,
) -> None:
    """Write a part of a nats-server configuration: a user for each role, with the permissions that it needs.

    Beside it goes a file with the seed of each user's nkey, for --nats-nkey; the server's file holds no secret.
    """
    settings = loaded.settings
    try:
        users = role_permissions(Grants(settings.namespace, layout(settings)), settings.pipeline, tenant or [])
        if (domain := settings.nats_domain) is not None:
            users = {name: permissions.in_domain(domain) for name, permissions in users.items()}
    except ValueError as error:
        raise StartupError(f"--tenant: {error}") from error
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise StartupError(f"{directory} cannot be made: {error.strerror}; name one that does not exist") from error
    blocks = []
    for name, permissions in users.items():
        seed = bytes(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER))
        _write(directory / f"{name}.nk", seed.decode() + "\n")
        key = nkeys.from_seed(bytearray(seed)).public_key.decode()
        blocks.append(f"    # {name}\n    {{ nkey: {key}, permissions: {_permissions(name, permissions)} }}")
        typer.echo(f"{name}: --nats-nkey {directory / name}.nk --nats-inbox-prefix {inbox(name)}")
    lines = ["accounts {", "  PENSTOCK {", "   jetstream: enabled", "   users: [", *blocks, "   ]", "  }", "}"]
    _write(directory / CONFIGURATION, "\n".join(lines) + "\n")
    typer.echo(f"write `include {CONFIGURATION}` into the configuration of each nats-server, beside this file")


def inbox(user: str) -> str:
    """The inbox prefix of a user: answers to one are not for another."""
    return f"_in_{user}"


def role_permissions(grants: Grants, pipeline: tuple[str, ...], tenants: list[str]) -> dict[str, Permissions]:
    """The users of a deployment by name. Raises `ValueError` for a tenant whose name fits no subject."""
    users = {name: getattr(grants, name)(inbox(name)) for name in ("admin", "agent", "bridge", "worker", "tools")}
    stages = [name for name in pipeline[: pipeline.index("infer")]] + ["stream"]
    users |= {f"stage-{name}": grants.stage(name, inbox(f"stage-{name}")) for name in stages}
    return users | {f"tenant-{name}": grants.tenant(name, inbox(f"tenant-{name}")) for name in tenants}


def _permissions(name: str, permissions: Permissions) -> str:
    # The stage validate answers publishers whose job no stream accepts.
    more = ", allow_responses: true" if name == "stage-validate" else ""
    return f"{{ publish: {json.dumps(permissions.publish)}, subscribe: {json.dumps(permissions.subscribe)}{more} }}"


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
