"""Responses whose tools have recorded side effects, which are compared with what the responses report.

The tools are those of a shop that the bundled model knows. Every call adds a line to a ledger, and returns a number
that no other call returns: the offset at which its line ends. So each line belongs to one call of one response, or to
none.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from ...tools.functions import tool
from ..answers import PAUSE
from .judge import Broken

LEDGER = "BENCH_CHAOS_LEDGER"  # the environment's name for the ledger's path
TOOLS = ",".join(f"penstock.api.bench.chaos.agents:{name}" for name in ("find_customer", "get_order", "get_price"))
SLOWEST = 0.5  # seconds of a call, so that some are under way when their process dies
ENDED = ("completed", "failed", "incomplete", "cancelled")
EMAILS = ("ann@bank.com", "paul@river.com")


def _note(name: str, value: str) -> int:
    """Add a call to the ledger; returns where its line ends."""
    ledger = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(ledger, json.dumps([name, value]).encode() + b"\n")
        number = os.lseek(ledger, 0, os.SEEK_CUR)
    finally:
        os.close(ledger)
    time.sleep(random.uniform(0, SLOWEST))
    return number


@tool(description="Find a customer")
def find_customer(email: str) -> dict[str, str]:
    return {"customer_id": str(_note("find_customer", email))}


@tool(description="Get an order")
def get_order(customer_id: str) -> dict[str, str]:
    return {"order_id": str(_note("get_order", customer_id))}


@tool(description="Get a price", repeatable=True)
def get_price(order_id: str) -> dict[str, int]:
    return {"price": _note("get_price", order_id)}


class Agent(NamedTuple):
    """The outcome of one response: its final body, or the error."""

    response: dict[str, Any] | None
    error: str = ""
    absent: int = 0  # times that the server did not find it although it had begun


def request(index: int, model: str) -> dict[str, Any]:
    wish = f"Find the customer with email {EMAILS[index % len(EMAILS)]}, get its order and tell me its price."
    tools = [{"type": "mcp", "server_label": "functions", "require_approval": "never"}]
    return {"model": model, "input": wish, "temperature": 0, "tools": tools, "background": True}


async def run(urls: Sequence[str], body: dict[str, Any], key: str, first: int, patience: float) -> Agent:
    """Create a response in the background, and poll until it has ended; where a bridge fails, at the next one."""
    bridge, said, id, absent = first, "nothing", None, 0
    try:
        async with asyncio.timeout(patience), httpx2.AsyncClient(timeout=30.0, trust_env=False) as client:
            while True:
                url = f"{urls[bridge % len(urls)]}/v1/responses"
                try:
                    if id is None:
                        answer = await client.post(url, json=body, headers={"Idempotency-Key": key})
                    else:
                        answer = await client.get(f"{url}/{id}")
                except httpx2.HTTPError as error:
                    said, bridge = repr(error), bridge + 1
                else:
                    said = f"HTTP {answer.status_code}: {answer.text[:200]}"
                    if answer.status_code == 200:
                        found = answer.json()
                        id = found["id"]
                        if found["status"] in ENDED:
                            return Agent(found, absent=absent)
                    elif answer.status_code == 404 and id is not None:
                        absent += 1
                    elif answer.status_code < 500 and answer.status_code not in (408, 409, 429):
                        return Agent(None, said)
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        return Agent(None, f"given up after {patience:g} s; the last time: {said}; the response is {id}")


def ledger_of(path: Path) -> dict[int, str]:
    """The tool of every line, by the offset at which the line ends."""
    found, end = {}, 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        end += len(line)
        found[end] = json.loads(line)[0]
    return found


def judge_agents(agents: Iterable[Agent], ledger: Mapping[int, str]) -> dict[str, list[Broken]]:
    """Compare the calls that responses report with those in the ledger.

    A call whose process died may be reported with an unknown outcome, and a repeatable one made again. Otherwise every
    call in the ledger must be in a response, and every call in a response in the ledger.
    """
    found: dict[str, list[Broken]] = {}
    claimed: Counter[int] = Counter()
    unknown: Counter[str] = Counter()
    for index, agent in enumerate(agents):
        name = agent.response["id"] if agent.response else f"agent {index}"
        broken = list(_judge_one(agent, ledger, claimed, unknown))
        if broken:
            found[name] = broken
    orphans = Counter(name for number, name in ledger.items() if number not in claimed)
    for name, count in orphans.items():
        if name != get_price.name and count > unknown[name]:
            detail = f"{name}: {count} calls that no response has, {unknown[name]} of unknown outcome"
            found.setdefault("tools", []).append(Broken("every side effect is a response's", detail))
    for number, count in claimed.items():
        if count > 1:
            found.setdefault("tools", []).append(Broken("a side effect is one call's", f"{number}: of {count} calls"))
    return found


def _judge_one(
    agent: Agent, ledger: Mapping[int, str], claimed: Counter[int], unknown: Counter[str]
) -> Iterable[Broken]:
    if agent.response is None:
        yield Broken("responses end", agent.error)
        return
    if agent.absent:
        yield Broken("a response that has begun can be read", f"{agent.absent} times HTTP 404")
    if agent.response["status"] != "completed":
        yield Broken("responses complete", f"{agent.response['status']}: {agent.response.get('error')}")
    items = agent.response["output"]
    if len({item["id"] for item in items}) < len(items):
        yield Broken("items are named once", ", ".join(item["id"] for item in items))
    for item in items:
        if item["type"] != "mcp_call":
            continue
        if item.get("output") is None:
            unknown[item["name"]] += 1
            continue
        (value,) = json.loads(item["output"]).values()
        claimed[int(value)] += 1
        if ledger.get(int(value)) != item["name"]:
            yield Broken(
                "what a response says was done", f"{item['name']} answered {value}, which is not in the ledger"
            )
