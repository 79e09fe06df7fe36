"""The file of MCP servers, and the secrets that a client gives for its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.api.tools.mcp_config import HttpServer, ServerConfig, StdioServer, load_servers
from penstock.api.tools.sealing import seal, unseal
from penstock.schemas.errors import ConfigurationError, ToolFailed

ENVIRONMENT = {"TOKEN": "s3cret-token", "EMPTY": ""}


def load(tmp_path: Path, servers: Any, *, stdio: bool = True) -> dict[str, ServerConfig]:
    path = tmp_path / "mcp.json"
    path.write_text(servers if isinstance(servers, str) else json.dumps({"mcpServers": servers}))
    return load_servers(path, stdio=stdio, environment=ENVIRONMENT)


def test_servers_are_read(tmp_path: Path) -> None:
    servers = load(
        tmp_path,
        {
            "search": {
                "type": "http",
                "url": "https://${HOST:-example.com}/mcp",
                "headers": {"Authorization": "Bearer ${TOKEN}"},
                "timeout": 5,
            },
            "time": {
                "command": "mcp-server-time",
                "args": ["--local-timezone", "${TZ:-UTC}"],
                "env": {"A": "${EMPTY:-b}"},
            },
        },
    )
    assert servers == {
        "search": HttpServer(
            url="https://example.com/mcp", headers={"Authorization": "Bearer s3cret-token"}, timeout=5.0
        ),
        "time": StdioServer(command="mcp-server-time", args=["--local-timezone", "UTC"], env={"A": "b"}),
    }
    assert servers["time"].timeout == 30.0


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({}, "s must have either a url or a command"),
        ("https://example.com", "s must have either a url or a command"),
        ({"url": "http://a/", "command": "b"}, "s must have either a url or a command"),
        ({"url": "http://a/", "header": {}}, "s.header: Extra inputs are not permitted"),
        ({"url": "http://a/", "timeout": 0}, "s.timeout: Input should be greater than 0"),
        ({"url": "http://a/", "type": "sse"}, "s.type: Input should be 'http', 'streamable-http' or 'streamableHttp'"),
        ({"url": "ftp://a/"}, "s.url: a URL begins with http:// or https:// and a host"),
        ({"url": "http://me:s3cret-token@a/"}, "s.url: a URL holds no user name or password; send them as a header"),
        ({"url": "http://a/ b"}, "s.url: a URL holds neither spaces, backslashes nor characters beyond ASCII"),
        ({"url": "http://a/#s3cret-token"}, "s.url: a URL of a server has no fragment"),
        ({"url": "http://a:s3cret-token/"}, "s.url: not a URL"),
        ({"url": "http://a/", "headers": {"A": "${NO}"}}, "s.headers.A: the environment has no variable NO"),
        ({"command": "a", "args": ["${NO}"]}, "s.args.0: the environment has no variable NO"),
        ({"command": ""}, "s.command: String should have at least 1 character"),
    ],
)
def test_fault_of_a_server_is_told(tmp_path: Path, entry: Any, fault: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(tmp_path, {"s": entry})
    assert refused.value.faults == (f"{tmp_path / 'mcp.json'}: {fault}",)
    assert "s3cret" not in str(refused.value)


def test_every_fault_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(
            tmp_path, {"a b": {"url": "http://a/"}, "functions": {"url": "nowhere"}, "c": {"command": "d"}}, stdio=False
        )
    assert [fault.split(": ", 1)[1].split(":")[0] for fault in refused.value.faults] == [
        "a b",
        "functions",
        "functions.url",
        "c has a command",
    ]
    assert "only the library starts stdio servers" in refused.value.faults[-1]


@pytest.mark.parametrize("text", ["{", "[]", '{"servers": {}}', '{"mcpServers": []}'])
def test_file_that_is_something_else_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError):
        load(tmp_path, text)


def test_unknown_key_of_the_file_and_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="inputs is not a known key"):
        load(tmp_path, '{"mcpServers": {}, "inputs": []}')
    with pytest.raises(ConfigurationError, match="cannot be read as JSON"):
        load_servers(tmp_path / "none.json")


def test_secrets_are_not_shown() -> None:
    secret = "s3cret-token"
    http = HttpServer(url=f"https://a/?key={secret}", headers={"A": secret})
    stdio = StdioServer(command="a", args=[secret], env={"A": secret})
    assert secret not in f"{http!r} {http} {stdio!r} {stdio}"


def test_sealed_secret_is_opened_with_its_key_alone() -> None:
    secret, place = {"Authorization": "Bearer s3cret-token", "X": "é"}, ("acme", "https://a/mcp")
    sealed = seal(secret, b"k", *place)
    assert sealed == seal(dict(reversed(secret.items())), b"k", *place)
    assert "s3cret" not in sealed and sealed.isascii()
    assert unseal(sealed, *place, b"k") == secret
    for text, key in ((sealed, b"other"), (sealed[:-4] + "AAAA", b"k"), ("nonsense", b"k"), ("é", b"k"), ("", b"k")):
        with pytest.raises(ToolFailed, match="not sealed here for this tenant and server; send it again"):
            unseal(text, *place, key)


@pytest.mark.parametrize(
    ("tenant", "url"),
    [("other", "https://a/mcp"), ("acme", "https://b/mcp"), ("acme", "https://a/mcp/"), ("acmeh", "ttps://a/mcp")],
)
def test_sealed_secret_is_nobody_elses_and_for_nowhere_else(tenant: str, url: str) -> None:
    sealed = seal({"A": "b"}, b"k", "acme", "https://a/mcp")
    with pytest.raises(ToolFailed, match="not sealed here"):
        unseal(sealed, tenant, url, b"k")
