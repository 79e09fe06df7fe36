"""Bodies of megabytes: what they hold is bounded, and nobody waits while one is read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from applications import Applications, Script
from asgi import ask

from penstock.api.batches.input import line_of
from penstock.api.bridge.bridge import Bridge
from penstock.api.http.answers import FOR_EVER
from penstock.api.http.app import create_app
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.events import ErrorBody, Failed
from penstock.schemas.jobs import Job

SIZE = 4_000_000
BODIES = {
    "deep": b'{"a":' * 200 + b'"' + b"x" * SIZE + b'"' + b"}" * 200,
    "keys": b"{" + b",".join(b'"%06d":0' % key for key in range(SIZE // 11)) + b"}",
    "arrays": b'{"a":[' + b",".join([b"[]"] * (SIZE // 3)) + b"]}",
    "numbers": b'{"a":[' + b",".join([b"0"] * (SIZE // 2)) + b"]}",
    "text": b'{"a":"' + b"\\u00e9" * (SIZE // 6),
    "marks": b'{"a":[' + b'"\\"[{",' * (SIZE // 7) + b"]}",
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
async def test_others_are_answered_while_a_large_body_is_read(name: str, path: str) -> None:
    script = await Script.start()
    answered: list[str] = []

    async def asked(*request: Any) -> int:
        response = await ask(script.app, *request)
        answered.append(request[1])
        return response.status

    statuses = await asyncio.gather(asked("POST", path, BODIES[name]), asked("GET", "/health/live"))
    assert tuple(statuses) == (400, 200)
    assert answered == ["/health/live", path]


async def test_others_go_on_while_a_large_line_of_a_batch_is_read() -> None:
    done: list[str] = []

    async def read() -> None:
        with pytest.raises(InvalidRequest, match="deeper than 128 levels"):
            await line_of(BODIES["deep"], "/v1/completions")
        done.append("line")

    async def other() -> None:
        done.append("other")

    await asyncio.gather(read(), other())
    assert done == ["other", "line"]


def test_what_stands_in_texts_does_not_count(applications: Applications) -> None:
    for text in ("[{:,}]" * 100_000, '\\"[{:' * 100_000, '"[' * 100_000):
        body = {"model": "echo", "prompt": "x", "metadata": text}
        error = applications.run(ask(applications.apps[0], "POST", "/v1/completions", body)).error
        assert (error["param"], error["code"]) == ("metadata", "invalid_type")


def test_a_refusal_names_twenty_faults_and_counts_the_others(applications: Applications) -> None:
    pipe = applications.pipeline.pipe
    strict = pipe.settings.model_copy(update={"strict": True})
    app = create_app(applications.bridges[0], pipe.broker, pipe.registry, strict, "0")

    def refused(body: dict[str, Any]) -> dict[str, Any]:
        return applications.run(ask(app, "POST", "/v1/completions", {"model": "echo", "prompt": "x"} | body)).error

    error = refused({f"key{place}": 0 for place in range(25)})
    assert error["message"].count("is not a known parameter.") == 20
    assert error["message"].endswith(" And 5 more faults.")
    assert error["param"] == "key0"

    error = refused({"k" * 1_000_000 + str(place): 0 for place in range(3)})
    assert len(error["message"]) < 1000 and len(error["param"]) <= 200
    assert error["message"].count("is not a known parameter.") == 3

    error = refused({f"key{place}": 0 for place in range(90_000)})
    assert error["message"] == "The body has 90,000 faults; see /docs for its schema."


def test_the_refusal_of_a_job_with_many_keys_fits_a_message(applications: Applications) -> None:
    async def refused(bridge: Bridge, body: dict[str, Any]) -> ErrorBody:
        job = Job(id="many", endpoint="/v1/completions", bridge=bridge.name, body=body)
        reading = await bridge.open(job, priority="normal", tenant="default")
        while not reading.ended:
            await reading.take(FOR_EVER)
        assert isinstance(reading.final, Failed)
        return reading.final.error

    error = applications.run(refused(applications.bridges[0], {f"k{key:06}": 0 for key in range(300_000)}))
    assert (error.status, error.code) == (400, "malformed_job")
    assert error.message.startswith("The job is malformed: it holds 300,0")
    assert len(error.message) < 200
