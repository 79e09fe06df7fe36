"""The pipeline behind two bridges, with a model that says what a test wrote for it, and tools that note their calls."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import orjson
from asgi import Response, ask
from mcp_servers import Everything
from memory_pipeline import FragileEcho, Pipeline
from responses_rules import check_responses

from penstock.api.bridge.bridge import Bridge
from penstock.api.http.app import create_app
from penstock.api.tools.functions import tool
from penstock.api.tools.mcp_config import HttpServer
from penstock.api.tools.policy import ToolPolicy
from penstock.api.tools.sealing import unseal
from penstock.api.tools.toolbox import Toolbox
from penstock.engine.models import BUNDLED, resolve_model
from penstock.engine.planning.manifests import ECHO
from penstock.schemas.params import GenerationParams
from penstock.streams.memory.broker import MemoryBroker

KEY = "a key of the installation"


class Scripted(FragileEcho):
    """Says one text after another, whoever asks and whatever the grammar; and remembers what it was asked."""

    manifest = ECHO.model_copy(update={"parameters": frozenset(GenerationParams.model_fields)})

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.texts: list[str] = []
        self.asked: list[str] = []

    def _admit(self) -> None:
        waiting = list(self._waiting)
        super()._admit()
        for sequence in waiting:
            if (row := self._running.get(sequence)) is not None:
                self.asked.append(self.tokenizer.decode(list(sequence.prompt)))
                row.cycle = tuple(self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False))


class Office:
    """The pipeline behind two bridges, and tools that note what is asked of them."""

    def __init__(self, runner: asyncio.Runner, memory: type[MemoryBroker] = MemoryBroker) -> None:
        self.run = runner.run
        self.done: list[tuple[Any, ...]] = []
        self.goes = asyncio.Event()
        self.waiting = asyncio.Semaphore(0)
        source = str(resolve_model(BUNDLED))
        self.everything = Everything()
        self.silent = socket.create_server(("127.0.0.1", 0))
        servers = {
            "everything": HttpServer(url=self.everything.url),
            "silent": HttpServer(url=f"http://127.0.0.1:{self.silent.getsockname()[1]}/mcp"),
        }
        policy = ToolPolicy(["default=*", "*=everything"], ["everything", "functions", "http://127.0.0.1:9/"])
        self.toolbox = Toolbox(servers, self._functions(), ["http://127.0.0.1:9/mcp"], self._unseal, policy)
        self.pipeline = runner.run(
            Pipeline.start(
                kind=Scripted,
                memory=memory,
                source=source,
                context_length=2048,
                relay_interval=0.0,
                toolbox=self.toolbox,
                secret_key=KEY,
            )
        )
        pipe = self.pipeline.pipe
        self.broker = pipe.broker
        other = Bridge(pipe.broker, pipe.subjects, "other")
        runner.run(other.start())
        self.apps = [
            create_app(bridge, pipe.broker, pipe.registry, pipe.settings, "0")
            for bridge in (self.pipeline.bridge, other)
        ]

    def close(self) -> None:
        self.run(self.pipeline.stop())
        self.run(self.toolbox.close())
        self.everything.kill()
        self.silent.close()

    @property
    def model(self) -> Scripted:
        assert isinstance(self.pipeline.backend, Scripted)
        return self.pipeline.backend

    def _unseal(self, text: str, tenant: str, url: str) -> dict[str, str]:
        return unseal(text, tenant, url, KEY.encode())

    def _functions(self) -> list[Any]:
        @tool
        def add(a: int, b: int) -> int:
            "Add two numbers."
            self.done.append(("add", a, b))
            if b == 13:
                raise ValueError("an unlucky number")
            return a + b

        @tool
        async def wait(name: str) -> str:
            "Wait until told otherwise."
            self.done.append(("wait", name))
            self.waiting.release()
            await self.goes.wait()
            return f"{name} has waited"

        @tool(repeatable=True)
        def look(name: str) -> str:
            "Look at something."
            self.done.append(("look", name))
            return "x" * 10_000_000 if name == "big" else f"{name} looks well"

        return [add, wait, look]

    def ask(self, method: str, path: str, body: Any = None, *, app: int = 0, **options: Any) -> Response:
        return self.run(ask(self.apps[app], method, path, body, **options))

    def create(self, *texts: str, app: int = 0, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        """The response to a request, whose turns are answered with these texts; a stream is judged first."""
        self.model.texts = list(texts)
        answer = self.ask("POST", "/v1/responses", {"model": "echo", **body}, app=app, headers=headers or {})
        assert answer.status == 200, answer.body
        return check_responses(answer.body) if body.get("stream") else orjson.loads(answer.body)

    def refused(self, status: int, **body: Any) -> dict[str, Any]:
        answer = self.ask("POST", "/v1/responses", {"model": "echo", **body})
        assert answer.status == status, answer.body
        return answer.error

    def kept(self) -> set[str]:
        """What is kept of responses, but for the fact that they are over."""
        bucket = self.run(self.broker.bucket("responses"))
        entries = {entry.key: entry.value for entry in self.run(bucket.entries())}
        ends = {orjson.loads(value)["version"] for key, value in entries.items() if key.endswith(".ended")}
        return {key for key in entries if not key.endswith(".ended") and key.partition(".")[0] not in ends}

    def stored(self, id: str) -> dict[str, Any]:
        answer = self.ask("GET", f"/v1/responses/{id}", app=1)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = orjson.loads(answer.body)
        return found


def call(tool: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def functions(**more: Any) -> list[dict[str, Any]]:
    return server("functions", **more)


def server(label: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "mcp", "server_label": label, "require_approval": "never", **more}]


def results(response: dict[str, Any]) -> list[tuple[str | None, str | None]]:
    """Output and error of each of its calls."""
    calls = [item for item in response["output"] if item["type"] == "mcp_call"]
    return [(one["output"], one["error"] and one["error"]["content"][0]["text"]) for one in calls]


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def said(response: dict[str, Any]) -> str:
    """The text of its last message."""
    text: str = response["output"][-1]["content"][0]["text"]
    return text
