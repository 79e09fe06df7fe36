"""The server that a benchmark measures: Penstock's own processes, always ended, or one that runs already."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import structlog

from ..config.settings import Settings
from ..schemas.errors import StartupError
from ..streams.server import EmbeddedServer
from .keeper import LEAST_DELAY, Keeper, Part, child_environment, keep_broker
from .supervisor import ready

START_LIMIT = 180.0  # seconds until all parts run: torch is loaded once for each worker


@contextlib.asynccontextmanager
async def running(
    settings: Settings, parts: Sequence[Part], urls: Sequence[str]
) -> AsyncIterator[tuple[EmbeddedServer, Keeper]]:
    """A broker and `parts` around it, kept alive as `penstock serve` does; ready at all `urls` once entered.

    Their state and what they log go with them. Raises `StartupError` with their last words where they cannot run.
    """
    async with contextlib.AsyncExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        logging.basicConfig(handlers=[logging.NullHandler()])  # that the broker went away is no news here
        structlog.configure(
            processors=[structlog.processors.JSONRenderer(orjson.dumps)],
            logger_factory=structlog.BytesLoggerFactory(output),
        )
        server = await EmbeddedServer.start(state, settings.nats_server, settings.nats_sync_interval)
        stack.push_async_callback(server.stop)
        keeper = Keeper(settings.drain_timeout, most_delay=LEAST_DELAY, output=output)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(group.create_task(keep_broker(server, keeper)).cancel)
        stack.callback(keeper.stopping.set)
        stack.callback(keeper.at_once.set)
        environment = child_environment(settings.model_copy(update={"state_dir": state}), server.url)
        for part in parts:
            group.create_task(keeper.keep(part, environment, keeper.stopping))
        all_ready = asyncio.gather(*(ready(url, settings.workers) for url in urls))
        given_up = asyncio.create_task(keeper.stopping.wait())
        either: set[asyncio.Future[Any]] = {all_ready, given_up}
        await asyncio.wait(either, timeout=START_LIMIT, return_when=asyncio.FIRST_COMPLETED)
        given_up.cancel()
        if not all_ready.done():
            all_ready.cancel()
            fault = keeper.fatal or f"not all processes ran after {START_LIMIT:g} s"
            said = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace").splitlines()
            raise StartupError("\n".join([f"{fault}; the last words:", *said[-5:]]))
        await all_ready
        yield server, keeper


async def served_models(url: str, api_key: str = "") -> list[str]:
    """The names of what the server at `url` serves, at least one. Raises `StartupError` with what to do."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(timeout=10.0, headers=headers) as client:
            answer = await client.get(f"{url}/v1/models")
        if answer.status_code in (401, 403):
            fault = f"{'refuses this key' if api_key else 'wants a key'} (HTTP {answer.status_code})"
            raise StartupError(f"the server at {url} {fault}; set OPENAI_API_KEY to a valid one")
        if models := [str(model["id"]) for model in answer.raise_for_status().json()["data"]]:
            return models
        raise StartupError(f"the server at {url} serves no model; load one there first")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error).partition("\n")[0].replace("All connection attempts failed", "nothing listens there")
    except (ValueError, KeyError, TypeError):
        reason = "what it says at /v1/models is no list of models"
    raise StartupError(f"no OpenAI-compatible server answers at {url}: {reason}; start one there or name another URL")
