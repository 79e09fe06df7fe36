"""Runs batches: each is one message of a work queue, which one bridge leases, and another once that one has died.

Every line is a job, whose id consists of the batch's id and the line's number, and its result is stored under that
number as soon as it ends. A bridge that takes a batch over keeps the stored results, follows the jobs that were begun
and runs the rest. Lines begin in order, so the jobs without a result that were begun belong to the first lines without.
Once the batch is cancelled, or its window has ended, no more lines begin, and those that are left end together.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, get_args

import orjson
import structlog

from ...config.settings import Settings
from ...schemas.errors import (
    Fatal,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    PenstockError,
    Refusal,
    StreamNotFound,
    Transient,
)
from ...schemas.events import Cancelled, Done, ErrorBody, Event, Expired, Failed
from ...schemas.jobs import Job
from ...schemas.openai.batches import FINAL, RESPONSES, Batch, Counts, Ending, Fault, Faults, Status
from ...streams.beats import until_beat
from ...streams.outages import outage_logged
from ...streams.port import ConsumerSpec, Delivery
from ...streams.stores.batches import change_batch
from ...streams.stores.files import delete_expired_files
from ...streams.stores.objects import ObjectInfo, Objects
from ...streams.stores.quotas import NO_SPACE, Quotas
from ...streams.topology import BATCH_RESULTS, BATCH_STATES, BATCHES, CONSUMER_IDLE, FILES
from ..bridge.bridge import Bridge
from ..bridge.reading import Reading
from ..bridge.response_reading import ResponseReading
from ..render.openai import error_payload
from .dialects import Answer, prepared, request_id
from .input import check_lines, checked_line, read_lines
from .results import Results

log = structlog.get_logger(__name__)

AT_ONCE = 4  # batches that run in one process
LONGEST_PAUSE = 30.0  # seconds
SWEEP = 600.0  # seconds between two deletions of expired files

Outcome = tuple[Ending, dict[str, Any] | None]  # with what HTTP would have answered


class BatchRunner:
    """Runs beside a bridge that has started. `now` returns Unix seconds.

    A request that another bridge may have begun counts as lost after `patience` seconds without an event.
    """

    def __init__(
        self, bridge: Bridge, settings: Settings, *, now: Callable[[], float] = time.time, patience: float = 200.0
    ) -> None:
        self.bridge = bridge
        self.settings = settings
        self.now = now
        self.patience = patience
        self.quotas = Quotas(bridge.broker, settings.tenant_quota)
        self._room = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Run batches until cancelled; then release them to other bridges, while their requests continue."""
        lanes: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep())
            while True:
                with outage_logged("new batches cannot be read"):
                    held = await self.bridge.broker.held(BATCHES)
                    tenants = {subject.rpartition(".")[2] for subject in held.by_subject}
                    for tenant in lanes.keys() - tenants:
                        lanes.pop(tenant).cancel()
                    for tenant in tenants:
                        if tenant not in lanes or lanes[tenant].done():
                            lanes[tenant] = group.create_task(self._lane(tenant, group))
                await asyncio.sleep(until_beat(self.settings.lease / 3))

    async def _lane(self, tenant: str, group: asyncio.TaskGroup) -> None:
        """Begin a tenant's batches. One at a time waits for a slot, behind those of others: so tenants take turns."""
        lease, name, subject = self.settings.lease, f"batches-{tenant}", self.bridge.subjects.batches(tenant)
        spec = ConsumerSpec(BATCHES, name, subject, ack_wait=lease, max_deliver=0, idle_limit=CONSUMER_IDLE)
        try:
            consumer = await self.bridge.broker.consume(spec, prefetch=1)
        except PenstockError as error:
            log.warning("the batches of a tenant cannot be consumed", tenant=tenant, reason=str(error))
            return
        try:
            while deliveries := await consumer.take(1):
                try:
                    async with asyncio.timeout(lease / 2):
                        await self._room.acquire()
                except (TimeoutError, asyncio.CancelledError) as error:
                    await deliveries[0].nak()  # another bridge may have room
                    if not isinstance(error, TimeoutError):
                        raise
                else:
                    settling = group.create_task(self._settle(deliveries[0]))
                    settling.add_done_callback(lambda _: self._room.release())
        finally:
            await consumer.close()

    async def _settle(self, delivery: Delivery) -> None:
        try:
            broker = self.bridge.broker
            files, results = await Objects.of(broker, FILES), await Objects.of(broker, BATCH_RESULTS)
            await _Run(self, delivery, files, results).run()
            await delivery.ack()
        except asyncio.CancelledError:
            await delivery.nak()
            raise
        except Exception as error:
            log.warning("a batch was interrupted, retrying", attempt=delivery.attempt, reason=_reason(error))
            await delivery.nak(min(2.0 ** min(delivery.attempt - 1, 5), LONGEST_PAUSE))

    async def _sweep(self) -> None:
        while True:
            with outage_logged("expired files cannot be deleted"):
                await delete_expired_files(self.bridge.broker)
            await asyncio.sleep(SWEEP)


