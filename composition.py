"""The composition root: the commands that run Penstock assemble its processes here, from parts that do not import each
other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer

from .api.grpc import beside_http, check_grpc
from .api.serve.adapters import check_adapters
from .api.serve.backends import report_refused
from .api.serve.connecting import connected
from .api.serve.declaring import with_model
from .api.serve.processes import END_TIMEOUT
from .api.serve.supervisor import Supervisor, announce, base_url, listen
from .api.terminal.options import with_settings
from .config import metrics
from .config.api_keys import Keys
from .config.catalogue import offered_models
from .config.logging import configure_logging
from .config.process import end_quietly, host, keep_loaded, stop_signal, uncollected
from .config.service_manager import at_service
from .config.settings import Settings
from .config.sources import Loaded
from .config.tracing import tracing
from .engine import EngineConfig, InferenceEngine, find_backend
from .engine.backend import ProgressCallback
from .engine.cpu.process import lower_priority, prepare_process, worker_threads
from .schemas.errors import StartupError, Transient
from .schemas.jobs import TOKEN_PATTERN
from .schemas.registry import RETURNED, ModelCard, StageCard, WorkerCard, reserve_of
from .stages import Filter, Pipe, Runner, Stage
from .stages.cancellations import Cancellations
from .stages.catalogue import LIGHT, find_filters, find_stage, installed
from .stages.loading import announced, early_card, model_card
from .stages.stream import Stream
from .stages.tools.stage import Tools
from .stages.validate.stage import Validate
from .streams.family import watch_loop
from .streams.lanes import open_lanes
from .streams.nats.administration.deployment import joined
from .streams.outages import outage_logged
from .streams.stores.registry import Registry
from .streams.topology import Subjects

if TYPE_CHECKING:
    from .api.tools.toolbox import Toolbox

log = structlog.get_logger(__name__)


@with_settings
def serve(
    loaded: Loaded,
    model: Annotated[str | None, typer.Argument(help="Directory, GGUF file or Hugging Face id of the model.")] = None,
) -> None:
    """Serve a model: broker, pipeline, engine and HTTP bridge in one command.

    Prints `penstock ready URL` as soon as it can answer a request. Ctrl-C lets running requests finish.
    """
    configure_logging(loaded.settings)
    _check(loaded.settings)
    report_refused(loaded.settings)
    settings, entries = loaded.settings, offered_models(loaded)
    if entries is None:
        settings = with_model(settings)
    check_adapters(settings, entries)
    sealed = {"secret_key": settings.secret_key or secrets.token_hex(32)}
    _run(Supervisor(replace(loaded, settings=settings.model_copy(update=sealed)), entries).run())


@with_settings
def worker(
    loaded: Loaded,
    model: Annotated[str | None, typer.Argument(help="Directory, GGUF file or Hugging Face id of the model.")] = None,
    id: Annotated[str | None, typer.Option(help="A name to keep over restarts; random by default.")] = None,
    revision: Annotated[int | None, typer.Option(hidden=True, help="Of a model of the catalogue.")] = None,
) -> None:
    """Run only the stage infer: an engine that takes batches from the broker."""
    if id is not None and re.fullmatch(TOKEN_PATTERN, id) is None:
        raise StartupError(f"--id {id!r}: use only letters, digits, '_' and '-', at most 64")
    if id == RETURNED:
        raise StartupError(f"--id {id}: this name is taken, choose another")
    configure_logging(loaded.settings, process="worker")
    whole = replace(loaded, settings=with_model(loaded.settings))
    _run(_worker(whole, id or f"w-{uuid.uuid4().hex[:8]}", revision))
    end_quietly()


@with_settings
def stage(
    loaded: Loaded,
    names: Annotated[
        list[str], typer.Argument(help="validate, queue, batch, stream, tools, or your own: file.py:Class.")
    ],
) -> None:
    """Run only the named stages, in one process, with the broker of a deployment.

    Filters run inside the stage stream, which is added for them: name all filters of the pipeline together.
    """
    found = [find_stage(name) for name in names]
    if twice := [kind.name for place, kind in enumerate(found) if kind.name in {one.name for one in found[:place]}]:
        raise StartupError(f"the stage {twice[0]} is named twice; start a process for each copy")
    filters = [kind for kind in found if issubclass(kind, Filter)]
    stages = [kind for kind in found if issubclass(kind, Stage)]
    if filters and Stream not in stages:
        stages.append(Stream)
    configure_logging(loaded.settings, process="stage")
    _run(_parts(loaded, lambda _: stages, None, filters))


@with_settings
def bridge(loaded: Loaded) -> None:
    """Run only the HTTP bridge, with the broker of a deployment."""
    configure_logging(loaded.settings, process="bridge")
    _check(loaded.settings)
    listener = listen(loaded.settings.host, loaded.settings.port)

    async def run() -> None:
        log.info("listening, the stages may not be running yet", url=base_url(listener))
        announcing = asyncio.create_task(announce(base_url(listener), 0))
        try:
            await _parts(loaded, lambda _: [], listener)
        finally:
            announcing.cancel()

    _run(run())


@with_settings
def front(loaded: Loaded, fd: Annotated[int, typer.Option(help="The listening socket.")] = 0) -> None:
    """Run the bridge and the light stages in one process; `serve` starts it."""
    configure_logging(loaded.settings, process="front")

    def stages(settings: Settings) -> list[type[Stage]]:
        light = [LIGHT[name] for name in (*settings.pipeline, "tools") if name in LIGHT]
        if elsewhere := [name for name in settings.filters if not installed(name)]:
            log.warning(
                "answers wait for a process with these filters, started as: penstock stage FILE.py:Class",
                filters=elsewhere,
            )
            light.remove(Stream)
        own = [find_stage(name) for name in settings.job_stages if installed(name)]
        return light + [kind for kind in own if issubclass(kind, Stage)]

    _run(_parts(loaded, stages, socket.socket(fileno=fd), expected=early_card(loaded.settings)))


async def _parts(
    loaded: Loaded,
    choose: Callable[[Settings], Sequence[type[Stage]]],
    listener: socket.socket | None,
    filters: Sequence[type[Filter]] = (),
    expected: ModelCard | None = None,
) -> None:
    """Run stages, and the bridge if there is a socket for it; on a signal the bridge drains before the stages.

    Requests may come for the `expected` model before its first worker has.
    """
    if listener is not None:
        with uncollected():
            from .api.http.server import serve_http  # imports FastAPI, which other processes do not need
    async with (
        _pipe(loaded, "bridge" if listener else "stage") as pipe,
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
        toolbox = await ending.enter_async_context(_toolbox(settings)) if Tools in stages else None
        made: dict[type[Stage], Callable[[Pipe], Stage]] = {
            Validate: partial(Validate, on_load=keep_loaded),
            Stream: partial(Stream, filters=find_filters(settings.filters, filters) if Stream in stages else ()),
        }
        if toolbox:
            made[Tools] = partial(Tools, toolbox=toolbox)
        parts = [made.get(kind, kind)(pipe) for kind in stages]
        runners = [Runner(part, pipe) for part in parts]
        running = [group.create_task(runner.run()) for runner in runners]
        background = [group.create_task(_heartbeats(pipe, parts)), group.create_task(pipe.registry.run())]
        background.append(group.create_task(watch_loop("front" if listener else "stage")))
        if listener is None:
            metrics.serve_metrics(settings.host, settings.metrics_port)
        keep_loaded()
        names = [part.name for part in parts]
        log.info("running", stages=names)
        drain = 2 * (settings.stop_delay + settings.drain_timeout) + END_TIMEOUT  # of the bridge, and of the stages
        async with at_service(stopping, drain, f"runs {', '.join(names) or 'the bridge'}"):
            if listener is None:
                await stopping.wait()
            else:
                beside = beside_http(pipe.broker, pipe.registry, settings)
                await serve_http(
                    pipe.broker, pipe.subjects, pipe.registry, settings, listener, stopping, pipe.tracer, beside
                )
            for runner in runners:
                runner.stop()
            await asyncio.gather(*running)
        for task in background:
            task.cancel()


async def _worker(loaded: Loaded, name: str, revision: int | None = None) -> None:
    from .engine.cpu.machine import human
    from .engine.planning.sizing import size
    from .stages.infer.stage import Infer

    settings, directory = loaded.settings, None if loaded.settings.model is None else Path(loaded.settings.model)
    shared = EngineConfig.model_fields.keys() & Settings.model_fields.keys()
    given = {name: getattr(settings, name) for name in shared} | {"model": settings.model or "echo"}
    lower_priority()
    if settings.backend != "echo":  # which computes nothing, and so does not import torch
        prepare_process(settings.threads or worker_threads(directory, settings.workers))
    sizes, basis = size(EngineConfig(**given), settings.workers)
    capacity, reserve = sizes.max_batch_size, reserve_of(sizes.max_batch_size)
    own = {"max_batch_size": capacity + reserve, "reserved_batch_size": reserve}
    if find_backend(settings.backend, settings.allowed_backends).cache:
        own["kv_cache_memory"] = sizes.kv_cache_memory
    config = EngineConfig(**given | own)
    cache, why = config.kv_cache_memory and human(config.kv_cache_memory), basis and basis.text
    log.info(
        "loading", model=config.model, backend=config.backend, max_batch_size=capacity, kv_cache_memory=cache, basis=why
    )
    async with contextlib.AsyncExitStack() as loading:
        report: ProgressCallback | None = None
        if early := early_card(settings, revision):
            connect = partial(_pipe, loaded, f"loading-{name}")
            report = await loading.enter_async_context(announced(connect, early, name))
        engine = await asyncio.to_thread(partial(InferenceEngine, config, progress=report))
    try:
        card = WorkerCard(
            id=name,
            model=model_card(settings, engine.model_info(), revision),
            capacity=capacity,
            pid=os.getpid(),
            incarnation=uuid.uuid4().hex,
            host=host(),
            slow_paths=engine.model_info().slow_paths,
        )
        async with _pipe(loaded, f"worker-{name}") as pipe, asyncio.TaskGroup() as group:
            stopping = stop_signal()  # not before: a process that loads or waits for the broker may be killed
            runner = Runner(Infer(pipe, engine, card), pipe)
            running = group.create_task(runner.run())
            slow = {"slow_paths": card.slow_paths} if card.slow_paths else {}
            keep_loaded()
            log.info("worker ready", worker=name, model=card.model.name, backend=settings.backend, **slow)
            retiring = group.create_task(_retire(pipe.settings, engine, stopping))
            async with at_service(stopping, pipe.settings.drain_timeout + END_TIMEOUT, f"serves {card.model.name}"):
                await stopping.wait()
                retiring.cancel()
                runner.stop()
                await running
    finally:
        await asyncio.to_thread(engine.close, 5.0)  # an engine that hangs ends with the process


async def _retire(settings: Settings, engine: InferenceEngine, stopping: asyncio.Event) -> None:
    """Drain the worker after its maximum of requests or hours; its supervisor starts another."""
    born = time.monotonic()
    requests, hours = settings.restart_after_requests or inf, settings.restart_after_hours or inf
    while engine.stats().num_requests < requests and time.monotonic() - born < hours * 3600:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.heartbeat_interval):
                await stopping.wait()
            return
    log.info("worker retires", requests=engine.stats().num_requests)
    stopping.set()


@contextlib.asynccontextmanager
async def _pipe(loaded: Loaded, name: str) -> AsyncIterator[Pipe]:
    """A connected broker with its topology in place and all that stages share, with the agreed settings.

    Raises `ConfigurationError` if a given setting differs from the agreed one.
    """
    async with tracing(loaded.settings, name) as tracer, connected(loaded.settings, name, patient=True) as broker:
        settings = await joined(broker, loaded)
        subjects = Subjects(settings.namespace)
        cancellations = Cancellations()
        await cancellations.listen(broker, subjects)
        registry = Registry(broker, interval=settings.heartbeat_interval, lifetime=settings.worker_ttl)
        await registry.refresh()  # a copy that starts under load must know the models before its first job
        yield Pipe(broker, subjects, settings, registry, cancellations, broker.now, tracer)


async def _heartbeats(pipe: Pipe, stages: Sequence[Stage]) -> None:
    """Announce the stages of this process, each once it is ready."""
    cards = [(stage, StageCard(stage=stage.name, id=stage.copy, pid=os.getpid())) for stage in stages]
    interval = pipe.settings.heartbeat_interval
    try:
        while True:
            for stage, card in cards:
                with outage_logged("heartbeat missed", stage=card.stage):
                    if stage.ready:
                        await pipe.registry.announce_stage(card)
            await asyncio.sleep(interval if all(stage.ready for stage in stages) else min(0.1, interval))
    finally:
        for _, card in cards:
            with contextlib.suppress(Transient):
                await pipe.registry.withdraw(card)


def _toolbox(settings: Settings) -> Toolbox:
    from .api.tools.toolbox import toolbox_of  # imports the MCP client, which few processes need

    return toolbox_of(settings)


def _check(settings: Settings) -> None:
    """Raise `ConfigurationError` for faults of keys and tools, before anything starts, and as `check_grpc` does."""
    check_grpc(settings)
    Keys(settings.api_keys or (), settings.api_keys_file)
    if settings.mcp_config or settings.mcp_allowed_urls or settings.tool_functions:
        _toolbox(settings)


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:  # not available on every system
        asyncio.run(main)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)
