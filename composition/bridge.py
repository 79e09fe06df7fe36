"""`penstock bridge`, and the front process of `penstock serve`, in which the light stages run too."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Annotated

import structlog
import typer

from ..api.grpc import beside_http
from ..api.serve.listening import announce, base_url, listen
from ..api.terminal.options import with_settings
from ..config.logs.setup import configure_logging
from ..config.settings import Settings
from ..config.sources import Loaded
from ..stages import Pipe, Stage
from ..stages.catalogue import LIGHT, built_in, find_stage, installed
from ..stages.loading import early_card
from .checks import check_front
from .parts import Serve, run_parts
from .process import run_process

log = structlog.get_logger(__name__)


@with_settings
def bridge(loaded: Loaded) -> None:
    """Run only the HTTP bridge, with the broker of a deployment."""
    configure_logging(loaded.settings, process="bridge")
    check_front(loaded.settings)
    listener = listen(loaded.settings.host, loaded.settings.port)

    async def run() -> None:
        log.info("listening, the stages may not be running yet", url=base_url(listener))
        announcing = asyncio.create_task(announce(base_url(listener), 0))
        try:
            meanwhile = _without_broker(listener, loaded.settings)
            await run_parts(loaded, lambda _: [], bridge=_over(listener), meanwhile=meanwhile)
        finally:
            announcing.cancel()

    run_process(run())


@with_settings
def front(loaded: Loaded, fd: Annotated[int, typer.Option(help="The listening socket.")] = 0) -> None:
    """Run the bridge and the light stages in one process; `serve` starts it."""
    configure_logging(loaded.settings, process="front")
    listener = socket.socket(fileno=fd)
    meanwhile = _without_broker(listener, loaded.settings)
    expected = early_card(loaded.settings)
    run_process(run_parts(loaded, _light_stages, bridge=_over(listener), meanwhile=meanwhile, expected=expected))


def _light_stages(settings: Settings) -> list[type[Stage]]:
    light = [built_in(name) for name in (*settings.pipeline, "tools") if name in LIGHT]
    if elsewhere := [name for name in settings.filters if not installed(name)]:
        log.warning(
            "answers wait for a process with these filters, started as: penstock stage FILE.py:Class",
            filters=elsewhere,
        )
        light.remove(built_in("stream"))
    own = [find_stage(name) for name in settings.job_stages if installed(name)]
    return light + [kind for kind in own if issubclass(kind, Stage)]


@contextlib.asynccontextmanager
async def _without_broker(listener: socket.socket, settings: Settings) -> AsyncIterator[None]:
    from ..api.http.waiting import answering  # imports FastAPI

    async with answering(listener, settings):
        yield


def _over(listener: socket.socket) -> Serve:
    async def serve(pipe: Pipe, stopping: asyncio.Event) -> None:
        from ..api.http.server import serve_http  # imports FastAPI, for which --help need not wait

        beside = beside_http(pipe.broker, pipe.registry, pipe.settings)
        await serve_http(
            pipe.broker, pipe.subjects, pipe.registry, pipe.settings, listener, stopping, pipe.tracer, beside
        )

    return serve
