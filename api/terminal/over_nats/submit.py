"""`penstock submit`: publish one job on NATS and print its answer."""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import Annotated

import orjson
import typer
from rich.console import Console

from ....config.sources import Loaded
from ....schemas.errors import StartupError
from ....schemas.events import Cancelled, Done, Expired, Failed, Token
from ....schemas.jobs import Job, Priority
from ....streams.nats.broker import JetStreamBroker
from ....streams.stores.registry import Registry
from ....streams.topology import Subjects
from ...bridge.bridge import Bridge
from ...serve.connecting import connected
from ..options import as_text, with_settings


@with_settings
def submit(
    loaded: Loaded,
    prompt: Annotated[str, typer.Argument(help="The message to the model; - reads it from standard input.")],
    ask: Annotated[str | None, typer.Option("--ask", help="Name of the model; by default the only one served.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    priority: Annotated[Priority, typer.Option(help="Lane of the job.")] = "normal",
    tenant: Annotated[str, typer.Option(help="Tenant of the job.")] = "default",
    events: Annotated[bool, typer.Option("--events", help="Print the events as JSON lines instead.")] = False,
) -> None:
    """Publish a chat job on NATS and print its answer as it arrives.

    Uses the broker of a `penstock serve` on this machine; --nats-url names another.
    """
    text = sys.stdin.read() if prompt == "-" else as_text(prompt)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": temperature}
    given: dict[str, object] = {name: value for name, value in body.items() if value is not None}
    failure = asyncio.run(_submit(loaded, given, ask, priority, tenant, as_events=events))
    if failure is not None:
        Console(stderr=True).print("error:", failure, highlight=False, markup=False)
        raise typer.Exit(1)


async def _submit(
    loaded: Loaded, body: dict[str, object], model: str | None, priority: Priority, tenant: str, *, as_events: bool
) -> str | None:
    """Run one job to its end; return its error, if any."""
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
