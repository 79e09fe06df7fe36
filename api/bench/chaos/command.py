"""`penstock bench chaos`: strikes Penstock's processes and connections under load, and looks for any effect.

Every part is a process of its own, which is restarted as by `penstock serve`. All requests run undisturbed first; then
again while faults strike, and each answer must be the same, token for token. At the end it judges what is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.progress import Progress
from typer import Option

from ....config.catalogue import OF_ONE
from ....config.settings import Settings
from ....config.sources import SECRET, Loaded, with_projector
from ....engine import find_backend
from ....schemas.errors import StartupError
from ....streams.stores.registry import Registry
from ....streams.topology import Subjects
from ...serve.connecting import connected
from ...serve.listening import listen
from ...serve.processes import Part, child_environment
from ...terminal.options import with_settings
from .. import offered
from .. import report as bench_report
from ..answers import PATIENCE, ReceivedAnswer, Request, ask, compare, mixed_requests
from ..brokers import Brokers, set_up
from ..load import Client, Ended, clock
from ..server import kept, served_models, workplace
from . import agents as bench_agents
from .agents import Agent, judge_agents, ledger_of
from .cluster_faults import KINDS, ClusterFaults, troubles
from .evidence import Evidence, Rooms
from .faults import POLL, Faults, Strike, longest_pauses
from .judge import Broken
from .outcome import outcome
from .probes import outlive, take_all_seats

STAGES = ("validate", "queue", "batch", "stream")
VICTIMS = ("worker", *STAGES, "tools", "bridge", "agent", "broker")
ECHO_RATE = 25.0  # tokens a second, as of a model, so that there are streams to be cut
KEPT = 7200.0  # seconds, and bytes, for which events are stored, to be judged at the end
KEPT_BYTES = 2 << 30
SLOW_WAITS = 100  # for a slow broker, one after the other, in a response with tools


@with_settings
def bench_chaos(
    loaded: Loaded,
    model: Annotated[
        str | None, typer.Argument(help="Directory, GGUF file or Hugging Face id; the echo backend by default.")
    ] = None,
    requests: Annotated[int, Option(min=1, help="Of mixed priority, length and sampling; asked twice.")] = 300,
    concurrency: Annotated[int, Option(min=1, max=1024, help="Requests at once.")] = 16,
    longest: Annotated[int, Option(min=8, help="Tokens of the longest answer.")] = 120,
    victims: Annotated[
        str, Option(help=f"What is killed and stopped, of {','.join(VICTIMS)}; an empty text for nothing.")
    ] = ",".join(VICTIMS[:-1]),
    interval: Annotated[float, Option(min=0.1, help="Seconds from kill to kill: half to one and a half of it.")] = 4.0,
    resets: Annotated[
        float, Option(min=0, help="Seconds between two parts whose connections to the broker are reset; 0: none is.")
    ] = 0.0,
    stops: Annotated[str, Option(help="Seconds for which a part is stopped (SIGSTOP), such as 6,60,130.")] = "",
    blackout: Annotated[
        float, Option(min=0, help="Seconds for which everything is dead at once, the broker too; 0: never.")
    ] = 0.0,
    brokers: Annotated[int, Option(min=1, max=5, help="NATS servers; of several, each stream is on three.")] = 1,
    broker_restarts: Annotated[
        int, Option(min=0, help="Times that a broker is killed, each in its turn, spread over the run.")
    ] = 0,
    cluster: Annotated[
        str,
        Option(
            help="What several brokers suffer, as KIND=SECONDS,…, once each, in this order. "
            + " ".join(f"{kind}: {what}." for kind, what in KINDS.items())
        ),
    ] = "",
    small_disk: Annotated[
        Path | None, Option(exists=True, file_okay=False, help="Of a small file system: the last broker stores there.")
    ] = None,
    copies: Annotated[int, Option(min=1, max=8, help="Processes of each stage.")] = 1,
    slow: Annotated[
        float, Option(min=0, help="Seconds by which one of several brokers is behind the others at most.")
    ] = 0.0,
    tools: Annotated[
        int, Option(min=0, help="Responses with tools that have side effects, besides; not of the echo backend.")
    ] = 0,
    names: Annotated[
        int,
        Option(
            min=0, max=16, help="Model names under which an agent offers the model, with room for two; 0: no agent."
        ),
    ] = 0,
    seed: Annotated[int, Option(help="For the same requests and the same choice of victims.")] = 0,
    json: bench_report.Json = None,
) -> None:
    """Strike processes and connections under load; compare every answer, and judge what the broker holds.

    Starts its own broker, two bridges, stages and workers on loopback; two workers in float32 by default.
    Requests are repeated until the last planned fault is over. Every fault found is printed with the first
    difference or the broken law, and ends it with exit code 1.
    """
    asked = {name: value for name, value in locals().items() if name not in ("loaded", "json")}
    chosen = [word.strip() for word in victims.split(",") if word.strip()]
    if unknown := [word for word in chosen if word not in VICTIMS]:
        raise typer.BadParameter(f"--victims {','.join(unknown)}: no such part; known: {', '.join(VICTIMS)}")
    if names and tools:
        raise typer.BadParameter("--names and --tools do not go together; leave one out")
    if (slow or cluster) and brokers < 3:
        raise typer.BadParameter(f"--{'slow' if slow else 'cluster'} needs several brokers; add --brokers 3")
    try:
        suffered = troubles(cluster)
    except ValueError as error:
        raise typer.BadParameter(f"--cluster {error}") from None
    if (small_disk is None) != all(kind != "full-disk" for kind, _ in suffered):
        raise typer.BadParameter("--small-disk and --cluster full-disk=SECONDS go together; give both, or none")
    seconds = bench_report.whole_numbers(stops, "--stops") if stops else []
    if seconds and not chosen:
        raise typer.BadParameter("--stops needs --victims to choose from")
    patience = PATIENCE + sum(seconds) + blackout + SLOW_WAITS * slow + sum(each.seconds for each in suffered)
    asked |= {"victims": chosen, "stops": seconds, "patience": patience, "cluster": suffered}
    asked["small_disk"] = small_disk and str(small_disk)
    settings = _settings(loaded, SimpleNamespace(**asked))
    with bench_report.bars() as bars:
        found = asyncio.run(Chaos(settings, SimpleNamespace(**asked), bars).run())
    options = asked | {"settings": settings.model_dump(mode="json", exclude=set(SECRET))}
    bench_report.publish(json, "chaos", options, found, *outcome(found))
    if found["faults"] or found["raw"]:
        raise typer.Exit(1)


def _settings(loaded: Loaded, asked: Any) -> Settings:
    """What was set, and what suits this benchmark where nothing was."""
    defaults: dict[str, Any] = {"workers": 2, "dtype": "float32", "log_level": "warning", "log_format": "json"}
    if not find_backend(loaded.settings.backend, loaded.settings.allowed_backends).expands:
        del defaults["dtype"]  # weights keep the form that they have in the file
    defaults |= {"events_ttl": KEPT, "events_limit": KEPT_BYTES, "nats_replicas": min(3, asked.brokers)}
    defaults |= {"default_timeout": max(loaded.settings.default_timeout, asked.patience + PATIENCE)}
    if asked.tools:
        if loaded.settings.backend == "echo":
            raise typer.BadParameter("--tools needs a model that calls tools; leave --backend echo out")
        defaults |= {"tool_functions": tuple(bench_agents.TOOLS.split(","))}
    elif loaded.settings.backend == "echo" or loaded.settings.model is None:
        defaults |= {"backend": "echo", "echo_rate": ECHO_RATE}
    given = {name: value for name, value in defaults.items() if loaded.origins[name] == "default"}
    return with_projector(loaded.settings.model_copy(update=given))


class Chaos:
    """The load, and what it came to; `asked` holds the command's options."""

    def __init__(self, settings: Settings, asked: Any, bars: Progress) -> None:
        self._settings, self._asked, self._bars = settings, asked, bars
        self._loads: dict[str, dict[str, Any]] = {}  # what was measured of each; set by `_load`
        self._brokers = Brokers()
        with listen("127.0.0.1", 0) as one, listen("127.0.0.1", 0) as two:  # both at once, so that they differ
            self._ports = {f"bridge {index}": it.getsockname()[1] for index, it in enumerate((one, two))}
        self._urls = [f"http://127.0.0.1:{port}" for port in self._ports.values()]

    async def run(self) -> dict[str, Any]:
        asked, settings, urls = self._asked, self._settings, self._urls
        async with contextlib.AsyncExitStack() as stack:
            starting = self._bars.add_task("starting", total=None, news="")
            state = stack.enter_context(workplace())
            settings = settings.model_copy(update={"state_dir": state})
            await stack.enter_async_context(self._brokers.started(settings, state, asked.brokers, asked.small_disk))
            direct = settings.model_copy(update={"nats_url": self._brokers.urls})
            broker = await stack.enter_async_context(connected(direct, "chaos"))
            await set_up(broker, direct)
            ledger = state / "ledger"
            parts = {
                part: child_environment(settings, await self._url(part)) | {bench_agents.LEDGER: str(ledger)}
                for part in self._parts()
            }
            if asked.names:
                chosen, url = offered.offered(settings, asked.names, state), await self._url(offered.AGENT)
                parts[offered.AGENT] = child_environment(chosen, url, without=OF_ONE)
                settings = settings.model_copy(update={"workers": 0})  # of our own
            keeper = await stack.enter_async_context(kept(settings, state, parts, urls))
            self._bars.remove_task(starting)
            models = await served_models(urls[0])
            bodies = mixed_requests(asked.requests, asked.longest, asked.seed, models[0])
            bodies = offered.spread(bodies, models, asked.seed) if asked.names else bodies
            registry, subjects = Registry(broker, interval=POLL), Subjects(settings.namespace)
            rooms = await stack.enter_async_context(Rooms.heard(broker, subjects, registry))
            expected = await self._load("undisturbed", bodies)
            if failed := [one.error for one in expected if one.error or not one.ends]:
                raise StartupError(f"{len(failed)} requests failed though nothing was struck, the first: {failed[0]}")
            loaded_before = await offered.loads(broker)
            faults = Faults(keeper, self._brokers, registry, self._ports, asked)
            began = clock()
            got, agents = await self._disturbed(faults, bodies)
            loaded_after = await offered.loads(broker)
            room = await rooms.at_rest()
            probes, leaked = list[ReceivedAnswer](), 0
            if not asked.names:
                probes, leaked = await take_all_seats(urls, rooms, models[0], asked.longest, asked.patience)
            if too_long := await outlive(urls[0], bodies[0], 2 * settings.longest_timeout):
                room.append(too_long)
            if leaked:
                room.append(Broken("all seats can be taken", f"{leaked} of {rooms.seats} never were"))
            texts: dict[str, dict[int, str] | None] = {agent.response["id"]: None for agent in agents if agent.response}
            texts |= {name: one.texts for one in (*expected, *got, *probes) for name in one.names}
            raw = await Evidence(broker, settings).verdict(texts)
            raw |= judge_agents(agents, ledger_of(ledger)) | ({"server": room} if room else {})
        return self._found(expected, got, agents, faults.strikes, began) | {
            "seats_leaked": leaked,
            "model_loads": [loaded_before, loaded_after - loaded_before],
            "raw": [{"request": name, **one._asdict()} for name, broken in raw.items() for one in broken],
        }

    def _found(
        self,
        expected: list[ReceivedAnswer],
        got: list[ReceivedAnswer],
        agents: list[Agent],
        strikes: list[Strike],
        began: float,
    ) -> dict[str, Any]:
        pairs = [(expected[index % len(expected)], one) for index, one in enumerate(got)]
        faults = [
            {"request": index, "id": sorted(pair[1].names), **fault._asdict()}
            for index, pair in enumerate(pairs)
            if (fault := compare(*pair))
        ]
        return {
            "requests": len(got),
            "responses": len(agents),
            **{kind: sum(one["kind"] == kind for one in faults) for kind in ("lost", "doubled", "different")},
            "detours": dict(sum((one.detours for one in got), Counter[str]())),
            "faults": faults,
            "loads": self._loads,
            "strikes": [
                {
                    "kind": one.kind,
                    "part": one.part,
                    "at": one.at - began,
                    "away": one.away,
                    "longest_pause": pause.seconds,
                    "request": pause.request,
                }
                for one, pause in zip(strikes, longest_pauses(strikes, got), strict=True)
            ],
        }

    def _parts(self) -> list[Part]:
        bridge = ("bridge", "--host", "127.0.0.1", "--port")
        parts = [Part(name, (*bridge, str(port))) for name, port in self._ports.items()]
        copies = range(self._asked.copies)
        parts += [Part(f"{stage} {index}", ("stage", stage)) for stage in STAGES for index in copies]
        if self._asked.tools:  # two, so that one may take over what the other has begun
            parts += [Part(f"tools {index}", ("stage", "tools")) for index in range(2)]
        workers = 0 if self._asked.names else self._settings.workers
        return parts + [Part(f"worker {index}", ("worker", "--id", f"w{index}")) for index in range(workers)]

    async def _url(self, part: Part) -> str:
        return await self._brokers.linked(part.name) if self._asked.resets else self._brokers.urls

    async def _disturbed(self, faults: Faults, bodies: list[Request]) -> tuple[list[ReceivedAnswer], list[Agent]]:
        """All requests, until they have ended and every planned fault is over."""
        events = f"{self._settings.namespace}_EVENTS".upper()
        suffered = ClusterFaults(self._brokers, events, self._asked.small_disk, faults.strikes.append)
        planned, due = [*faults.planned(), *suffered.planned(self._asked.cluster)], asyncio.Semaphore(0)
        total = len(bodies)
        at = [total * index // (len(planned) + 1) for index in range(1, len(planned) + 1)]

        async def strike() -> None:
            for blow in planned:
                await due.acquire()
                await blow()

        def answered(index: int) -> None:
            for _ in range(at.count(index)):
                due.release()

        async with asyncio.TaskGroup() as group:
            striking = group.create_task(strike())
            random = group.create_task(faults.strike_at_random())
            agents = group.create_task(self._agents(bodies[0][1]["model"]))
            got = await self._load("disturbed", bodies, answered, lambda: striking.done() and agents.done())
            await asyncio.wait((striking, agents))
            random.cancel()
        await faults.settle()
        return got, agents.result()

    async def _load(
        self,
        label: str,
        bodies: list[Request],
        answered: Callable[[int], None] = lambda count: None,
        may_end: Callable[[], bool] = lambda: True,
    ) -> list[ReceivedAnswer]:
        """Ask everything in the same order, so much at once, and from the beginning again until it may end.

        It calls `answered` with the number of answers.
        """
        answers: dict[int, ReceivedAnswer] = {}
        indices, total = count(), len(bodies)
        clients = [Client(url) for url in self._urls]

        async def loop(ended: Ended) -> None:
            async def one_after_another() -> None:
                while (index := next(indices)) < total or not may_end():
                    path, body = bodies[index % total]
                    key = f"{label}-{index}"
                    answers[index] = await ask(clients, path, body, key, index, self._asked.patience)
                    answered(len(answers))
                    ended(answers[index])

            async with asyncio.TaskGroup() as group:
                for _ in range(self._asked.concurrency):
                    group.create_task(one_after_another())

        await bench_report.measured(label, self._bars, loop, self._loads, total)
        self._loads[label]["requests"] = len(answers)
        for client in clients:
            client.close()
        return [answers[index] for index in sorted(answers)]

    async def _agents(self, model: str) -> list[Agent]:
        """All responses with tools, a few at once."""
        indices, found = iter(range(self._asked.tools)), dict[int, Agent]()

        async def one_after_another() -> None:
            for index in indices:
                body, key = bench_agents.request(index, model), f"agent-{index}"
                found[index] = await bench_agents.run(self._urls, body, key, index, self._asked.patience)

        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, self._asked.concurrency // 4)):
                group.create_task(one_after_another())
        return [found[index] for index in sorted(found)]
