"""The commands that look at Penstock or use it; `__main__` adds those that run it."""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import Annotated, Literal

import orjson
import typer
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..config.sources import Loaded
from ..schemas.asyncapi import asyncapi, json_schemas
from ..schemas.errors import StartupError
from ..schemas.events import Cancelled, Done, Expired, Failed, Token
from ..schemas.jobs import Job, Priority
from ..streams.nats.broker import JetStreamBroker
from ..streams.stores.registry import Registry
from ..streams.topology import Subjects
from .bench.chaos import bench_chaos
from .bench.engine import bench_engine
from .bench.pipeline import pipeline
from .bench.serve import bench_serve
from .bridge.bridge import Bridge
from .http.keys import make_key
from .serve.supervisor import connected
from .terminal.chat import chat
from .terminal.chat_client import models as served_by
from .terminal.chat_client import server_at
from .terminal.dead import dead
from .terminal.deployment import config
from .terminal.options import ApiKey, ServerUrl, with_settings

app = typer.Typer(
    name="penstock",
    help="Penstock: an LLM server that loses no request. `penstock serve MODEL` is the whole of it on one machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=True,
)
bench = typer.Typer(help="Measure a server, or a part of Penstock.", no_args_is_help=True)
bench.command()(pipeline)
bench.command("serve")(bench_serve)
bench.command("engine")(bench_engine)
bench.command("chaos")(bench_chaos)
app.add_typer(bench, name="bench", rich_help_panel="Measure")
app.add_typer(dead, name="dead", rich_help_panel="Look")
app.command(rich_help_panel="Use")(chat)
app.command("key", rich_help_panel="Look")(make_key)
app.command("config", rich_help_panel="Look")(config)


def _version(asked: bool) -> None:
    if asked:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command(rich_help_panel="Look")
@with_settings
def schema(
    loaded: Loaded,
    kind: Annotated[
        Literal["asyncapi", "json"], typer.Argument(help="asyncapi: the subjects too; json: the messages alone.")
    ] = "asyncapi",
) -> None:
    """Print what travels on NATS: an AsyncAPI document, or the messages' JSON Schemas alone."""
    document = asyncapi(loaded.settings.namespace, __version__)
    if kind == "json":
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "components": {"schemas": json_schemas()},
        }
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")


@app.command(rich_help_panel="Look")
@with_settings
def models(loaded: Loaded, url: ServerUrl = None, api_key: ApiKey = None) -> None:
    """List the models of a server, of Penstock or of any with OpenAI's API."""
    table = Table("model", "context", box=None, pad_edge=False)
    with server_at(url, api_key, loaded.settings) as server:
        for name, model in served_by(server).items():
            table.add_row(name, f"{model.get('max_model_len', '')}")
    Console().print(table)


@app.command(rich_help_panel="Look")
@with_settings
def scheduling(
    loaded: Loaded,
    strategy: Annotated[
        Literal["round_robin", "least_loaded", "memory_aware"] | None,
        typer.Argument(help="The one to use from now on."),
    ] = None,
) -> None:
    """Show which worker gets the next batch, or change it while everything runs."""

    async def run() -> str:
        async with connected(loaded.settings, "scheduling") as broker:
            bucket = await broker.bucket("state")
            if strategy is not None:
                await bucket.put("scheduling", strategy.encode())
            entry = await bucket.get("scheduling")
            return entry.value.decode() if entry else f"{loaded.settings.scheduling} (by its setting)"

    typer.echo(asyncio.run(run()))


@app.command(rich_help_panel="Use")
@with_settings
def submit(
    loaded: Loaded,
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from standard input.")],
    ask: Annotated[str | None, typer.Option("--ask", help="Name of the model; the only one served by default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    priority: Annotated[Priority, typer.Option(help="Lane of the job.")] = "normal",
    tenant: Annotated[str, typer.Option(help="Tenant of the job.")] = "default",
    events: Annotated[bool, typer.Option("--events", help="Print the events as JSON lines instead.")] = False,
) -> None:
    """Publish a chat job on NATS and print its answer as it comes.

    Finds the broker of a `penstock serve` on this machine by itself; --nats-url names another.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": temperature}
    given: dict[str, object] = {name: value for name, value in body.items() if value is not None}
    failure = asyncio.run(_submit(loaded, given, ask, priority, tenant, as_events=events))
    if failure is not None:
        Console(stderr=True).print("error:", failure, highlight=False, markup=False)
        raise typer.Exit(1)


async def _submit(
    loaded: Loaded, body: dict[str, object], model: str | None, priority: Priority, tenant: str, *, as_events: bool
) -> str | None:
    """Run one job to its end; returns what went wrong."""
    async with connected(loaded.settings, "submit") as broker:
        bridge = Bridge(broker, Subjects(loaded.settings.namespace))
        await bridge.start()
        body["model"] = model or await _only_model(broker)
        job = Job(id=f"sub-{uuid.uuid4().hex}", bridge=bridge.name, body=body)
        reading = await bridge.open(job, priority=priority, tenant=tenant)
        try:
            while not reading.ended:
                for event in await reading.take(60.0):
                    if as_events:
                        print(orjson.dumps(event).decode(), flush=True)
                    match event:
                        case Failed(error=error) | Expired(error=error):
                            return error.message
                        case Cancelled():
                            return "the request was cancelled"
                        case Token() | Done() if not as_events:
                            print(event.text if isinstance(event, Token) else "\n", end="", flush=True)
        finally:
            if not reading.ended:
                await reading.cancel()
            reading.close()
    return None


async def _only_model(broker: JetStreamBroker) -> str:
    registry = Registry(broker, interval=1.0)
    await registry.refresh()
    if len(registry.models) != 1:
        raise StartupError(f"name one with --ask; served: {', '.join(registry.models) or 'none'}")
    return next(iter(registry.models))
