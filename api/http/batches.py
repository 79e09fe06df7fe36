"""OpenAI's `/v1/batches`: create, show and cancel batches. `api.batches.runner` runs them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from ...schemas.errors import InvalidRequest, Overloaded, StreamFull
from ...schemas.ids import new_id
from ...schemas.openai.batches import RESPONSES, WINDOW, Batch, BatchRequest
from ...streams.shares import crowds
from ...streams.stores.batches import change_batch, find_batch, list_batches
from ...streams.stores.files import find_file
from ...streams.topology import BATCH_STATES, BATCHES
from .files import page
from .openapi import body_of, refusals
from .requests import Gateway, Routes, read_parsed, tenant_of
from .responses import check_stage

TOO_MANY = "Too many batches are waiting; try again later."


def add_batches(app: FastAPI, gateway: Gateway) -> None:
    routes = BatchRoutes(gateway)
    app.post(
        "/v1/batches",
        tags=["openai"],
        openapi_extra=body_of(BatchRequest),
        responses=refusals(400, 404, 408, 413, 429, 503, 507),
    )(routes.create)
    app.get("/v1/batches", tags=["openai"], responses=refusals(400, 503))(routes.batches)
    app.get("/v1/batches/{id}", tags=["openai"], responses=refusals(404, 503))(routes.batch)
    app.post("/v1/batches/{id}/cancel", tags=["openai"], responses=refusals(400, 404, 503))(routes.cancel)


class BatchRoutes(Routes):
    async def create(self, request: Request) -> Any:
        """Create a batch, which runs the requests of a file within a day, at low priority."""
        asked = await read_parsed(BatchRequest, request, self._settings)
        if asked.endpoint == RESPONSES:
            check_stage(self._gateway.registry)
        tenant, now, lifetime = tenant_of(request), int(self._broker.now()), self._settings.files_ttl
        if (expires := asked.output_expires_after) is not None:
            if expires.seconds > lifetime:
                message = f"output_expires_after: files expire after {int(lifetime)} seconds here; ask for no more."
                raise InvalidRequest(message, param="output_expires_after")
            lifetime = expires.seconds
        file = await find_file(self._broker, tenant, asked.input_file_id, "input_file_id")
        if file.about["purpose"] != "batch":
            raise InvalidRequest("The input file's purpose must be batch.", param="input_file_id")
        batch = Batch(
            id=new_id("batch_"),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            created_at=now,
            expires_at=now + WINDOW,
            metadata=asked.metadata,
            tenant=tenant,
            output_ttl=lifetime,
        )
        await publish(self._gateway, batch)
        return batch.shown()

    async def batches(self, request: Request) -> Any:
        """List the batches, newest first; `limit` and `after` select."""
        found = await list_batches(self._broker, tenant_of(request))
        return page(request, [batch.shown() for batch in found], default=20, most=100)

    async def batch(self, id: str, request: Request) -> Any:
        """Show a batch and its progress."""
        return (await find_batch(self._broker, tenant_of(request), id)).shown()

    async def cancel(self, id: str, request: Request) -> Any:
        """Cancel a batch; requests that were answered keep their answers."""

        def cancelling(batch: Batch) -> Batch:
            return batch.after({"validating": "cancelling", "in_progress": "cancelling"}, self._broker.now())

        batch = await change_batch(self._broker, tenant_of(request), id, cancelling)
        if batch.status not in ("cancelling", "cancelled"):
            raise InvalidRequest(f"A batch that is {batch.status} cannot be cancelled.", code="batch_over")
        return batch.shown()


async def publish(gateway: Gateway, batch: Batch) -> None:
    """Publish a new batch to the batch runners.

    Raises `QuotaExceeded`, `Overloaded`, and `StreamFull` if the store is full.
    """
    data = batch.model_dump_json().encode()
    await gateway.quotas.check(batch.tenant, len(data))
    subject = gateway.bridge.subjects.batches(batch.tenant)
    held = await gateway.broker.held(BATCHES, subject)
    if crowds(held.messages + 1, gateway.settings.batches_limit - held.total):
        raise Overloaded(TOO_MANY, retry_after=60.0)
    try:
        # First, so that every visible batch will run.
        await gateway.broker.publish(subject, data, message_id=batch.id)
    except StreamFull as error:
        if error.storage:
            raise
        raise Overloaded(TOO_MANY, retry_after=60.0) from None
    await (await gateway.broker.bucket(BATCH_STATES)).create(batch.key, data)
