"""Dead letters over HTTP: listed, read, sent again and dropped by operators."""

from __future__ import annotations

import orjson
from applications import Script
from asgi import ask

from penstock.schemas.jobs import Job
from penstock.schemas.wire import codec
from penstock.streams.port import DEAD_ATTEMPTS, DEAD_REASON, DEAD_SUBJECT, SCHEMA

LETTERS = "/server/dead-letters"


async def bury(script: Script, data: bytes, schema: str | None = codec.JOB) -> None:
    headers = {DEAD_REASON: "ValueError", DEAD_SUBJECT: "penstock.jobs.high.acme", DEAD_ATTEMPTS: "5"}
    headers |= {SCHEMA: schema} if schema else {}
    await script.broker.publish("penstock.dead.validate", data, message_id=f"{len(data)}", headers=headers)


async def test_letters_are_listed_shown_retried_and_dropped() -> None:
    script = await Script.start()
    await bury(script, codec.encode(Job(id="one", body={"prompt": "a secret"})))
    await bury(script, b"\xffnot a job", None)
    listed = orjson.loads((await ask(script.app, "GET", LETTERS)).body)["data"]
    assert [(each["number"], each["reason"], each["requests"]) for each in listed] == [
        (1, "ValueError", ["one"]),
        (2, "ValueError", []),
    ]
    shown = await ask(script.app, "GET", f"{LETTERS}/1")
    assert b"secret" not in shown.body
    assert orjson.loads(shown.body)["headers"][DEAD_SUBJECT] == "penstock.jobs.high.acme"

    retried = await ask(script.app, "POST", f"{LETTERS}/1/retry")
    assert orjson.loads(retried.body) == {"number": 1, "requests": ["one-r1"]}
    assert (await script.job()).id == "one-r1"
    unreadable = await ask(script.app, "POST", f"{LETTERS}/2/retry")
    assert (unreadable.status, unreadable.error["code"]) == (409, "dead_letter")
    assert orjson.loads((await ask(script.app, "DELETE", f"{LETTERS}/2")).body) == {"number": 2, "deleted": True}
    assert orjson.loads((await ask(script.app, "GET", LETTERS)).body)["data"] == []
    for path in ("1", "2", "0", "x", "9" * 40):
        assert (await ask(script.app, "GET", f"{LETTERS}/{path}")).status == 404
        assert (await ask(script.app, "DELETE", f"{LETTERS}/{path}")).status == 404


async def test_payloads_are_shown_where_the_operator_wants_it() -> None:
    script = await Script.start(show_prompts=True)
    await bury(script, codec.encode(Job(id="one", body={"prompt": "a secret"})))
    await bury(script, b"\xffnot a job", None)
    shown = orjson.loads((await ask(script.app, "GET", f"{LETTERS}/1")).body)
    assert shown["payload"]["body"] == {"prompt": "a secret"}
    assert "not a job" in orjson.loads((await ask(script.app, "GET", f"{LETTERS}/2")).body)["payload"]
