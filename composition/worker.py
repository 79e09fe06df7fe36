"""`penstock worker`: the stage infer, with an engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated

import structlog
import typer

from ..api.serve.declaring import with_model
from ..api.serve.processes import END_TIMEOUT
from ..api.terminal.options import with_settings
from ..config.logs.setup import configure_logging
from ..config.process import end_quietly, host, keep_loaded, stop_signal
from ..config.service_manager import at_service
from ..config.settings import Settings
from ..config.sources import Loaded
from ..engine import EngineConfig, InferenceEngine, find_backend
from ..engine.backend import ProgressCallback
from ..engine.cpu.machine import human
from ..engine.cpu.process import lower_priority, prepare_process, worker_threads
from ..engine.planning.sizing import size
from ..schemas.errors import PenstockError, StartupError
from ..schemas.jobs import TOKEN_PATTERN
from ..schemas.registry import RETURNED, WorkerCard, reserve_of
from ..stages import Runner
from ..stages.infer.stage import Infer
from ..stages.loading import announced, early_card, model_card
from .process import connected_pipe, run_process

log = structlog.get_logger(__name__)


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
    run_process(_worker(whole, id or f"w-{uuid.uuid4().hex[:8]}", revision))
    end_quietly()


async def _engine(loaded: Loaded, name: str, revision: int | None) -> tuple[InferenceEngine, int]:
    """The engine with its model loaded, which is announced meanwhile, and how many sequences it runs at the same time,
    without those in reserve."""
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
            connect = partial(connected_pipe, loaded, f"loading-{name}")
            report = await loading.enter_async_context(announced(connect, early, name))
        engine = await asyncio.to_thread(partial(InferenceEngine, config, progress=report))
    return engine, capacity


async def _worker(loaded: Loaded, name: str, revision: int | None = None) -> None:
    settings = loaded.settings
    async with _last_word(loaded, name, revision):
        engine, capacity = await _engine(loaded, name, revision)
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
        async with connected_pipe(loaded, f"worker-{name}") as pipe, asyncio.TaskGroup() as group:
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


@contextlib.asynccontextmanager
async def _last_word(loaded: Loaded, name: str, revision: int | None) -> AsyncIterator[None]:
    """Where an agent has started this worker, tell it why no model could be loaded."""
    try:
        yield
    except Exception as error:
        if revision is not None:
            reason = str(error) if isinstance(error, PenstockError) else type(error).__name__
            async with connected_pipe(loaded, f"loading-{name}") as pipe:
                await pipe.registry.leave_word(name, reason)
        raise


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
