"""`penstock dead`: list dead letters, the messages that failed for good, and retry or drop them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from ....config.deployment import adopt
from ....config.settings import Settings
from ....config.sources import Loaded
from ....schemas.errors import Conflict, StartupError
from ....streams.nats.administration.deployment import Deployment
from ....streams.nats.broker import JetStreamBroker
from ....streams.port import Message
from ....streams.stores.dead_letters import DeadLetters, summary
from ....streams.topology import Subjects
from ...serve.connecting import connected
from ..options import with_settings

dead = typer.Typer(
    help="Look after the messages that could not be handled.", no_args_is_help=True, add_completion=False
)

Numbers = Annotated[list[int] | None, typer.Argument(help="Numbers from `penstock dead list`.", metavar="NUMBER…")]
All = Annotated[bool, typer.Option("--all", help="All there are.")]


@dead.command("list")
@with_settings
def list_letters(
    loaded: Loaded, as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead.")] = False
) -> None:
    """List the dead letters, the oldest first: the stage that gave up, why, and which requests are in them."""
    rows = [summary(letter) for letter in asyncio.run(_letters(loaded.settings))]
    if as_json:
        for row in rows:
            typer.echo(orjson.dumps(row))
        return
    table = Table("number", "stage", "deliveries", "reason", "requests", box=None, pad_edge=False)
    for row in rows:
        shown = row | {"number": str(row["number"]), "requests": " ".join(row["requests"]) or "unreadable"}
        table.add_row(*shown.values())
    Console().print(table if rows else "no dead letters")


@dead.command()
@with_settings
def show(loaded: Loaded, number: Annotated[int, typer.Argument(help="Number from `penstock dead list`.")]) -> None:
    """Print one dead letter whole, as JSON: its headers, and its payload with whatever the client had written."""
    ((letter, whole),) = asyncio.run(_whole(loaded.settings, [number]))
    data = whole.data if whole else b""
    try:
        payload: Any = orjson.loads(data)
    except orjson.JSONDecodeError:
        payload = data.decode(errors="replace") if whole else None  # has expired
    shown = {"number": letter.sequence, "headers": dict(letter.headers), "payload": payload}
    typer.echo(orjson.dumps(shown, option=orjson.OPT_INDENT_2))


@dead.command()
@with_settings
def retry(loaded: Loaded, numbers: Numbers = None, everything: All = False) -> None:
    """Send dead letters on their way again, as requests of new names: their clients were told that they failed.

    A request goes back to the stage that gave it up, with a new deadline; its events can be read under the new name.
    """

    asyncio.run(_remove(loaded, _chosen(numbers, everything), retried=True))


@dead.command()
@with_settings
def drop(loaded: Loaded, numbers: Numbers = None, everything: All = False) -> None:
    """Delete dead letters for good."""

    typer.echo(f"dropped {asyncio.run(_remove(loaded, _chosen(numbers, everything), retried=False))}")


async def _remove(loaded: Loaded, numbers: list[int] | None, *, retried: bool) -> int:
    """Delete dead letters, with `retried` after publishing their requests again; returns how many."""
    async with _kept(loaded.settings) as (broker, letters):
        agreed = await Deployment(broker, loaded).agreed()
        settings = adopt(loaded.settings, agreed.configuration)
        chosen = await _choose(letters, numbers)
        for letter in chosen:
            if not retried:
                await letters.drop(letter)
                continue
            try:
                names = await letters.retry(letter, settings)
            except Conflict as error:
                raise StartupError(str(error)) from None
            for name in names:
                typer.echo(f"{letter.sequence}: {name}")
    return len(chosen)


async def _letters(settings: Settings) -> list[Message]:
    async with _kept(settings) as (_, letters):
        return await letters.all()


async def _whole(settings: Settings, numbers: list[int]) -> list[tuple[Message, Message | None]]:
    """Each letter as stored, and with its body; None if the body has expired."""
    async with _kept(settings) as (_, letters):
        return [(letter, await letters.whole(letter)) for letter in await _choose(letters, numbers)]


@contextlib.asynccontextmanager
async def _kept(settings: Settings) -> AsyncIterator[tuple[JetStreamBroker, DeadLetters]]:
    async with connected(settings, "dead") as broker:
        yield broker, await DeadLetters.of(broker, Subjects(settings.namespace))


async def _choose(letters: DeadLetters, numbers: list[int] | None) -> list[Message]:
    """All dead letters, or those with these numbers. Raises `StartupError` for an unknown number."""
    found = {letter.sequence: letter for letter in await letters.all()}
    if numbers is None:
        return list(found.values())
    if missing := [str(number) for number in numbers if number not in found]:
        raise StartupError(f"no dead letter {', '.join(missing)}; `penstock dead list` shows all")
    return [found[number] for number in numbers]


def _chosen(numbers: list[int] | None, everything: bool) -> list[int] | None:
    if bool(numbers) == everything:
        raise StartupError("give the numbers of dead letters, or --all")
    return numbers if numbers else None
