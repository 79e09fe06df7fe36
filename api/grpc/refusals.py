"""How a call ends that fails: a status of gRPC, and metadata that say what OpenAI's error object does on HTTP."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from ...schemas.bounds import shortened
from ...schemas.errors import STORE_FULL, BrokerUnavailable, Overloaded, Refusal, StorageFull, StreamFull
from ...schemas.events import ErrorBody

MOST_DETAILS = 1_000  # characters; clients refuse trailers of more than 8 KiB
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def status_of(error: ErrorBody) -> grpc.StatusCode:
    """The status for an HTTP status; INTERNAL for those that are the server's fault."""
    return _CODES.get(error.status, grpc.StatusCode.INTERNAL)


def trailers_of(error: ErrorBody) -> tuple[tuple[str, str], ...]:
    """`penstock-code`, `penstock-param` and `retry-after` (seconds), where they are known."""
    after = None if error.retry_after is None else f"{error.retry_after:g}"
    known = {"penstock-code": error.code, "penstock-param": error.param, "retry-after": after}
    return tuple((name, value) for name, value in known.items() if value and value.isascii() and value.isprintable())


async def abort(context: Any, error: ErrorBody) -> NoReturn:
    await context.abort(status_of(error), shortened(error.message, MOST_DETAILS), trailers_of(error))
    raise AssertionError("abort always raises")


def refusal_of(error: Refusal | BrokerUnavailable | StreamFull) -> Refusal:
    """What the client hears of an error, as on HTTP."""
    match error:
        case BrokerUnavailable():
            text = "The message broker does not answer; try again later."
            return Overloaded(text, code="broker_away", retry_after=2.0)
        case StreamFull(storage=True):
            return StorageFull(STORE_FULL)
        case StreamFull():
            return Overloaded("Too many messages are waiting; try again later.", retry_after=1.0)
        case _:
            return error
