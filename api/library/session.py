"""Conversations whose tool calls this process runs, with an engine in this process or with any Penstock server:

    async with ResponsesSession(engine, servers={"time": HttpServer(url="https://example.com/mcp")}) as session:
        result = await session.run("What time is it in Oslo, and what in Lima?")
        print(result.text, result.calls)

A conversation ends with its process; `/v1/responses` survives one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import httpx2

from ...engine import InferenceEngine
from ...schemas.base import tool_name
from ...schemas.errors import GenerationFailed, InvalidRequest
from ...schemas.loops import LoopTool, Source, ToolResult
from ...schemas.urls import by_proxy, check_server, goes_through_proxies
from ..tools.functions import Function
from ..tools.mcp_config import FUNCTIONS, ServerConfig, server_config
from ..tools.toolbox import Toolbox
from .adapter import OpenAIAdapter

MAX_TURNS = 10
TRIES = 5  # of a request that a server refuses for overload, or where it cannot be reached
PAUSE = 1.0  # seconds before the second try, doubled before each further one: a front restarts meanwhile
LONGEST_PAUSE = 30.0  # seconds, whatever `Retry-After` asks for
_OF_SESSION = {
    "messages": "a session makes the messages; pass texts to run().",
    "tools": "a session makes the list of tools; pass functions or servers.",
    "n": "a session reads one choice; leave n out.",
    "stream": "run() returns whole answers; leave stream out.",
}
_NEUTRAL = (("n", 1), ("stream", False))

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutedCall:
    """A tool call: `arguments` is JSON as the model wrote it, `result` the text that it received."""

    id: str
    name: str
    arguments: str
    result: str
    is_error: bool


@dataclass(frozen=True, slots=True)
class ConversationResult:
    """What one `run` came to: `text` is the final message, `calls` are the executed tool calls, in order, and `turns`
    counts the requests to the model. `finish_reason` is as in OpenAI's chats."""

    text: str
    calls: tuple[ExecutedCall, ...]
    turns: int
    finish_reason: str


