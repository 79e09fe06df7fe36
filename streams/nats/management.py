"""JetStream's management API: requests in JSON, and the configurations of our streams, buckets and consumers.

The JSON is the server's (`nats-server`, `server/jetstream_api.go`); durations there are in nanoseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from ...schemas.errors import BrokerUnavailable
from ..port import BucketSpec, ConsumerSpec, StreamSpec
from .connection.link import Link

Json = dict[str, Any]

STREAM_EXISTS = 10058  # under the same name, with another configuration
STREAM_MISSING = 10059
CONSUMER_MISSING = 10014
MESSAGE_MISSING = (10037, 10043, 10057)
CONSUMER_EXISTS = (10105, 10148)
LIMIT_REACHED = 10077  # of a stream: messages, messages per subject, or bytes
INSUFFICIENT = 10023  # memory or disk; in a cluster that has not settled, servers for the copies of a consumer
STREAM_FULL = (LIMIT_REACHED, 10002, INSUFFICIENT, 10047)  # also limits of the account, and of the server
JETSTREAM_OFF = (10039, 10076)  # for the account; on the server
TOO_MANY_CONSUMERS = 10026  # for the account, or for the stream
TOO_MANY_UNSETTLED = 10121  # that a consumer asks for, of the server or the account
NO_PEERS = (10005, 10074)  # too few servers for the copies; no cluster at all
WRONG_REVISION = (10071, 10164)
TOO_LARGE = 10054

EXPECTED_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"  # a header of publishes

BUCKET, KEY_VALUE = "KV_", "$KV."  # prefixes of the names and the subjects of the streams behind buckets

_MAX_CONSUMERS = 1_000_000  # the server's own limit is 1,000 a stream: INFER has one per worker, EVENTS one per client
_READS = ("INFO", "STREAM.INFO", "STREAM.LIST", "STREAM.MSG.GET", "STREAM.NAMES", "CONSUMER.INFO", "CONSUMER.LIST")
_TRANSIENT = 503  # the class of "no leader", "starting up" and the like
_IN_PROCESS = 10158  # a repeated message whose first copy is not stored on a majority of servers yet
_RETRY_WAIT = 0.1
_ADVICE = {
    STREAM_MISSING: "; if the server has lost its store, create it again with `penstock nats setup --apply`",
    TOO_MANY_CONSUMERS: "; have NATS clients read events with fewer consumers, or raise the account's max_consumers",
}


class ApiError(BrokerUnavailable):
    """The server answered with an error. `code` is its `err_code`: one of the constants above, or another."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(error.get("description", "unknown error"))
        self.status: int = error.get("code", 0)
        self.code: int = error.get("err_code", 0)


def advice(error: Exception) -> str:
    """What an operator can do against the refusal of a consumer, to be appended to it."""
    return _ADVICE.get(error.code, "") if isinstance(error, ApiError) else ""


@contextlib.contextmanager
def allowed(*codes: int) -> Iterator[None]:
    """Suppress `ApiError`s with these codes."""
    try:
        yield
    except ApiError as error:
        if error.code not in codes:
            raise


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


async def call(
    link: Link,
    method: str,
    body: Mapping[str, Any] | None = None,
    *,
    at_once: bool = False,
    retry_on: int | None = None,
) -> Json:
    """Call `$JS.API.<method>`, in the domain of the link, and return its answer; `at_once` as for `Link.exchange`.

    Raises `ApiError`, if its code is `retry_on` only after the link's timeout, and `BrokerUnavailable` if the server
    does not answer in time.
    """
    data = orjson.dumps(body) if body else b""
    reads = method.startswith(_READS)
    return await ask(link, link.access.api + method, data, at_once=at_once, retry_on=retry_on, reads=reads)


async def ask(
    link: Link,
    subject: str,
    data: bytes,
    headers: dict[str, str] | None = None,
    *,
    at_once: bool = False,
    retry_on: int | None = None,
    reads: bool = False,
) -> Json:
    """Send a message that JetStream answers in JSON (a call, or a message to store), again while errors are transient.

    `reads`: it changes nothing, so a server that is cut off from its cluster may answer. Raises as `call` does.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + link.timeout
    if not reads:
        link.isolation.asked()
    while True:
        answer: Json = orjson.loads((await link.exchange(subject, data, headers, at_once=at_once)).data)
        if "error" not in answer:
            if not reads:
                link.isolation.answered()
            return answer
        error = ApiError(answer["error"])
        is_transient = (error.status == _TRANSIENT or error.code == _IN_PROCESS) and error.code not in STREAM_FULL
        if not is_transient and not reads:
            link.isolation.answered()
        is_late = clock() >= deadline
        if not is_transient and (error.code != retry_on or is_late):
            raise error
        if is_late:
            raise BrokerUnavailable(f"NATS at {link.address}: {error}") from error
        await asyncio.sleep(_RETRY_WAIT)


async def account(link: Link, replicas: int) -> Json:
    """What the account has, and its `limits`, for streams with so many copies; a limit of -1 is none."""
    info = await call(link, "INFO")
    found: Json = (info.get("tiers") or {}).get(f"R{replicas}", info)
    return found


def stream_config(name: str, spec: StreamSpec, replicas: int) -> Json:
    return {
        "name": name,
        "subjects": list(spec.subjects),
        "retention": "workqueue" if spec.retention == "work_queue" else "limits",
        "storage": spec.storage,
        "discard": spec.discard,
        "discard_new_per_subject": spec.discard == "new" and spec.max_messages_per_subject > 0,
        "max_msgs": spec.max_messages or -1,
        "max_msgs_per_subject": spec.max_messages_per_subject or -1,
        "max_bytes": spec.max_bytes or -1,
        "max_consumers": _MAX_CONSUMERS,
        "max_age": nanoseconds(spec.max_age),
        "duplicate_window": nanoseconds(_dedup_window(spec.dedup_window, spec.max_age)),
        "num_replicas": replicas,
        "allow_direct": True,
    }


def bucket_config(bucket: str, spec: BucketSpec, replicas: int) -> Json:
    """A key-value bucket as other clients create it, so that `nats kv` shows ours."""
    return {
        "name": f"{BUCKET}{bucket}",
        "subjects": [f"{KEY_VALUE}{bucket}.>"],
        "retention": "limits",
        "storage": spec.storage,
        "discard": spec.discard,
        "max_msgs_per_subject": 1,
        "max_bytes": spec.max_bytes or -1,
        "max_consumers": _MAX_CONSUMERS,
        "max_age": nanoseconds(spec.ttl),
        "duplicate_window": nanoseconds(_dedup_window(120.0, spec.ttl)),
        "num_replicas": replicas,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
    }


def consumer_config(spec: ConsumerSpec) -> Json:
    return {
        "durable_name": spec.name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": nanoseconds(spec.ack_wait),
        "max_deliver": spec.max_deliver or -1,
        "max_ack_pending": spec.max_ack_pending,
        "filter_subject": spec.subject,
        "inactive_threshold": nanoseconds(spec.idle_limit),
    }


def _dedup_window(wanted: float, max_age: float) -> float:
    # The server refuses a window longer than the age of its messages.
    return min(wanted, max_age) if max_age else wanted
