"""The commands `penstock scheduling` and `schema`."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Literal

import orjson
import typer

from ....config.sources import Loaded
from ....schemas.version import __version__
from ....schemas.wire.asyncapi import asyncapi, json_schemas
from ....schemas.wire.protobuf import proto
from ...serve.connecting import connected
from ..options import with_settings


@with_settings
def schema(
    loaded: Loaded,
    kind: Annotated[
        Literal["asyncapi", "json", "proto"],
        typer.Argument(help="asyncapi: subjects and messages; json: only the messages; proto: the gRPC service."),
    ] = "asyncapi",
) -> None:
    """Print the NATS messages and subjects as an AsyncAPI document, or only the messages as JSON Schemas.

    `proto` prints the file that gRPC's clients are made from.
    """
    if kind == "proto":
        sys.stdout.write(proto())
        return
    document = asyncapi(loaded.settings.namespace, __version__)
    if kind == "json":
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "components": {"schemas": json_schemas()},
        }
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")


@with_settings
def scheduling(
    loaded: Loaded,
    strategy: Annotated[
        Literal["round_robin", "least_loaded", "memory_aware", "prefix_aware"] | None,
        typer.Argument(help="The strategy to use from now on."),
    ] = None,
) -> None:
    """Show the strategy that chooses a worker for each batch, or change it in the running deployment."""

    async def run() -> str:
        async with connected(loaded.settings, "scheduling") as broker:
            bucket = await broker.bucket("state")
            if strategy is not None:
                await bucket.put("scheduling", strategy.encode())
            entry = await bucket.get("scheduling")
            return entry.value.decode() if entry else f"{loaded.settings.scheduling} (the setting)"

    typer.echo(asyncio.run(run()))
