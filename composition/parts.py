"""A process of light stages, beside which the bridge may run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from ..api.serve.connecting import Meanwhile
from ..api.serve.processes import END_TIMEOUT
from ..config import metrics
from ..config.process import keep_loaded, spare_threads, stop_signal
from ..config.service_manager import at_service
from ..config.settings import Settings
from ..config.sources import Loaded
from ..schemas.errors import StartupError, Transient
from ..schemas.registry import ModelCard, StageCard
from ..stages import Filter, Pipe, Runner, Stage
from ..stages.catalogue import LIGHT, find_filters
from ..streams.beats import until_beat
from ..streams.family import watch_loop
from ..streams.lanes import open_lanes
from ..streams.outages import outage_logged
from .process import connected_pipe

log = structlog.get_logger(__name__)

Serve = Callable[[Pipe, asyncio.Event], Coroutine[Any, Any, None]]
"""What serves HTTP until the event is set, and then drains."""


async def run_parts(
    loaded: Loaded,
    choose: Callable[[Settings], Sequence[type[Stage]]],
    *,
    bridge: Serve | None = None,
    meanwhile: Meanwhile | None = None,
    filters: Sequence[type[Filter]] = (),
    expected: ModelCard | None = None,
) -> None:
    """Run stages, and the bridge if there is one; on a signal the bridge drains before the stages.

    `meanwhile` goes on while there is no broker. Requests may come for the `expected` model before its first worker
    has.
    """
    spare_threads()
    async with (
        connected_pipe(loaded, "bridge" if bridge else "stage", meanwhile) as pipe,
        contextlib.AsyncExitStack() as ending,
        asyncio.TaskGroup() as group,
    ):
        stopping = stop_signal()  # not before: a process that waits for the broker may be killed
        settings, stages = pipe.settings, choose(pipe.settings)
        if idle := [kind.name for kind in stages if kind.name not in (*LIGHT, *settings.job_stages)]:
            pipeline = ",".join(settings.pipeline)
            raise StartupError(f"the stage {idle[0]} is not in the pipeline {pipeline}; name it there (--pipeline)")
        if expected is not None:
            await open_lanes(pipe.broker, settings, expected.name, expected.revision)
            await pipe.registry.announce_model(expected)
            await pipe.registry.refresh()
        parts = [await _made(kind, pipe, filters, ending) for kind in stages]
        runners = [Runner(part, pipe) for part in parts]
        running = [group.create_task(runner.run()) for runner in runners]
        background = [group.create_task(heartbeats(pipe, parts)), group.create_task(pipe.registry.run())]
        background.append(group.create_task(watch_loop("front" if bridge else "stage")))
        if bridge is None:
            metrics.serve_metrics(settings.host, settings.metrics_port)
        keep_loaded()
        names = [part.name for part in parts]
        log.info("running", stages=names)
        drain = 2 * (settings.stop_delay + settings.drain_timeout) + END_TIMEOUT  # of the bridge, and of the stages
        async with at_service(stopping, drain, f"runs {', '.join(names) or 'the bridge'}"):
            if bridge is None:
                await stopping.wait()
            else:
                await bridge(pipe, stopping)
            for runner in runners:
                runner.stop()
            await asyncio.gather(*running)
        for task in background:
            task.cancel()


async def _made(
    kind: type[Stage], pipe: Pipe, filters: Sequence[type[Filter]], ending: contextlib.AsyncExitStack
) -> Stage:
    """The stage, with what the built-in ones take besides; `ending` closes it. The imports load nothing: `kind` has."""
    match kind.name:
        case "validate":
            from ..stages.validate.stage import Validate

            return Validate(pipe, on_load=keep_loaded)
        case "stream":
            from ..stages.stream import Stream

            return Stream(pipe, filters=find_filters(pipe.settings.filters, filters))
        case "tools":
            from ..api.tools.toolbox import toolbox_of
            from ..stages.tools.stage import Tools

            return Tools(pipe, toolbox=await ending.enter_async_context(toolbox_of(pipe.settings)))
        case _:
            return kind(pipe)


async def heartbeats(pipe: Pipe, stages: Sequence[Stage]) -> None:
    """Announce the stages of this process, each once it is ready."""
    cards = [(stage, StageCard(stage=stage.name, id=stage.copy, pid=os.getpid())) for stage in stages]
    interval = pipe.settings.heartbeat_interval
    try:
        while True:
            await asyncio.gather(*(_heartbeat(pipe, card) for stage, card in cards if stage.ready))
            await asyncio.sleep(until_beat(interval if all(stage.ready for stage in stages) else min(0.1, interval)))
    finally:
        for _, card in cards:
            with contextlib.suppress(Transient):
                await pipe.registry.withdraw(card)


async def _heartbeat(pipe: Pipe, card: StageCard) -> None:
    with outage_logged("heartbeat missed", stage=card.stage):
        await pipe.registry.announce_stage(card)
