"""python client.py MODEL PROMPT, with the broker's URL in NATS_URL"""

import asyncio
import json
import os
import sys
import uuid

import nats


async def main(model: str, prompt: str) -> None:
    connection = await nats.connect(os.environ["NATS_URL"])
    js = connection.jetstream()
    id = str(uuid.uuid4())  # the same id is the same request: publishing it again is harmless
    job = {"id": id, "bridge": "example", "body": {"model": model, "messages": [{"role": "user", "content": prompt}]}}
    events = await js.subscribe(f"penstock.events.default.example.{id}", ordered_consumer=True)
    await js.publish("penstock.jobs.normal.default", json.dumps(job).encode(), headers={"Nats-Msg-Id": id})
    async for message in events.messages:
        event = json.loads(message.data)
        if event["type"] == "token":
            print(event["text"], end="", flush=True)
        if event["type"] in ("failed", "expired"):
            print(event["error"]["message"], file=sys.stderr)
        if event["type"] in ("done", "failed", "cancelled", "expired"):
            break
    print()
    await connection.close()


asyncio.run(main(*sys.argv[1:]))
