"""A NATS client without JetStream follows an answer while the parts around it die."""

from __future__ import annotations

import json
import os
import signal

import nats
import psutil
from nats.errors import NoRespondersError, TimeoutError
from serving import Serve

PROMPT = " ".join(map(str, range(1000, 1080)))
VICTIMS = {5: "worker", 100: "front", 200: "nats-server"}  # by the characters that have arrived


async def test_whatever_dies_a_client_that_asks_for_what_follows_has_each_event_once(serve: Serve) -> None:
    served = serve("--backend", "echo", "--echo-rate", "50", "--lease", "1")
    client = await nats.connect(served.nats_url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": len(PROMPT)}
    job = {"id": "r1", "bridge": "me", "endpoint": "/v1/completions", "body": body}
    sent = await client.request("penstock.jobs.normal.default", json.dumps(job).encode(), timeout=60)
    assert b'"stream"' in sent.data
    victims, text, after, event = dict(VICTIMS), "", 0, {"type": ""}
    while event["type"] != "done":
        assert event["type"] in ("", "accepted", "queued", "token"), event
        question = json.dumps({"after": after, "wait": 1}).encode()
        try:
            answer = await client.request("penstock.control.replay.default.me.r1", question, timeout=2)
        except (NoRespondersError, TimeoutError):
            continue
        for stored in json.loads(answer.data)["events"]:
            assert stored["sequence"] > after
            event, after = stored["event"], stored["sequence"]
            text += event.get("text", "")
        for length in [length for length in victims if length <= len(text)]:
            name = victims.pop(length)
            parts = psutil.Process(served.process.pid).children(recursive=True)
            os.kill(next(part.pid for part in parts if name in " ".join(part.cmdline())), signal.SIGKILL)
    assert text == PROMPT and not victims
    await client.close()
