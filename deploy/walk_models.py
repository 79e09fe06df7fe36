"""Random commands for the models of real processes: nothing may be lost, and the laws of models hold all the time.

    python deploy/walk_models.py --steps 300 --seed 1

Starts `penstock serve` with five models and memory for two, and an agent of a second host with memory for one. Then it
asks, gives up, loads, unloads, swaps, removes, adds and pins models, kills workers and the agent, all drawn from the
seed: the commands of the state machine in `tests/schemas/models/test_planner.py`. The echo backend with tokenizers
that differ shows which revision has answered. `walk_laws.py` has the laws. Prints what it did and every broken law,
and ends with status 1 if there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import nats
import psutil
import typer
from walk_hosts import HOSTS, LIMIT, NAMES, Deployment
from walk_laws import Asked, Laws

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine, resolve_model
from penstock.engine.models import BUNDLED
from penstock.engine.planning.sizing import footprint
from penstock.schemas.models.catalogue import Catalogue
from penstock.schemas.models.model_state import ModelState
from penstock.streams.topology import lanes_of

COMMANDS = {  # how often each is drawn, in relation to the others
    "ask": 12,
    "wait": 4,
    "give_up": 1,
    "swap": 3,
    "remove_or_add": 1,
    "pin": 1,
    "operate": 3,
    "kill": 2,
    "restart": 1,
}
LOOK = 0.1  # seconds between two looks at what other processes do


class Walk:
    """The commands, each by its name in `COMMANDS`."""

    def __init__(self, deployment: Deployment, laws: Laws, sources: list[str], url: str, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self.asked: list[Asked] = []
        self._deployment, self._laws, self._sources = deployment, laws, sources
        self._random = Random(seed)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        self._client = httpx2.AsyncClient(base_url=url, timeout=2 * LIMIT, limits=limits)
        self._running: dict[asyncio.Task[None], Asked] = {}
        self._offered, self._pinned = {*NAMES}, False

    async def step(self, name: str) -> None:
        self.done[name] += 1
        await getattr(self, name)()

    async def ask(self) -> None:
        for _ in range(self._random.randint(1, 5)):
            self.ask_one(self._random.choice(NAMES))

    async def wait(self) -> None:
        await asyncio.sleep(self._random.uniform(0.1, 1.5))

    async def give_up(self) -> None:
        if self._running:
            task = self._random.choice([*self._running])
            self._running[task].given_up = True
            task.cancel()

    async def swap(self) -> None:
        source = self._random.choice([*self._sources, self._deployment.broken])
        await self._change("swap", {200, 404, 409}, model=self._random.choice(NAMES), source=source)

    async def remove_or_add(self) -> None:
        name = self._random.choice(NAMES)
        await (self._remove(name) if name in self._offered else self._add(name))

    async def pin(self) -> None:
        """The last model is pinned or not, the others are not: they can all be loaded."""
        if NAMES[-1] in self._offered:
            await self._remove(NAMES[-1])
            await self._add(NAMES[-1], pin=not self._pinned)

    async def operate(self) -> None:
        name, verb = self._random.choice(NAMES), self._random.choice(("load", "unload"))
        await self._change(verb, {200, 409} | ({404} if name not in self._offered else set()), model=name)

    async def kill(self) -> None:
        if workers := self._deployment.workers():
            agent, process = self._random.choice(workers)
            with contextlib.suppress(psutil.NoSuchProcess):
                command = process.cmdline()
                lanes = command[command.index("--id") + 1].removeprefix(f"{agent}-")
                process.kill()
                self._laws.deaths += [
                    key.name for key in self._laws.states if lanes_of(key.name, key.revision) == lanes
                ]

    async def restart(self) -> None:
        """Kill the agent of the second host, and its workers with it, and start it again."""
        assert self._deployment.agent is not None
        self._deployment.agent.kill()
        await self._deployment.agent.wait()
        await self._deployment.start_agent()

    def ask_one(self, name: str) -> None:
        number = len(self.asked)
        asked = Asked(name, f"{number}: what flows in the river {number * 7} ", self._random.randint(8, 40), 0.0)
        asked.prompt += "and how much of it is water " * 8
        body: dict[str, Any] = {"model": self._random.choice((name, f"{name}-too")), "prompt": asked.prompt}
        body |= {"max_tokens": asked.tokens, "priority": self._random.choice(("high", "normal", "low"))}
        body |= {"stream": self._random.random() < 0.6, "timeout": LIMIT}
        body |= {"keep_alive": self._random.choice((0, "2s", -1))} if self._random.random() < 0.1 else {}
        self.asked.append(asked)
        task = asyncio.create_task(self._ask(asked, body))
        self._running[task] = asked
        task.add_done_callback(lambda done: self._running.pop(done))

    async def ended(self) -> None:
        """Return when nothing runs any more."""
        while self._running:
            await asyncio.wait([*self._running])

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, asked: Asked, body: dict[str, Any]) -> None:
        asked.sent = time.monotonic()
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                asked.status = answer.status_code
                if body["stream"] and answer.status_code == 200:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            self._take(asked, json.loads(line.removeprefix("data: ")))
                else:
                    self._take(asked, json.loads(await answer.aread()))
        except httpx2.HTTPError as error:
            asked.code, asked.message = "cut off", repr(error)
        finally:
            asked.ended = time.monotonic()

    def _take(self, asked: Asked, body: dict[str, Any]) -> None:
        if error := body.get("error"):
            asked.code, asked.message = error["code"] or error["type"], error["message"]
        for choice in body.get("choices", ()):
            asked.text += choice["text"]
            asked.finish = choice["finish_reason"] or asked.finish

    async def _add(self, name: str, *, pin: bool = False) -> None:
        await self._change("add", {200}, model=name, **self._deployment.table(name, pin=pin))
        self._offered.add(name)
        self._pinned = pin if name == NAMES[-1] else self._pinned

    async def _remove(self, name: str) -> None:
        await self._change("remove", {200}, model=name)
        self._offered.remove(name)

    async def _change(self, verb: str, allowed: set[int], **body: Any) -> None:
        answer = await self._client.post(f"/models/{verb}", json=body)
        self.done[f"{verb} {answer.status_code}"] += 1
        if answer.status_code not in allowed:
            detail = f"{verb} {body}: {answer.status_code} {answer.text}"
            self._laws.broken.append(f"commands are done, or refused for a reason: {detail}")


class Watch:
    """What is stored of models, as it is written, and the processes that run."""

    def __init__(self, deployment: Deployment, laws: Laws) -> None:
        self._deployment, self._laws = deployment, laws
        self._sequence = 0

    async def follow(self, connection: Any) -> None:
        await connection.jetstream().subscribe(
            "$KV.penstock_catalogue.>", stream="KV_penstock_catalogue", ordered_consumer=True, cb=self.see
        )

    async def see(self, message: Any) -> None:
        missed, self._sequence = message.metadata.sequence.stream - self._sequence - 1, message.metadata.sequence.stream
        if message.subject.endswith(".models"):
            self._laws.see_catalogue(Catalogue.model_validate_json(message.data), time.monotonic())
        elif message.data:
            self._laws.see_state(ModelState.model_validate_json(message.data), missed)

    async def count_workers(self) -> None:
        while True:
            held = Counter(agent for agent, _ in self._deployment.workers())
            if crowded := {agent: count for agent, count in held.items() if count > int(HOSTS[agent])}:
                self._laws.broken.append(f"no more worker processes than fit: {crowded}")
            await asyncio.sleep(LOOK)

    async def left(self, connection: Any) -> dict[str, int]:
        """Messages in the queues, and of dead ones: of a deployment at rest, none."""
        streams = await connection.jetstream().streams_info()
        queues = [each for each in streams if each.config.retention == "workqueue" or each.config.name == "DEAD"]
        return {str(each.config.name): each.state.messages for each in queues if each.state.messages}


def texts_of(sources: list[str], asked: list[Asked]) -> dict[str, list[str]]:
    """The whole answers to all requests, by source."""
    found = {}
    for source in sources:
        with InferenceEngine(EngineConfig(model=source, backend="echo")) as engine:
            params = [GenerationParams(max_tokens=each.tokens) for each in asked]
            found[source] = [engine.generate(each.prompt, own).text for each, own in zip(asked, params, strict=True)]
    return found


async def until(condition: Callable[[], bool]) -> bool:
    """Whether it comes true in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LIMIT):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(LOOK)
    return condition()


