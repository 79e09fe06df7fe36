"""What earlier versions have written is still read, and still means the same. `recorded/generate.py` recorded it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import BaseModel

from penstock.schemas import registry
from penstock.schemas.jobs import InferenceBatch, Job, ValidatedJob
from penstock.schemas.loops import LoopJob, Step, ToolResult
from penstock.schemas.openai import batches
from penstock.schemas.wire import codec
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.stores.conversations import Conversations
from penstock.streams.stores.responses import CallKey, ResponseLog
from penstock.streams.topology import topology

RECORDED = Path(__file__).parent / "recorded"
VERSIONS = sorted(folder.name for folder in RECORDED.iterdir() if folder.is_dir() and folder.name[0].isdigit())
RESPONSE = "resp_" + "a" * 32


def recorded(version: str, name: str) -> Any:
    return json.loads((RECORDED / version / f"{name}.json").read_text(encoding="utf-8"))


OLD_LAYOUTS = ("0.1.0",)  # parts of these do not work beside ours: what they kept is read, and they are not heard
HEARD = ("Room",)  # told to whoever listens, and never stored
MESSAGES = [
    (version, message)
    for version in VERSIONS
    for message in recorded(version, "messages")
    if not (version in OLD_LAYOUTS and message["kind"] in HEARD)
]

Reader = Callable[[bytes, str | None], Any]
READERS: dict[str, Reader] = {
    "Job": lambda data, schema: codec.decode_model(Job, data, schema),
    "ValidatedJob": lambda data, schema: codec.decode_model(ValidatedJob, data, schema),
    "InferenceBatch": lambda data, schema: codec.decode_model(InferenceBatch, data, schema),
    "LoopJob": lambda data, schema: codec.decode_model(LoopJob, data, schema),
    "Step": lambda data, schema: codec.decode_model(Step, data, schema),
    "Outputs": lambda data, schema: codec.decode_outputs(data),
    "Event": lambda data, schema: codec.decode_event(data),
    "ModelCard": lambda data, schema: registry.ModelCard.model_validate_json(data),
    "WorkerCard": lambda data, schema: registry.WorkerCard.model_validate_json(data),
    "StageCard": lambda data, schema: registry.StageCard.model_validate_json(data),
    "Room": lambda data, schema: registry.Room.model_validate_json(data),
    "Admission": lambda data, schema: registry.Admission.model_validate_json(data),
    "Batch": lambda data, schema: batches.Batch.model_validate_json(data),
}


def as_json(value: Any) -> Any:
    def fields(model: BaseModel) -> dict[str, Any]:
        return model.model_dump(mode="json")

    return json.loads(orjson.dumps(value, default=fields))


def holds(value: Any, said: Any) -> bool:
    """Whether all that was said is in the value, which may say more: fields that are new have their defaults."""
    if isinstance(said, dict):
        return isinstance(value, dict) and all(name in value and holds(value[name], said[name]) for name in said)
    if isinstance(said, list):
        return isinstance(value, list) and len(value) == len(said) and all(map(holds, value, said))
    return bool(value == said) and type(value) is type(said)


@pytest.mark.parametrize(
    ("version", "message"), MESSAGES, ids=[f"{version}-{message['name']}" for version, message in MESSAGES]
)
def test_recorded_message_is_read_and_means_the_same(version: str, message: dict[str, Any]) -> None:
    data = message["data"].encode()
    value = READERS[message["kind"]](data, message["headers"].get("Penstock-Schema"))
    assert holds(as_json(value), json.loads(data))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_kind_of_message_was_recorded(version: str) -> None:
    assert {message["kind"] for message in recorded(version, "messages")} == READERS.keys()


@pytest.fixture
async def broker() -> MemoryBroker:
    broker = MemoryBroker()
    await broker.ensure(*topology("penstock", ["queue"]))
    return broker


async def put(broker: MemoryBroker, version: str) -> Any:
    for name, entries in recorded(version, "buckets").items():
        bucket = await broker.bucket(name)
        for key, value in entries.items():
            await bucket.put(key, value.encode())
    return recorded(version, "meaning")


@pytest.mark.parametrize("version", VERSIONS)
async def test_recorded_response_is_read_and_means_the_same(broker: MemoryBroker, version: str) -> None:
    meant = await put(broker, version)
    log = await ResponseLog.of(broker)
    stored = await log.read("acme", RESPONSE)
    assert stored is not None and stored.is_unwanted
    assert holds(as_json(stored.begun), meant["begun"])
    assert holds(as_json(stored.turns), [meant["turned"]])
    assert holds(as_json(stored.ended), meant["ended"])
    assert await log.sealed("acme", RESPONSE) == {"sums": "c2VhbGVk"}


@pytest.mark.parametrize("version", VERSIONS)
async def test_recorded_calls_are_read_and_mean_the_same(broker: MemoryBroker, version: str) -> None:
    meant = await put(broker, version)
    log = await ResponseLog.of(broker)
    claimed = await log.claim(CallKey("acme", RESPONSE, 0, 0), "other")
    assert (claimed.owner, claimed.is_new, claimed.result) == ("c0ffee00", False, None)
    settled = await log.claim(CallKey("acme", RESPONSE, 1, 0), "other")
    assert settled.result == ToolResult(*meant["result"])


@pytest.mark.parametrize("version", VERSIONS)
async def test_recorded_conversation_is_read_and_means_the_same(broker: MemoryBroker, version: str) -> None:
    meant = await put(broker, version)
    conversations = await Conversations.of(broker)
    conversation = await conversations.read("acme", "conv_1")
    assert conversation is not None
    assert holds(as_json(conversation), meant["conversation"] | {"parts": [RESPONSE]})
    assert await conversations.items("acme", conversation) == meant["items"]
