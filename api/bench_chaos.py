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
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.progress import Progress
from typer import Option

from ..config.settings import Settings
from ..config.sources import SECRET, Loaded
from ..schemas.errors import StartupError, Transient
from ..streams.registry import Registry
from ..streams.server import EmbeddedServer
from . import bench_report
from .bench_answers import Answer, Request, ask, compare, mixed_requests
from .bench_load import Client, clock, closed_loop
from .bench_report import milliseconds, number
from .bench_server import START_LIMIT, running, served_models
from .keeper import Keeper, Part
from .options import with_settings
from .supervisor import connected, listen

STAGES = ("validate", "queue", "batch", "stream")
VICTIMS = ("worker", *STAGES, "bridge", "broker")
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
    json: bench_report.Json = None,
) -> None:
    """Kill processes at random under load, and compare every answer with the undisturbed one.

    Starts its own broker, two bridges, stages and workers on loopback; two workers in float32 by default.
    Every fault is printed with the first difference, and ends it with exit code 1.
    """
    asked = {name: value for name, value in locals().items() if name not in ("loaded", "json")}
    chosen = [word.strip() for word in victims.split(",") if word.strip()]
    if unknown := [word for word in chosen if word not in VICTIMS]:
        raise typer.BadParameter(f"--victims {','.join(unknown)}: no such part; known: {', '.join(VICTIMS)}")
    defaults: dict[str, Any] = {"workers": 2, "dtype": "float32", "log_level": "warning", "log_format": "json"}
    if loaded.settings.backend == "echo" or loaded.settings.model is None:
        defaults |= {"backend": "echo", "echo_rate": ECHO_RATE}
    given = {name: value for name, value in defaults.items() if loaded.origins[name] == "default"}
    settings = loaded.settings.model_copy(update=given)
    with bench_report.bars() as bars:
        found = asyncio.run(Chaos(settings, SimpleNamespace(**asked | {"victims": chosen}), bars).run())
    options = asked | {"settings": settings.model_dump(mode="json", exclude=set(SECRET))}
    bench_report.publish(json, "chaos", options, found, *_shown(found))
    if found["faults"]:
        raise typer.Exit(1)


