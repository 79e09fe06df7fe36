"""The operator's policy on tools: which tenant may use which, and which may run without approval.

A rule names tools as `SERVER` or `SERVER/TOOL`, by a configured server or `functions`; as the beginning of URLs, for
servers that requests bring, whose labels prove nothing; or as `*`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn, Self, TypeVar

from ...schemas.errors import ConfigurationError, InvalidRequest
from ...schemas.jobs import TOKEN_PATTERN
from ...schemas.loops import Source
from ...schemas.urls import UrlLocation

Parsed = TypeVar("Parsed")


def location_of(text: str) -> UrlLocation:
    """Raises `InvalidRequest` for a URL that a server might interpret as another one."""
    try:
        return UrlLocation.of(text)
    except ValueError as error:
        refuse(f"The server_url cannot be used: {error}.")


def mcp_prefix(text: str) -> UrlLocation:
    """An allowed prefix of URLs. Raises `ConfigurationError`."""
    try:
        return UrlLocation.prefix(text)
    except ValueError as error:
        raise ConfigurationError([f"the allowed MCP URL {text!r}: {error}"]) from None


class _Tools(NamedTuple):
    """The tools that one rule names; `server` is `*` for all tools."""

    server: str
    tool: str | None = None
    prefix: UrlLocation | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ConfigurationError`."""
        if "://" in text:
            return cls("", None, mcp_prefix(text))
        server, named, tool = text.partition("/")
        if (server != "*" and re.fullmatch(TOKEN_PATTERN, server) is None) or (named and not tool):
            fault = "tools are written SERVER, SERVER/TOOL, https://BEGINNING-OF-URLS or *"
            raise ConfigurationError([f"{text!r}: {fault}"])
        return cls(server, tool or None)

    def covers(self, source: Source, tool: str | None) -> bool:
        """Whether the rule names this tool of the source; with None, any of its tools."""
        if self.prefix is not None:
            return source.url is not None and location_of(source.url).is_within(self.prefix)
        is_server = self.server == "*" or (source.url is None and source.label == self.server)
        return is_server and (self.tool is None or tool in (None, self.tool))


class ToolPolicy:
    """`grants` are rules `TENANT=TOOLS`, with `*` for every tenant; None lets every tenant use all tools.
    `spared` names the tools that may run without approval where a request asks for that; None names all.

    Raises `ConfigurationError` for a bad rule.
    """

    def __init__(self, grants: Sequence[str] | None = None, spared: Sequence[str] | None = None) -> None:
        self._grants = None if grants is None else each(_grant, grants)
        self._spared = None if spared is None else each(_Tools.parse, spared)

    def may_use(self, source: Source, tool: str | None = None) -> bool:
        """Whether the source's tenant may use this tool of it; with None, any of its tools."""
        if self._grants is None:
            return True
        return any(tenant in ("*", source.tenant) and tools.covers(source, tool) for tenant, tools in self._grants)

    def needs_approval(self, source: Source, tool: str) -> bool:
        if self._spared is not None and not any(tools.covers(source, tool) for tools in self._spared):
            return True
        return source.needs_approval(tool)


def each(parse: Callable[[str], Parsed], texts: Iterable[str]) -> list[Parsed]:
    """Parse all texts. Raises `ConfigurationError` with the faults of all."""
    found: list[Parsed] = []
    faults: list[str] = []
    for text in texts:
        try:
            found.append(parse(text))
        except ConfigurationError as error:
            faults += error.faults
    if faults:
        raise ConfigurationError(faults)
    return found


def _grant(entry: str) -> tuple[str, _Tools]:
    tenant, _, tools = entry.partition("=")
    if tenant != "*" and re.fullmatch(TOKEN_PATTERN, tenant) is None:
        raise ConfigurationError([f"tool_grants: {entry!r} is not TENANT=TOOLS"])
    return tenant, _Tools.parse(tools)


def refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, param="tools")
