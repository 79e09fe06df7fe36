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
from typing import get_args

from ..engine.grammar.checker import GrammarChecker
from ..engine.prepare import Preparer, load_preparer
from ..schemas import codec
from ..schemas.codec import DecodeError
from ..schemas.errors import (
    STORE_FULL,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    StorageFull,
    StreamFull,
)
from ..schemas.jobs import TOKEN_PATTERN, Endpoint, Job, Priority, ValidatedJob
from ..schemas.loops import LoopJob, is_response
from ..schemas.openai.completions import parse_request
from ..schemas.openai.responses import parse_responses
from ..schemas.registry import ModelCard
from ..streams.outages import through_outages
from ..streams.port import DEADLINE, SCHEMA, Delivery, Message
from ..streams.stores.quotas import Quotas
from ..streams.topology import EVENTS, JOBS, PRIORITIES
from . import endings
from .contract import Intake, Pipe, Stage

_Key = tuple[str, str, str, str]  # what a model's preparer is made of: source, backend, tool and reasoning format

_STRAY = f"A job's subject is jobs.<priority>.<tenant>, and the priority one of {', '.join(PRIORITIES)}."
MOST_STRAYS = 1_000  # that wait to be refused by an event

CLOCKS = 2.0  # seconds by which a client's clock may differ from ours
LONG_AT_ONCE = 2  # jobs longer than that
WORTH_A_LOOK = 4_000  # bytes of a job; whether it is a repetition is asked for more
LONG = 20_000  # bytes of a job; tokenising more than this would hold up the event loop for milliseconds