class _Model(Protocol):
    async def acreate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a chat request."""


class ResponsesSession:
    """A conversation that continues from one `run` to the next; `messages` holds all of it, in OpenAI's format.

    `model` is an engine, an adapter, or the URL of a server, `http://host:port`, which needs the model's `name` and
    perhaps an `api_key`. `servers` maps names to MCP servers, `functions` are made by `@tool`. `allowed_tools` names
    the tools that the model may call (all, if None). `parameters` go into every request.

    Use a session in one event loop, and for one `run` at a time.
    """

    def __init__(
        self,
        model: InferenceEngine | OpenAIAdapter | str,
        *,
        name: str | None = None,
        api_key: str | None = None,
        servers: Mapping[str, ServerConfig | str] | None = None,
        functions: Sequence[Function] = (),
        allowed_tools: Sequence[str] | None = None,
        max_turns: int = MAX_TURNS,
        instructions: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises `InvalidRequest` for fewer turns than one, a URL that no server has or without a model's name, a name
        or key without effect, two functions or servers of a name, and parameters that a session sets itself. What a
        server ignores of the parameters is logged. Raises `TypeError` for what is no function or server.

        Raises `StartupError` where the environment names a proxy for the URL that cannot be used.
        """
        if max_turns < 1:
            raise InvalidRequest("max_turns is at least 1.", param="max_turns")
        if isinstance(model, str):
            if name is None:
                raise InvalidRequest("A URL serves several models; give the name of one.", param="name")
            self._model: _Model = _Remote(_checked_url(model), name, api_key)
        else:
            if api_key is not None:
                raise InvalidRequest("api_key has no effect without a server's URL; leave it out.", param="api_key")
            if name is not None and isinstance(model, OpenAIAdapter) and name != model.name:
                raise InvalidRequest(f"The adapter's name is {model.name!r}; leave name out.", param="name")
            self._model = model if isinstance(model, OpenAIAdapter) else OpenAIAdapter(model, name=name)
        known = {label: server_config(one) for label, one in (servers or {}).items()}
        if FUNCTIONS in known:
            raise InvalidRequest(f"{FUNCTIONS!r} is no name for a server; choose another.", param="servers")
        self._toolbox = Toolbox(known, _checked_functions(functions))
        if isinstance(allowed_tools, str):
            raise TypeError("allowed_tools must be a list of names, not a text")
        allowed = None if allowed_tools is None else tuple(allowed_tools)
        self._allowed = frozenset(allowed or ())
        labels = [*known, *([FUNCTIONS] if functions else [])]
        self._sources = {label: Source(label=label, allowed=allowed) for label in labels}
        self._tools: dict[str, LoopTool] | None = None  # by the names that the model knows; set by `tools`
        self._max_turns = max_turns
        self._parameters = dict(parameters or {})
        for own, hint in _OF_SESSION.items():
            value = self._parameters.get(own)
            if value is not None and (own, value) not in _NEUTRAL:
                raise InvalidRequest(f"{own} has no effect in parameters: {hint}", param=own)
        self._is_running = False  # set by run
        self.messages: list[dict[str, Any]] = []
        if instructions:
            self.messages.append({"role": "system", "content": instructions})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; an engine or adapter stays open."""
        await self._toolbox.close()
        if isinstance(self._model, _Remote):
            await self._model.close()

    async def tools(self) -> dict[str, LoopTool]:
        """The tools that the model may call, by name; a name that two servers use is prefixed with the server's label.

        Raises `ToolFailed` where a server does not list its tools.
        """
        if self._tools is None:
            lists = await asyncio.gather(*map(self._toolbox.tools, self._sources.values()))
            found = [tool for tools in lists for tool in tools]
            if unknown := self._allowed - {tool.tool for tool in found}:
                _log.warning("allowed_tools names what no server or function offers: %s", ", ".join(sorted(unknown)))
            names = [tool.name for tool in found]
            self._tools = {
                tool.name if names.count(tool.name) == 1 else tool_name(f"{tool.label}__{tool.name}"): tool
                for tool in found
            }
        return self._tools

    async def run(self, text: str) -> ConversationResult:
        """Send `text`, and run the model's tool calls until it makes none; it may make none in the last turn.

        Raises `InvalidRequest` and `GenerationFailed` as requests to the model do, and `ToolFailed`. The messages until
        then stay in `messages`. Raises `RuntimeError` while another run goes on: the two would mix their messages.
        """
        if self._is_running:
            raise RuntimeError("a session answers one run at a time; await the other run, or use a session for each")
        self._is_running = True
        try:
            return await self._run(text)
        finally:
            self._is_running = False

    async def _run(self, text: str) -> ConversationResult:
        tools = await self.tools()
        self.messages.append({"role": "user", "content": text})
        executed: list[ExecutedCall] = []
        for turn in range(1, self._max_turns + 1):
            answer = await self._model.acreate(self._body(tools, is_last=turn == self._max_turns))
            choice = answer["choices"][0]
            message = choice["message"]
            # The last call of an answer that was cut is incomplete, and no request could hold it.
            calls = [] if choice["finish_reason"] == "length" else message.get("tool_calls") or []
            said = {name: message[name] for name in ("content", "reasoning_content") if message.get(name)}
            self.messages.append(
                {"role": "assistant", "content": "", **said} | ({"tool_calls": calls} if calls else {})
            )
            if not calls:
                break
            results = await asyncio.gather(*(self._called(tools, call["function"]) for call in calls))
            for call, result in zip(calls, results, strict=True):
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.text})
                function = call["function"]
                executed.append(
                    ExecutedCall(call["id"], function["name"], function["arguments"], result.text, result.is_error)
                )
        return ConversationResult(message.get("content") or "", tuple(executed), turn, choice["finish_reason"])

    def _body(self, tools: Mapping[str, LoopTool], *, is_last: bool) -> dict[str, Any]:
        offered = [
            {
                "type": "function",
                "function": {"name": name, "description": tool.description, "parameters": tool.parameters},
            }
            for name, tool in tools.items()
        ]
        choice: dict[str, Any] = {"tools": offered} if offered else {}
        if offered and is_last:
            choice["tool_choice"] = "none"
        return {**self._parameters, "messages": self.messages, **choice}

    async def _called(self, tools: Mapping[str, LoopTool], call: Mapping[str, str]) -> ToolResult:
        tool = tools.get(call["name"])
        if tool is None:
            return ToolResult(f"There is no tool {call['name']}; call one of those listed.", is_error=True)
        return await self._toolbox.call(self._sources[tool.label], tool, call["arguments"])


def _checked_url(text: str) -> str:
    """Raises `InvalidRequest` unless it is the URL of a server."""
    try:
        check_server(httpx2.URL(text))
    except (ValueError, httpx2.InvalidURL) as error:
        raise InvalidRequest(f"{text!r} is not the URL of a server: {error}.", param="model") from None
    return text


def _checked_functions(functions: Sequence[Function]) -> Sequence[Function]:
    """Raises `TypeError` for what `@tool` did not make, and `InvalidRequest` for two of a name."""
    names: set[str] = set()
    for function in functions:
        if not isinstance(function, Function):
            raise TypeError(f"functions must be made by @tool, not {type(function).__name__}")
        if function.name in names:
            raise InvalidRequest(f"Two functions have the name {function.name!r}; rename one.", param="functions")
        names.add(function.name)
    return functions


class _Remote:
    """A client of a server's chat completions that retries where the server is overloaded or restarts."""

    def __init__(self, url: str, name: str, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        base = url.rstrip("/").removesuffix("/v1")
        timeout = httpx2.Timeout(10.0, read=None)
        proxies = goes_through_proxies(base)
        self._http = httpx2.AsyncClient(base_url=f"{base}/v1/", headers=headers, timeout=timeout, trust_env=proxies)
        self._name = name
        self._ignored: set[str] = set()  # what the log has said; set by acreate

    async def acreate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        # The key makes a retry the same request to the server.
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        fault: InvalidRequest | GenerationFailed
        for attempt in range(TRIES):
            pause = PAUSE * 2**attempt
            try:
                response = await self._http.post(
                    "chat/completions", json={"model": self._name, **body}, headers=headers
                )
            except httpx2.HTTPError as error:
                reason = f"{type(error).__name__}{by_proxy(str(self._http.base_url))}"
                fault = GenerationFailed(f"No answer from {self._http.base_url} ({reason}).")
            else:
                if response.is_success:
                    self._tell_ignored(response.headers.get("penstock-ignored", ""))
                    return _completion(response)
                fault = _fault(response)
                if response.status_code not in (408, 429, 500, 502, 503):
                    raise fault
                with contextlib.suppress(ValueError):  # it may also be a date
                    pause = float(response.headers.get("retry-after", pause))
            if attempt + 1 < TRIES:
                await asyncio.sleep(min(pause, LONGEST_PAUSE))
        raise fault

    def _tell_ignored(self, names: str) -> None:
        if names and names not in self._ignored:
            self._ignored.add(names)
            _log.warning("%s ignores these parameters: %s", self._http.base_url, names)

    async def close(self) -> None:
        await self._http.aclose()


def _completion(response: httpx2.Response) -> dict[str, Any]:
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        answer: dict[str, Any] = response.json()
        if {"message", "finish_reason"} <= answer["choices"][0].keys():
            return answer
    raise GenerationFailed(f"{response.url} answered {response.status_code}, but not with a chat completion.")


def _fault(response: httpx2.Response) -> InvalidRequest | GenerationFailed:
    try:
        error = response.json()["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, LookupError, TypeError):
        message, code, param = f"HTTP {response.status_code} from {response.url}", None, None
    kind = GenerationFailed if response.status_code >= 500 else InvalidRequest
    return kind(message, code=code, param=param)