async def walk(folder: Path, steps: int, seed: int) -> tuple[Walk, Laws]:
    """Give so many commands, wait until everything rests, ask every model once more, and judge."""
    sources = ["echo", str(resolve_model(BUNDLED).resolve())]
    need = footprint(EngineConfig(model="echo", backend="echo", device="cpu")).total
    laws = Laws(dict.fromkeys(NAMES, need), {host: int(room * need) for host, room in HOSTS.items()})
    deployment = Deployment(folder, need, sources)
    async with deployment.running() as url, asyncio.TaskGroup() as group:
        connection = await nats.connect(deployment.nats_url)
        watch, work = Watch(deployment, laws), Walk(deployment, laws, sources, url, seed)
        await watch.follow(connection)
        assert await until(lambda: len(laws.catalogue.entries) == len(NAMES))
        counting = group.create_task(watch.count_workers())
        for name in Random(seed).choices([*COMMANDS], [*COMMANDS.values()], k=steps):
            await work.step(name)
        await work.ended()
        for entry in laws.catalogue.entries:
            work.ask_one(entry.name)
        await work.ended()
        if not await until(lambda: not laws.unrest):
            laws.broken.append(f"everything comes to rest: {', '.join(laws.unrest)}")
        ready = sum(state.status == "ready" for state in laws.states.values())
        if not await until(lambda: len(deployment.workers()) == ready):
            laws.broken.append(f"no process is left over: {len(deployment.workers())} of {ready} models")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT):
                while left := await watch.left(connection):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK)
        if left:
            laws.broken.append(f"no message is left over: {left}")
        counting.cancel()
        await work.close()
        await connection.close()
    texts = await asyncio.to_thread(texts_of, sources, work.asked)
    for number, asked in enumerate(work.asked):
        laws.judge(asked, {source: answers[number] for source, answers in texts.items()})
    return work, laws


def walk_models(steps: int = 100, seed: int = 0, folder: Path | None = None) -> None:
    """Give random commands to the models of real processes; their logs stay in `folder`, which must be new."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-walk-")))
        folder.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        work, laws = asyncio.run(walk(folder, steps, seed))
        print(", ".join(f"{count} {name}" for name, count in sorted(work.done.items())))
        ends = Counter("given up" if each.given_up else each.code or each.status for each in work.asked)
        print(f"{len(work.asked)} requests: " + ", ".join(f"{count} {end}" for end, count in ends.most_common()))
        print(f"{laws.transitions} changes of state, {laws.missed} not seen; {time.monotonic() - begun:.0f} s")
        for broken in laws.broken:
            print(f"broken: {broken}")
        if laws.broken:
            raise SystemExit(1)


if __name__ == "__main__":
    typer.run(walk_models)
