"""OpenAI's `/v1/batches`: what asks for them and what is told of them. Whoever runs them is in `batch_runner`."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import FastAPI, Request

from ...schemas.errors import InvalidRequest, Overloaded, StreamFull
from ...schemas.openai.batches import WINDOW, Batch, BatchRequest
from ...streams.stores.batches import change_batch, find_batch, list_batches
from ...streams.stores.files import find_file
from ...streams.topology import BATCH_STATES
from .files import page
from .openapi import body_of, refusals
from .requests import Gateway, read_parsed, tenant_of


def add_batches(app: FastAPI, gateway: Gateway) -> None:
    broker = gateway.broker

    @app.post(
        "/v1/batches",
        tags=["openai"],
        openapi_extra=body_of(BatchRequest),
        responses=refusals(400, 404, 408, 413, 429, 503, 507),
    )
    async def create(request: Request) -> Any:
        """Run the requests of a file, within a day, at low priority."""
        asked = await read_parsed(BatchRequest, request, gateway.settings)
        tenant, now, lifetime = tenant_of(request), int(time.time()), gateway.settings.files_ttl
        if (expires := asked.output_expires_after) is not None:
            if expires.seconds > lifetime:
                message = f"Files are kept {int(lifetime)} seconds here, and no longer."
                raise InvalidRequest(message, param="output_expires_after")
            lifetime = expires.seconds
        file = await find_file(broker, tenant, asked.input_file_id, "input_file_id")
        if file.about["purpose"] != "batch":
            raise InvalidRequest("The input file's purpose is not batch.", param="input_file_id")
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            created_at=now,
            expires_at=now + WINDOW,
            metadata=asked.metadata,
            tenant=tenant,
            output_ttl=lifetime,
        )
        await publish(gateway, batch)
        return batch.shown()

    @app.get("/v1/batches", tags=["openai"], responses=refusals(400, 503))
    async def batches(request: Request) -> Any:
        """The batches there are, newest first; `limit` and `after` choose."""
        found = await list_batches(broker, tenant_of(request))
        return page(request, [batch.shown() for batch in found], default=20, most=100)

    @app.get("/v1/batches/{id}", tags=["openai"], responses=refusals(404, 503))
    async def batch(id: str, request: Request) -> Any:
        """How far a batch has come."""
        return (await find_batch(broker, tenant_of(request), id)).shown()

    @app.post("/v1/batches/{id}/cancel", tags=["openai"], responses=refusals(400, 404, 503))
    async def cancel(id: str, request: Request) -> Any:
        """Stop a batch; what is answered already stays."""

        def cancelling(batch: Batch) -> Batch:
            return batch.after({"validating": "cancelling", "in_progress": "cancelling"}, time.time())

        batch = await change_batch(broker, tenant_of(request), id, cancelling)
        if batch.status not in ("cancelling", "cancelled"):
            raise InvalidRequest(f"A batch that is {batch.status} cannot be cancelled.", code="batch_over")
        return batch.shown()


async def publish(gateway: Gateway, batch: Batch) -> None:
    """Have a new batch run. Raises `QuotaExceeded`, `Overloaded`, and `StreamFull` where there is no space."""
    data = batch.model_dump_json().encode()
    await gateway.quotas.check(batch.tenant, len(data))
    try:
        # First, so that no batch can be seen that nobody would run.
        await gateway.broker.publish(gateway.bridge.subjects.batches(batch.tenant), data, message_id=batch.id)
    except StreamFull as error:
        if error.storage:
            raise
        raise Overloaded("Too many batches are waiting.", retry_after=60.0) from None
    await (await gateway.broker.bucket(BATCH_STATES)).create(batch.key, data)
