"""A JetStream cluster on this machine: nats-servers on loopback that know each other, for tests and `bench chaos`.

Clients learn of no server but those in `urls` (`no_advertise`), so a proxy in front of one stays between.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from ...schemas.errors import StartupError
from .link import Link
from .management import ApiError, call
from .server import EmbeddedServer

_READY_TIMEOUT = 60.0  # seconds for an election; servers on busy cores take several of them
_ANSWER_TIMEOUT = 2.0  # seconds; a stopped server answers nobody
_POLL = 0.1


# From which node to which, whose routes are taken at this port; returns the port to dial instead.
Dial = Callable[[int, int, int], Awaitable[int]]


class _Ports(NamedTuple):
    """A node's own, besides the one for clients."""

    route: int
    monitor: int
    nowhere: int  # where nobody listens


class LocalCluster:
    """Made by `start`. Nodes are counted from 0; `urls` and each node's ports stay the same through its restarts.

    The ports are reserved by sockets that are bound without listening, beside which a server may listen and nobody
    else gets them: they are free for their node however long it is away.
    """

    def __init__(self, nodes: list[EmbeddedServer], monitors: list[str], reserved: contextlib.ExitStack) -> None:
        self.nodes = nodes
        self._monitors = monitors
        self._reserved = reserved
        self._stopped: set[int] = set()

    @classmethod
    async def start(
        cls,
        state_dir: Path,
        size: int = 3,
        binary: Path | None = None,
        sync_interval: str | None = None,
        *,
        dial: Dial | None = None,
    ) -> LocalCluster:
        """Start `size` servers, each with a directory below `state_dir`; returns once a stream can be made on all.

        `dial` may put something between two of them. Raises `StartupError`.
        """
        token, nodes = secrets.token_hex(16), []
        async with contextlib.AsyncExitStack() as stack:
            reserved = stack.enter_context(contextlib.ExitStack())
            routes, monitors, nowhere = ([_reserve(reserved) for _ in range(size)] for _ in range(3))
            for place in range(size):
                # Every server needs all routes from the beginning: it reads from them how many votes an election takes.
                others = [
                    await dial(place, other, port) if dial else port
                    for other, port in enumerate(routes)
                    if other != place
                ]
                own = _Ports(routes[place], monitors[place], nowhere[place])
                more = _configuration(place, token, own, others)
                node = await EmbeddedServer.start(
                    state_dir / f"n{place}", binary, sync_interval, token=token, more=more
                )
                stack.push_async_callback(node.stop)
                nodes.append(node)
            cluster = cls(nodes, [f"http://127.0.0.1:{port}" for port in monitors], reserved)
            await cluster.ready()
            stack.pop_all()
        return cluster

    @property
    def urls(self) -> str:
        """All nodes with commas between, and with the token: keep it out of logs."""
        return ",".join(node.url for node in self.nodes)

    async def kill(self, place: int) -> None:
        """End a node by SIGKILL; returns when the process is gone."""
        self.nodes[place].signal(signal.SIGKILL)
        self._stopped.discard(place)
        await self.nodes[place].wait()

    def stop(self, place: int) -> None:
        """Halt a node by SIGSTOP: its connections stay open, and nobody answers on them."""
        self.nodes[place].signal(signal.SIGSTOP)
        self._stopped.add(place)

    def cont(self, place: int) -> None:
        """Let a stopped node go on."""
        self.nodes[place].signal(signal.SIGCONT)
        self._stopped.discard(place)

    async def restart(self, place: int) -> None:
        """Start a node that is gone again; returns when it takes connections, perhaps before it is up to date."""
        await self.nodes[place].restart()

    async def ready(self) -> None:
        """Return when every node that runs holds all that the cluster does, and the cluster has a leader.

        Raises `StartupError`.
        """
        running = [place for place, node in enumerate(self.nodes) if node.alive and place not in self._stopped]
        try:
            async with asyncio.timeout(_READY_TIMEOUT), self._client() as client:
                for place in running:
                    while not await self._is_current(client, place, len(running)):  # noqa: ASYNC110
                        await asyncio.sleep(_POLL)
        except TimeoutError:
            raise StartupError(
                f"the NATS cluster has no leader after {_READY_TIMEOUT:g} s; look into nats-server.log of each node"
            ) from None

    async def leader_of(self, stream: str) -> int | None:
        """The node that leads a stream, by the server's name for it (`PENSTOCK_JOBS`); None while none does."""
        return (await self._leaders()).get(stream)

    async def meta_leader(self) -> int | None:
        """The node that decides about streams and consumers."""
        async with self._client() as client:
            for place in range(len(self.nodes)):
                found = await self._ask(client, place, "/jsz") or {}
                if leader := found.get("meta_cluster", {}).get("leader"):
                    return _place(leader)
        return None

    async def step_aside(self, place: int) -> None:
        """Have other nodes lead the streams and consumers that a node leads.

        Raises `BrokerAway` where the node is, and `BrokerUnavailable` where nobody answers.
        """
        async with self._client() as client:
            found = await self._ask(client, place, "/jsz?accounts=1&streams=1&consumers=1") or {}
        streams = [one for account in found.get("account_details", ()) for one in account["stream_detail"]]
        led = [f"STREAM.LEADER.STEPDOWN.{one['name']}" for one in streams if _is_led(one, place)]
        led += [
            f"CONSUMER.LEADER.STEPDOWN.{one['name']}.{consumer['name']}"
            for one in streams
            for consumer in one.get("consumer_detail") or ()
            if _is_led(consumer, place)
        ]
        link = await Link.connect(self.nodes[place].url, name="step-aside", timeout=_ANSWER_TIMEOUT)
        try:
            for method in led:
                with contextlib.suppress(ApiError):  # it has gone, or has another leader already
                    await call(link, method)
        finally:
            await link.close()

    async def close(self) -> None:
        """End all nodes, and let go of their directories and ports."""
        for place in tuple(self._stopped):
            self.cont(place)
        await asyncio.gather(*(node.stop() for node in self.nodes))
        self._reserved.close()

    async def _leaders(self) -> dict[str, int]:
        async with self._client() as client:
            for place in range(len(self.nodes)):
                found = await self._ask(client, place, "/jsz?accounts=1&streams=1") or {}
                streams = [one for account in found.get("account_details", ()) for one in account["stream_detail"]]
                clusters = {one["name"]: one.get("cluster", {}).get("leader") for one in streams}
                if found:
                    return {name: _place(leader) for name, leader in clusters.items() if leader}
        return {}

    async def _is_current(self, client: httpx2.AsyncClient, place: int, size: int) -> bool:
        meta = (await self._ask(client, place, "/jsz") or {}).get("meta_cluster", {})
        if leader := meta.get("leader"):
            about = await self._ask(client, _place(leader), "/jsz") or {}
            replicas = about.get("meta_cluster", {}).get("replicas", ())
            current = sum(replica.get("current", False) for replica in replicas)
            return current >= size - 1 and await self._ask(client, place, "/healthz") is not None
        return False

    async def _ask(self, client: httpx2.AsyncClient, place: int, path: str) -> dict[str, Any] | None:
        """What a node's monitoring says, None where it says nothing or that something is amiss."""
        if place in self._stopped:
            return None
        try:
            answer = await client.get(self._monitors[place] + path)
        except httpx2.HTTPError:
            return None
        return dict(answer.json()) if answer.status_code == 200 else None

    def _client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(timeout=_ANSWER_TIMEOUT, trust_env=False)


def _configuration(place: int, token: str, own: _Ports, others: list[int]) -> list[str]:
    return [
        f"server_name: n{place}",
        f'http: "127.0.0.1:{own.monitor}"',
        "cluster {",
        "  name: local",
        f'  listen: "127.0.0.1:{own.route}"',
        # Servers tell each other where they may be dialled; these know it, and must not go round what `dial` gave.
        f'  advertise: "127.0.0.1:{own.nowhere}"',
        "  no_advertise: true",
        f"  authorization {{ user: node, password: {json.dumps(token)} }}",
        f"  routes: {json.dumps([f'nats-route://node:{token}@127.0.0.1:{port}' for port in others])}",
        "}",
    ]


def _is_led(detail: dict[str, Any], place: int) -> bool:
    return bool(detail.get("cluster", {}).get("leader") == f"n{place}")


def _place(name: str) -> int:
    return int(name.removeprefix("n"))


def _reserve(stack: contextlib.ExitStack) -> int:
    """A port that stays reserved for a server of ours until the stack is closed."""
    one = stack.enter_context(socket.socket())
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    return int(one.getsockname()[1])
