"""python agent.py MODEL PROMPT [SERVER…], with the broker's URL in NATS_URL: an answer for which tools of these servers
may be called, which Penstock runs"""

import asyncio
import json
import os
import sys
import uuid

import nats


async def main(model: str, prompt: str, *servers: str) -> None:
    connection = await nats.connect(os.environ["NATS_URL"])
    js = connection.jetstream()
    unique = uuid.uuid4().hex
    id, bridge = f"resp_{unique}", f"agent-{unique}"  # with a bridge of its own, its turns' events come with its own
    tools = [{"type": "mcp", "server_label": server, "require_approval": "never"} for server in servers]
    body = {"model": model, "input": prompt, "tools": tools, "temperature": 0}
    job = {"id": id, "bridge": bridge, "endpoint": "/v1/responses", "body": body}
    events = await js.subscribe(f"penstock.events.default.{bridge}.*", ordered_consumer=True)
    await js.publish("penstock.jobs.normal.default", json.dumps(job).encode(), headers={"Nats-Msg-Id": id})
    async for message in events.messages:
        event = json.loads(message.data)
        match event["type"]:
            case "token":
                print(event["text"], end="", flush=True)
            case "item" if event["finished"] and event["item"]["type"] == "mcp_call":
                item = event["item"]
                print(f"[{item['name']} {item['arguments']} → {item['output'] or item['error']}]")
            case "failed" | "expired" if event["request"] == id:
                print(event["error"]["message"], file=sys.stderr)
        if event["type"] in ("done", "failed", "cancelled", "expired") and event["request"] == id:
            break
    print()
    await connection.close()


asyncio.run(main(*sys.argv[1:]))
