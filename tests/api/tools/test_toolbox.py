"""The toolbox: which servers a request may use, what its model may call, and what a bad call is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp_servers import McpServer, counting_socket, mcp_server

from penstock.api.tools import toolbox as toolbox_module
from penstock.api.tools.functions import tool
from penstock.api.tools.mcp_config import HttpServer
from penstock.api.tools.sealing import seal, unseal
from penstock.api.tools.toolbox import Toolbox, parse_arguments
from penstock.schemas.errors import ConfigurationError, InvalidRequest, ToolFailed
from penstock.schemas.loops import LoopTool, Source, ToolResult

KEY = b"a key"
SECRET = "Bearer correct-horse-battery"


@tool(repeatable=True)
def double(n: int) -> int:
    """Doubles."""
    return 2 * n


def opened(text: str, tenant: str, url: str) -> dict[str, str]:
    return unseal(text, tenant, url, KEY)


def sealed_for(url: str, headers: dict[str, str], key: bytes = KEY) -> str:
    return seal(headers, key, "default", url)


@pytest.fixture
async def server() -> AsyncIterator[McpServer]:
    async with mcp_server() as server:
        yield server


@pytest.fixture
async def toolbox(server: McpServer) -> AsyncIterator[Toolbox]:
    toolbox = Toolbox({"desk": HttpServer(url=server.url)}, [double], [server.url], opened)
    yield toolbox
    await toolbox.close()


def a_tool(name: str, **parameters: Any) -> LoopTool:
    return LoopTool(name=name, label="desk", tool=name, parameters={"type": "object", **parameters})


async def test_tools_of_a_configured_server(toolbox: Toolbox) -> None:
    tools = {tool.name: tool for tool in await toolbox.tools(Source(label="desk"))}
    assert list(tools) == ["add", "slow", "changes", "fails", "structured", "wrong", "big", "pictures", "tells"]
    assert (tools["add"].label, tools["add"].tool, tools["add"].description) == ("desk", "add", "Adds.")
    assert tools["add"].parameters["required"] == ["a", "b"]
    assert [name for name, tool in tools.items() if tool.repeatable] == ["add", "slow"]


async def test_functions_are_a_source(toolbox: Toolbox) -> None:
    (found,) = await toolbox.tools(Source(label="functions"))
    assert (found.name, found.tool, found.description, found.repeatable) == ("double", "double", "Doubles.", True)
    assert await toolbox.call(Source(label="functions"), found, '{"n": 4}') == ToolResult("8")


@pytest.mark.parametrize(
    ("approval", "needing"), [("always", {"add", "fails"}), ("never", set()), (("fails", "big"), {"fails"})]
)
async def test_allowed_tools_alone_are_listed(toolbox: Toolbox, approval: Any, needing: set[str]) -> None:
    tools = await toolbox.tools(Source(label="desk", allowed=("fails", "add", "nope"), approval=approval))
    assert [tool.name for tool in tools] == ["add", "fails"]
    assert {tool.name for tool in tools if tool.approval} == needing


async def test_disallowed_tool_is_not_called(toolbox: Toolbox, server: McpServer) -> None:
    result = await toolbox.call(Source(label="desk", allowed=("fails",)), a_tool("add"), "{}")
    assert result == ToolResult("The tool add is not allowed; call another one.", is_error=True)
    assert server.requests == []


async def test_calls_run_at_once_and_answer_in_order(toolbox: Toolbox, server: McpServer) -> None:
    source = Source(label="desk")
    names = ["slow", "fails", "add"]
    tools = {tool.name: tool for tool in await toolbox.tools(source)}
    server.go_after = len(names)
    results = await asyncio.gather(
        *(toolbox.call(source, tools[name], '{"a": 1, "b": 2}' if name == "add" else "") for name in names)
    )
    assert results == [ToolResult("at last"), ToolResult("out of paper", True), ToolResult("3")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"a": 1', "The arguments of add are not a JSON object (Expecting"),
        ("[1, 2]", "The arguments of add are not a JSON object (it is no object)"),
        ('{"a": NaN}', "(NaN is not a number)"),
        ("[" * 100_000, "The arguments of add are not a JSON object (it is nested deeper than 128 levels)"),
        ('{"a": "one", "b": 2}', "The arguments of add are wrong: at $.a: 'one' is not of type 'integer'"),
        ('{"a": 1}', "The arguments of add are wrong: at $: 'b' is a required property"),
        ('{"a": 1, "b": 2, "c": 3}', "('c' was unexpected)"),
        ("", "'a' is a required property"),
    ],
)
async def test_malformed_arguments_are_told_and_not_sent(
    toolbox: Toolbox, server: McpServer, arguments: str, said: str
) -> None:
    add = (await toolbox.tools(Source(label="desk")))[0]
    text, is_error, _ = await toolbox.call(Source(label="desk"), add, arguments)
    assert is_error and said in text
    assert "not a JSON object" not in text or '"required": ["a", "b"]' in text
    assert server.calls == []


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "nonsense"}}},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
        {"properties": {"a": {"pattern": "("}}},
        {"properties": 3},
        {"$ref": "#"},
    ],
)
def test_schema_that_cannot_be_used_is_left_to_the_server(parameters: dict[str, Any]) -> None:
    assert parse_arguments(a_tool("odd", **parameters), '{"a": "1"}') == {"a": "1"}


async def test_schema_has_nothing_fetched() -> None:
    async with counting_socket() as (url, connections):
        odd = a_tool("odd", properties={"a": {"$ref": f"{url}/schema.json"}})
        assert await asyncio.to_thread(parse_arguments, odd, '{"a": 1}') == {"a": 1}
        assert connections == []


@pytest.mark.parametrize(
    "source", [Source(label="nope"), Source(label="functions"), Source(label="a", url="http://b/")]
)
async def test_unknown_source_is_refused(source: Source) -> None:
    toolbox = Toolbox({"desk": HttpServer(url="http://127.0.0.1:1/")})
    with pytest.raises(InvalidRequest) as refused:
        toolbox.check(source)
    assert refused.value.param == "tools"
    with pytest.raises(InvalidRequest):
        await toolbox.tools(source)
    assert (await toolbox.call(source, a_tool("add"), "{}")).is_error


ALLOWED = ["https://good.example/mcp", "http://plain.example:8080", "https://other.example/a%20b/"]


@pytest.mark.parametrize(
    "url",
    [
        "https://good.example/mcp",
        "https://good.example/mcp/",
        "https://good.example/mcp/deeper?x=../y",
        "https://GOOD.example:443/mcp",
        "http://plain.example:8080/anything",
        "https://other.example/a%20b/c",
    ],
)
def test_url_below_an_allowed_one_is_let_pass(url: str) -> None:
    Toolbox({}, (), ALLOWED).check(Source(label="a", url=url))


@pytest.mark.parametrize(
    "url",
    [
        "http://good.example/mcp",
        "https://good.example:8443/mcp",
        "https://good.example.evil/mcp",
        "https://good.example./mcp",
        "https://sub.good.example/mcp",
        "https://good.example/",
        "https://good.example/mcpx",
        "https://good.example/mcp/../admin",
        "https://good.example/mcp/./admin",
        "https://good.example/mcp/..;/admin",
        "https://good.example/mcp/%2e%2e/admin",
        "https://good.example/mcp/%2E%2e%2fadmin",
        "https://good.example/mcp%2fadmin",
        "https://good.example/mcp/%252e%252e/admin",
        "https://good.example//mcp",
        "https://good.example\\@evil/mcp",
        "https://good.example@evil/mcp",
        "https://user:word@good.example/mcp",
        "https://evil/https://good.example/mcp",
        "https://evil?https://good.example/mcp",
        "https://evil/#https://good.example/mcp",
        "https://good.example/mcp#x",
        "https://good\u3002example/mcp",
        "https://good.example /mcp",
        "https://good.example/mcp\r\nX: y",
        "http://plain.example/",
        "file:///etc/passwd",
        "//good.example/mcp",
        "good.example/mcp",
        "",
    ],
)
def test_url_beside_the_allowed_ones_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="server_url"):
        Toolbox({}, (), ALLOWED).check(Source(label="a", url=url))


async def test_no_request_leaves_for_a_refused_url() -> None:
    async with counting_socket() as (url, connections):
        toolbox = Toolbox({}, (), [f"{url}/allowed"], opened)
        source = Source(label="a", url=f"{url}/other", sealed=sealed_for(f"{url}/other", {"Authorization": SECRET}))
        with pytest.raises(InvalidRequest):
            await toolbox.tools(source)
        result = await toolbox.call(source, a_tool("add"), "{}")
        told = "This installation does not allow the server_url of a; the setting "
        told += "--mcp-allowed-urls (PENSTOCK_MCP_ALLOWED_URLS) names those it does."
        assert result == ToolResult(told, True)
        assert connections == []
        allowed = source.model_copy(update={"url": f"{url}/allowed", "sealed": None})
        assert (await toolbox.call(allowed, a_tool("add"), "{}")).is_error
        assert connections != []
        await toolbox.close()


@pytest.mark.parametrize("url", ["example.com", "https://a/?b", "https://a/../b", "ftp://a/"])
def test_prefix_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="the allowed MCP URL"):
        Toolbox({}, (), [url])


async def test_sealed_headers_are_sent_and_never_shown(toolbox: Toolbox, server: McpServer) -> None:
    server.token = SECRET
    source = Source(label="mine", url=server.url, sealed=sealed_for(server.url, {"Authorization": SECRET}))
    (tells,) = [tool for tool in await toolbox.tools(source) if tool.name == "tells"]
    assert await toolbox.call(source, tells, "{}") == ToolResult("You sent [hidden].")
    assert {headers["authorization"] for _, headers in server.requests} == {SECRET}
    other = source.model_copy(update={"sealed": sealed_for(server.url, {"Authorization": "Bearer other-secret"})})
    text, is_error, _ = await toolbox.call(other, tells, "{}")
    assert is_error and text == "mine could not run tells: it answered 401 Unauthorized"
    with pytest.raises(ToolFailed, match="401"):
        await toolbox.tools(source.model_copy(update={"sealed": None}))


async def test_headers_go_with_a_url_alone(server: McpServer) -> None:
    """What the operator has configured is not for requests to add to."""
    server.token = SECRET
    config = HttpServer(url=server.url, headers={"authorization": "Bearer of the house"})
    sealed = sealed_for(server.url, {"Authorization": SECRET})
    toolbox = Toolbox({"desk": config}, (), [server.url], opened)
    with pytest.raises(InvalidRequest, match="set by the configuration"):
        toolbox.check(Source(label="desk", sealed=sealed))
    with pytest.raises(ToolFailed, match="401"):
        await toolbox.tools(Source(label="desk"))
    assert await toolbox.tools(Source(label="mine", url=server.url, sealed=sealed))
    await toolbox.close()


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"Host": "internal"}, "A header for a cannot be sent; leave it out."),
        ({"Mcp-Session-Id": "1"}, "A header for a cannot be sent; leave it out."),
        ({"A b": "1"}, "A header for a cannot be sent; leave it out."),
        ({"A": "1\r\nHost: internal"}, "A header for a cannot be sent; leave it out."),
        ({"A": "é"}, "A header for a has characters beyond ASCII; encode them."),
    ],
)
async def test_headers_that_are_not_a_clients_business_are_refused(headers: dict[str, str], said: str) -> None:
    async with counting_socket() as (url, connections):
        source = Source(label="a", url=url, sealed=sealed_for(url, headers))
        assert await Toolbox({}, (), [url], opened).call(source, a_tool("add"), "{}") == ToolResult(said, True)
        assert connections == []


async def test_sealed_headers_that_cannot_be_opened_are_an_error(server: McpServer) -> None:
    source = Source(label="a", url=server.url, sealed=sealed_for(server.url, {"A": "b"}, b"another key"))
    text, is_error, _ = await Toolbox({}, (), [server.url], opened).call(source, a_tool("add"), "{}")
    assert is_error and "not sealed here" in text
    text, is_error, _ = await Toolbox({}, (), [server.url]).call(source, a_tool("add"), "{}")
    assert is_error and "has no secret_key" in text
    assert server.requests == []


async def test_connections_for_requests_are_shared_and_bounded(
    toolbox: Toolbox, server: McpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolbox_module, "MAX_CLIENTS", 1)
    first, second = (Source(label=name, url=f"{server.url}?{name}") for name in "ab")
    slow = asyncio.create_task(toolbox.call(first, a_tool("slow"), "{}"))
    await server.started.wait()
    text, is_error, _ = await toolbox.call(second, a_tool("fails"), "{}")
    assert is_error and "Too many MCP servers" in text
    assert await toolbox.call(first, a_tool("fails"), "{}") == ToolResult("out of paper", True)
    server.go.set()
    assert await slow == ToolResult("at last")
    assert await toolbox.call(second, a_tool("fails"), "{}") == ToolResult("out of paper", True)
    connects = [headers for _, headers in server.requests if headers.get("mcp-method") == "server/discover"]
    assert len(connects) == 2


async def test_function_that_is_no_more_is_an_error(toolbox: Toolbox) -> None:
    text, is_error, _ = await toolbox.call(Source(label="functions"), a_tool("halve"), "{}")
    assert is_error and text == "There is no tool halve any more."


@pytest.mark.parametrize(("urls", "loaded"), [([], []), (["https://example.com/"], ["mcp"])])
def test_a_bridge_starts_with_what_it_needs(urls: list[str], loaded: list[str]) -> None:
    script = (
        "import sys, penstock.composition.bridge\n"
        "from penstock.api.tools.toolbox import Toolbox\n"
        f"Toolbox({{}}, [], {urls})\n"
        "print(*{'mcp', 'numpy', 'torch', 'transformers'} & {*sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == loaded
