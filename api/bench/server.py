"""The server that a benchmark measures: Penstock's own processes, always ended, or one that runs already."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import httpx2
import structlog

from ...config.settings import Settings
from ...schemas.errors import StartupError
from ...schemas.urls import goes_through_proxies
from ..serve.connecting import connected
from ..serve.processes import LEAST_DELAY, Part, ProcessKeeper, child_environment
from ..serve.watching import ready
from .brokers import Brokers, set_up

START_LIMIT = 180.0  # seconds until all parts run: torch is loaded once for each worker


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A temporary directory, and silent logs: parts that start and end are not reported."""
    logging.basicConfig(handlers=[logging.NullHandler()])
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as state:
        yield Path(state)


@contextlib.asynccontextmanager
async def running(settings: Settings, parts: Sequence[Part], urls: Sequence[str]) -> AsyncIterator[None]:
    """A broker and `parts` around it, kept alive as `penstock serve` does; ready at all `urls` once entered.

    With `nats_replicas` above 1 the broker is a cluster of so many nats-servers.
    Their state and logs are deleted with them. Raises `StartupError` with their last lines where they cannot run.
    """
    async with contextlib.AsyncExitStack() as stack:
        state = stack.enter_context(workplace())
        brokers = Brokers()
        await stack.enter_async_context(brokers.started(settings, state, settings.nats_replicas))
        direct = settings.model_copy(update={"nats_url": brokers.urls})
        async with connected(direct, "bench") as broker:
            await set_up(broker, direct)
        environment = child_environment(settings.model_copy(update={"state_dir": state}), brokers.urls)
        async with kept(settings, state, {part: environment for part in parts}, urls):
            yield


@contextlib.asynccontextmanager
async def kept(
    settings: Settings, state: Path, parts: Mapping[Part, dict[str, str]], urls: Sequence[str]
) -> AsyncIterator[ProcessKeeper]:
    """Keep `parts` alive, each with its environment; ready at all `urls` once entered. Raises as `running` does."""
    async with contextlib.AsyncExitStack() as stack:
        output = stack.enter_context((state / "output").open("a+b"))
        keeper = ProcessKeeper(settings.drain_timeout, most_delay=LEAST_DELAY, output=output)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        for end in (keeper.may_start, keeper.stopping, keeper.at_once):
            stack.callback(end.set)
        for part, environment in parts.items():
            group.create_task(keeper.keep(part, environment, keeper.stopping))
        starting = group.create_task(_all_ready(urls, settings.workers))
        given_up = group.create_task(keeper.stopping.wait())
        await asyncio.wait((starting, given_up), timeout=START_LIMIT, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            fault = keeper.fatal or f"not all processes ran after {START_LIMIT:g} s"
            output.seek(0)
            said = output.read().decode(errors="replace").splitlines()
            raise StartupError("\n".join([f"{fault}; the last words:", *said[-5:]]))
        yield keeper


async def _all_ready(urls: Sequence[str], workers: int) -> None:
    await asyncio.gather(*(ready(url, workers) for url in urls))


async def served_models(url: str, api_key: str = "") -> list[str]:
    """The names of what the server at `url` serves, at least one. Raises `StartupError` with what to do."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    proxies = goes_through_proxies(url)
    try:
        async with httpx2.AsyncClient(timeout=10.0, headers=headers, trust_env=proxies) as client:
            answer = await client.get(f"{url}/v1/models")
        if answer.status_code in (401, 403):
            fault = f"{'refuses this key' if api_key else 'wants a key'} (HTTP {answer.status_code})"
            raise StartupError(f"the server at {url} {fault}; set OPENAI_API_KEY to a valid one")
        if models := [str(model["id"]) for model in answer.raise_for_status().json()["data"]]:
            return models
        raise StartupError(f"the server at {url} serves no model; load one there first")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = str(error).partition("\n")[0].replace("All connection attempts failed", "nothing listens there")
    except (ValueError, KeyError, TypeError):
        reason = "its answer at /v1/models is not a list of models"
    raise StartupError(f"no OpenAI-compatible server answers at {url}: {reason}; start one there or name another URL")
