"""How a worker publishes its engine's outputs: each right behind the one before, or not at all."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from math import floor

from ...engine import RequestHandle
from ...engine.vision.images import PromptImage
from ...schemas.errors import PayloadTooLarge, Superseded
from ...schemas.events import Delta, Output, Started
from ...schemas.jobs import ValidatedJob
from ...schemas.wire import codec
from ...schemas.wire.hops import PREEMPTED, append_hop
from ...streams.port import HOPS, Headers
from ..contract import Pipe
from ..visits import CURRENT
from .request_metrics import RequestMetrics
from .spans import InferSpan

_PROCESS = uuid.uuid4().hex
_numbers = count()  # with _PROCESS they name each holder; a random name for each would wait for the engine's thread
_NO_HEADERS: Headers = {}
_LONGEST_PAUSE = 0.5  # seconds
_EACH = 0.01  # seconds for each event of a request, where the interval is no shorter
_MOST_EVENTS = 1_000  # of a worker's streams in a second; more are made larger instead
_EVENTS_OF_A_CORE = 150  # no more than so many, where the model may be computed on the same cores
_MOST_TOKENS = 4096  # of the outputs of one message


class OutputPublisher:
    """Publishes the outputs of one request in one epoch. In an outage of the broker it waits; it skips nothing.

    The epoch's announcement travels with its first token, or before it if `announce` is called. Each output names the
    sequence that it must follow. If another worker has published since, the request is that worker's, and this
    publisher stops.
    """

    def __init__(
        self,
        pipe: Pipe,
        job: ValidatedJob,
        pace: Callable[[], float],
        metrics: RequestMetrics,
        adapter: str | None = None,
        images: tuple[PromptImage, ...] = (),
    ) -> None:
        """`adapter` is the engine's name for the adapter of the job, `images` are those of its prompt."""
        self.job = job
        self.adapter = adapter
        self.images = images
        self.metrics = metrics
        self.fallback: str | None = None  # the backend that runs it instead of the worker's first; set by Infer
        self.epoch = 1  # set by Infer
        self.span: InferSpan | None = None  # set by Infer while tracing is on
        self.last = 0  # sequence of the newest output stored; set by Infer and _store
        self.handles: list[RequestHandle] = []  # set by Infer
        self.finished: frozenset[int] = frozenset()  # choices that an earlier worker has finished; set by Infer
        self.begun = asyncio.Event()  # the first output of this epoch is stored; set by _tell_together
        self.ended = asyncio.Event()  # set by Infer
        self.is_cut = False  # the deadline came before every vector; half of them are no answer; set by relay
        self._pipe = pipe
        self._pace = pace  # seconds for each event, while all streams of the worker are to have their turns
        self._subject = pipe.outputs_of(job.tenant, job.id)
        self._holder = f"{_PROCESS}-{next(_numbers)}"
        self._turn = asyncio.Lock()  # outputs are stored one after the other
        self._ours: bool | None = None  # None until announced; set by announce
        self.expired = False  # set by expire

    @property
    def is_ours(self) -> bool:
        """False once another worker was found to have published for this request."""
        return self._ours is not False

    def cancel(self) -> None:
        """Stop before the next token."""
        for handle in self.handles:
            handle.cancel()

    def expire(self) -> None:
        """The deadline has come."""
        self.expired = True
        self.cancel()

    async def announce(self, *first: Delta) -> bool:
        """Publish the epoch's beginning, with its first output if there is one; False if another worker was first."""
        job, holder = self.job, self._holder
        form = job.form.model_dump() if job.form else None
        started = Started(
            job.id,
            self.epoch,
            holder,
            job.tenant,
            job.bridge,
            job.choices,
            job.prompt_tokens,
            form,
            job.priority,
            job.endpoint,
            job.served_name,
            self.fallback,
            int(job.created),
            job.shown_prompts,
        )
        visit = CURRENT.get()
        headers = visit.headers(None, epoch=self.epoch) if visit else {}
        self._ours = await self._store((started, *first), f"started.{holder}", headers)
        return self._ours

    async def relay(self, handle: RequestHandle) -> None:
        """Publish the deltas of one engine request to its end; those made during a publish go out together.

        So do those of an interval: each message takes time from a model that is computed on the same cores. The first
        token waits for nothing.
        """
        loop = asyncio.get_running_loop()
        while not handle.finished and self._ours is not False:
            taken = await handle.take()
            told = loop.time()
            deltas = [delta for delta in taken if delta.choice not in self.finished]
            if self.expired and any(delta.finish_reason == "cancelled" for delta in deltas):
                self.is_cut = self.job.is_pooled
                if self.is_cut:
                    return
            for message in messages(map(self._addressed, deltas)):
                await self._publish(message, handle)
            if handle.finished:
                return
            going = sum(not other.finished for other in self.handles)  # each a prompt of the request
            until = next_turn(told, len(deltas) * going, self._pipe.settings.relay_interval, self._pace())
            if (early := until - loop.time()) > 0:
                await handle.pause(early)

    def _addressed(self, delta: Delta) -> Delta:
        """The delta, now under its job's id; what the deadline has cancelled says so."""
        delta.request = self.job.id
        if self.expired and delta.finish_reason == "cancelled":
            delta.finish_reason = "deadline"
        return delta

    async def _publish(self, deltas: Sequence[Delta], handle: RequestHandle) -> None:
        """Publish deltas in one message, or in several where the broker takes only small ones."""
        try:
            await self._tell_together(deltas, handle)
        except PayloadTooLarge:
            if len(deltas) == 1:
                raise
            middle = len(deltas) // 2
            await self._publish(deltas[:middle], handle)
            await self._publish(deltas[middle:], handle)

    async def _tell_together(self, deltas: Sequence[Delta], handle: RequestHandle) -> None:
        first = deltas[0]
        async with self._turn:
            if self._ours is None:
                await self.announce(*deltas)
            elif self._ours:
                self._ours = await self._store(deltas, f"{first.choice}.{first.index}.{first.finish_reason or ''}")
            if self._ours:
                self.metrics.published(deltas, handle.times)
                if self.span is not None:
                    self.span.published(deltas)
        self.begun.set()

    async def _store(self, outputs: Sequence[Output], key: str, headers: Headers = _NO_HEADERS) -> bool:
        """Publish outputs, however long it takes; False if another worker's are stored instead.

        Preemptions since the last output are told in the header of hops.
        """
        for handle in self.handles:
            if handle.preemptions:
                headers = self._with_preemptions(headers, handle)
        data = codec.encode_outputs(outputs)
        name = f"{self.job.tenant}.{self.job.id}.{self.epoch}.{key}"
        while True:
            try:
                stored = await self._pipe.store(self._subject, data, name, codec.OUTPUTS, headers, self.last)
            except Superseded:
                transcript = await self._pipe.transcript(self.job.tenant, self.job.id)
                is_pushed_out = transcript.last == 0 < self.last  # by the stream's limits: it counts all the same
                is_ours = transcript.started is not None and transcript.started.holder == self._holder
                if not (is_pushed_out or is_ours):  # otherwise another worker has published
                    return False
                self.last = transcript.last
            else:
                self.last = stored.sequence
                return True

    def _with_preemptions(self, headers: Headers, handle: RequestHandle) -> Headers:
        """The headers, with the preemptions that are over behind the hops; the handle forgets these."""
        hops = headers.get(HOPS, "")
        for one in [one for one in handle.preemptions if one.resumed is not None]:
            handle.preemptions.remove(one)
            hops = append_hop(hops, PREEMPTED, at=one.at, began=one.at, left=one.resumed, choice=one.choice)
            if self.span is not None and one.resumed is not None:
                self.span.preempted(one.choice, one.at, one.resumed)
        return {**headers, HOPS: hops} if hops else headers


