"""What `penstock bench chaos` says of tools' side effects: each is one call's, and each call's answer is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.api.bench.chaos.agents import LEDGER, Agent, find_customer, get_order, get_price, judge_agents, ledger_of


def call(id: str, name: str, output: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": id, "type": "mcp_call", "name": name, "output": output and json.dumps(output)}


def agent(*items: dict[str, Any], status: str = "completed", absent: int = 0) -> Agent:
    return Agent({"id": "resp_1", "status": status, "output": list(items)}, absent=absent)


LEDGER_OF_ONE = {10: "find_customer", 20: "get_order", 30: "get_price"}
FOUND, ORDER = call("a", "find_customer", {"customer_id": "10"}), call("b", "get_order", {"order_id": "20"})
PRICE, UNKNOWN = call("c", "get_price", {"price": 30}), call("d", "get_order", None)


@pytest.mark.parametrize(
    ("law", "agents", "ledger"),
    [
        (None, [agent(FOUND, ORDER, PRICE)], LEDGER_OF_ONE),
        (None, [agent(FOUND, UNKNOWN, PRICE)], LEDGER_OF_ONE),
        (None, [agent(FOUND, UNKNOWN)], {10: "find_customer"}),
        (None, [agent(FOUND, ORDER, PRICE)], LEDGER_OF_ONE | {40: "get_price"}),
        ("responses end", [Agent(None, "given up")], {}),
        ("responses complete", [agent(status="failed")], {}),
        ("a response that has begun can be read", [agent(absent=2)], {}),
        ("items are named once", [agent(PRICE, PRICE)], LEDGER_OF_ONE),
        ("what a response says was done", [agent(FOUND)], {}),
        ("what a response says was done", [agent(FOUND)], {10: "get_order"}),
        ("every side effect is a response's", [agent(FOUND, ORDER, PRICE)], LEDGER_OF_ONE | {40: "get_order"}),
        ("every side effect is a response's", [agent(FOUND, UNKNOWN)], LEDGER_OF_ONE | {40: "get_order"}),
        ("a side effect is one call's", [agent(FOUND), agent(FOUND)], {10: "find_customer"}),
    ],
)
def test_every_fault_has_its_law(law: str | None, agents: list[Agent], ledger: dict[int, str]) -> None:
    assert [broken.law for those in judge_agents(agents, ledger).values() for broken in those][:1] == [law] * bool(law)


def test_each_call_answers_with_the_end_of_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(path))
    monkeypatch.setattr("penstock.api.bench.chaos.agents.SLOWEST", 0.0)
    assert ledger_of(path) == {}
    customer = find_customer("ann@bank.com")["customer_id"]
    order = get_order(customer)["order_id"]
    price = get_price(order)["price"]
    assert ledger_of(path) == {int(customer): "find_customer", int(order): "get_order", price: "get_price"}
