"""Compares the streams on a server with those that a deployment has agreed on, for parts and for `penstock nats setup`.

Parts create none but what a server keeps in memory, and so loses when it restarts: heartbeats, leases and the like.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import structlog

from ....config.deployment import explicit, shown
from ....config.sources import SECRET, Loaded, flag
from ....schemas.errors import StartupError
from ...topology import Topology
from ..broker import JetStreamBroker
from ..checks import check_fixed
from ..management import Json

log = structlog.get_logger(__name__)

# Settings that name the broker, and a token, which a server has for all; users may differ.
_WHERE = ("nats_url", "nats_token_file", "nats_ca", "nats_tls_first", "nats_domain", "namespace")
_MOST_NAMED = 5  # streams in a message
_KEPT = ("max_consumers",)  # no update changes it: an account that allows fewer has given the stream fewer


class NotSetUp(StartupError):
    """A deployment's streams are missing, or not as this release needs them."""


class LimitChange(NamedTuple):
    """A limit of a stream that would change; both names are the server's."""

    stream: str
    limit: str
    present: Any
    wanted: Any


class Differences(NamedTuple):
    """What separates the streams on the server from the wanted ones; all names are the server's."""

    missing: tuple[str, ...]
    changed: tuple[LimitChange, ...]


async def differences(broker: JetStreamBroker, layout: Topology) -> Differences:
    """What to create and to change so that the server has all of `layout`."""
    pairs = await _compared(broker, layout)
    missing = tuple(wanted["name"] for wanted, present in pairs if present is None)
    changes = tuple(
        LimitChange(wanted["name"], name, present.get(name), value)
        for wanted, present in pairs
        if present is not None
        for name, value in wanted.items()
        if name not in _KEPT and present.get(name, value) != value
    )
    return Differences(missing, changes)


async def verify(broker: JetStreamBroker, layout: Topology, former: Sequence[str], loaded: Loaded) -> None:
    """Raise `NotSetUp` unless a part can run with the streams on the server; log limits that are not as agreed.

    `former` are the names, as the server has them, of streams of earlier releases: what waits there would be lost.
    """
    pairs = await _compared(broker, Topology(layout.streams, tuple(s for s in layout.buckets if s.storage == "file")))
    moved = await asyncio.gather(*map(broker.present, former))
    faults = [f"{name} has yet to be moved" for name, present in zip(former, moved, strict=True) if present is not None]
    faults += [f"{wanted['name']} is missing" for wanted, present in pairs if present is None]
    odd = []
    for wanted, present in pairs:
        if present is None:
            continue
        check_fixed(wanted, present)
        if not set(wanted["subjects"]) <= set(present["subjects"]):
            faults.append(f"{wanted['name']} does not store {', '.join(wanted['subjects'])}")
        odd += [
            f"{wanted['name']}: {name} {present.get(name)} instead of {value}"
            for name, value in wanted.items()
            if name not in ("subjects", *_KEPT) and present.get(name, value) != value
        ]
    if faults:
        raise NotSetUp(
            f"the streams of the namespace {loaded.settings.namespace!r} on NATS at {broker.address} are not as this "
            f"release needs them ({_few(faults)}): mend them with `{setup_command(loaded)}`{_as_whom(loaded)}"
        )
    if odd:  # by an operator, or by another release during an upgrade
        log.warning("streams are not as agreed", streams=_few(odd), mend=setup_command(loaded))
    await broker.ensure([], [spec for spec in layout.buckets if spec.storage == "memory"])


def not_set_up(address: str, loaded: Loaded) -> NotSetUp:
    """For a namespace in which nothing is agreed yet."""
    return NotSetUp(
        f"NATS at {address} is not set up for Penstock in the namespace {loaded.settings.namespace!r}: create the "
        f"streams with `{setup_command(loaded)}`{_as_whom(loaded)}"
    )


def setup_command(loaded: Loaded) -> str:
    """What to type to set a deployment up with the settings that a part was given as flags."""
    given = [*_WHERE, *explicit(loaded)]
    words = ["penstock", "nats", "setup", "--apply"]
    for name in given:
        value = getattr(loaded.settings, name)
        if loaded.origins[name] != flag(name) or value is None:
            continue  # a variable or a file says the same to that command
        is_secret = name in SECRET and "@" in str(value)
        words += [flag(name), "…" if is_secret else shlex.quote(shown(value))]
    return " ".join(words)


def _as_whom(loaded: Loaded) -> str:
    """Where users have roles, those of parts may not do that."""
    settings = loaded.settings
    proofs = (settings.nats_credentials, settings.nats_nkey, settings.nats_user_file, settings.nats_certificate)
    return ", as a user who may create streams, such as admin" if any(proofs) else ""


async def _compared(broker: JetStreamBroker, layout: Topology) -> list[tuple[Json, Json | None]]:
    """The wanted configurations, each with what is on the server."""
    wanted = broker.configs(*layout)
    present = await asyncio.gather(*(broker.present(config["name"]) for config in wanted))
    return list(zip(wanted, present, strict=True))


def _few(texts: Sequence[str]) -> str:
    return "; ".join(texts[:_MOST_NAMED]) + ("; …" if len(texts) > _MOST_NAMED else "")
