"""python tenant.py MODEL PROMPT, with the broker's URL in NATS_URL: a client without JetStream"""

import asyncio
import json
import os
import sys
import uuid

import nats
from nats.errors import NoRespondersError, TimeoutError


async def main(model: str, prompt: str) -> None:
    connection = await nats.connect(os.environ["NATS_URL"])
    id = str(uuid.uuid4())
    job = {"id": id, "bridge": "example", "body": {"model": model, "messages": [{"role": "user", "content": prompt}]}}
    sent = await connection.request(
        "penstock.jobs.normal.default", json.dumps(job).encode(), timeout=30, headers={"Nats-Msg-Id": id}
    )
    if "error" in (told := json.loads(sent.data)):  # not stored
        sys.exit(told["error"]["description"])
    after, event = 0, {"type": ""}
    while event["type"] not in ("done", "failed", "cancelled", "expired"):
        question = json.dumps({"after": after, "wait": 30}).encode()
        try:
            answer = await connection.request(f"penstock.control.replay.default.example.{id}", question, timeout=40)
        except (NoRespondersError, TimeoutError):  # a restart, perhaps: ask again
            await asyncio.sleep(1)
            continue
        told = json.loads(answer.data)
        if "error" in told:
            if told["error"]["status"] != 503:
                sys.exit(told["error"]["message"])
            await asyncio.sleep(1)  # others ask as well
        for stored in told.get("events", ()):
            after, event = stored["sequence"], stored["event"]
            if event["type"] == "token":
                print(event["text"], end="", flush=True)
            if event["type"] in ("failed", "expired"):
                print(event["error"]["message"], file=sys.stderr)
    print()
    await connection.close()


asyncio.run(main(*sys.argv[1:]))
