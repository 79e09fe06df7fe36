"""All tools that requests may use: those of MCP servers and Python functions, behind one port."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

import jsonschema
import referencing.exceptions
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for

from ...config.settings import Settings
from ...schemas.base import tool_name
from ...schemas.errors import InvalidRequest, ToolFailed
from ...schemas.loops import LoopTool, Source, ToolResult
from .functions import Function, find_functions
from .mcp_client import McpClient
from .mcp_config import FUNCTIONS, HttpServer, ServerConfig, load_servers
from .policy import ToolPolicy, UrlLocation, each, refuse
from .sealing import unseal

MAX_CLIENTS = 256  # servers that clients name, each with one set of headers
MAX_SCHEMA = 4000  # characters of a schema that a model is reminded of

Unseal = Callable[[str, str, str], dict[str, str]]  # of what was sealed, for a tenant, for a URL

# What says who is asked, or how a message is framed: none of a client's business.
_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect"})
_header = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch


class Toolbox:
    """`servers` are the configured ones, by name. `allowed_urls` are prefixes of the URLs that a request may name
    itself; none allows none. `unseal` opens `Source.sealed`. `policy` is the operator's word on what they all may do.

    Raises `ConfigurationError` for a prefix that is no URL.
    """

    def __init__(
        self,
        servers: Mapping[str, ServerConfig],
        functions: Sequence[Function] = (),
        allowed_urls: Sequence[str] = (),
        unseal: Unseal | None = None,
        policy: ToolPolicy | None = None,
    ) -> None:
        self._servers = servers
        self._functions = {function.name: function for function in functions}
        self._allowed = each(UrlLocation.prefix, allowed_urls)
        self._unseal = unseal
        self._policy = policy or ToolPolicy()
        self._clients: dict[tuple[str, str, tuple[tuple[str, str], ...]], McpClient] = {}  # the longest unused first
        self._named: dict[str, McpClient] = {}

    def check(self, source: Source) -> None:
        """Raises `InvalidRequest` for a server that a request may not use. Nothing is asked of the network."""
        if source.url is not None:
            place = UrlLocation.of(source.url)
            if not any(place.is_within(one) for one in self._allowed):
                refuse(
                    f"The server_url of {source.label} is not among those that this installation allows; the setting "
                    "--mcp-allowed-urls (PENSTOCK_MCP_ALLOWED_URLS) names them."
                )
        elif source.sealed is not None:
            refuse(f"Headers go with a server_url; those of {source.label} are the configuration's.")
        elif source.label == FUNCTIONS:
            if not self._functions:
                refuse("This installation has no functions as tools.")
        elif source.label not in self._servers:
            refuse(f"No MCP server is called {source.label} here; give its server_url.")
        if not self._policy.may_use(source):
            refuse(f"The tools of {source.label} are not for this tenant; the setting tool_grants says which are.")

    async def tools(self, source: Source) -> list[LoopTool]:
        """All that may be called. Raises `ToolFailed`, and `InvalidRequest` as `check` does."""
        self.check(source)
        if _is_functions(source):
            found = [
                LoopTool(
                    name=one.name,
                    label=source.label,
                    tool=one.name,
                    description=one.description,
                    parameters=one.parameters,
                    repeatable=one.repeatable,
                )
                for one in self._functions.values()
            ]
        else:
            found = []
            for tool in await (await self._client(source)).list_tools():
                hints = tool.annotations
                found.append(
                    LoopTool(
                        name=tool_name(tool.name),
                        label=source.label,
                        tool=tool.name,
                        description=tool.description or "",
                        parameters=tool.input_schema,
                        repeatable=hints is not None and bool(hints.read_only_hint or hints.idempotent_hint),
                    )
                )
        return [
            tool.model_copy(update={"approval": self._policy.needs_approval(source, tool.tool)})
            for tool in found
            if self._is_allowed(source, tool.tool)
        ]

    async def call(self, source: Source, tool: LoopTool, arguments: str) -> ToolResult:
        """Run a tool with the arguments that a model wrote. All that goes wrong is a text for the model."""
        try:
            self.check(source)
            if not self._is_allowed(source, tool.tool):
                raise ToolFailed(f"The tool {tool.name} is not allowed.")
            given = parse_arguments(tool, arguments)
            if not _is_functions(source):
                return await (await self._client(source)).call(tool.tool, given)
            if tool.tool not in self._functions:
                raise ToolFailed(f"There is no tool {tool.name} any more.")
            return await self._functions[tool.tool].run(given)
        except (InvalidRequest, ToolFailed) as error:
            return ToolResult(str(error), is_error=True)

    def _is_allowed(self, source: Source, tool: str) -> bool:
        return (source.allowed is None or tool in source.allowed) and self._policy.may_use(source, tool)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections."""
        clients = [*self._clients.values(), *self._named.values()]
        await asyncio.gather(*(client.close() for client in clients))

    async def _client(self, source: Source) -> McpClient:
        if source.url is None:  # the operator's own: not many, and never pushed out by those that requests name
            return self._named.setdefault(source.label, McpClient(self._servers[source.label], name=source.label))
        config = HttpServer(url=source.url, headers=self._headers(source))
        key = (source.label, config.url, tuple(sorted(config.headers.items())))
        client = self._clients.pop(key, None) or McpClient(config, name=source.label)
        while len(self._clients) >= MAX_CLIENTS:
            idle = next((known for known, one in self._clients.items() if not one.busy), None)
            if idle is None:
                raise ToolFailed("Too many MCP servers are being asked at the moment; try again later.")
            await self._clients.pop(idle).close()
        return self._clients.setdefault(key, client)

    def _headers(self, source: Source) -> dict[str, str]:
        if source.sealed is None:
            return {}
        if self._unseal is None:
            raise ToolFailed("This installation takes no authorisation for MCP servers.")
        headers = _lowered(self._unseal(source.sealed, source.tenant, source.url or ""))
        for name, value in headers.items():
            if not _header(name) or name in _OURS or name.startswith("mcp-") or not value.isprintable():
                raise ToolFailed(f"A header that {source.label} is given cannot be sent.")
            if not value.isascii():
                raise ToolFailed(f"A header that {source.label} is given has characters beyond ASCII.")
        return headers


