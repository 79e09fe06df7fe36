"""`penstock bench chaos`: kills Penstock's processes under load, and looks for an answer that shows it.

Every part is a process of its own, kept alive as `penstock serve` does. All requests run undisturbed first; then again,
while processes die by SIGKILL, and each answer must be the same, token for token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import IO, Annotated, Any

import httpx
import orjson
import structlog
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from typer import Option

from ..config.settings import Settings
from ..config.sources import Loaded
from ..schemas.errors import StartupError, Transient
from ..streams.jetstream import JetStreamBroker
from ..streams.registry import Registry
from ..streams.server import EmbeddedServer
from . import bench_report
from .bench_answers import KINDS, Answer, Client, Request, clock, compare, mixed_requests
from .bench_report import milliseconds
from .keeper import LEAST_DELAY, Keeper, Part, child_environment, keep_broker
from .options import with_settings
from .supervisor import base_url, listen, ready

log = structlog.get_logger(__name__)

STAGES = ("validate", "queue", "batch", "stream")
VICTIMS = ("worker", *STAGES, "bridge", "broker")
START_LIMIT = 180.0  # seconds until all parts run: torch is loaded once for each worker
POLL = 0.2  # seconds between two looks at who is back
ECHO_RATE = 25.0  # tokens a second, as of a model, so that there are streams to be cut


@with_settings
def bench_chaos(
    loaded: Loaded,
    model: Annotated[
        str | None, typer.Argument(help="Directory or Hugging Face id; the echo backend by default.")
    ] = None,
    bridges: Annotated[int, Option(min=1, max=8, help="Bridge processes.")] = 2,
    stage_copies: Annotated[int, Option(min=1, max=8, help="Processes of each light stage.")] = 1,
    requests: Annotated[int, Option(min=1, help="Of mixed priority, length and sampling; asked twice.")] = 300,
    concurrency: Annotated[int, Option(min=1, max=1024, help="Requests at once.")] = 16,
    longest: Annotated[int, Option(min=8, help="Tokens of the longest answer.")] = 120,
    victims: Annotated[str, Option(help=f"What is killed, of {','.join(VICTIMS)}.")] = ",".join(VICTIMS[:-1]),
    interval: Annotated[float, Option(min=0.1, help="Seconds from kill to kill: half to one and a half of it.")] = 4.0,
    broker_restarts: Annotated[int, Option(min=0, help="Times that the broker is killed, spread over the run.")] = 0,
    patience: Annotated[float, Option(min=1, help="Seconds until a client gives its request up.")] = 120.0,
    seed: Annotated[int, Option(help="For the same requests and the same choice of victims.")] = 0,
    verbose: Annotated[bool, Option("--verbose", help="Print each fault, with the first difference.")] = False,
    logs: Annotated[Path | None, Option(help="File for what the processes log.")] = None,
    json: Annotated[Path | None, Option(help="File for all figures and settings; - is standard output.")] = None,
) -> None:
    """Kill processes at random under load, and compare every answer with the undisturbed one.

    Starts its own broker, bridges, stages and workers on loopback; two workers in float32 by default.
    Ends with exit code 1 if an answer was lost, doubled or different.
    """
    asked = {name: value for name, value in locals().items() if name not in ("loaded", "verbose", "logs", "json")}
    bench_report.check_writable(json, "--json")
    bench_report.check_writable(logs, "--logs")
    chosen = tuple(dict.fromkeys(word.strip() for word in victims.split(",") if word.strip()))
    if unknown := [word for word in chosen if word not in VICTIMS]:
        raise StartupError(f"--victims {','.join(unknown)}: no such part; known: {', '.join(VICTIMS)}")
    defaults: dict[str, Any] = {"workers": 2, "dtype": "float32", "log_level": "warning", "log_format": "json"}
    if loaded.settings.backend == "echo" or loaded.settings.model is None:
        defaults |= {"backend": "echo", "echo_rate": ECHO_RATE}
    given = {name: value for name, value in defaults.items() if loaded.origins[name] == "default"}
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(logs.open("w+b") if logs else tempfile.TemporaryFile())  # noqa: SIM115
        logging.basicConfig(handlers=[logging.NullHandler()])  # that the broker went away is no news here
        structlog.configure(
            processors=[structlog.processors.TimeStamper("iso"), structlog.processors.JSONRenderer(orjson.dumps)],
            logger_factory=structlog.BytesLoggerFactory(file),
        )
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-chaos-"))
        settings = loaded.settings.model_copy(update={**given, "state_dir": Path(state)})
        bars = stack.enter_context(bench_report.bars(MofNCompleteColumn(), TextColumn("{task.fields[news]}")))
        run = Chaos(settings, SimpleNamespace(**asked | {"victims": chosen}), bars, file)
        found = asyncio.run(run.run())
    console = Console(stderr=json == bench_report.STDOUT, highlight=False, markup=False, soft_wrap=True)
    console.print(_table(found))
    for fault in found["faults"] if verbose else ():
        console.print(f"request {fault['request']} {fault['kind']}: {fault['detail']}", style="red")
    options = asked | {"settings": settings.model_dump(mode="json", exclude={"nats_url"})}
    bench_report.write(json, "chaos", options, found)
    if found["faults"]:
        raise typer.Exit(1)


@dataclass(slots=True)
class Kill:
    """A process that was killed, so many seconds after the beginning, and how long it took until another served."""

    at: float
    part: str
    pid: int
    away: float | None = None  # set by `Chaos._recover`


class Chaos:
    """All processes, the load and the killing; `asked` holds the command's options, `log` gets what the parts write."""

    def __init__(self, settings: Settings, asked: Any, bars: Progress, log: IO[bytes]) -> None:
        self._settings, self._asked, self._bars, self._log = settings, asked, bars, log
        self._keeper = Keeper(settings.drain_timeout, most_delay=LEAST_DELAY, output=log)
        self._urls, self._parts = _parts(asked, settings.workers)
        self._kills: list[Kill] = []
        self._whole = asyncio.Event()  # whoever was killed is back; set by `_recover`, cleared by `_strike`
        self._began = 0.0  # when the killing did; set by `run`
        self._server: EmbeddedServer  # set by `run`
        self._registry: Registry  # set by `run`

    async def run(self) -> dict[str, Any]:
        asked, settings, keeper = self._asked, self._settings, self._keeper
        async with contextlib.AsyncExitStack() as stack:
            sync = settings.nats_sync_interval
            server = self._server = await EmbeddedServer.start(settings.state_dir, settings.nats_server, sync)
            stack.push_async_callback(server.stop)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            background = [group.create_task(keep_broker(server))]
            stack.callback(lambda: [task.cancel() for task in background])
            stack.callback(keeper.stopping.set)
            stack.callback(keeper.at_once.set)
            environment = child_environment(settings, server.url)
            for part in self._parts:
                group.create_task(keeper.keep(part, environment, keeper.stopping))
            broker = await JetStreamBroker.connect(server.url, namespace=settings.namespace, name="penstock-chaos")
            stack.push_async_callback(broker.close)
            self._registry = Registry(broker, interval=POLL)
            await self._ready()
            client = Client(self._urls, asked.patience)
            stack.push_async_callback(client.close)
            bodies = mixed_requests(asked.requests, asked.longest, asked.seed, next(iter(self._registry.models)))
            expected = await self._load("undisturbed", client, bodies, lambda done: None)
            if failed := [one.error for one in expected if one.error or not one.ends]:
                raise StartupError(f"{len(failed)} requests failed though nothing was killed, the first: {failed[0]}")
            self._began = clock()
            background += [group.create_task(self._recover()), group.create_task(self._kill())]
            got = await self._load("disturbed", client, bodies, self._restart_broker)
            background[-1].cancel()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._whole.wait(), START_LIMIT)
        return _figures(expected, got, self._kills)

    async def _ready(self) -> None:
        """Return when every process serves. Raises `StartupError` with the last words of the log."""
        bar = self._bars.add_task("starting", total=len(self._parts), news="")
        fault = f"not all processes ran after {START_LIMIT:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_LIMIT):
                while len(serving := await self._serving()) <= len(self._parts):  # the broker is one more
                    self._bars.update(bar, completed=len(serving))
                    if self._keeper.fatal is not None:
                        fault = str(self._keeper.fatal)
                        break
                    await asyncio.sleep(POLL)
                else:
                    await asyncio.gather(*(ready(url, self._settings.workers) for url in self._urls))
                    self._bars.remove_task(bar)
                    return
        said = os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace").splitlines()
        raise StartupError("\n".join([f"{fault}; the last words:", *said[-5:]]))

    async def _serving(self) -> dict[str, int]:
        """The parts that serve now, by name, and their processes."""
        running = {name: child.pid for name, child in self._keeper.running.items()}
        found = {}
        with contextlib.suppress(Transient):
            await self._registry.refresh()
            cards = {card.pid for card in self._registry.workers} | {card.pid for card in self._registry.stages}
            found = {name: pid for name, pid in running.items() if pid in cards} | {"broker": self._server.pid}
        async with httpx.AsyncClient(timeout=1.0, trust_env=False) as client:
            for place, url in enumerate(self._urls):
                with contextlib.suppress(httpx.TransportError, KeyError):
                    await client.get(f"{url}/health/live")
                    found[f"bridge {place}"] = running[f"bridge {place}"]
        return found

    async def _load(
        self, label: str, client: Client, bodies: list[Request], ended: Callable[[int], None]
    ) -> list[Answer]:
        """Ask everything, so much at once, in the same order; `ended` hears how many answers there are."""
        answers: dict[int, Answer] = {}
        left = iter(enumerate(bodies))
        bar = self._bars.add_task(label, total=len(bodies), news="")

        async def one_after_another() -> None:
            for place, (path, body) in left:
                answers[place] = await client.ask(path, body, f"{label}-{place}", place)
                ended(len(answers))
                self._bars.update(bar, completed=len(answers), news=f"{len(self._kills)} kills")

        async with asyncio.TaskGroup() as group:
            for _ in range(self._asked.concurrency):
                group.create_task(one_after_another())
        return [answers[place] for place in range(len(bodies))]

    async def _kill(self) -> None:
        random, asked = Random(self._asked.seed), self._asked
        while asked.victims:
            pause, victim, copy = random.uniform(0.5, 1.5), random.choice(asked.victims), random.random()
            await asyncio.sleep(pause * asked.interval)
            living = [
                (part.name, child.pid)
                for part in self._parts
                if part.name.startswith(victim) and (child := self._keeper.running[part.name]).returncode is None
            ]
            living += [("broker", self._server.pid)] if victim == "broker" else []
            if living:
                self._strike(*living[int(copy * len(living))])

    def _restart_broker(self, done: int) -> None:
        """Kill the broker if this many answers mean that it is due."""
        asked = self._asked
        past, now = ((count * (asked.broker_restarts + 1)) // asked.requests for count in (done - 1, done))
        if past < now <= asked.broker_restarts:
            self._strike("broker", self._server.pid)

    def _strike(self, part: str, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._whole.clear()
            self._kills.append(Kill(clock() - self._began, part, pid))
            log.warning("killed", part=part, pid=pid)

    async def _recover(self) -> None:
        """Note who is back."""
        while True:
            await asyncio.sleep(POLL)
            serving = await self._serving()
            away = [kill for kill in self._kills if kill.away is None]
            for kill in away:
                if serving.get(kill.part, kill.pid) != kill.pid:
                    kill.away = clock() - self._began - kill.at
            if not away:
                self._whole.set()


def _parts(asked: Any, workers: int) -> tuple[list[str], list[Part]]:
    """The bridges' URLs, and every process but the broker."""
    with contextlib.ExitStack() as stack:  # all ports at once, so that they differ
        urls = [base_url(stack.enter_context(contextlib.closing(listen("127.0.0.1", 0)))) for _ in range(asked.bridges)]
    parts = [
        Part(f"bridge {place}", ("bridge", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]))
        for place, url in enumerate(urls)
    ]
    parts += [Part(f"{stage} {copy}", ("stage", stage)) for stage in STAGES for copy in range(asked.stage_copies)]
    return urls, parts + [Part(f"worker {place}", ("worker", "--id", f"w{place}")) for place in range(workers)]


def _figures(expected: list[Answer], got: list[Answer], kills: list[Kill]) -> dict[str, Any]:
    pairs = enumerate(zip(expected, got, strict=True))
    found = [(place, came, fault) for place, (wanted, came) in pairs if (fault := compare(wanted, came))]
    return {
        "requests": len(got),
        **{kind: sum(fault.kind == kind for _, _, fault in found) for kind in KINDS},
        "undisturbed": _load_figures(expected),
        "disturbed": _load_figures(got) | _kill_figures(kills),
        "kills": [asdict(kill) for kill in kills],
        "faults": [{"request": place, "names": sorted(came.names), **fault._asdict()} for place, came, fault in found],
    }


def _load_figures(answers: list[Answer]) -> dict[str, float | None]:
    """By their names in the table; times in seconds."""
    pauses, first = [one.longest_pause for one in answers], [one.to_first for one in answers]
    refusals = sum((one.refusals for one in answers), Counter[str]())
    return {
        "seconds": max(one.ended for one in answers) - min(one.sent for one in answers),
        "tokens": sum(tokens for one in answers for _, tokens in one.usages),
        **{f"longest pause of a stream, p{part}": _percentile(pauses, part) for part in (50, 99, 100)},
        **{f"first piece, p{part}": _percentile(first, part) for part in (50, 99, 100)},
        "resumed": sum(one.resumed for one in answers),
        "repeated": sum(one.repeated for one in answers),
        **{f"refused, {code}": number for code, number in sorted(refusals.items())},
    }


def _kill_figures(kills: list[Kill]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for victim in VICTIMS:
        away = [kill.away for kill in kills if kill.part.partition(" ")[0] == victim]
        if away:
            found |= {f"{victim}: killed": len(away), f"{victim}: recovered": sum(one is not None for one in away)}
            found |= {f"{victim}: away, p{part}": _percentile(away, part) for part in (50, 100)}
    return found


def _percentile(seconds: Iterable[float | None], percent: float) -> float | None:
    found = milliseconds(seconds, percent)
    return None if found is None else found / 1000


def _table(found: dict[str, Any]) -> Table:
    loads = ("undisturbed", "disturbed")
    title = f"{found['requests']} requests: " + ", ".join(f"{found[kind]} {kind}" for kind in KINDS)
    columns = (Column(name, justify="right") for name in loads)
    table = Table("", *columns, title=title, title_justify="left", box=None, pad_edge=False)
    for name in dict.fromkeys(name for load in loads for name in found[load]):
        values = (found[load].get(name) for load in loads)
        table.add_row(name, *("" if x is None else f"{x:,.2f}" if isinstance(x, float) else f"{x:,}" for x in values))
    return table
