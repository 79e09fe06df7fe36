"""A shop whose tools depend on one another, as functions of a `penstock serve` of the model in the box.

Every call is noted before anything else. A call may be held: it calls the test, and waits until it is let go.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
from serving import Process, Served, until

MODEL = "penstock-nano"
TOOLS = ("find_customer", "get_order", "get_price")
TIMEOUT = 60.0
WISH = "Find the customer with email {}, get its order and tell me its price."
CALLS = {  # that it takes, by the email
    "ann@bank.com": [("find_customer", "ann@bank.com"), ("get_order", "C-481"), ("get_price", "7302")],
    "paul@river.com": [("find_customer", "paul@river.com"), ("get_order", "2837"), ("get_price", "5096")],
}
FUNCTIONS: Any = {"type": "mcp", "server_label": "functions", "require_approval": "never"}

SOURCE = """
import json
import socket
from pathlib import Path

from penstock.api.tools.functions import tool

HERE = Path(__file__).parent


def note(name, value):
    with (HERE / "calls").open("a") as file:
        file.write(json.dumps([name, value]) + "\\n")
    if (HERE / f"held-{value}").exists():
        with socket.create_connection(("127.0.0.1", PORT)) as gate:
            gate.recv(1)


@tool(description="Find a customer")
def find_customer(email: str):
    note("find_customer", email)
    return {"customer_id": {"ann@bank.com": "C-481", "paul@river.com": "2837"}[email]}


@tool(description="Get an order")
def get_order(customer_id: str):
    note("get_order", customer_id)
    return {"order_id": {"C-481": "7302", "2837": "5096"}[customer_id]}


@tool(description="Get a price", repeatable=True)
def get_price(order_id: str):
    note("get_price", order_id)
    return {"price": {"7302": 12.5, "5096": 71}[order_id]}
"""


class Shop:
    """The files of the tools, in a folder; `options` are those of `serve`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(TIMEOUT)
        (folder / "shop.py").write_text(SOURCE.replace("PORT", str(self._listener.getsockname()[1])))

    @property
    def options(self) -> list[str]:
        return ["--tool-functions", ",".join(f"{self._folder / 'shop.py'}:{name}" for name in TOOLS)]

    @property
    def calls(self) -> list[tuple[str, str]]:
        """What was called, with which argument, since `clear`."""
        file = self._folder / "calls"
        return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []

    def clear(self) -> None:
        for file in (self._folder / "calls", *self._folder.glob("held-*")):
            file.unlink(missing_ok=True)

    def hold(self, *values: str) -> None:
        """Calls with these arguments will wait."""
        for value in values:
            (self._folder / f"held-{value}").touch()

    @contextmanager
    def held(self, *values: str) -> Iterator[None]:
        """Calls with these arguments wait, and go on behind this; later ones do not wait."""
        with ExitStack() as gates:
            for _ in values:
                gates.enter_context(self._listener.accept()[0])
            for value in values:
                (self._folder / f"held-{value}").unlink()
            yield

    def close(self) -> None:
        self._listener.close()


class Bundled:
    """`penstock serve` of the model in the box, which can be started again over the same state."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self.served = self._start()
        self.client = self._client()

    def _start(self) -> Served:
        arguments = ["--heartbeat-interval", "0.2", "--lease", "1", *self._options]
        state = self._folder / "state"
        return Served(Process("serve", *arguments, "--port", "0", "--state-dir", str(state), cwd=self._folder), state)

    def _client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.served.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=TIMEOUT,
            _strict_response_validation=True,
        )

    def kill(self, name: str) -> None:
        """End the front, the worker or the nats-server at once; it is started again."""
        children = psutil.Process(self.served.process.pid).children(recursive=True)
        (victim,) = [child for child in children if name in " ".join(child.cmdline())]
        os.kill(victim.pid, signal.SIGKILL)
        psutil.wait_procs([victim], timeout=TIMEOUT)

    def wait_ready(self) -> None:
        with httpx2.Client(timeout=TIMEOUT, transport=httpx2.HTTPTransport(retries=20)) as client:
            until(lambda: client.get(f"{self.served.url}/health/ready").status_code == 200)

    def restart(self) -> None:
        self.served.process.send(signal.SIGINT)
        assert self.served.process.wait() == 0
        self.close()
        self.served = self._start()
        self.client = self._client()

    def close(self) -> None:
        self.client.close()
        self.served.process.end()
