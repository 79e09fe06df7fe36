"""The tools that requests may use, of MCP servers and of Python functions, behind one interface."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import jsonschema
import referencing.exceptions
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for

from ...config.settings import Settings
from ...schemas.base import tool_name
from ...schemas.bounds import load_arguments
from ...schemas.errors import InvalidRequest, ToolFailed
from ...schemas.loops import KeepImage, LoopTool, Source, ToolResult
from .functions import Function, find_functions
from .mcp_config import FUNCTIONS, HttpServer, ServerConfig, load_servers
from .policy import ToolPolicy, each, location_of, mcp_prefix, refuse
from .sealing import unseal

if TYPE_CHECKING:
    from .mcp_client import McpClient

MAX_CLIENTS = 256  # connections to servers that requests bring, one for each set of headers
MAX_SCHEMA = 4000  # characters of a schema that an error repeats to the model

Unseal = Callable[[str, str, str], dict[str, str]]  # of a sealed text, a tenant and a URL

# Headers that name the host or frame the message, which clients must not set.
_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect"})
_header = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch


class Toolbox:
    """Lists and calls tools. `servers` are the configured ones, by name. `allowed_urls` are prefixes of the URLs that a
    request may bring; without any it may bring none. `unseal` decrypts `Source.sealed`, and `policy` is the operator's.

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
        self._allowed = each(mcp_prefix, allowed_urls)
        self._unseal = unseal
        self._policy = policy or ToolPolicy()
        self._clients: dict[
            tuple[str, str, tuple[tuple[str, str], ...]], McpClient
        ] = {}  # the least recently used first
        self._named: dict[str, McpClient] = {}
        if servers or allowed_urls:
            _mcp_client()  # not at the first call

    def check(self, source: Source) -> None:
        """Raise `InvalidRequest` for a source that its request may not use. Opens no connection."""
        if source.url is not None:
            location = location_of(source.url)
            if not any(location.is_within(one) for one in self._allowed):
                refuse(
                    f"This installation does not allow the server_url of {source.label}; the setting "
                    "--mcp-allowed-urls (PENSTOCK_MCP_ALLOWED_URLS) names those it does."
                )
        elif source.sealed is not None:
            refuse(f"The headers of {source.label} are set by the configuration; send headers only with a server_url.")
        elif source.label == FUNCTIONS:
            if not self._functions:
                refuse("This installation offers no functions as tools; leave functions out.")
        elif source.label not in self._servers:
            refuse(f"No MCP server is called {source.label} here; give its server_url.")
        if not self._policy.may_use(source):
            refuse(f"This tenant may not use the tools of {source.label}; the setting tool_grants says which it may.")

    async def tools(self, source: Source) -> list[LoopTool]:
        """The tools of a source that its tenant may call. Raises `ToolFailed`, and `InvalidRequest` as `check` does."""
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

    async def call(self, source: Source, tool: LoopTool, arguments: str, keep: KeepImage | None = None) -> ToolResult:
        """Call a tool with the arguments that a model wrote; failures become results that tell the model.

        `keep` stores the images of a result; without it, they are described.
        """
        try:
            self.check(source)
            if not self._is_allowed(source, tool.tool):
                raise ToolFailed(f"The tool {tool.name} is not allowed; call another one.")
            given = parse_arguments(tool, arguments)
            if not _is_functions(source):
                return await (await self._client(source)).call(tool.tool, given, keep)
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
        """Close all connections."""
        clients = [*self._clients.values(), *self._named.values()]
        await asyncio.gather(*(client.close() for client in clients))

    async def _client(self, source: Source) -> McpClient:
        client_type = _mcp_client()
        if source.url is None:  # the operator's own are few, and never evicted
            return self._named.setdefault(source.label, client_type(self._servers[source.label], name=source.label))
        config = HttpServer(url=source.url, headers=self._headers(source))
        key = (source.label, config.url, tuple(sorted(config.headers.items())))
        client = self._clients.pop(key, None) or client_type(config, name=source.label)
        while len(self._clients) >= MAX_CLIENTS:
            idle = next((known for known, one in self._clients.items() if not one.busy), None)
            if idle is None:
                raise ToolFailed("Too many MCP servers are in use at the moment; try again later.")
            await self._clients.pop(idle).close()
        return self._clients.setdefault(key, client)

    def _headers(self, source: Source) -> dict[str, str]:
        if source.sealed is None:
            return {}
        if self._unseal is None:
            raise ToolFailed("This installation has no secret_key, and so sends no headers to MCP servers of requests.")
        headers = _lowered(self._unseal(source.sealed, source.tenant, source.url or ""))
        for name, value in headers.items():
            if not _header(name) or name in _OURS or name.startswith("mcp-") or not value.isprintable():
                raise ToolFailed(f"A header for {source.label} cannot be sent; leave it out.")
            if not value.isascii():
                raise ToolFailed(f"A header for {source.label} has characters beyond ASCII; encode them.")
        return headers


def toolbox_of(settings: Settings) -> Toolbox:
    """The tools that a server offers under these settings. Raises `ConfigurationError`."""
    servers = load_servers(settings.mcp_config, stdio=False) if settings.mcp_config else {}
    key = settings.secret_key
    opening = partial(unseal, key=key.encode()) if key else None
    policy = ToolPolicy(settings.tool_grants, settings.tools_without_approval)
    return Toolbox(servers, find_functions(settings.tool_functions), settings.mcp_allowed_urls, opening, policy)


def parse_arguments(tool: LoopTool, arguments: str) -> dict[str, Any]:
    """Parse arguments that a model wrote, and check them against the tool's schema.

    Raises `ToolFailed` with a message that lets the model correct them.
    """
    try:
        given = load_arguments(arguments if arguments.strip() else "{}", _no_number)
        if not isinstance(given, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise ToolFailed(
            f"The arguments of {tool.name} are not a JSON object ({error}). "
            f"Its schema is {json.dumps(tool.parameters, ensure_ascii=False)[:MAX_SCHEMA]}"
        ) from None
    validator = validator_for(tool.parameters, default=jsonschema.Draft202012Validator)
    try:
        validator.check_schema(tool.parameters)
        # With the default registry a server's schema could make this process fetch any URL.
        schema = _without_patterns(tool.parameters)
        fault = best_match(validator(schema, registry=referencing.Registry()).iter_errors(given))
    except (jsonschema.SchemaError, referencing.exceptions.Unresolvable, re.error, RecursionError):
        return given  # the schema is unusable; the server checks the arguments itself
    if fault is not None:
        raise ToolFailed(f"The arguments of {tool.name} are wrong: at {fault.json_path}: {fault.message[:1000]}")
    return given


def _without_patterns(schema: Any) -> Any:
    """A schema without regular expressions, whose matching may never end; the server checks those itself."""
    if isinstance(schema, list):
        return [_without_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_patterns(value)
        for key, value in schema.items()
        if not (key == "pattern" and isinstance(value, str)) and key not in ("patternProperties", "propertyNames")
    }


def _mcp_client() -> type[McpClient]:
    """The client, whose import takes as long as all others of a bridge together; most servers need none."""
    from .mcp_client import McpClient

    return McpClient


def _is_functions(source: Source) -> bool:
    return source.url is None and source.label == FUNCTIONS


def _lowered(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