class Validate(Stage):
    """`jobs` in, validated jobs out. Tokenizers are loaded at a model's first request and kept."""

    name = "validate"
    outwaits_elections = False

    def __init__(self, pipe: Pipe, loaded: Callable[[], None] = lambda: None) -> None:
        """`loaded` is called whenever a tokenizer has been loaded, which will stay."""
        super().__init__(pipe)
        self._loaded = loaded
        self._preparers: dict[_Key, asyncio.Task[Preparer]] = {}
        self._grammars = GrammarChecker()
        self._quotas = Quotas(pipe.broker, pipe.settings.tenant_quota)
        self._long = asyncio.Semaphore(LONG_AT_ONCE)
        self._strays: asyncio.Queue[Message] = asyncio.Queue(MOST_STRAYS)

    async def run(self, intake: Intake) -> None:
        """Load the tokenizer of every model that appears, before its first request comes."""
        await intake.consume_lanes(JOBS, self.name, self.pipe.subjects.jobs_of)
        await self.pipe.broker.refuse(self.pipe.subjects.jobs_all(), self.name, self._why_stray)
        settings = self.pipe.settings
        if settings.model:
            self._load((settings.model, settings.backend, settings.tool_format, settings.reasoning_format))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._refuse_strays())
                while True:
                    for card in self.pipe.registry.models.values():
                        self._load(_key(card))
                    await asyncio.sleep(settings.heartbeat_interval)
        finally:
            await self._grammars.close()

    @property
    def ready(self) -> bool:
        return all(loading.done() for loading in self._preparers.values())

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        priority, tenant = self._lane(message)
        job = self._decode(message)
        # A worker finds a repetition out, too, but with the prompt computed.
        if job.endpoint == "/v1/responses" or len(message.data) > WORTH_A_LOOK:
            events = self.pipe.subjects.events(tenant, job.bridge, job.id or endings.request_id(message))
            if await self.pipe.broker.last(EVENTS, events) is not None:
                return
        if job.endpoint == "/v1/responses":
            await self._begin_response(job, message, priority, tenant)
            return
        validated = await self._validate(job, job.endpoint, message, priority, tenant)
        route = [self.pipe.subjects.stage(stage, priority, tenant) for stage in self.pipe.settings.job_stages]
        route.append(self.pipe.subjects.batch(priority, tenant))
        try:
            await self.pipe.forward(validated, route, delivery)
        except StreamFull as error:
            if error.storage:
                raise StorageFull(STORE_FULL) from None
            first = self.pipe.settings.job_stages[0]
            raise Overloaded(
                f"The stage {first} takes no more requests of {priority} priority for now.",
                code="queue_full",
                retry_after=1.0,
            ) from None

    def _why_stray(self, message: Message) -> str | None:
        """Why a job is refused that no lane takes, since its subject names none or no tenant."""
        priority, _, tenant = message.subject.removeprefix(f"{self.pipe.subjects.root}.jobs.").partition(".")
        if priority in PRIORITIES and tenant:
            return None
        with contextlib.suppress(asyncio.QueueFull):  # then the publisher alone is told
            is_long = len(message.data) > LONG  # and its request is found by its message id, if at all
            self._strays.put_nowait(replace(message, data=b"") if is_long else message)
        return _STRAY

    async def _refuse_strays(self) -> None:
        while True:
            for request, tenant, bridge, _ in endings.addresses(await self._strays.get()):
                subject = self.pipe.subjects.events(tenant, bridge, request)
                if await through_outages(partial(self.pipe.broker.last, EVENTS, subject), subject) is None:
                    event = endings.ending(request, InvalidRequest(_STRAY, param="priority"))
                    await self.pipe.emit(event, tenant=tenant, bridge=bridge, key="end")

    def _lane(self, message: Message) -> tuple[Priority, str]:
        priority, tenant = message.subject.split(".")[-2:]
        if re.fullmatch(TOKEN_PATTERN, tenant) is None:
            raise InvalidRequest("A tenant's name holds letters, digits, '_' and '-' alone.", param="tenant")
        for known in get_args(Priority):
            if priority == known:
                return known, tenant
        raise InvalidRequest(_STRAY, param="priority")

    def _decode(self, message: Message) -> Job:
        try:
            return codec.decode_model(Job, message.data, message.headers.get(SCHEMA))
        except DecodeError as error:
            raise InvalidRequest(f"The job cannot be read: {error}.", code="malformed_job") from None

    async def _validate(
        self, job: Job, endpoint: Endpoint, message: Message, priority: Priority, tenant: str
    ) -> ValidatedJob:
        created = self.pipe.now()
        request = parse_request(endpoint, job.body)
        deadline = self._deadline(job.timeout or request.timeout, message, created)
        model = await self._model(request.model)
        preparer = await self._preparer(model)
        prepare = partial(
            preparer.prepare,
            request,
            context_length=model.context_length,
            name=model.name,
            seed=secrets.randbits(63),
        )
        if len(message.data) <= LONG:
            prepared = prepare()
        else:
            async with self._long:
                prepared = await asyncio.to_thread(prepare)
        if (grammar := prepared.params.grammar) is not None:
            await self._grammars.check(grammar, model.source, model.backend, param=prepared.grammar_param)
        return ValidatedJob(
            id=job.id or endings.request_id(message),
            endpoint=endpoint,
            bridge=job.bridge,
            tenant=tenant,
            priority=priority,
            model=model.name,
            prompts=tuple(map(tuple, prepared.prompts)),
            params=prepared.params,
            created=created,
            deadline=deadline,
            body=job.body,
            form=prepared.form,
            dimensions=prepared.dimensions,
        )

    async def _begin_response(self, job: Job, message: Message, priority: Priority, tenant: str) -> None:
        """Have the stage tools take turns with the model; each comes here again as a chat request."""
        created = self.pipe.now()
        request = parse_responses(job.body)
        await self._model(request.model)
        name = job.id or endings.request_id(message)
        if job.id is None:
            name = f"resp_{hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()}"
        if not is_response(name):
            raise InvalidRequest("The id of a response is resp_ and 32 hexadecimal digits.", param="id")
        request.sources()  # it may refuse
        deadline = self._deadline(job.timeout or request.timeout, message, created)
        loop = LoopJob(
            id=name,
            tenant=tenant,
            priority=priority,
            bridge=job.bridge,
            created=created,
            deadline=deadline,
            body=job.body,
        )
        await self._quotas.check(tenant, len(message.data))
        subject, headers = (
            self.pipe.subjects.tools(priority, tenant),
            {DEADLINE: f"{deadline:.3f}", SCHEMA: codec.LOOP_JOB},
        )
        try:
            await self.pipe.broker.publish(subject, codec.encode(loop), message_id=f"{tenant}.{name}", headers=headers)
        except StreamFull as error:  # to wait here would hold up the turns that make room there
            if error.storage:
                raise StorageFull(STORE_FULL) from None
            raise Overloaded("Too many responses are under way.", retry_after=1.0) from None

    async def _model(self, name: str) -> ModelCard:
        model = await self.pipe.registry.find(name)
        if model is None:
            known = ", ".join(self.pipe.registry.models) or "none yet"
            raise ModelNotFound(f"The model {name!r} is not served here. Served: {known}.", param="model")
        return model

    def _deadline(self, timeout: float | None, message: Message, created: float) -> float:
        given = message.headers.get(DEADLINE)
        try:
            deadline = float(given) if given else created + (timeout or self._default_timeout)
        except ValueError:
            deadline = math.nan
        if not math.isfinite(deadline):
            raise InvalidRequest(f"The header {DEADLINE} must hold Unix seconds.", param="deadline")
        longest = self.pipe.settings.longest_timeout
        if deadline > created + longest + CLOCKS:
            raise InvalidRequest(
                f"The request may take {longest:g} s at most: what was said of it is kept no longer. Ask for less, or "
                "have the setting events_ttl raised.",
                param="timeout",
            )
        if deadline <= created:
            raise DeadlineExceeded("The deadline passed before the job was looked at.")
        return deadline

    @property
    def _default_timeout(self) -> float:
        return min(self.pipe.settings.default_timeout, self.pipe.settings.longest_timeout)

    async def _preparer(self, model: ModelCard) -> Preparer:
        """Raises `ModelLoadError` where this machine cannot load the model's tokenizer."""
        try:
            return await asyncio.shield(self._load(_key(model)))
        except Exception:
            self._preparers.pop(_key(model), None)  # the next request tries again
            raise

    def _load(self, key: _Key) -> asyncio.Task[Preparer]:
        if key not in self._preparers:
            self._preparers[key] = asyncio.create_task(self._prepare(key))
        return self._preparers[key]

    async def _prepare(self, key: _Key) -> Preparer:
        preparer = await asyncio.to_thread(load_preparer, *key)
        self._loaded()
        return preparer


def _key(model: ModelCard) -> _Key:
    return model.source, model.backend, model.tool_format, model.reasoning_format
