"""What a response follows: the items of earlier ones, or of a conversation, and those that its request refers to.

A response keeps references to what came before it, so that a chain of them takes room in proportion to its length. Each
names the responses before it, up to `MOST_LINKS`; what came before those, the first of them tells. A chain that grows
older than a share of what responses live (`COPY_AFTER`) is copied into the next response, so that whatever is kept can
be followed, though its first responses have expired.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable

from ...schemas.errors import InvalidRequest, StreamNotFound
from ...schemas.loops import Begun, Items, LoopJob, Origin
from ...schemas.openai.items import input_items
from ...schemas.openai.responses import ResponsesRequest, parse_responses
from ...streams.stores.conversations import Conversations
from ...streams.stores.responses import ResponseLog, Stored

MOST_REFERENCES = 100  # of one request
MOST_LINKS = 32
MOST_BYTES = 64 << 20  # of the responses of a chain, as they are stored; a message, which a prompt must fit, is smaller
CACHED_BYTES = 32 << 20
COPY_AFTER = 1 / 30  # of the life of a response

_of_response = re.compile(r"[a-z]+_([0-9a-f]{32})").match


class History:
    """Reads what is kept. `ttl` is how many seconds a response is kept."""

    def __init__(
        self, log: ResponseLog, conversations: Conversations, ttl: float, now: Callable[[], float] = time.time
    ) -> None:
        self._log = log
        self._conversations = conversations
        self._ttl = ttl
        self._now = now
        self._cached: OrderedDict[tuple[str, str], Stored] = OrderedDict()  # have ended; the longest unread first
        self._cached_bytes = 0

    async def origin(self, job: LoopJob, request: ResponsesRequest) -> Origin:
        """Where the items before a request's input are. Raises `InvalidRequest` and `StreamNotFound`."""
        if (previous := request.previous_response_id) is not None:
            stored = await self._log.read(job.tenant, previous)
            if stored is None or not stored.can_be_followed:
                raise _unknown(previous)
            if stored.ended is None and not stored.is_lost(self._now()):
                raise InvalidRequest(f"The response {previous!r} has not ended yet.", param="previous_response_id")
            begun = stored.begun
            since = min(begun.job.created, begun.since or begun.job.created)
            if self._now() - since > self._ttl * COPY_AFTER:
                return Origin(history=[*await self.items(begun.job, begun), *begun.input, *stored.output])
            follows = begun.follows if len(begun.follows) < MOST_LINKS else ()
            return Origin(follows=(*follows, previous), since=since)
        if (name := request.conversation) is not None:
            conversation = await self._conversations.use(job.tenant, name)
            if conversation is None:
                raise InvalidRequest(
                    f"There is no conversation {name!r}.", code="conversation_not_found", param="conversation"
                )
            return Origin(parts=len(conversation.parts))
        return Origin()

    async def items(self, job: LoopJob, origin: Origin) -> Items:
        """The items before the input of the request `job`. Raises `StreamNotFound` where they are kept no more, and
        `InvalidRequest`."""
        chain: list[Stored] = []
        tenant = job.tenant
        while origin.follows:
            chain[:0] = await asyncio.gather(*(self._link(tenant, id) for id in origin.follows))
            if sum(link.size for link in chain) > MOST_BYTES:
                raise InvalidRequest(
                    f"The responses before this one take more than {MOST_BYTES >> 20} MiB; begin anew with a shorter "
                    "history.",
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
        """The request's input, with the items in place that others only refer to: an item's id begins with that of its
        response. Raises `InvalidRequest`."""
        items = input_items(request.input, job.id)
        references = [item["id"] for item in items if item["type"] == "item_reference"]
        if len(references) > MOST_REFERENCES:
            raise InvalidRequest(f"input refers to more than {MOST_REFERENCES} items.", param="input")
        known: dict[str, Items] = {}
        for response in {found[1] for id in references if (found := _of_response(id))}:
            if (stored := await self._log.read(job.tenant, f"resp_{response}")) is not None:
                for item in (*stored.begun.input, *stored.output):
                    known[item["id"]] = [item]
        return [meant for item in items for meant in known.get(item["id"], [item])]

    async def keep(self, begun: Begun) -> Begun:
        """Write a response's beginning, and keep what it refers to for as long as itself; returns the one that stands.

        Raises `StreamNotFound` where the response before was deleted meanwhile.
        """
        tenant, id = begun.job.tenant, begun.job.id
        if begun.follows and not await self._log.follow(tenant, begun.follows[-1], id):
            raise _unknown(begun.follows[-1])
        return await self._log.write(tenant, id, begun)

    async def _link(self, tenant: str, id: str) -> Stored:
        """A response of a chain, hidden or not."""
        if (stored := self._cached.get((tenant, id))) is not None:
            self._cached.move_to_end((tenant, id))
            return stored
        if (stored := await self._log.read(tenant, id, hidden=True)) is None:
            raise _unknown(id)
        if stored.ended is not None and (tenant, id) not in self._cached:
            self._cached[tenant, id] = stored
            self._cached_bytes += stored.size
            while self._cached_bytes > CACHED_BYTES:
                self._cached_bytes -= self._cached.popitem(last=False)[1].size
        return stored


def _unknown(id: str) -> StreamNotFound:
    return StreamNotFound(
        f"There is no response {id!r}, or it is kept no more.",
        code="previous_response_not_found",
        param="previous_response_id",
    )
