"""The broker of a benchmark: a server or a cluster, kept alive, and proxies by which parts reach it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from ...config.settings import Settings
from ...config.sources import Loaded
from ...schemas.errors import StartupError
from ...streams.nats.administration.deployment import owned
from ...streams.nats.broker import JetStreamBroker
from ...streams.nats.servers.cluster import LocalCluster
from ...streams.nats.servers.server import EmbeddedServer
from ..serve.processes import LEAST_DELAY
from .proxy import Proxy


async def set_up(broker: JetStreamBroker, settings: Settings) -> None:
    """Create the streams, as `penstock serve` does on a broker of its own."""
    await owned(broker, Loaded(settings, dict.fromkeys(Settings.model_fields, "default")))


class Brokers:
    """`nodes` by their number; `links` are the proxies of each part, one a node."""

    def __init__(self) -> None:
        self.nodes: list[EmbeddedServer] = []  # set by started
        self.links: dict[str, list[Proxy]] = {}  # set by linked
        self.may_start = asyncio.Event()  # cleared while what is dead is to stay so
        self.may_start.set()
        self._cluster: LocalCluster | None = None  # set by started
        self._routes: dict[tuple[int, int], Proxy] = {}  # from which node to which; set by started

    @property
    def urls(self) -> str:
        """Of all nodes, past every proxy."""
        return ",".join(node.url for node in self.nodes)

    @contextlib.asynccontextmanager
    async def started(
        self, settings: Settings, state: Path, count: int, small_disk: str | None = None
    ) -> AsyncIterator[None]:
        """Run `count` nodes, and start again what dies; the last one may store on another file system."""
        binary, sync = settings.nats_server, settings.nats_sync_interval
        try:
            async with contextlib.AsyncExitStack() as stack:
                if small_disk is not None:
                    store = stack.enter_context(tempfile.TemporaryDirectory(prefix="nats-", dir=small_disk))
                    (state / f"n{count - 1}").symlink_to(store)
                if count == 1:
                    self.nodes = [await EmbeddedServer.start(state / "n0", binary, sync)]
                    stack.push_async_callback(self.nodes[0].stop)
                else:
                    cluster = self._cluster = await LocalCluster.start(state, count, binary, sync, dial=self._dial)
                    stack.push_async_callback(cluster.close)
                    self.nodes = cluster.nodes
                group = await stack.enter_async_context(asyncio.TaskGroup())
                for node in self.nodes:
                    stack.callback(group.create_task(self._keep(node)).cancel)
                yield
        finally:
            for proxy in (*self._routes.values(), *(proxy for links in self.links.values() for proxy in links)):
                await proxy.close()

    async def linked(self, part: str) -> str:
        """The servers' URLs for one part, each by a proxy of its own."""
        urls = [urlsplit(node.url) for node in self.nodes]
        self.links[part] = [await Proxy.start(url.port or 0) for url in urls]
        pairs = zip(urls, self.links[part], strict=True)
        return ",".join(urlunsplit(url._replace(netloc=f"{url.username}@127.0.0.1:{it.port}")) for url, it in pairs)

    async def be_a_follower(self, node: int) -> bool:
        """Move the leadership of all streams away from a node; False where it is the meta leader, which stays."""
        if self._cluster is None or await self._cluster.meta_leader() == node:
            return False
        await self._cluster.step_aside(node)
        return True

    def delay(self, node: int, seconds: float) -> None:
        """Delay the traffic between a node and the others."""
        for ends, proxy in self._routes.items():
            if node in ends:
                proxy.delay = seconds

    def hold(self, node: int, *, sent: bool = True, received: bool = True) -> None:
        """Hold back what a node sends to the others, or what they send to it, or both, until `release`."""
        for (source, target), proxy in self._routes.items():
            if source == node:
                proxy.stall(sent=sent, received=received)
            elif target == node:
                proxy.stall(sent=received, received=sent)

    def release(self) -> None:
        for proxy in self._routes.values():
            proxy.resume()

    async def leader_of(self, stream: str) -> int | None:
        """The node that leads a stream (the server's name)."""
        return await self._cluster.leader_of(stream) if self._cluster else None

    async def replace(self, node: int) -> None:
        """Kill a node; it is started again."""
        if self._cluster:
            await self._cluster.kill(node)

    async def whole(self) -> None:
        """Return when all nodes run and are up to date. Raises `StartupError` where they are not in a minute."""
        if self._cluster:
            while not all(node.alive for node in self.nodes):  # noqa: ASYNC110  (`_keep` starts them)
                await asyncio.sleep(LEAST_DELAY)
            await self._cluster.ready()

    async def _dial(self, source: int, target: int, port: int) -> int:
        proxy = self._routes[source, target] = await Proxy.start(port)
        return proxy.port

    async def _keep(self, node: EmbeddedServer) -> None:
        while True:
            await node.wait()
            await self.may_start.wait()
            try:
                await node.restart()
            except StartupError:  # for instance, its port is not free yet
                await asyncio.sleep(LEAST_DELAY)
