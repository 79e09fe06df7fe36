"""The items before a response: those of earlier responses or of a conversation, and those that its request refers to.

A response stores references to earlier ones, so that the size of a chain is proportional to its length. Each names the
responses before it, up to `MAX_LINKS`; the first of these names those before it. When a chain is older than a fraction
of the lifetime of responses (`COPY_AFTER`), its items are copied into the next response, so that a stored response
stays usable when the first responses of its chain expire. As often a conversation that is used is renewed.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable

from ...schemas.errors import InvalidRequest, StreamNotFound
from ...schemas.loops import Begun, Items, LoopJob, Origin
from ...schemas.openai.responses.items import input_items
from ...schemas.openai.responses.request import ResponsesRequest, parse_responses
from .conversations import Conversations
from .responses import ResponseLog, Stored

MAX_REFERENCES = 100  # of one request
MAX_LINKS = 32
MAX_BYTES = 64 << 20  # of the stored responses of a chain; a prompt must fit into a message, which is smaller
CACHED_BYTES = 32 << 20
_OF_OBJECTS = 6 << 10  # bytes that a response in memory takes besides its stored ones
COPY_AFTER = 1 / 30  # of the lifetime of a response

_of_response = re.compile(r"[a-z]+_([0-9a-f]{32})").match


class History:
    """Reads stored responses and conversations. `ttl` is the lifetime of a response in seconds."""

    def __init__(
        self, log: ResponseLog, conversations: Conversations, ttl: float, now: Callable[[], float] = time.time
    ) -> None:
        self._log = log
        self._conversations = conversations
        self._ttl = ttl
        self._now = now
        self._cached: OrderedDict[tuple[str, str], Stored] = OrderedDict()  # ended ones; the least recently used first
        self._cached_bytes = 0

    async def origin(self, job: LoopJob, request: ResponsesRequest) -> Origin:
        """References to the items before a request's input. Raises `InvalidRequest` and `StreamNotFound`."""
        if (previous := request.previous_response_id) is not None:
            stored = await self._log.read(job.tenant, previous)
            if stored is None or not stored.can_be_followed:
                raise _unknown(previous)
            if stored.ended is None and not stored.is_lost(self._now()):
                raise InvalidRequest(
                    f"The response {previous!r} has not ended yet; wait for its end.", param="previous_response_id"
                )
            begun = stored.begun
            since = min(begun.job.created, begun.since or begun.job.created)
            if self._now() - since > self._ttl * COPY_AFTER:
                return Origin(history=[*await self.items(begun.job, begun), *begun.input, *stored.output])
            follows = begun.follows if len(begun.follows) < MAX_LINKS else ()
            return Origin(follows=(*follows, previous), since=since)
        if (name := request.conversation) is not None:
            conversation = await self._conversations.use(job.tenant, name, self._now(), self._ttl * COPY_AFTER)
            if conversation is None:
                raise InvalidRequest(
                    f"There is no conversation {name!r}.", code="conversation_not_found", param="conversation"
                )
            return Origin(parts=len(conversation.parts))
        return Origin()

    async def items(self, job: LoopJob, origin: Origin) -> Items:
        """The items before the input of the request `job`. Raises `StreamNotFound` if they have expired, and
        `InvalidRequest`."""
        chain: list[Stored] = []
        tenant = job.tenant
        while origin.follows:
            chain[:0] = await asyncio.gather(*(self._link(tenant, id) for id in origin.follows))
            if sum(link.size for link in chain) > MAX_BYTES:
                raise InvalidRequest(
                    f"The responses before this one exceed {MAX_BYTES >> 20} MiB; start again with a shorter history.",
                    code="context_length_exceeded",
                    param="previous_response_id",
                )
            job = chain[0].begun.job
            origin = chain[0].begun
        items = list(origin.history)
        if origin.parts and (name := parse_responses(job.body).conversation) is not None:
            conversation = await self._conversations.read(tenant, name, deleted=True)
            if conversation is not None:
                items += await self._conversations.items(tenant, conversation, origin.parts)
        for link in chain:
            items += [*link.begun.input, *link.output]
        return items

    async def input(self, job: LoopJob, request: ResponsesRequest) -> Items:
        """The request's input, with references replaced by the items they name: an item's id begins with that of its
        response. Raises `InvalidRequest`."""
        items = input_items(request.input, job.id)
        references = [item["id"] for item in items if item["type"] == "item_reference"]
        if len(references) > MAX_REFERENCES:
            raise InvalidRequest(
                f"input refers to more than {MAX_REFERENCES} items; send some of them in full.", param="input"
            )
        known: dict[str, Items] = {}
        for response in {found[1] for id in references if (found := _of_response(id))}:
            if (stored := await self._log.read(job.tenant, f"resp_{response}")) is not None:
                for item in (*stored.begun.input, *stored.output):
                    known[item["id"]] = [item]
        return [found for item in items for found in known.get(item["id"], [item])]

    async def keep(self, begun: Begun) -> Begun:
        """Store a response's beginning and extend the life of the responses it refers to; return the stored beginning.

        Raises `StreamNotFound` if the previous response was deleted meanwhile.
        """
        tenant, id = begun.job.tenant, begun.job.id
        if begun.follows and not await self._log.follow(tenant, begun.follows[-1], id):
            raise _unknown(begun.follows[-1])
        return await self._log.write(tenant, id, begun)

    async def _link(self, tenant: str, id: str) -> Stored:
        """Read a response of a chain, hidden or not."""
        if (stored := self._cached.get((tenant, id))) is not None:
            self._cached.move_to_end((tenant, id))
            return stored
        if (stored := await self._log.read(tenant, id, hidden=True)) is None:
            raise _unknown(id)
        if stored.ended is not None and (tenant, id) not in self._cached:
            self._cached[tenant, id] = stored
            self._cached_bytes += stored.size + _OF_OBJECTS
            while self._cached_bytes > CACHED_BYTES:
                self._cached_bytes -= self._cached.popitem(last=False)[1].size + _OF_OBJECTS
        return stored


def _unknown(id: str) -> StreamNotFound:
    return StreamNotFound(
        f"There is no response {id!r}, or it has expired.",
        code="previous_response_not_found",
        param="previous_response_id",
    )