class Chaos:
    """The load and the killing; `asked` holds the command's options."""

    def __init__(self, settings: Settings, asked: Any, bars: Progress) -> None:
        self._settings, self._asked, self._bars = settings, asked, bars
        self._loads: dict[str, dict[str, Any]] = {}  # what was measured of each; set by `_load`
        self._kills: list[dict[str, Any]] = []  # when, in seconds; of which part; how long it was away, once it is back
        with listen("127.0.0.1", 0) as one, listen("127.0.0.1", 0) as two:  # both at once, so that they differ
            self._ports = {f"bridge {place}": it.getsockname()[1] for place, it in enumerate((one, two))}
        self._urls = [f"http://127.0.0.1:{port}" for port in self._ports.values()]
        # Set by `run`.
        self._began = 0.0  # when the killing did
        self._server: EmbeddedServer
        self._keeper: Keeper
        self._registry: Registry
        self._recovering: asyncio.TaskGroup

    async def run(self) -> dict[str, Any]:
        asked, settings, urls = self._asked, self._settings, self._urls
        bridge = ("bridge", "--host", "127.0.0.1", "--port")
        parts = [Part(name, (*bridge, str(port))) for name, port in self._ports.items()]
        parts += [Part(f"{stage} 0", ("stage", stage)) for stage in STAGES]
        parts += [Part(f"worker {place}", ("worker", "--id", f"w{place}")) for place in range(settings.workers)]
        starting = self._bars.add_task("starting", total=None, news="")
        async with running(settings, parts, urls) as (self._server, self._keeper):
            self._bars.remove_task(starting)
            bodies = mixed_requests(asked.requests, asked.longest, asked.seed, (await served_models(urls[0]))[0])
            expected = await self._load("undisturbed", bodies, restarts=0)
            if failed := [one.error for one in expected if one.error or not one.ends]:
                raise StartupError(f"{len(failed)} requests failed though nothing was killed, the first: {failed[0]}")
            async with connected(settings.model_copy(update={"nats_url": self._server.url}), "chaos") as broker:
                self._registry, self._began = Registry(broker, interval=POLL), clock()
                async with asyncio.TaskGroup() as self._recovering:
                    killing = self._recovering.create_task(self._kill())
                    got = await self._load("disturbed", bodies, asked.broker_restarts)
                    killing.cancel()
        found = map(compare, expected, got)
        faults = [{"request": place, **fault._asdict()} for place, fault in enumerate(found) if fault]
        return {
            "requests": len(got),
            **{kind: sum(one["kind"] == kind for one in faults) for kind in ("lost", "doubled", "different")},
            "detours": dict(sum((one.detours for one in got), Counter[str]())),
            "faults": faults,
            "loads": self._loads,
            "kills": self._kills,
        }

    async def _load(self, label: str, bodies: list[Request], restarts: int) -> list[Answer]:
        """Ask everything, so much at once, in the same order, and kill the broker so many times meanwhile."""
        answers: dict[int, Answer] = {}
        left, total = iter(enumerate(bodies)), len(bodies)
        at = {total * place // (restarts + 1) for place in range(1, restarts + 1)}
        clients = [Client(url) for url in self._urls]

        async def ask_next() -> Answer:
            place, (path, body) = next(left)
            answers[place] = await ask(clients, path, body, f"{label}-{place}", place)
            if len(answers) in at:
                self._strike("broker")
            return answers[place]

        loop = partial(closed_loop, ask_next, concurrency=self._asked.concurrency, requests=total)
        await bench_report.measured(label, self._bars, loop, self._loads, total)
        for client in clients:
            client.close()
        return [answers[place] for place in range(total)]

    async def _kill(self) -> None:
        random, asked = Random(self._asked.seed), self._asked
        while asked.victims:
            pause, victim, copy = random.uniform(0.5, 1.5), random.choice(asked.victims), random.random()
            await asyncio.sleep(pause * asked.interval)
            if copies := [name for name in self._living() if name.startswith(victim)]:
                self._strike(copies[int(copy * len(copies))])

    def _strike(self, part: str) -> None:
        pid = self._living()[part]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._kills.append({"at": clock() - self._began, "part": part, "pid": pid, "away": None})
            self._recovering.create_task(self._recovery(self._kills[-1]))

    async def _recovery(self, kill: dict[str, Any]) -> None:
        """Note when another process serves in the place of a killed one; give it up after `START_LIMIT`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_LIMIT):
                while not await self._is_back(kill["part"], kill["pid"]):  # noqa: ASYNC110
                    await asyncio.sleep(POLL)
                kill["away"] = clock() - self._began - kill["at"]

    async def _is_back(self, part: str, killed: int) -> bool:
        pid = self._living().get(part, killed)
        try:
            if port := self._ports.get(part):
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
            else:
                await self._registry.refresh()
        except (OSError, Transient):
            return False
        serving = {card.pid for card in self._registry.workers + self._registry.stages}
        return pid != killed and (pid in serving or part in ("broker", *self._ports))

    def _living(self) -> dict[str, int]:
        """The process of each part."""
        children = {name: child.pid for name, child in self._keeper.running.items() if child.returncode is None}
        return children | {"broker": self._server.pid}


def _shown(found: dict[str, Any]) -> list[object]:
    title = "{requests} requests: {lost} lost, {doubled} doubled, {different} different".format_map(found)
    clients = ", ".join(f"clients {what} {count}" for what, count in found["detours"].items())
    recoveries = bench_report.numbers_table(("killed",), ("times", "recovered", "after, ms, p50", "max"))
    for victim in VICTIMS:
        if away := [kill["away"] for kill in found["kills"] if kill["part"].partition(" ")[0] == victim]:
            figures = len(away), sum(one is not None for one in away), milliseconds(away, 50), milliseconds(away, 100)
            recoveries.add_row(victim, *map(number, figures))
    faults = [f"request {one['request']} {one['kind']}: {one['detail']}" for one in found["faults"]]
    return [title, *bench_report.shown(found["loads"]), clients, recoveries, *faults]
