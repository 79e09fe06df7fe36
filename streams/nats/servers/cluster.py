"""A JetStream cluster on this machine: connected nats-servers on loopback, for tests and `bench chaos`.

The servers advertise no addresses to clients (`no_advertise`), so a client cannot bypass a proxy in `urls`.
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

from ....schemas.errors import StartupError
from ..connection.link import Link
from ..management import ApiError, call
from .server import EmbeddedServer

_READY_TIMEOUT = 60.0  # seconds for an election; servers on busy cores take several of them
_ANSWER_TIMEOUT = 2.0  # seconds; a stopped server answers nobody
_POLL = 0.1


# Called with the indices of two nodes and the second one's route port; returns the port that the first one dials.
Dial = Callable[[int, int, int], Awaitable[int]]


class _Ports(NamedTuple):
    """The ports of a node, besides the one for clients."""

    route: int
    monitor: int
    nowhere: int  # where nothing listens


class LocalCluster:
    """Create it with `start`. Node indices count from 0; `urls` and the ports of a node stay the same when it restarts.

    Sockets that are bound but do not listen reserve the ports, so they stay free for their node while it is down.
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

        `dial` may put a proxy between two of them. Raises `StartupError`.
        """
        token, nodes = secrets.token_hex(16), []
        async with contextlib.AsyncExitStack() as stack:
            reserved = stack.enter_context(contextlib.ExitStack())
            routes, monitors, nowhere = ([_reserve(reserved) for _ in range(size)] for _ in range(3))
            for index in range(size):
                # Every server needs all routes from the beginning: it derives the quorum of an election from them.
                others = [
                    await dial(index, other, port) if dial else port
                    for other, port in enumerate(routes)
                    if other != index
                ]
                own = _Ports(routes[index], monitors[index], nowhere[index])
                more = _configuration(index, token, own, others)
                node = await EmbeddedServer.start(
                    state_dir / f"n{index}", binary, sync_interval, token=token, more=more
                )
                stack.push_async_callback(node.stop)
                nodes.append(node)
            cluster = cls(nodes, [f"http://127.0.0.1:{port}" for port in monitors], reserved)
            await cluster.ready()
            stack.pop_all()
        return cluster

    @property
    def urls(self) -> str:
        """All nodes, separated by commas, with the token: keep it out of logs."""
        return ",".join(node.url for node in self.nodes)

    async def kill(self, index: int) -> None:
        """End a node by SIGKILL; returns when the process is gone."""
        self.nodes[index].signal(signal.SIGKILL)
        self._stopped.discard(index)
        await self.nodes[index].wait()

    def stop(self, index: int) -> None:
        """Suspend a node by SIGSTOP: its connections stay open without an answer."""
        self.nodes[index].signal(signal.SIGSTOP)
        self._stopped.add(index)

    def cont(self, index: int) -> None:
        """Resume a suspended node by SIGCONT."""
        self.nodes[index].signal(signal.SIGCONT)
        self._stopped.discard(index)

    async def restart(self, index: int) -> None:
        """Restart a dead node; returns when it accepts connections, perhaps before it is up to date."""
        await self.nodes[index].restart(may_be_empty=True)

    async def ready(self) -> None:
        """Return when every running node is up to date and the cluster has a leader.

        Raises `StartupError`.
        """
        running = [index for index, node in enumerate(self.nodes) if node.alive and index not in self._stopped]
        try:
            async with asyncio.timeout(_READY_TIMEOUT), self._client() as client:
                for index in running:
                    while not await self._is_current(client, index, len(running)):  # noqa: ASYNC110
                        await asyncio.sleep(_POLL)
        except TimeoutError:
            raise StartupError(
                f"the NATS cluster has no leader after {_READY_TIMEOUT:g} s; read the nats-server.log of each node"
            ) from None

    async def leader_of(self, stream: str) -> int | None:
        """The index of the node that leads a stream (the server's name, `PENSTOCK_JOBS`); None while none does."""
        return (await self._leaders()).get(stream)

    async def meta_leader(self) -> int | None:
        """The index of the node that manages streams and consumers."""
        async with self._client() as client:
            for index in range(len(self.nodes)):
                found = await self._ask(client, index, "/jsz") or {}
                if leader := found.get("meta_cluster", {}).get("leader"):
                    return _index_of(leader)
        return None

    async def step_aside(self, index: int) -> None:
        """Make other nodes lead the streams and consumers that a node leads.

        Raises `BrokerAway` if the node is down, and `BrokerUnavailable` if it does not answer.
        """
        async with self._client() as client:
            found = await self._ask(client, index, "/jsz?accounts=1&streams=1&consumers=1") or {}
        streams = [one for account in found.get("account_details", ()) for one in account["stream_detail"]]
        led = [f"STREAM.LEADER.STEPDOWN.{one['name']}" for one in streams if _is_led(one, index)]
        led += [
            f"CONSUMER.LEADER.STEPDOWN.{one['name']}.{consumer['name']}"
            for one in streams
            for consumer in one.get("consumer_detail") or ()
            if _is_led(consumer, index)
        ]
        link = await Link.connect(self.nodes[index].url, name="step-aside", timeout=_ANSWER_TIMEOUT)
        try:
            for method in led:
                with contextlib.suppress(ApiError):  # it was deleted, or already has another leader
                    await call(link, method)
        finally:
            await link.close()

    async def close(self) -> None:
        """Stop all nodes and release their directories and ports."""
        for index in tuple(self._stopped):
            self.cont(index)
        await asyncio.gather(*(node.stop() for node in self.nodes))
        self._reserved.close()

    async def _leaders(self) -> dict[str, int]:
        async with self._client() as client:
            for index in range(len(self.nodes)):
                found = await self._ask(client, index, "/jsz?accounts=1&streams=1") or {}
                streams = [one for account in found.get("account_details", ()) for one in account["stream_detail"]]
                clusters = {one["name"]: one.get("cluster", {}).get("leader") for one in streams}
                if found:
                    return {name: _index_of(leader) for name, leader in clusters.items() if leader}
        return {}

    async def _is_current(self, client: httpx2.AsyncClient, index: int, size: int) -> bool:
        meta = (await self._ask(client, index, "/jsz") or {}).get("meta_cluster", {})
        if leader := meta.get("leader"):
            about = await self._ask(client, _index_of(leader), "/jsz") or {}
            replicas = about.get("meta_cluster", {}).get("replicas", ())
            current = sum(replica.get("current", False) for replica in replicas)
            return current >= size - 1 and await self._ask(client, index, "/healthz") is not None
        return False

    async def _ask(self, client: httpx2.AsyncClient, index: int, path: str) -> dict[str, Any] | None:
        """The answer of a node's monitoring endpoint; None if it does not answer, or with an error."""
        if index in self._stopped:
            return None
        try:
            answer = await client.get(self._monitors[index] + path)
        except httpx2.HTTPError:
            return None
        return dict(answer.json()) if answer.status_code == 200 else None

    def _client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(timeout=_ANSWER_TIMEOUT, trust_env=False)


def _configuration(index: int, token: str, own: _Ports, others: list[int]) -> list[str]:
    return [
        f"server_name: n{index}",
        f'http: "127.0.0.1:{own.monitor}"',
        "cluster {",
        "  name: local",
        f'  listen: "127.0.0.1:{own.route}"',
        # Servers gossip their addresses; with a dead one, they cannot bypass the ports that `dial` returned.
        f'  advertise: "127.0.0.1:{own.nowhere}"',
        "  no_advertise: true",
        f"  authorization {{ user: node, password: {json.dumps(token)} }}",
        f"  routes: {json.dumps([f'nats-route://node:{token}@127.0.0.1:{port}' for port in others])}",
        "}",
    ]


def _is_led(detail: dict[str, Any], index: int) -> bool:
    return bool(detail.get("cluster", {}).get("leader") == f"n{index}")


def _index_of(name: str) -> int:
    return int(name.removeprefix("n"))


def _reserve(stack: contextlib.ExitStack) -> int:
    """A port that stays reserved for one of our servers until the stack is closed."""
    one = stack.enter_context(socket.socket())
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    return int(one.getsockname()[1])
