"""`penstock bench chaos`: kills Penstock's processes under load, and looks for an answer that shows it.

Every part is a process of its own, kept alive as `penstock serve` does. All requests run undisturbed first; then again,
while processes die by SIGKILL, and each answer must be the same, token for token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Annotated, Any

import httpx
import typer
from rich.progress import Progress
from typer import Option

from ..config.settings import Settings
from ..config.sources import Loaded
from ..schemas.errors import StartupError, Transient
from ..streams.registry import Registry
from ..streams.server import EmbeddedServer
from . import bench_report
from .bench_answers import KINDS, Answer, Request, ask, compare, mixed_requests
from .bench_load import Client, clock, closed_loop
from .bench_report import milliseconds
from .bench_server import START_LIMIT, running
from .keeper import Keeper, Part
from .options import with_settings
from .supervisor import base_url, connected, listen

STAGES = ("validate", "queue", "batch", "stream")
VICTIMS = ("worker", *STAGES, "bridge", "broker")
BRIDGES = 2
POLL = 0.2  # seconds between two looks at who is back
ECHO_RATE = 25.0  # tokens a second, as of a model, so that there are streams to be cut


@with_settings
def bench_chaos(
    loaded: Loaded,
    model: Annotated[
        str | None, typer.Argument(help="Directory or Hugging Face id; the echo backend by default.")
    ] = None,
    requests: Annotated[int, Option(min=1, help="Of mixed priority, length and sampling; asked twice.")] = 300,
    concurrency: Annotated[int, Option(min=1, max=1024, help="Requests at once.")] = 16,
    longest: Annotated[int, Option(min=8, help="Tokens of the longest answer.")] = 120,
    victims: Annotated[str, Option(help=f"What is killed, of {','.join(VICTIMS)}.")] = ",".join(VICTIMS[:-1]),
    interval: Annotated[float, Option(min=0.1, help="Seconds from kill to kill: half to one and a half of it.")] = 4.0,
    broker_restarts: Annotated[int, Option(min=0, help="Times that the broker is killed, spread over the run.")] = 0,
    seed: Annotated[int, Option(help="For the same requests and the same choice of victims.")] = 0,
    json: Annotated[Path | None, Option(help="File for all figures and settings; - is standard output.")] = None,
) -> None:
    """Kill processes at random under load, and compare every answer with the undisturbed one.

    Starts its own broker, two bridges, stages and workers on loopback; two workers in float32 by default.
    Every fault is printed with the first difference, and ends it with exit code 1.
    """
    asked = {name: value for name, value in locals().items() if name not in ("loaded", "json")}
    bench_report.check_writable(json, "--json")
    chosen = tuple(dict.fromkeys(word.strip() for word in victims.split(",") if word.strip()))
    if unknown := [word for word in chosen if word not in VICTIMS]:
        raise StartupError(f"--victims {','.join(unknown)}: no such part; known: {', '.join(VICTIMS)}")
    defaults: dict[str, Any] = {"workers": 2, "dtype": "float32", "log_level": "warning", "log_format": "json"}
    if loaded.settings.backend == "echo" or loaded.settings.model is None:
        defaults |= {"backend": "echo", "echo_rate": ECHO_RATE}
    given = {name: value for name, value in defaults.items() if loaded.origins[name] == "default"}
    settings = loaded.settings.model_copy(update=given)
    with bench_report.bars() as bars:
        found = asyncio.run(Chaos(settings, SimpleNamespace(**asked | {"victims": chosen}), bars).run())
    options = asked | {"settings": settings.model_dump(mode="json", exclude={"nats_url"})}
    bench_report.publish(json, "chaos", options, found, *_shown(found))
    if found["faults"]:
        raise typer.Exit(1)


@dataclass(slots=True)
class Kill:
    """A process that was killed, so many seconds after the beginning, and how long it took until another served."""

    at: float
    part: str
    pid: int
    away: float | None = None  # set by `Chaos._recovery`


class Chaos:
    """The load and the killing; `asked` holds the command's options."""

    def __init__(self, settings: Settings, asked: Any, bars: Progress) -> None:
        self._settings, self._asked, self._bars = settings, asked, bars
        self._loads: dict[str, dict[str, Any]] = {}  # what was measured of each; set by `_load`
        self._kills: list[Kill] = []
        with contextlib.ExitStack() as ports:  # all at once, so that they differ
            urls = [base_url(ports.enter_context(listen("127.0.0.1", 0))) for _ in range(BRIDGES)]
        self._urls = {f"bridge {place}": url for place, url in enumerate(urls)}
        self._began = 0.0  # when the killing did; set by `run`
        self._server: EmbeddedServer  # set by `run`
        self._keeper: Keeper  # set by `run`
        self._registry: Registry  # set by `run`
        self._recovering: asyncio.TaskGroup  # set by `run`

    async def run(self) -> dict[str, Any]:
        asked, settings, urls = self._asked, self._settings, self._urls
        bridge = ("bridge", "--host", "127.0.0.1", "--port")
        parts = [Part(name, (*bridge, url.rpartition(":")[2])) for name, url in urls.items()]
        parts += [Part(f"{stage} 0", ("stage", stage)) for stage in STAGES]
        parts += [Part(f"worker {place}", ("worker", "--id", f"w{place}")) for place in range(settings.workers)]
        starting = self._bars.add_task("starting", total=None, news="")
        async with running(settings, parts, list(urls.values())) as (self._server, self._keeper):
            self._bars.remove_task(starting)
            async with connected(settings.model_copy(update={"nats_url": self._server.url}), "chaos") as broker:
                self._registry = Registry(broker, interval=POLL)
                await self._registry.refresh()
                model = next(iter(self._registry.models))
                bodies = mixed_requests(asked.requests, asked.longest, asked.seed, model)
                expected = await self._load("undisturbed", bodies, broker_restarts=0)
                if failed := [one.error for one in expected if one.error or not one.ends]:
                    fault = f"{len(failed)} requests failed though nothing was killed, the first: {failed[0]}"
                    raise StartupError(fault)
                self._began = clock()
                async with asyncio.TaskGroup() as self._recovering:
                    killing = self._recovering.create_task(self._kill())
                    got = await self._load("disturbed", bodies, asked.broker_restarts)
                    killing.cancel()
        found = _compared(expected, got)
        return found | {"loads": self._loads, "kills": [asdict(kill) for kill in self._kills]}

    async def _load(self, label: str, bodies: list[Request], broker_restarts: int) -> list[Answer]:
        """Ask everything, so much at once, in the same order."""
        answers: dict[int, Answer] = {}
        left, total, asked = iter(enumerate(bodies)), len(bodies), self._asked
        restarts = {total * place // (broker_restarts + 1) for place in range(1, broker_restarts + 1)}
        clients = [Client(url) for url in self._urls.values()]

        async def ask_next() -> Answer:
            place, (path, body) = next(left)
            answers[place] = await ask(clients, path, body, f"{label}-{place}", place)
            if len(answers) in restarts:
                self._strike("broker", self._server.pid)
            return answers[place]

        loop = partial(closed_loop, ask_next, concurrency=asked.concurrency, requests=total)
        await bench_report.measured(label, self._bars, loop, self._loads, total)
        for client in clients:
            client.close()
        return [answers[place] for place in range(total)]

    async def _kill(self) -> None:
        random, asked = Random(self._asked.seed), self._asked
        while asked.victims:
            pause, victim, copy = random.uniform(0.5, 1.5), random.choice(asked.victims), random.random()
            await asyncio.sleep(pause * asked.interval)
            processes = {name: child.pid for name, child in self._keeper.running.items() if child.returncode is None}
            processes["broker"] = self._server.pid
            if living := [(name, pid) for name, pid in processes.items() if name.startswith(victim)]:
                self._strike(*living[int(copy * len(living))])

    def _strike(self, part: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._kills.append(Kill(clock() - self._began, part, pid))
            self._recovering.create_task(self._recovery(self._kills[-1]))

    async def _recovery(self, kill: Kill) -> None:
        """Note when another process serves in the place of a killed one; give it up after `START_LIMIT`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_LIMIT), httpx.AsyncClient(timeout=1.0, trust_env=False) as client:
                while not await self._is_back(kill, client):  # noqa: ASYNC110
                    await asyncio.sleep(POLL)
                kill.away = clock() - self._began - kill.at

    async def _is_back(self, kill: Kill, client: httpx.AsyncClient) -> bool:
        pid = self._server.pid if kill.part == "broker" else self._keeper.running[kill.part].pid
        if pid == kill.pid:
            return False
        try:
            if url := self._urls.get(kill.part):
                await client.get(f"{url}/health/live")
                return True
            await self._registry.refresh()
        except (Transient, httpx.TransportError):
            return False
        serving = {card.pid for card in self._registry.workers} | {card.pid for card in self._registry.stages}
        return kill.part == "broker" or pid in serving


def _compared(expected: list[Answer], got: list[Answer]) -> dict[str, Any]:
    pairs = enumerate(zip(expected, got, strict=True))
    found = [(place, came, fault) for place, (wanted, came) in pairs if (fault := compare(wanted, came))]
    return {
        "requests": len(got),
        **{kind: sum(fault.kind == kind for _, _, fault in found) for kind in KINDS},
        "resumed": sum(one.resumed for one in got),
        "repeated": sum(one.repeated for one in got),
        "refused": dict(sum((one.refusals for one in got), Counter[str]())),
        "faults": [{"request": place, "names": sorted(came.names), **fault._asdict()} for place, came, fault in found],
    }


def _shown(found: dict[str, Any]) -> list[object]:
    title = f"{found['requests']} requests: " + ", ".join(f"{found[kind]} {kind}" for kind in KINDS)
    clients = "clients resumed {resumed}, repeated {repeated}, refused {refused}".format_map(found)
    recoveries = bench_report.numbers_table(("killed",), ("times", "recovered", "after, ms, p50", "max"))
    for victim in VICTIMS:
        if away := [kill["away"] for kill in found["kills"] if kill["part"].partition(" ")[0] == victim]:
            figures = len(away), sum(one is not None for one in away), milliseconds(away, 50), milliseconds(away, 100)
            recoveries.add_row(victim, *("-" if x is None else f"{x:,.0f}" for x in figures))
    faults = [f"request {one['request']} {one['kind']}: {one['detail']}" for one in found["faults"]]
    return [title, bench_report.loads_table(found["loads"]), clients, recoveries, *faults]
