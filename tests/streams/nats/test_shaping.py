"""Streams are made and changed where a cluster has yet to agree on what it said; its answers are written out here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.schemas.errors import StartupError
from penstock.streams.nats import shaping
from penstock.streams.nats.connection.link import Link
from penstock.streams.nats.management import ApiError, Json

CONFIG: Json = {
    **{"name": "P_JOBS", "retention": "workqueue", "storage": "file", "discard": "old"},
    **{"max_bytes": 9, "max_consumers": 9, "num_replicas": 3},
}
OFFLINE = ApiError({"code": 400, "err_code": 10005, "description": "no suitable peers for placement, peer offline"})
TOO_FEW = ApiError({"code": 400, "err_code": 10005, "description": "no suitable peers for placement"})
EXISTS = ApiError({"code": 400, "err_code": 10058, "description": "stream name already in use"})
MISSING = ApiError({"code": 404, "err_code": 10059, "description": "stream not found"})
SETTLED = {"config": CONFIG, "cluster": {"replicas": [{}, {}]}}
CATCHING_UP = {"config": CONFIG, "cluster": {"replicas": [{}, {}], "desired": {}}}
ALONE = {"config": CONFIG, "cluster": {"leader": "n0"}}


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    monkeypatch.setattr(shaping, "_LOOK", 0.0)
    return cast(Link, SimpleNamespace(timeout=60.0, has=lambda what: what == "cluster"))


def answers(monkeypatch: pytest.MonkeyPatch, **said: list[Any]) -> list[str]:
    """What is asked, which each method answers in this order, and with the last one from then on."""
    asked: list[str] = []

    async def call(_link: Link, method: str, _body: Json | None = None) -> Json:
        asked.append(method.split(".")[1])
        await asyncio.sleep(0)
        left = said[asked[-1]]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, ApiError):
            raise answer
        return cast(Json, answer)

    async def account(_link: Link, _replicas: int) -> Json:
        return {"streams": 0, "limits": {"max_streams": -1, "max_consumers": -1}}

    monkeypatch.setattr(shaping, "call", call)
    monkeypatch.setattr(shaping, "account", account)
    return asked


async def test_a_stream_is_created_once_the_cluster_takes_its_servers_for_present(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers(monkeypatch, CREATE=[OFFLINE, OFFLINE, {}])
    assert await shaping.create(link, CONFIG) is None and asked == ["CREATE"] * 3


async def test_too_few_servers_are_told_at_once(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, CREATE=[TOO_FEW])
    with pytest.raises(StartupError, match="3 copies need 3 servers"):
        await shaping.create(link, CONFIG)
    assert asked == ["CREATE"]


async def test_a_stream_that_only_the_leader_knows_yet_is_found_and_changed(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers(monkeypatch, INFO=[MISSING, MISSING, SETTLED], CREATE=[EXISTS], UPDATE=[{}])
    await shaping.shape(link, [CONFIG])
    assert asked == ["INFO", "CREATE", "INFO", "CREATE", "INFO", "UPDATE", "INFO"]


@pytest.mark.parametrize("unfinished", [ALONE, CATCHING_UP])
async def test_it_waits_until_all_copies_belong_to_the_stream(
    link: Link, monkeypatch: pytest.MonkeyPatch, unfinished: Json
) -> None:
    asked = answers(monkeypatch, INFO=[ALONE, unfinished, unfinished, SETTLED], UPDATE=[{}])
    await shaping.shape(link, [CONFIG])
    assert asked == ["INFO", "UPDATE", "INFO", "INFO", "INFO"]


async def test_copies_that_never_come_are_told(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaping, "COPYING", 0.01)
    answers(monkeypatch, INFO=[CATCHING_UP], UPDATE=[{}])
    with pytest.raises(StartupError, match="P_JOBS does not have its 3 copies"):
        await shaping.shape(link, [CONFIG])
