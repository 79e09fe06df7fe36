"""Errors as a protocol: each branch tells what the code that catches it does.

PenstockError
├── Refusal                 answer the client with `status`; the request has ended
│   ├── InvalidRequest      400  the request can never be served; `param` names the faulty field
│   ├── Unauthorized        401  the API key is missing or unknown
│   ├── Forbidden           403  a web page, or an API key without the right to a tool or priority
│   ├── ModelNotFound       404
│   ├── StreamNotFound      404  the tenant has no such request, or its events have expired
│   ├── DeadlineExceeded    408
│   ├── Conflict            409  an idempotency key was used for another request
│   ├── PayloadTooLarge     413
│   ├── NotJson             415  a body is compressed, or a browser's is not said to be JSON
│   ├── QuotaExceeded       429  the tenant has exhausted its quota; `retry_after`
│   ├── Overloaded          503  the server has no capacity left; `retry_after`
│   ├── StorageFull         507  the store is full: delete something first
│   └── GenerationFailed    500  the engine could not finish this one request
├── Transient               retry the delivery after a wait
│   ├── NotYet              others go first; nothing has failed
│   ├── StreamFull          the broker refused a message: its stream is full
│   └── BrokerUnavailable   the broker did not answer in time
│       └── StreamMissing   it has answered all that time that a stream does not exist
├── Superseded              another writer was first: read again, then decide again
├── StageFailed             a custom stage broke its contract: retry, as after any bug, and at last a dead letter
├── ToolFailed              report to the model or the client; the request continues
└── Fatal                   stop the process: exit code 2, the message says what to do
    ├── ConfigurationError  all faults of the configuration, one a line
    ├── ModelLoadError      the model's files are missing, broken or unsupported
    └── StartupError        a port, directory, program or broker is not available
        ├── BrokerAway      no broker answers yet: a server waits for one, a command ends
        └── BrokerDenied    the broker does not allow a subject to us
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .bounds import shortened

MOST_MESSAGE = 8_000  # characters; part of a message may come from a request's body
MOST_PARAM = 200
STORE_FULL = (
    "The server's store is full: delete files, responses or conversations that you no longer need, "
    "or have the operator raise store_limit."
)


class PenstockError(Exception):
    """Root of the tree above."""


class Refusal(PenstockError):
    """The request ends here with an error response. `str(error)` is its message.

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


def prompt_too_long(
    length: int | str, context_length: int, *, param: str, advice: str = "shorten it"
) -> InvalidRequest:
    """The refusal of a prompt of `length` tokens that leaves no room for an answer.

    Clients and agents shorten their history and try again where they find OpenAI's words ("maximum context length is")
    or Anthropic's ("prompt is too long: 9 tokens > 8 maximum"); few look at the code.
    """
    return InvalidRequest(
        f"This model's maximum context length is {context_length} tokens, answer included, and the prompt is too long: "
        f"{length} tokens > {context_length - 1} maximum; {advice}.",
        code="context_length_exceeded",
        param=param,
    )


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
    status = 507
    type = "server_error"
    default_code = "storage_full"


class GenerationFailed(Refusal):
    status = 500
    type = "server_error"
    default_code = "generation_failed"


class Transient(PenstockError):
    """Retry after `delay` seconds."""

    def __init__(self, message: str, *, delay: float = 1.0) -> None:
        super().__init__(message)
        self.delay = delay


class NotYet(Transient):
    """Others go first: the delivery comes again after `delay` seconds. That is no failure, and nobody is told."""

    def __init__(self, delay: float) -> None:
        super().__init__("others go first", delay=delay)


class StreamFull(Transient):
    """`per_subject`: only this subject has reached its limit. `storage`: the bucket or the server has no space;
    otherwise too many messages wait, which passes by itself."""

    def __init__(self, message: str, *, per_subject: bool = False, storage: bool = False) -> None:
        super().__init__(message)
        self.per_subject = per_subject
        self.storage = storage


class BrokerUnavailable(Transient):
    pass


class StreamMissing(BrokerUnavailable):
    """All the time that a call may take, the broker has answered that the stream does not exist."""


class Superseded(PenstockError):
    """The subject's last message is not the one that the publisher expected. The broker stored nothing."""


class StageFailed(PenstockError):
    """What the code of a custom stage did or returned that it must not; the text quotes nothing of a request."""


class ToolFailed(PenstockError):
    """A tool or its server failed; the message is written for a model to read."""


class Fatal(PenstockError):
    """Retrying does not help: a person must change something first."""


class ConfigurationError(Fatal):
    """Holds all faults at once, in `faults`; each is a sentence."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[Sequence[str]]]:
        """By its faults: pools of processes pass errors on."""
        return type(self), (self.faults,)


class ModelLoadError(Fatal):
    pass


class StartupError(Fatal):
    pass


class BrokerAway(StartupError):
    pass


class BrokerDenied(StartupError):
    pass