def toolbox_of(settings: Settings) -> Toolbox:
    """What a server offers. Raises `ConfigurationError`."""
    servers = load_servers(settings.mcp_config, stdio=False) if settings.mcp_config else {}
    key = settings.secret_key
    opening = partial(unseal, key=key.encode()) if key else None
    policy = ToolPolicy(settings.tool_grants, settings.tools_without_approval)
    return Toolbox(servers, find_functions(settings.tool_functions), settings.mcp_allowed_urls, opening, policy)


def parse_arguments(tool: LoopTool, arguments: str) -> dict[str, Any]:
    """What a model wrote, checked against the tool's schema. Raises `ToolFailed` with words that help the model."""
    try:
        given = json.loads(arguments if arguments.strip() else "{}", parse_constant=_no_number)
        if not isinstance(given, dict):
            raise ValueError("it is no object")
        json.dumps(given).encode()
    except (ValueError, RecursionError) as error:
        raise ToolFailed(
            f"The arguments of {tool.name} are not a JSON object ({error}). "
            f"Its schema is {json.dumps(tool.parameters, ensure_ascii=False)[:MAX_SCHEMA]}"
        ) from None
    validator = validator_for(tool.parameters, default=jsonschema.Draft202012Validator)
    try:
        validator.check_schema(tool.parameters)
        # An empty registry: with the default one a server's schema could have anything fetched from anywhere.
        schema = _without_patterns(tool.parameters)
        fault = best_match(validator(schema, registry=referencing.Registry()).iter_errors(given))
    except (jsonschema.SchemaError, referencing.exceptions.Unresolvable, re.error, RecursionError):
        return given  # a schema that cannot be used: the server checks for itself
    if fault is not None:
        raise ToolFailed(f"The arguments of {tool.name} are wrong: at {fault.json_path}: {fault.message[:1000]}")
    return given


def _without_patterns(schema: Any) -> Any:
    """A schema without regular expressions, which can take for ever; the server checks for itself."""
    if isinstance(schema, list):
        return [_without_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_patterns(value)
        for key, value in schema.items()
        if not (key == "pattern" and isinstance(value, str)) and key not in ("patternProperties", "propertyNames")
    }


def _is_functions(source: Source) -> bool:
    return source.url is None and source.label == FUNCTIONS


def _lowered(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
