"""`penstock config`: the settings of a process, and those that a deployment has agreed on."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Annotated, Literal

import typer

from ....config.deployment import adopt, changes, explicit, shared_settings, shown
from ....config.settings import Settings
from ....config.sources import SECRET, Loaded, flag, variable
from ....schemas.deployment import SHARED, Configuration
from ....schemas.errors import StartupError
from ....schemas.registry import ModelCard
from ....streams.nats.administration.deployment import Deployment
from ....streams.nats.broker import JetStreamBroker
from ....streams.stores.declared import DeclaredChange, declaration, declare
from ...serve.connecting import connected
from ...serve.declaring import named_models
from ..options import with_settings

_CHOSEN = ("max_batch_size", "kv_cache_memory")  # by the engine as it loads, unless they are given
Action = Annotated[
    Literal["show", "agreed", "apply"],
    typer.Argument(help="agreed: show the settings that the deployment has agreed on; apply: change them."),
]
Defaults = Annotated[list[str] | None, typer.Option("--default", help="Reset a setting to its default.")]


@with_settings
def config(
    loaded: Loaded,
    action: Action = "show",
    default: Defaults = None,
    yes: Annotated[bool, typer.Option("--yes", help="apply: make the changes.")] = False,
) -> None:
    """Print every setting with its value and origin, or the settings that a deployment has agreed on.

    `penstock config apply --queue-limit 500` prints what would change in the deployment and its streams; with --yes it
    makes the changes. A shorter lifetime deletes what is older. Limits of streams take effect at once; other settings
    take effect in each process when it restarts.
    """
    if action == "show":
        _show(loaded)
    else:
        asyncio.run(_agreed(loaded) if action == "agreed" else apply(loaded, default or [], yes, way="--yes"))


def _show(loaded: Loaded) -> None:
    rows = [(name, _shown(name, value), loaded.origins[name]) for name, value in loaded.settings.model_dump().items()]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    sys.stdout.writelines(f"{name:<{names}}  {value:<{values}}  {origin}\n" for name, value, origin in rows)
    if sys.stdout.isatty():
        sys.stdout.write(
            f"\nSet one with its flag ({flag('max_batch_size')}), its variable ({variable('max_batch_size')}) "
            "or its key in penstock.toml.\n"
        )


async def _agreed(loaded: Loaded) -> None:
    async with connected(loaded.settings, "config") as broker:
        configuration, revision = await Deployment(broker, loaded).agreed()
    if not revision:
        raise StartupError("nothing is agreed yet; set the deployment up with `penstock nats setup --apply`")
    for name in SHARED:
        typer.echo(f"{name:<18}  {shown(getattr(configuration, name))}")


async def apply(
    loaded: Loaded, defaults: list[str], yes: bool, *, way: str = "--apply", declares: bool = False
) -> None:
    """Print what would change in the deployment and its streams, and with `yes` change it; `way` is the flag for it.

    With `declares` also which models would be declared, if the settings name some.
    """
    cards = named_models(loaded) if declares else None
    async with connected(loaded.settings, "config") as broker:
        deployment = Deployment(broker, loaded)
        agreed = await deployment.agreed()
        before, revision = agreed
        wanted = before.model_copy(update=_defaults(defaults) | explicit(loaded))
        await deployment.check_safe(before, wanted)
        _print_plan(before if revision else None, wanted)
        missing, changed = await deployment.differences(wanted)
        for stream in missing if revision else ():
            typer.echo(f"  {stream}: missing → created")
        for stream, limit, present, value in changed:
            typer.echo(f"  {stream}: {limit} {present} → {value}")
        is_new = await _print_models(broker, cards, not revision)
        if revision and before == wanted and not (missing or changed or is_new):
            typer.echo("nothing to change")
        elif yes:
            if not revision or before != wanted or missing or changed:
                await deployment.change(wanted, agreed)
            if cards is not None:
                await declare(broker, adopt(loaded.settings, wanted), cards)
            typer.echo("changed")
        else:
            typer.echo(f"nothing was changed; add {way} to make the changes")


async def _print_models(broker: JetStreamBroker, cards: list[ModelCard] | None, is_first: bool) -> bool:
    """Print which models would be declared; returns whether that changes anything."""
    if cards is None:
        return False
    names = [card.name for card in cards]
    change = DeclaredChange(tuple(names), (), ()) if is_first else await declaration(broker, cards)
    for verb, models in (
        ("declared", change.added),
        ("declared anew", change.changed),
        ("not declared any more", change.removed),
    ):
        for name in models:
            typer.echo(f"  model {name}: {verb}")
    return any(change)


def _print_plan(before: Configuration | None, wanted: Configuration) -> None:
    if before is None:
        typer.echo("nothing is agreed yet; the deployment would begin with")
        for name in SHARED:
            typer.echo(f"{name}: {shown(getattr(wanted, name))}")
    else:
        for name, (old, new) in changes(before, wanted).items():
            typer.echo(f"{name}: {shown(old)} → {shown(new)}")


def _defaults(names: list[str]) -> dict[str, object]:
    fields = [name.removeprefix("--").replace("-", "_") for name in names]
    if unknown := [name for name in fields if name not in SHARED]:
        raise StartupError(
            f"--default {', '.join(unknown)}: not a setting of the deployment; choose from {', '.join(SHARED)}"
        )
    return shared_settings(Settings()).model_dump(include=set(fields))


def _shown(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(re.sub("=sha256:.*", "=***", part) if name in SECRET else part for part in value)
    if value is None:
        return "auto" if name in _CHOSEN else ""
    # Up to the last @, since a password may contain one: of several servers only the last is shown.
    return re.sub(r"^(\w+://)?.*@", r"\1***@", str(value), flags=re.DOTALL) if name in SECRET else str(value)
