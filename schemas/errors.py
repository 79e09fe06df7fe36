"""Errors as a protocol: each branch says what whoever catches it will do.

PenstockError
├── Refusal                 reply to the client with `status`, and forget the request
│   ├── InvalidRequest      400  what was asked can never be served; `param` names the fault
│   ├── Unauthorized        401  no API key, or none that is known
│   ├── Forbidden           403  this caller may not: a foreign web page, a tool or priority that it has no right to
│   ├── ModelNotFound       404
│   ├── StreamNotFound      404  no such request of this tenant, or its events are gone
│   ├── DeadlineExceeded    408
│   ├── Conflict            409  an idempotency key used for two different requests
│   ├── PayloadTooLarge     413
│   ├── NotJson             415  a browser that does not say that it sends JSON
│   ├── QuotaExceeded       429  one tenant over its own quota; `retry_after`
│   ├── Overloaded          503  everyone is; `retry_after`
│   ├── StorageFull         507  what is kept has reached its share of the store: something must be deleted first
│   └── GenerationFailed    500  the engine could not finish this one request
├── Transient               leave the delivery to be retried after a wait
│   ├── StreamFull          the broker refused a message: a limit of its stream is reached
│   └── BrokerUnavailable   no answer from the broker in time
├── Superseded              somebody else wrote there first: read again, and decide anew
├── ToolFailed              tell the model or the person who asked; the request goes on
└── Fatal                   stop the process: exit code 2, the message says what to do
    ├── ConfigurationError  every fault of the configuration, one a line
    ├── ModelLoadError      the model's files are missing, broken or unsupported
    └── StartupError        a port, directory, binary or broker that cannot be had
        └── BrokerAway      no broker answers yet: what serves waits for one, a command ends
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .bounds import shortened

MOST_MESSAGE = 8_000  # characters of what a client reads; a body may have brought any part of it
MOST_PARAM = 200
STORE_FULL = (
    "The server's store is full: delete files, responses or conversations that nobody needs, "
    "or have the operator raise store_limit."
)


class PenstockError(Exception):
    """Root of the tree above."""


class Refusal(PenstockError):
    """The request ends here, with an answer. `str(error)` is what the client reads.

    `status` is the HTTP status, `type` and `code` follow OpenAI's error body, `retry_after` is in seconds.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(shortened(message, MOST_MESSAGE))
        self.code = code or self.default_code
        self.param = None if param is None else shortened(param, MOST_PARAM)
        self.retry_after = retry_after


class InvalidRequest(Refusal):
    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class Unauthorized(Refusal):
    status = 401
    type = "invalid_request_error"
    default_code = "invalid_api_key"


class Forbidden(Refusal):
    status = 403
    type = "invalid_request_error"
    default_code = "forbidden"


class ModelNotFound(Refusal):
    status = 404
    type = "invalid_request_error"
    default_code = "model_not_found"


class StreamNotFound(Refusal):
    status = 404
    type = "invalid_request_error"
    default_code = "stream_not_found"


class DeadlineExceeded(Refusal):
    status = 408
    type = "timeout_error"
    default_code = "deadline_exceeded"


class Conflict(Refusal):
    status = 409
    type = "idempotency_error"
    default_code = "idempotency_key_reused"


class PayloadTooLarge(Refusal):
    status = 413
    type = "invalid_request_error"
    default_code = "payload_too_large"


class NotJson(Refusal):
    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_media_type"


class QuotaExceeded(Refusal):
    status = 429
    type = "rate_limit_error"
    default_code = "quota_exceeded"


class Overloaded(Refusal):
    status = 503
    type = "overloaded_error"
    default_code = "server_busy"


class StorageFull(Refusal):
    """Raised with the message `STORE_FULL`."""

    status = 507
    type = "server_error"
    default_code = "storage_full"


class GenerationFailed(Refusal):
    status = 500
    type = "server_error"
    default_code = "generation_failed"


class Transient(PenstockError):
    """Worth another try after `delay` seconds."""

    def __init__(self, message: str, *, delay: float = 1.0) -> None:
        super().__init__(message)
        self.delay = delay


class StreamFull(Transient):
    """`per_subject`: the limit is the subject's own, others may still publish. `storage`: there is no space, be it in
    the bucket or on the server; otherwise too many messages wait, which goes by itself."""

    def __init__(self, message: str, *, per_subject: bool = False, storage: bool = False) -> None:
        super().__init__(message)
        self.per_subject = per_subject
        self.storage = storage


class BrokerUnavailable(Transient):
    pass


class Superseded(PenstockError):
    """The subject's last message is not the one that the publisher expected: nothing was stored."""


class ToolFailed(PenstockError):
    """A tool, or the server that has it, could not do its part: in words that a model can read."""


class Fatal(PenstockError):
    """Nothing to retry: a person must change something first."""


class ConfigurationError(Fatal):
    """All faults at once; `faults` holds one sentence each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


class ModelLoadError(Fatal):
    pass


class StartupError(Fatal):
    pass


class BrokerAway(StartupError):
    pass
