"""What each role may do on a NATS server, made from the topology: nothing else is allowed.

Permissions name subjects, and JetStream's management has a subject for each call on each stream. A consumer's filter
stands in the subject by which it is created, so a part can neither read another stream nor another part of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..schemas.registry import RETURNED
from .topology import (
    BATCHES,
    DEAD,
    EVENTS,
    INFER,
    JOBS,
    PRIORITIES,
    RATES,
    STREAM,
    TOOLS,
    Subjects,
    Topology,
    lane_stream,
    stage_stream,
)

API = "$JS.API."
_CHARGING = ("validate", "stream")  # stages that charge tenants, in the bucket RATES


class Permissions(NamedTuple):
    """Subjects, with wildcards, that a user may publish and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    def in_domain(self, domain: str) -> Permissions:
        """For streams in a JetStream domain, whose name stands in the subjects that parts publish on.

        A server of that domain allows what it maps these to, as without a domain, and a leaf node what it receives.
        """
        api = f"$JS.{domain}.API."
        calls = (api + subject.removeprefix(API) for subject in self.publish if subject.startswith((API, "$KV.")))
        return self._replace(publish=(*self.publish, *calls))


class Grants:
    """Builds the permissions in a namespace whose streams and buckets are `layout`."""

    def __init__(self, root: str, layout: Topology) -> None:
        self._root = root
        self._layout = layout
        self._subjects = Subjects(root)

    def admin(self, inbox: str) -> Permissions:
        """Everything below the namespace and all of JetStream's management."""
        keys = (f"$KV.{self._root}_{spec.name}.>" for spec in self._layout.buckets)
        publish = (f"{self._root}.>", "$JS.API.>", "$JS.ACK.>", "$JS.SNAPSHOT.>", *keys, f"{inbox}.>")
        return Permissions(publish, (f"{self._root}.>", f"{inbox}.>"))

    def agent(self, inbox: str) -> Permissions:
        """Keeps the catalogue, creates and removes lanes of models, tries new revisions, and runs workers as itself.

        Names of lanes share no token, so whoever may create and remove them may do so with any stream.
        """
        worker = self.worker(inbox)
        root, subjects = self._root, self._subjects
        publish = [f"{root}.batch.>", *(f"{API}STREAM.{call}.*" for call in ("CREATE", "DELETE"))]
        publish += [subjects.cancel_all(), *worker.publish]
        return Permissions(tuple(dict.fromkeys(publish)), worker.subscribe)

    def bridge(self, inbox: str) -> Permissions:
        """Publishes jobs, steps of tools and batches; reads events, outputs and all that is kept for clients."""
        root = self._root
        publish = [f"{root}.{kind}.>" for kind in ("jobs", "batches", "dead", "events", "tools")]
        streams = [EVENTS, STREAM, DEAD, INFER, *_lanes(TOOLS)]
        publish += [*self._reads(streams), *self._deletes(DEAD), f"{API}STREAM.LIST", f"{API}CONSUMER.LIST.*"]
        publish += self._consumes(BATCHES, "*", self._subjects.batches("x").rpartition(".")[0] + ".*")
        subscribe = (f"{root}.events.>", f"{root}.control.>", f"{root}.jobs.>", f"{root}.tools.>")
        return self._part(inbox, publish, subscribe)

    def stage(self, name: str, inbox: str) -> Permissions:
        """Takes from the streams of its own name alone, and publishes what follows them."""
        root, subjects = self._root, self._subjects
        publish = [f"{root}.{kind}.>" for kind in ("events", "dead", "tools")]
        subscribe: list[str] = [f"{root}.control.>"]
        reads = [EVENTS, STREAM]
        if name == "validate":
            for priority in PRIORITIES:
                publish += self._consumes(lane_stream(JOBS, priority), name, subjects.jobs_of(priority))
            publish += self._next_stages(name)
            subscribe += [subjects.jobs_all(), f"{root}.events.>"]
        elif name == "batch":
            for priority in PRIORITIES:
                publish += self._consumes(None, f"batch-{priority}", f"{root}.batch.*.{priority}.>")
            publish += [f"{root}.infer.*", f"{API}CONSUMER.DELETE.{self._server(INFER)}.*"]
            publish += [*self._consumes(INFER, "*", f"{root}.infer.*"), f"{root}.batch.>"]
            reads.append(INFER)
        elif name == "stream":
            publish += self._consumes(STREAM, "*", f"{root}.stream.*.>")
        else:
            for priority in PRIORITIES:
                stream = lane_stream(stage_stream(name), priority)
                publish += [*self._consumes(stream, name, subjects.stage_of(name, priority)), *self._deletes(stream)]
            publish += self._next_stages(name)
        return self._part(inbox, [*publish, *self._reads(reads)], subscribe, charges=name in _CHARGING)

    def worker(self, inbox: str) -> Permissions:
        """Takes batches of requests and publishes their outputs."""
        root = self._root
        publish = [*(f"{root}.{kind}.>" for kind in ("stream", "events", "dead")), self._subjects.infer(RETURNED)]
        publish += [*self._consumes(INFER, "*", f"{root}.infer.*"), *self._reads([EVENTS, STREAM, INFER])]
        return self._part(inbox, publish, [f"{root}.control.>"])

    def tools(self, inbox: str) -> Permissions:
        """Calls the tools of responses, and publishes the jobs of their turns."""
        root, subjects = self._root, self._subjects
        publish = [f"{root}.{kind}.>" for kind in ("jobs", "tools", "events", "dead")]
        for priority in PRIORITIES:
            publish += self._consumes(lane_stream(TOOLS, priority), "tools", subjects.tools_of(priority))
        return self._part(inbox, [*publish, *self._reads([EVENTS, STREAM])], [f"{root}.control.>"])

    def tenant(self, tenant: str, inbox: str) -> Permissions:
        """Publishes and cancels its own jobs, hears its own events as they come, and asks for those that are stored."""
        publish = [self._subjects.jobs(priority, tenant) for priority in PRIORITIES]
        publish += [self._subjects.cancel_of(tenant), self._subjects.replay_of(tenant), f"{inbox}.>"]
        return Permissions(tuple(publish), (self._subjects.events_to(tenant), f"{inbox}.>"))

    def _part(
        self, inbox: str, publish: Sequence[str], subscribe: Sequence[str], *, charges: bool = False
    ) -> Permissions:
        """What all parts do besides: they announce themselves, see whether the streams are there, and read and write
        the buckets. Buckets in memory they create again, as a server that restarts has lost them.

        That of the rates is for those that charge tenants alone.
        """
        in_memory = [f"KV_{self._root}_{spec.name}" for spec in self._layout.buckets if spec.storage == "memory"]
        buckets = [f"{self._root}_{spec.name}" for spec in self._layout.buckets if charges or spec.name != RATES]
        common = [
            *(f"$KV.{bucket}.>" for bucket in buckets),
            *(each for bucket in buckets for each in _reading(f"KV_{bucket}")),
            *(f"{API}STREAM.PURGE.KV_{bucket}" for bucket in buckets),
            *(f"{API}STREAM.CREATE.{bucket}" for bucket in in_memory),
            *(f"{API}{call}" for call in ("INFO", "STREAM.NAMES", "STREAM.INFO.*")),
            f"{self._root}.control.>",
            f"{inbox}.>",
        ]
        return Permissions(tuple(dict.fromkeys([*publish, *common])), (*subscribe, f"{inbox}.>"))

    def _next_stages(self, name: str) -> list[str]:
        """Where a job may go from this stage: another one with a queue, or the lanes of its model."""
        queues = {spec.subjects[0].split(".")[1] for spec in self._layout.streams if spec.name.startswith("STAGE_")}
        return [*(f"{self._root}.{queue}.>" for queue in sorted(queues - {name})), f"{self._root}.batch.>"]

    def _consumes(self, stream: str | None, consumer: str, subject: str) -> Iterator[str]:
        """All calls of a durable consumer; without `stream` on any that has the subject."""
        at = f"{self._server(stream) if stream else '*'}.{consumer}"
        yield f"{API}CONSUMER.CREATE.{at}.{subject}"
        for call in ("CONSUMER.INFO", "CONSUMER.MSG.NEXT"):
            yield f"{API}{call}.{at}"
        if stream == STREAM:  # of which a partition is taken over
            yield f"{API}CONSUMER.DELETE.{at}"
        yield f"$JS.ACK.{at}.>"
        yield f"$JS.ACK.*.*.{at}.>"  # as later servers write it

    def _reads(self, streams: Sequence[str]) -> list[str]:
        return [each for stream in streams for each in _reading(self._server(stream))]

    def _deletes(self, stream: str) -> list[str]:
        return [f"{API}STREAM.MSG.DELETE.{self._server(stream)}"]

    def _server(self, stream: str) -> str:
        return f"{self._root}_{stream}".upper()


def _lanes(stream: str) -> list[str]:
    return [lane_stream(stream, priority) for priority in PRIORITIES]


def _reading(stream: str) -> list[str]:
    return [f"{API}STREAM.MSG.GET.{stream}", f"{API}DIRECT.GET.{stream}", f"{API}DIRECT.GET.{stream}.>"]
