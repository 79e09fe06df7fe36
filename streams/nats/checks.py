"""What a server must offer, and why it refuses a stream."""

from __future__ import annotations

import re

from ...schemas.errors import BrokerAway, BrokerUnavailable, StartupError
from .connection.link import Link
from .management import JETSTREAM_OFF, NO_PEERS, STREAM_FULL, ApiError, Json, call

LEAST_VERSION = 2, 10  # of nats-server: consumers with metadata


def check_version(link: Link) -> None:
    found = re.match(r"(\d+)\.(\d+)", link.server_version)
    if found is None or (int(found[1]), int(found[2])) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise StartupError(
            f"the NATS server at {link.address} has version {link.server_version or 'unknown'}: Penstock needs {least} "
            "or later; upgrade it"
        )


async def check_jetstream(link: Link) -> None:
    try:
        await call(link, "INFO")
    except BrokerUnavailable as error:
        cause = error if isinstance(error, ApiError) else error.__cause__  # which it is after repetitions
        where = f"the NATS server at {link.address}"
        if link.access.domain is not None and not isinstance(cause, ApiError):
            raise StartupError(
                f"{where} knows no JetStream domain {link.access.domain!r}: {error}; correct --nats-domain"
            ) from error
        if isinstance(cause, ApiError) and cause.code in JETSTREAM_OFF:
            raise StartupError(
                f"{where} offers no JetStream to this account: {error}; enable it for the account there"
            ) from error
        if not link.has("jetstream"):
            raise StartupError(f"{where} offers no JetStream; start it with -js") from error
        raise BrokerAway(f"{where} offers no JetStream: {error}; start it with -js") from error


def refused(config: Json, error: ApiError) -> StartupError:
    advice = ""
    if error.code in STREAM_FULL:
        advice = f" for its {config['max_bytes']:,} bytes; lower --store-limit, or give the server more space"
    elif error.code in NO_PEERS:
        copies = config["num_replicas"]
        advice = f"; {copies} copies need {copies} servers with JetStream: start them, or lower --nats-replicas"
    return StartupError(f"stream {config['name']}: {error}{advice}")


def check_fixed(config: Json, present: Json) -> None:
    for fixed in ("retention", "storage"):
        if present[fixed] != config[fixed]:
            raise StartupError(
                f"stream {config['name']} exists with {fixed} {present[fixed]!r} where {config[fixed]!r} is needed; "
                "delete it, or choose another namespace"
            )
