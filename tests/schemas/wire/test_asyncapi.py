"""`penstock schema`: a document that stands alone, and says what the wire really is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from penstock import __version__
from penstock.__main__ import app
from penstock.schemas.wire import codec
from penstock.streams.topology import PRIORITIES, Subjects

MESSAGES = {
    "Job": codec.JOB,
    "ValidatedJob": codec.VALIDATED_JOB,
    "InferenceBatch": codec.BATCH,
    "LoopJob": codec.LOOP_JOB,
    "Step": codec.STEP,
    "Outputs": codec.OUTPUTS,
    "Event": codec.EVENT,
    "ReplayRequest": codec.REPLAY,
}


def _schema(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["schema", *arguments])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return _schema()


def test_document_has_what_asyncapi_needs(document: dict[str, Any]) -> None:
    assert document["asyncapi"] == "3.0.0"
    assert document["info"] == {"title": "Penstock", "version": __version__, "license": {"name": "Apache-2.0"}}
    assert document["defaultContentType"] == "application/json"
    assert document["components"]["messages"].keys() == MESSAGES.keys()
    for channel in document["channels"].values():
        assert channel.keys() == {"address", "description", "parameters", "messages"}
        named = {part.strip("{}") for part in channel["address"].split(".") if part.startswith("{")}
        assert channel["parameters"].keys() == named
    operated = {operation["channel"]["$ref"] for operation in document["operations"].values()}
    assert operated == {f"#/channels/{name}" for name in document["channels"]}
    assert {operation["action"] for operation in document["operations"].values()} == {"send", "receive"}


def test_addresses_are_the_subjects_that_are_used(document: dict[str, Any]) -> None:
    subjects = Subjects("penstock")
    values = {name: name for name in ("lanes", "tenant", "stage", "worker", "request", "bridge")}
    values |= {"priority": PRIORITIES[0], "partition": "3"}
    addresses = {name: channel["address"].format(**values) for name, channel in document["channels"].items()}
    assert addresses == {
        "jobs": subjects.jobs(PRIORITIES[0], "tenant"),
        "queue": subjects.stage("queue", PRIORITIES[0], "tenant"),
        "custom": subjects.stage("stage", PRIORITIES[0], "tenant"),
        "batch": subjects.batch("lanes", PRIORITIES[0], "tenant"),
        "infer": subjects.infer("worker"),
        "stream": subjects.stream(3, "tenant", "request"),
        "tools": subjects.tools(PRIORITIES[0], "tenant"),
        "events": subjects.events("tenant", "bridge", "request"),
        "replay": subjects.replay_of("tenant").replace("*.*", "bridge.request"),
    }


def test_namespace_is_in_every_address() -> None:
    other = _schema("--namespace=other")
    assert all(channel["address"].startswith("other.") for channel in other["channels"].values())


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_says_its_schema_and_headers(document: dict[str, Any], name: str) -> None:
    message = document["components"]["messages"][name]
    assert message["payload"] == {"$ref": f"#/components/schemas/{name}"}
    headers = message["headers"]["properties"]
    assert headers["Penstock-Schema"] == {"const": MESSAGES[name]}
    assert headers.keys() >= {"Nats-Msg-Id", "Penstock-Deadline", "Penstock-Next", "traceparent"}


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for whole in (document, _schema("json")):
        for reference in _references(whole):
            node: Any = whole
            for part in reference.removeprefix("#/").split("/"):
                node = node[part]


def test_schemas_are_json_schemas_and_the_same_alone(document: dict[str, Any]) -> None:
    alone = _schema("json")
    assert alone["components"]["schemas"] == document["components"]["schemas"]
    assert alone["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for schema in alone["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("job", "valid"),
    [
        ({"body": {"model": "m", "messages": []}}, True),
        ({"id": "a-1", "bridge": "app", "timeout": 1.5, "endpoint": "/v1/completions", "body": {}}, True),
        ({}, False),
        ({"body": []}, False),
        ({"id": "a.b", "body": {}}, False),
        ({"timeout": 0, "body": {}}, False),
        ({"colour": "red", "body": {}}, False),
    ],
)
def test_schema_of_a_job_says_what_a_client_may_publish(document: dict[str, Any], job: Any, valid: bool) -> None:
    schema = {"$ref": "#/components/schemas/Job", "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(job) == valid


def test_unknown_kind_of_schema_ends_with_code_2() -> None:
    assert CliRunner().invoke(app, ["schema", "xml"]).exit_code == 2


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)
