"""What a response follows: the items of an earlier one, or of a conversation, and those that its request refers to."""

from __future__ import annotations

import re
import time

from ..schemas.errors import InvalidRequest
from ..schemas.items import input_items
from ..schemas.loops import Items, LoopJob
from ..schemas.responses import ResponsesRequest
from ..streams.conversations import Conversations
from ..streams.response_log import ResponseLog

MOST_REFERENCES = 100  # of one request

_of_response = re.compile(r"[a-z]+_([0-9a-f]{32})").match


class Past:
    """Reads what is kept."""

    def __init__(self, log: ResponseLog, conversations: Conversations) -> None:
        self._log = log
        self._conversations = conversations

    async def items(self, job: LoopJob, request: ResponsesRequest) -> tuple[Items, Items]:
        """What came before the request's input, and that input. Raises `InvalidRequest`."""
        history = await self._history(job, request)
        return history, await self._referred(job.tenant, input_items(request.input, job.id))

    async def _referred(self, tenant: str, items: Items) -> Items:
        """The items with those in place that others only refer to: an item's id begins with that of its response."""
        references = [item["id"] for item in items if item["type"] == "item_reference"]
        if len(references) > MOST_REFERENCES:
            raise InvalidRequest(f"input refers to more than {MOST_REFERENCES} items.", param="input")
        known: dict[str, Items] = {}
        for response in {found[1] for id in references if (found := _of_response(id))}:
            if (stored := await self._log.read(tenant, f"resp_{response}")) is not None:
                for item in (*stored.begun.input, *stored.output):
                    known[item["id"]] = [item]
        return [meant for item in items for meant in known.get(item["id"], [item])]

    async def _history(self, job: LoopJob, request: ResponsesRequest) -> Items:
        if (previous := request.previous_response_id) is not None:
            stored = await self._log.read(job.tenant, previous)
            if stored is None or stored.begun.job.body.get("store") is False:
                raise InvalidRequest(
                    f"There is no response {previous!r}, or it is kept no more.",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            if stored.ended is None and not stored.is_lost(time.time()):
                raise InvalidRequest(f"The response {previous!r} has not ended yet.", param="previous_response_id")
            return [*stored.begun.history, *stored.begun.input, *stored.output]
        if (name := request.conversation) is not None:
            conversation = await self._conversations.read(job.tenant, name)
            if conversation is None:
                raise InvalidRequest(
                    f"There is no conversation {name!r}.", code="conversation_not_found", param="conversation"
                )
            return await self._conversations.items(job.tenant, conversation)
        return []
