"""`penstock nats`: create and change the streams of a deployment, and write the users of a NATS server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import nkeys
import typer

from ....config.settings import Settings
from ....config.sources import Loaded
from ....schemas.errors import StartupError
from ....streams.nats.administration.backup import load, save
from ....streams.nats.administration.deployment import check_stopped, layout
from ....streams.nats.connection.access import Access
from ....streams.nats.connection.link import Link
from ....streams.nats.servers.accounts import TenantAccount, User, configuration
from ....streams.permissions import Grants, Permissions
from ...serve.connecting import broker_url, connected
from ..options import with_settings
from .deployment import apply

CONFIGURATION = "penstock.conf"

nats = typer.Typer(no_args_is_help=True, help="Set up the streams of a deployment, save them, and write NATS users.")


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
def backup(
    loaded: Loaded, directory: Annotated[Path, typer.Argument(help="Where it goes; it must not exist yet.")]
) -> None:
    """Copy all streams and buckets of a deployment whose parts are stopped: requests, responses, files, and so on.

    Whoever can read the directory can read prompts and answers.
    """
    asyncio.run(_backup(loaded.settings, directory))


@nats.command()
@with_settings
def restore(
    loaded: Loaded, directory: Annotated[Path, typer.Argument(help="What `penstock nats backup` wrote.")]
) -> None:
    """Create the streams and buckets of a backup, in servers that have none of the namespace.

    They have as many copies as before; `penstock nats setup --nats-replicas 3 --apply` changes that.
    """
    asyncio.run(_restore(loaded.settings, directory))


@nats.command()
@with_settings
def config(
    loaded: Loaded,
    directory: Annotated[Path, typer.Argument(help="Where the files go; it must not exist yet.")],
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Also a user for this tenant, in a NATS account of its own; may be repeated."),
    ] = None,
) -> None:
    """Write a part of a nats-server configuration: a user for each role, with the permissions that it needs.

    Beside it goes a file with the seed of each user's nkey, for --nats-nkey; the server's file holds no secret.
    """
    settings, tenants = loaded.settings, list(dict.fromkeys(tenant or []))
    try:
        users = role_permissions(Grants(settings.namespace, layout(settings)), settings.pipeline, tenants)
        if (domain := settings.nats_domain) is not None:
            users = {name: permissions.in_domain(domain) for name, permissions in users.items()}
    except ValueError as error:
        raise StartupError(f"--tenant: {error}") from error
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise StartupError(f"{directory} cannot be made: {error.strerror}; name one that does not exist") from error
    made = {name: _user(name, permissions, directory) for name, permissions in users.items()}
    # Not in the account of the parts: JetStream answers a publisher wherever it says, also where it may not publish.
    own = [TenantAccount(name, (made.pop(tenant_user(name)),)) for name in tenants]
    _write(directory / CONFIGURATION, configuration(settings.namespace, [*made.values()], own))
    typer.echo(f"write `include {CONFIGURATION}` into the configuration of each nats-server, beside this file")


async def _backup(settings: Settings, directory: Path) -> None:
    async with connected(settings, "backup") as broker:
        await check_stopped(broker, "a backup is whole")
    async with _linked(settings) as link:
        names = await save(link, settings.namespace, directory)
    typer.echo(f"{len(names)} streams and buckets are in {directory}")


async def _restore(settings: Settings, directory: Path) -> None:
    async with connected(settings, "restore"), _linked(settings) as link:
        names = await load(link, settings.namespace, directory)
    typer.echo(f"{len(names)} streams and buckets are restored")


@contextlib.asynccontextmanager
async def _linked(settings: Settings) -> AsyncIterator[Link]:
    link = await Link.connect(
        broker_url(settings), name="penstock-backup", timeout=settings.nats_timeout, access=Access.of(settings)
    )
    try:
        yield link
    finally:
        await link.close()


def inbox(user: str) -> str:
    """The inbox prefix of a user: answers to one are not for another."""
    return f"_in_{user}"


def tenant_user(tenant: str) -> str:
    return f"tenant-{tenant}"


def role_permissions(grants: Grants, pipeline: tuple[str, ...], tenants: list[str]) -> dict[str, Permissions]:
    """The users of a deployment by name. Raises `ValueError` for a tenant whose name fits no subject."""
    users = {name: getattr(grants, name)(inbox(name)) for name in ("admin", "agent", "bridge", "worker", "tools")}
    stages = [name for name in pipeline[: pipeline.index("infer")]] + ["stream"]
    users |= {f"stage-{name}": grants.stage(name, inbox(f"stage-{name}")) for name in stages}
    return users | {tenant_user(name): grants.tenant(name, inbox(tenant_user(name))) for name in tenants}


def _user(name: str, permissions: Permissions, directory: Path) -> User:
    """Make a user, write the seed of its nkey, and say how a part becomes it."""
    seed = bytes(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER))
    _write(directory / f"{name}.nk", seed.decode() + "\n")
    typer.echo(f"{name}: --nats-nkey {directory / name}.nk --nats-inbox-prefix {inbox(name)}")
    key = nkeys.from_seed(bytearray(seed)).public_key.decode()
    # The stage validate, which may run as the admin, says why no stream takes a job, and replays events.
    return User(name, key, permissions, answers=name in ("stage-validate", "admin"))


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
