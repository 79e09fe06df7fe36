"""Reads MCP servers by name from a configuration file in the format that MCP clients share:

    {"mcpServers": {
        "search": {"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}, "timeout": 30},
        "time": {"command": "mcp-server-time", "args": ["--local-timezone", "${TZ:-UTC}"], "env": {}}}}

`${NAME}` and `${NAME:-default}` in any string are replaced from the environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from ...config.files import read_text
from ...schemas.base import Strict
from ...schemas.errors import ConfigurationError
from ...schemas.urls import parse_url

TIMEOUT = 30.0  # seconds, for connecting, listing and calling each
FUNCTIONS = "functions"  # the label of the source whose tools are Python functions

_variable = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_is_name = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}").fullmatch


def _checked_url(text: str) -> str:
    parse_url(text)
    return text


class _Server(Strict):
    timeout: Annotated[float, Field(gt=0, le=3600)] = TIMEOUT


class HttpServer(_Server):
    """A server that speaks streamable HTTP. `timeout` is in seconds, of each connection, list and call."""

    type: Literal["http", "streamable-http", "streamableHttp"] = "http"
    url: Annotated[str, AfterValidator(_checked_url), Field(repr=False)]
    headers: dict[str, str] = Field(default_factory=dict, repr=False)


class StdioServer(_Server):
    """A server that the library starts as a child process. `env` is added to a minimal environment."""

    type: Literal["stdio"] = "stdio"
    command: Annotated[str, Field(min_length=1)]
    args: list[str] = Field(default_factory=list, repr=False)
    env: dict[str, str] = Field(default_factory=dict, repr=False)


ServerConfig = HttpServer | StdioServer


def server_config(server: ServerConfig | str) -> ServerConfig:
    """A text is the URL of a server that needs no headers. Raises `TypeError` for anything else."""
    if isinstance(server, str):
        return HttpServer(url=server)
    if not isinstance(server, ServerConfig):
        raise TypeError(f"a server must be a URL, an HttpServer or a StdioServer, not {type(server).__name__}")
    return server


def load_servers(
    path: Path, *, stdio: bool = True, environment: Mapping[str, str] = os.environ
) -> dict[str, ServerConfig]:
    """Read the file. Without `stdio` a server with a command is a fault.

    Raises `ConfigurationError` with every fault.
    """
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError([f"{path} cannot be read as JSON: {error}"]) from None
    entries = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise ConfigurationError([f'{path} must hold an object {{"mcpServers": {{…}}}}'])
    faults = [f"{path}: {key} is not a known key" for key in content if key != "mcpServers"]
    servers: dict[str, ServerConfig] = {}
    for name, entry in entries.items():

        def fault(text: str, name: str = name) -> None:
            faults.append(f"{path}: {name}{text}")

        if not _is_name(name) or name == FUNCTIONS:
            fault(f": a name has up to 64 letters, digits, - and _, begins with a letter and is not {FUNCTIONS}")
        known = len(faults)
        values = _expanded(entry, environment, fault, "")
        if not isinstance(values, dict) or ("url" in values) == ("command" in values):
            fault(" must have either a url or a command")
        elif "command" in values and not stdio:
            fault(" has a command: only the library starts stdio servers; give a url")
        elif known == len(faults):
            try:
                servers[name] = (StdioServer if "command" in values else HttpServer).model_validate(values)
            except ValidationError as error:
                for each in error.errors(include_url=False, include_input=False, include_context=False):
                    fault(f".{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}")
    if faults:
        raise ConfigurationError(faults)
    return servers


def _expanded(value: Any, environment: Mapping[str, str], fault: Callable[[str], None], path: str) -> Any:
    match value:
        case str():

            def replaced(found: re.Match[str]) -> str:
                if (text := environment.get(found[1]) or found[2]) is None:
                    fault(f"{path}: the environment has no variable {found[1]}")
                return text or ""

            return _variable.sub(replaced, value)
        case list():
            return [_expanded(each, environment, fault, f"{path}.{index}") for index, each in enumerate(value)]
        case dict():
            return {key: _expanded(each, environment, fault, f"{path}.{key}") for key, each in value.items()}
        case _:
            return value
