"""The stage `validate`: checks each job, renders and tokenises its prompt, or refuses it with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import re
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from ...engine.grammar.checker import GrammarChecker
from ...engine.plug_ins.found import PlugIns
from ...engine.preparing.documents import has_documents
from ...engine.preparing.preparers import PreparerCache, PreparerKey
from ...engine.vision.chat import has_images
from ...engine.vision.reading import ImageLimits
from ...schemas.bounds import LONG
from ...schemas.errors import (
    STORE_FULL,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Refusal,
    StorageFull,
    StreamFull,
)
from ...schemas.events import Cancelled, Usage
from ...schemas.jobs import TOKEN_PATTERN, Endpoint, Job, Priority, ValidatedJob
from ...schemas.loops import LoopJob, is_response
from ...schemas.openai.chat import CustomTool
from ...schemas.openai.completions import ChatRequest, Request, parse_request
from ...schemas.openai.embeddings import PooledRequest
from ...schemas.openai.responses.request import parse_responses
from ...schemas.registry import ModelCard
from ...schemas.wire import codec
from ...schemas.wire.codec import DecodeError
from ...streams.beats import until_beat
from ...streams.gate import FairGate
from ...streams.outages import through_outages
from ...streams.port import DEADLINE, SCHEMA, TRACE_PARENT, Delivery, Message
from ...streams.shares import crowds
from ...streams.stores.images import ImageStore, ImageUse
from ...streams.stores.quotas import Quotas
from ...streams.topology import EVENTS, JOBS, PRIORITIES, RESPONSES, TOOLS, lane_of, lane_stream
from .. import endings
from ..contract import SETTLED, Intake, Pipe, Stage
from ..images import lean_body, stored_images
from ..visits import headers_until, traceparent
from .replays import Replays
from .slow_parts import CancelledMeanwhile, SlowParts, Waiter

MAX_MISADDRESSED = 1_000  # jobs on subjects of no lane that wait for their refusal

MAX_CLOCK_SKEW = 2.0  # seconds between a client's clock and this machine's
AHEAD = 8  # models, loaded or not, whose tokenizers are loaded ahead of any request
WITHOUT_GRAMMARS = ("echo", "sentence_transformers")  # backends
MAX_LONG_JOBS = 2  # that are parsed or tokenised at the same time
TOO_MANY_RESPONSES = "Too many responses are in progress; try again later."
MIN_DUPLICATE_CHECK = 4_000  # bytes of a job; a larger one is checked for being a duplicate before it is tokenised


class Validate(Stage):
    """Consumes `jobs` and publishes validated jobs. Loads the tokenizer of each model once and keeps it."""

    name = "validate"
    outwaits_elections = False

    def __init__(self, pipe: Pipe, on_load: Callable[[], None] = lambda: None) -> None:
        """`on_load` is called after each load of a tokenizer."""
        super().__init__(pipe)
        self._preparers = PreparerCache(on_load, ImageLimits.of(pipe.settings))
        self._grammars = GrammarChecker()
        self._plug_ins = PlugIns(pipe.settings.allowed_plug_ins)
        self._quotas = Quotas(pipe.broker, pipe.settings.tenant_quota)
        self._images = ImageStore(pipe.broker, pipe.subjects, self._quotas)
        self._slow = SlowParts(pipe, self._grammars)
        self._long = FairGate(MAX_LONG_JOBS, "long requests", bounded=False)  # not more are in hand
        self._misaddressed: asyncio.Queue[Message] = asyncio.Queue(MAX_MISADDRESSED)
        self._replays = Replays(pipe.broker, pipe.subjects)

    async def run(self, intake: Intake) -> None:
        """Consume jobs, and load the tokenizers of the models before their first requests come: of those that have
        workers, and of a few others."""
        await intake.consume_lanes(JOBS, self.name, self.pipe.subjects.jobs_of)
        jobs = self.pipe.subjects.jobs_all()
        await through_outages(lambda: self.pipe.broker.refuse(jobs, self.name, self._why_misaddressed), jobs)
        await self._replays.listen(self.name)
        settings, own = self.pipe.settings, []
        if settings.model:
            own = [PreparerKey(settings.model, settings.backend, settings.tool_format, settings.reasoning_format)]
            self._preparers.start(own[0])
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._refuse_misaddressed())
                while True:
                    cards = self.pipe.registry.models.values()
                    for number, card in enumerate(cards):
                        is_served = bool(self.pipe.registry.workers_for(card.name, card.revision))
                        if number < AHEAD or is_served:
                            self._preparers.start(PreparerKey.of(card))
                        if is_served and card.backend not in WITHOUT_GRAMMARS:
                            self._grammars.prepare(card.source, card.backend, card.revision, after=SETTLED)
                    self._preparers.keep(cards, *own)
                    await asyncio.sleep(until_beat(settings.heartbeat_interval))
        finally:
            await self._replays.close()
            await self._grammars.close()

    @property
    def ready(self) -> bool:
        return self._preparers.idle

    async def handle(self, delivery: Delivery) -> None:
        try:
            await self._accept(delivery)
        except CancelledMeanwhile:
            request, tenant, bridge, priority = endings.addresses(delivery.message)[0]
            await self.pipe.emit(
                Cancelled(request, Usage(0, 0, 0)), tenant=tenant, bridge=bridge, key="end", priority=priority
            )
        except Refusal:
            request, tenant, bridge, _ = endings.addresses(delivery.message)[0]
            if await self.pipe.broker.last(EVENTS, self.pipe.subjects.events(tenant, bridge, request)) is None:
                raise
            # A repetition, and whatever is wrong with it, the request goes on.

    async def _accept(self, delivery: Delivery) -> None:
        message = delivery.message
        priority, tenant = self._lane(message)
        job = self._decode(message)
        rates, is_loop = self.pipe.rates, job.endpoint == "/v1/responses"  # whose turns are charged
        is_charged = rates is not None and not is_loop and bool(rates.limits(tenant))
        # A worker detects a duplicate, too, but only after its prompt has been tokenised, and charged for.
        if is_loop or is_charged or len(message.data) > MIN_DUPLICATE_CHECK:
            events = self.pipe.subjects.events(tenant, job.bridge, job.id or endings.request_id(message))
            if await self.pipe.broker.last(EVENTS, events) is not None:
                return
        if rates is not None and is_charged and delivery.attempt == 1:
            await rates.check(tenant, message.time)  # costs no tokenising
        if job.endpoint == "/v1/responses":
            await self._begin_response(job, delivery, priority, tenant)
            return
        validated = await self._validate(job, job.endpoint, message, priority, tenant)
        if rates is not None:
            await rates.begin(tenant, validated.id, validated.prompt_tokens, message.time)
        route = [self.pipe.subjects.stage(stage, priority, tenant) for stage in self.pipe.settings.job_stages]
        route.append(lane_of(self.pipe.subjects, validated))
        try:
            await self.pipe.forward(validated, route, delivery)
        except StreamFull as error:
            if error.storage:
                raise StorageFull(STORE_FULL) from None
            first = self.pipe.settings.job_stages[0]
            raise Overloaded(
                f"The queue of the stage {first} is full for {priority} priority; try again later.",
                code="queue_full",
                retry_after=1.0,
            ) from None

    def _why_misaddressed(self, message: Message) -> str | None:
        """Why the broker refuses a job to its publisher: its subject names no lane or no tenant."""
        priority, _, tenant = message.subject.removeprefix(f"{self.pipe.subjects.root}.jobs.").partition(".")
        if priority in PRIORITIES and tenant:
            return None
        with contextlib.suppress(asyncio.QueueFull):  # then only the publisher learns of it
            is_long = len(message.data) > LONG  # then the message id alone identifies the request, if there is one
            self._misaddressed.put_nowait(replace(message, data=b"") if is_long else message)
        return self._right_subject()

    async def _refuse_misaddressed(self) -> None:
        """Refuse these jobs to their clients, too, by an event."""
        while True:
            for request, tenant, bridge, _ in endings.addresses(await self._misaddressed.get()):
                subject = self.pipe.subjects.events(tenant, bridge, request)
                if await through_outages(partial(self.pipe.broker.last, EVENTS, subject), subject) is None:
                    event = endings.ending(request, InvalidRequest(self._right_subject(), param="priority"))
                    await self.pipe.emit(event, tenant=tenant, bridge=bridge, key="end")

    def _lane(self, message: Message) -> tuple[Priority, str]:
        priority, tenant = message.subject.split(".")[-2:]
        if re.fullmatch(TOKEN_PATTERN, tenant) is None:
            raise InvalidRequest("A tenant's name may hold only letters, digits, '_' and '-'.", param="tenant")
        for known in get_args(Priority):
            if priority == known and message.subject == self.pipe.subjects.jobs(priority, tenant):
                return known, tenant
        raise InvalidRequest(self._right_subject(), param="priority")

    def _right_subject(self) -> str:
        root, known = self.pipe.subjects.root, ", ".join(PRIORITIES)
        return f"Publish a job on the subject {root}.jobs.<priority>.<tenant>, with one of the priorities {known}."

    def _decode(self, message: Message) -> Job:
        try:
            return codec.decode_model(Job, message.data, message.headers.get(SCHEMA))
        except DecodeError as error:
            raise InvalidRequest(f"The job is malformed: {str(error).rstrip('.')}.", code="malformed_job") from None

    async def _validate(
        self, job: Job, endpoint: Endpoint, message: Message, priority: Priority, tenant: str
    ) -> ValidatedJob:
        created = self.pipe.now()
        job = await self._named(job)
        request = await self._parsed(endpoint, job.body, tenant, len(message.data))
        deadline = self._deadline(job.timeout or request.timeout, message, created)
        model = await self._model(request.model)
        if model.defaults and not isinstance(request, PooledRequest):
            body = with_defaults(job.body, model.defaults)
            request = await self._parsed(endpoint, body, tenant, len(message.data))
        preparer = await self._preparers.get(model)
        waiter = Waiter(job.id or endings.request_id(message), tenant, len(message.data), deadline)
        async with self._slow.contents(request, preparer, waiter) as (read, fetched):
            prepare = partial(
                preparer.prepare,
                read,
                fetched=fetched,
                context_length=model.context_length,
                name=model.name,
                seed=secrets.randbits(63),
            )
            is_short = len(message.data) <= LONG and not has_documents(request)
            if is_short and not has_images(request) and not _has_lark(request):
                prepared = prepare()
            else:
                async with self._long.turn(tenant, len(message.data)):
                    prepared = await asyncio.to_thread(prepare)
        for grammar in filter(None, (prepared.asked_grammar, prepared.params.grammar)):
            await self._slow.check(grammar, model, prepared.grammar_param, waiter)
        if prepared.params.plug_ins:
            await asyncio.to_thread(self._plug_ins.check, prepared.params, preparer.tokenizer, prepared.prompts[0])
        use = ImageUse(waiter.id, job.bridge, deadline)
        images = await stored_images(self._images, tenant, prepared.images, created, use)
        job = lean_body(job, request, prepared.images)
        return ValidatedJob(
            id=waiter.id,
            endpoint=endpoint,
            bridge=job.bridge,
            tenant=tenant,
            priority=priority,
            model=model.name,
            revision=model.revision,
            prompts=tuple(map(tuple, prepared.prompts)),
            params=prepared.params,
            created=created,
            deadline=deadline,
            body=job.body,
            form=prepared.form,
            dimensions=prepared.dimensions,
            adapter=model.adapter(request.model),
            keep_alive=getattr(request, "keep_alive", None) if model.catalogued else None,
            images=images,
        )

    async def _parsed(
        self, endpoint: Endpoint, body: dict[str, Any], tenant: str, size: int
    ) -> Request | PooledRequest:
        if size <= LONG:
            return parse_request(endpoint, body)
        async with self._long.turn(tenant, size):
            return await asyncio.to_thread(parse_request, endpoint, body)

    async def _begin_response(self, job: Job, delivery: Delivery, priority: Priority, tenant: str) -> None:
        """Hand a response to the stage `tools`, which sends each turn of the model through here as a chat request."""
        message, created = delivery.message, self.pipe.now()
        job = await self._named(job)
        request = parse_responses(job.body)
        await self._model(request.model)
        name = job.id or endings.request_id(message)
        if job.id is None:
            name = f"resp_{hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()}"
        if not is_response(name):
            raise InvalidRequest("The id of a response must be resp_ and 32 hexadecimal digits.", param="id")
        request.sources()  # raises `InvalidRequest`
        deadline = self._deadline(job.timeout or request.timeout, message, created)
        loop = LoopJob(
            id=name,
            tenant=tenant,
            priority=priority,
            bridge=job.bridge,
            created=created,
            deadline=deadline,
            body=job.body,
            trace=traceparent().get(TRACE_PARENT, ""),
        )
        await self._quotas.check(tenant, len(message.data), RESPONSES)
        subject = self.pipe.subjects.tools(priority, tenant)
        headers = {DEADLINE: f"{deadline:.3f}", SCHEMA: codec.LOOP_JOB, **headers_until(self.pipe.now())}
        if delivery.attempt == 1:  # otherwise it may wait there already, and only the acknowledgement was lost
            held = await self.pipe.broker.held(lane_stream(TOOLS, priority), subject)
            if crowds(held.messages + 1, self.pipe.settings.tools_limit - held.total):
                raise Overloaded(TOO_MANY_RESPONSES, retry_after=1.0)
        try:
            await self.pipe.broker.publish(subject, codec.encode(loop), message_id=f"{tenant}.{name}", headers=headers)
        except StreamFull as error:  # waiting here would block the turns that make room there
            if error.storage:
                raise StorageFull(STORE_FULL) from None
            raise Overloaded(TOO_MANY_RESPONSES, retry_after=1.0) from None

    async def _named(self, job: Job) -> Job:
        """The job with the name of the only model where it names none."""
        if "model" in job.body or (name := await self.pipe.registry.only()) is None:
            return job
        return job.model_copy(update={"body": job.body | {"model": name}})

    async def _model(self, name: str) -> ModelCard:
        model = await self.pipe.registry.find(name)
        if model is None:
            raise self.pipe.registry.unknown(name)
        return model

    def _deadline(self, timeout: float | None, message: Message, created: float) -> float:
        given = message.headers.get(DEADLINE)
        try:
            deadline = float(given) if given is not None else created + (timeout or self._default_timeout)
        except ValueError:
            deadline = math.nan
        if not math.isfinite(deadline):
            raise InvalidRequest(f"The header {DEADLINE} must be a time in Unix seconds.", param="deadline")
        longest = self.pipe.settings.longest_timeout
        if deadline > created + longest + MAX_CLOCK_SKEW:
            raise InvalidRequest(
                f"A request may take {longest:g} s at most, as its events are stored no longer. Ask for less, or have "
                "the operator raise the setting events_ttl.",
                param="timeout",
            )
        if deadline <= created:
            raise DeadlineExceeded("The deadline passed before the job was validated.")
        return deadline

    @property
    def _default_timeout(self) -> float:
        return min(self.pipe.settings.default_timeout, self.pipe.settings.longest_timeout)


def _has_lark(request: object) -> bool:
    """Whether a grammar has to be written as a pattern, which would block the event loop for milliseconds, too."""
    tools = request.tools or () if isinstance(request, ChatRequest) else ()
    return any(isinstance(tool, CustomTool) and tool.is_in_lark for tool in tools)


def with_defaults(body: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A request's body with a model's sampling defaults where it leaves something to them."""
    has = {name for name, value in body.items() if value is not None}
    if "max_completion_tokens" in has:
        has.add("max_tokens")  # another name of the same
    return body | {name: value for name, value in defaults.items() if name not in has}