class _Run:
    """Runs one batch."""

    def __init__(self, runner: BatchRunner, delivery: Delivery, files: Objects, results: Objects) -> None:
        self.batch = Batch.model_validate_json(delivery.message.data)  # as the client requested it
        self._runner = runner
        self._bridge = runner.bridge
        self._delivery = delivery
        self._files = files
        self._results = Results(self.batch, results, files)
        self._tally: Counter[Ending] = Counter()  # lines
        self._open: set[Reading] = set()
        self._cancelled = asyncio.Event()  # set by run and _beat

    async def run(self) -> None:
        """Run the batch to its end, from wherever it is."""
        states = await self._bridge.broker.bucket(BATCH_STATES)
        await states.create(self.batch.key, self._delivery.message.data)  # if its bridge died before it could
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(self._beat())
            batch = await self._move({})
            if batch.status == "cancelling":
                self._cancelled.set()
            if batch.status not in FINAL:
                batch = await self._finish(batch)
            await self._results.forget()
            beating.cancel()

    async def _finish(self, batch: Batch) -> Batch:
        input = await self._files.info(f"{batch.tenant}.{batch.input_file_id}")
        if input is None:
            gone = Fault(code="input_file_not_found", message="The input file was deleted.", param="input_file_id")
            return await self._fail([gone])
        if not (total := batch.request_counts.total):
            limit = self._runner.settings.max_body_size
            total, faults = await check_lines(self._files.read(input), limit, batch.endpoint)
            if faults:
                return await self._fail(faults)
            await self._move({"validating": "in_progress"}, request_counts=Counts(total=total))
        if (begun := await self._answer_all(input)) < total:
            await self._results.leave(begun, self._ending)
        await self._move({"in_progress": "finalizing"})
        summary = await self._results.summary(total, read_lines(self._files.read(input)))
        ended: Status = "expired" if summary.request_counts.expired else "completed"
        return await self._move({"cancelling": "cancelled", "finalizing": ended}, **summary._asdict())

    async def _fail(self, faults: list[Fault]) -> Batch:
        return await self._move(dict.fromkeys(get_args(Status), "failed"), errors=Faults(data=faults))

    async def _move(self, steps: Mapping[Status, Status], **values: Any) -> Batch:
        def moved(batch: Batch) -> Batch:
            return batch.after(steps, self._runner.now(), **values)

        return await change_batch(self._bridge.broker, self.batch.tenant, self.batch.id, moved)

    async def _answer_all(self, input: ObjectInfo) -> int:
        """Run the lines without a result; returns the number of the first that is not run, and none behind it is."""
        most = self._runner.settings.batch_concurrency
        window = asyncio.Semaphore(most)
        inherited = most if self._delivery.attempt > 1 else 0  # lines without a result whose jobs may have been begun
        kept, left = await self._results.kept()
        newest, last = max(kept, default=-1), left.first if left else inf
        number = 0
        async with asyncio.TaskGroup() as group:
            async for _, raw in read_lines(self._files.read(input)):
                if number in kept:
                    self._tally[kept[number].about["ending"]] += 1
                elif number >= last or (inherited <= 0 and self._is_over and number > newest):
                    break
                else:
                    await window.acquire()
                    line = await checked_line(raw)
                    task = group.create_task(self._answer(number, line, inherited > 0))
                    task.add_done_callback(lambda _: window.release())
                    inherited -= 1
                number += 1
        return number

    async def _answer(self, number: int, line: dict[str, Any], inherited: bool) -> None:
        """Run one line, and store its result."""
        ending, response = await self._outcome(number, line["body"], inherited)
        await self._results.keep(number, line["custom_id"], ending, response)
        self._tally[ending] += 1

    async def _outcome(self, number: int, body: dict[str, Any], inherited: bool) -> Outcome:
        """How a line ends, and what HTTP would have answered; overload is not an end but retried."""
        attempt = 0
        try:
            body, answer_to = prepared(self.batch, number, body, int(self._runner.now()))
        except InvalidRequest as refusal:
            return _failed(ErrorBody.of(refusal), self.batch.id)
        while True:
            request = request_id(self.batch, number, attempt)
            answer = answer_to(request)
            is_cut = False
            final: Event | None
            try:
                if not inherited:
                    await self._runner.quotas.check(self.batch.tenant)
                reading = await self._begin(request, body, inherited)
            except Refusal as refusal:
                final = Failed(request, ErrorBody.of(refusal))
            else:
                if reading is None:
                    return self._ending, None
                final = await self._read(reading, answer, inherited)
                is_cut = reading.is_cut
                attempt += 1
            match final:
                case Done():
                    try:
                        whole = orjson.Fragment(answer.whole(final))
                    except GenerationFailed as failure:
                        return _failed(ErrorBody.of(failure), request)
                    return "completed", {"status_code": 200, "request_id": request, "body": whole}
                case Failed(error=error) | Expired(error=error):
                    if answer.has_acted and not (is_cut and error.status == 503):
                        whole = orjson.Fragment(answer.whole(final))
                        return "failed", {"status_code": 200, "request_id": request, "body": whole}
                    if self._may_still(error):
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(min(error.retry_after or 1.0, LONGEST_PAUSE)):
                                await self._cancelled.wait()
                    elif error.status != 408:
                        return _failed(error, request)
                    else:
                        return "expired", None
                case _:
                    return "cancelled" if isinstance(final, Cancelled) else "expired", None

    @property
    def _is_over(self) -> bool:
        """Whether no more lines begin."""
        return self._cancelled.is_set() or self._runner.now() >= self.batch.expires_at

    @property
    def _ending(self) -> Ending:
        """How lines end that are not begun."""
        return "cancelled" if self._cancelled.is_set() else "expired"

    def _may_still(self, error: ErrorBody) -> bool:
        """Whether to retry a line: it was refused for overload, or its own deadline passed and not the batch's."""
        if error.status == 408:
            return self._runner.now() < self.batch.expires_at
        return error.status in (429, 503) and error.code != NO_SPACE

    async def _begin(self, request: str, body: dict[str, Any], inherited: bool) -> Reading | None:
        """Open the request, or follow it where it was begun; None where it was not and it is too late to begin."""
        tenant, now = self.batch.tenant, self._runner.now()
        deadline = min(float(self.batch.expires_at), now + self._runner.settings.longest_timeout)
        if inherited:
            with contextlib.suppress(StreamNotFound):
                return await self._bridge.follow(request, tenant, deadline=deadline)
        if self._is_over:
            return None
        job = Job(id=request, endpoint=self.batch.job_endpoint, bridge=self._bridge.name, body=body)
        shared = self._delivery.attempt > 1
        return await self._bridge.open(
            job, priority="low", tenant=tenant, deadline=deadline, kept=True, shared=shared, named=True
        )

    async def _read(self, reading: Reading, answer: Answer, inherited: bool) -> Event | None:
        """Have all events heard; returns the final one. An inherited request that publishes no event has failed."""
        source = ResponseReading(self._bridge, reading) if self.batch.endpoint == RESPONSES else reading
        patience = self._runner.patience if inherited else inf
        self._open.add(reading)
        try:
            while not source.ended:
                if not (events := await source.take(patience)):
                    reading.end(Overloaded("The request was lost.", retry_after=0.1))
                for event in events:
                    patience = inf
                    answer.hear(event)
            if inherited:
                await reading.ask_to_stop()  # in case it runs a second time
            return reading.final
        finally:
            self._open.discard(reading)
            source.close()

    async def _beat(self) -> None:
        """Renew the lease, store the counts, and learn whether the batch is cancelled."""

        def counted(batch: Batch) -> Batch:
            told, completed = batch.request_counts, self._tally["completed"]
            failed = self._tally.total() - completed
            # A bridge that takes a batch over counts from 0 again, which clients should not see.
            now = {"completed": max(told.completed, completed), "failed": max(told.failed, failed)}
            return batch.after({}, 0.0, request_counts=told.model_copy(update=now))

        while True:
            await self._delivery.in_progress()
            with outage_logged("progress of a batch cannot be written"):
                batch = await change_batch(self._bridge.broker, self.batch.tenant, self.batch.id, counted)
                if batch.status == "cancelling":
                    self._cancelled.set()
                    for reading in tuple(self._open):
                        await reading.ask_to_stop()
            await asyncio.sleep(self._runner.settings.lease / 3)


def _failed(error: ErrorBody, request: str) -> Outcome:
    return "failed", {"status_code": error.status, "request_id": request, "body": error_payload(error)}


def _reason(error: BaseException) -> str:
    """What happened, without the text of a refusal or a foreign exception, which might quote a prompt."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(sorted({_reason(each) for each in error.exceptions}))
    return str(error) if isinstance(error, Transient | Fatal) else type(error).__name__