def next_turn(told: float, events: int, interval: float, pace: float) -> float:
    """The loop time at which a request that has just told of so many events may do so again.

    All streams take their turns at the same moments, multiples of the interval: what wakes the broker, the stages and
    the clients for one of them does so for all. Time passes for each event too, so that a request for many choices
    makes no more of them in a second than others, nor do many streams together; but never more than half a second.
    `interval` is in seconds, `pace` in seconds for each event.
    """
    each = max(min(interval, _EACH), pace)
    until = told + max(interval, min(each * events, _LONGEST_PAUSE))
    return floor(until / interval + 1e-6) * interval if interval else until  # a clock may be early by so little


def pace(num_streams: int, interval: float, cores: int) -> float:
    """Seconds for each event of a stream, so that all of a worker together make no more than the machine is good for.

    Without an `interval` few cores are no reason to send tokens together.
    """
    return num_streams / min(_MOST_EVENTS, _EVENTS_OF_A_CORE * cores if interval else _MOST_EVENTS)


def messages(deltas: Iterable[Delta]) -> Iterator[list[Delta]]:
    """What travels in one message: as much as surely fits. Log-probabilities are large, and travel alone."""
    together: list[Delta] = []
    tokens = 0
    for delta in deltas:
        tokens += len(delta.token_ids)
        if together and (tokens > _MOST_TOKENS or delta.logprobs is not None or together[-1].logprobs is not None):
            yield together
            together, tokens = [], len(delta.token_ids)
        together.append(delta)
    if together:
        yield together
