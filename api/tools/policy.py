"""The operator's word on tools: which tenant may use which, and which may run without approval.

What is meant is written `SERVER` or `SERVER/TOOL`, with the name of a configured server or `functions`; or as the
beginning of URLs, for servers that requests name themselves, whose label is the request's and says nothing; or `*`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn, Self, TypeVar

from ...schemas.errors import ConfigurationError, InvalidRequest
from ...schemas.jobs import TOKEN_PATTERN
from ...schemas.loops import Source
from .mcp_config import parse_url

Parsed = TypeVar("Parsed")

_hidden_step = re.compile(r"%(2e|2f|5c|25|00)", re.IGNORECASE).search


class UrlLocation(NamedTuple):
    """A URL as prefixes are compared with it: by whole steps of its path."""

    origin: tuple[str, str, int | None]
    path: tuple[bytes, ...]

    @classmethod
    def of(cls, text: str) -> Self:
        """Raises `InvalidRequest` for a URL that a server may read as another than it looks."""
        try:
            url = parse_url(text)
        except ValueError as error:
            refuse(f"The server_url cannot be used: {error}.")
        path = text.split("?")[0].split("//", 1)[1]
        if _hidden_step(path) or "//" in path or any(step == "." or step.startswith("..") for step in path.split("/")):
            refuse("The server_url cannot be used: its path is not plain.")
        steps = tuple(step for step in url.raw_path.split(b"?")[0].split(b"/") if step)
        return cls((url.scheme, url.host, url.port), steps)

    @classmethod
    def prefix(cls, text: str) -> Self:
        """Raises `ConfigurationError`."""
        try:
            if "?" in text:
                raise ValueError("a prefix has no query")
            return cls.of(text)
        except (ValueError, InvalidRequest) as error:
            raise ConfigurationError([f"the allowed MCP URL {text!r}: {error}"]) from None

    def is_within(self, prefix: UrlLocation) -> bool:
        return self.origin == prefix.origin and self.path[: len(prefix.path)] == prefix.path


class _Tools(NamedTuple):
    """Some tools. `server` is `*` for all there are."""

    server: str
    tool: str | None = None
    place: UrlLocation | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ConfigurationError`."""
        if "://" in text:
            return cls("", None, UrlLocation.prefix(text))
        server, named, tool = text.partition("/")
        if (server != "*" and re.fullmatch(TOKEN_PATTERN, server) is None) or (named and not tool):
            fault = "tools are written SERVER, SERVER/TOOL, https://BEGINNING-OF-URLS or *"
            raise ConfigurationError([f"{text!r}: {fault}"])
        return cls(server, tool or None)

    def covers(self, source: Source, tool: str | None) -> bool:
        """`tool` None: some tool of the source."""
        if self.place is not None:
            return source.url is not None and UrlLocation.of(source.url).is_within(self.place)
        is_server = self.server == "*" or (source.url is None and source.label == self.server)
        return is_server and (self.tool is None or tool in (None, self.tool))


class ToolPolicy:
    """`grants` are `TENANT=TOOLS`, with `*` for every tenant; None: everybody may use all. `spared` are the tools that
    may run without approval, where a request asks for that; None: all.

    Raises `ConfigurationError`.
    """

    def __init__(self, grants: Sequence[str] | None = None, spared: Sequence[str] | None = None) -> None:
        self._grants = None if grants is None else each(_grant, grants)
        self._spared = None if spared is None else each(_Tools.parse, spared)

    def may_use(self, source: Source, tool: str | None = None) -> bool:
        """Whether its tenant may use this tool of the source; or any, without one."""
        if self._grants is None:
            return True
        return any(tenant in ("*", source.tenant) and tools.covers(source, tool) for tenant, tools in self._grants)

    def needs_approval(self, source: Source, tool: str) -> bool:
        if self._spared is not None and not any(tools.covers(source, tool) for tools in self._spared):
            return True
        return source.needs_approval(tool)


def each(parse: Callable[[str], Parsed], texts: Iterable[str]) -> list[Parsed]:
    """Parse all. Raises `ConfigurationError` with the faults of all."""
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
