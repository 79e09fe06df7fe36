"""The MCP client against real servers: one of this process in both eras, npm's reference server, one over stdio."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import mcp_types as types
import psutil
import pytest
from mcp_servers import CLOCK, PAGE, TOOLS, Era, Everything, McpServer, counting_socket, mcp_server

from penstock.api.tools.cutting import MAX_TEXT
from penstock.api.tools.mcp_client import McpClient
from penstock.api.tools.mcp_config import HttpServer, StdioServer
from penstock.api.tools.text import mcp_tool, openai_tools, result_text, tool_message, tool_result
from penstock.schemas.errors import ToolFailed
from penstock.schemas.loops import ToolResult

SECRET = "Bearer correct-horse-battery"


@pytest.fixture(params=["2025", "2026"])
def era(request: pytest.FixtureRequest) -> Era:
    return cast(Era, request.param)


@pytest.fixture
async def server(era: Era) -> AsyncIterator[McpServer]:
    async with mcp_server(era=era) as server:
        yield server


@pytest.fixture
async def client(server: McpServer) -> AsyncIterator[McpClient]:
    async with McpClient(server.url, name="desk") as client:
        yield client


async def test_lists_the_tools_of_all_pages(client: McpClient, server: McpServer) -> None:
    assert await client.list_tools() == tuple(TOOLS)
    assert server.lists == -(-len(TOOLS) // PAGE)


async def test_list_is_asked_for_once(era: Era) -> None:
    async with mcp_server(era=era, ttl_ms=60_000) as server, McpClient(server.url) as client:
        first, second = await asyncio.gather(client.list_tools(), client.list_tools())
        asked = server.lists
        assert await client.list_tools() == first == second == tuple(TOOLS)
        assert server.lists == asked == -(-len(TOOLS) // PAGE)


async def test_list_is_asked_for_again_when_it_has_changed() -> None:
    async with mcp_server(era="2025") as server, McpClient(server.url) as client:
        await client.list_tools()
        asked = server.lists
        assert (await client.call("changes", {})).text == "changed"
        await client.list_tools()
        assert server.lists == 2 * asked


async def test_list_is_good_for_as_long_as_the_server_says() -> None:
    async with mcp_server(era="2026") as server, McpClient(server.url) as client:
        await client.list_tools()
        asked = server.lists
        await client.list_tools()
        assert server.lists == 2 * asked


@pytest.mark.parametrize("json", [True, False])
async def test_calls_a_tool(era: Era, json: bool) -> None:
    async with mcp_server(era=era, json=json) as server, McpClient(server.url) as client:
        assert await client.call("add", {"a": 2, "b": 3}) == ToolResult("5")
        methods = {method for method, _ in server.requests}
        assert methods == ({"POST", "GET"} if era == "2025" else {"POST"})


@pytest.mark.usefixtures("proxied")
async def test_a_server_on_this_machine_is_asked_without_a_proxy(client: McpClient) -> None:
    assert await client.call("add", {"a": 2, "b": 3}) == ToolResult("5")


@pytest.mark.usefixtures("proxied")
async def test_a_proxy_that_cannot_be_used_is_told() -> None:
    async with McpClient("http://192.0.2.1/mcp", name="far") as client:
        assert (await client.call("add", {})).text.startswith("far could not run add: a proxy that the environment")


async def test_a_proxy_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with McpClient("http://192.0.2.1/mcp", name="far") as client:
        told = (await client.call("add", {})).text
    assert told == "far could not run add: it cannot be reached (ConnectError, by the proxy that HTTP_PROXY names)"


async def test_concurrent_calls_share_a_connection(client: McpClient, server: McpServer) -> None:
    slow = asyncio.create_task(client.call("slow", {}))
    await server.started.wait()
    results = await asyncio.gather(*(client.call("add", {"a": a, "b": 1}) for a in range(8)))
    assert [result.text for result in results] == [str(a + 1) for a in range(8)]
    assert not slow.done()
    server.go.set()
    assert await slow == ToolResult("at last")
    assert len({headers.get("mcp-session-id") for _, headers in server.requests} - {None}) <= 1


async def test_structured_content_is_added_to_the_text(client: McpClient) -> None:
    assert await client.call("structured", {}) == ToolResult('some\n{"count": 3}')


async def test_what_is_no_text_is_described(client: McpClient) -> None:
    assert (await client.call("pictures", {})).text.splitlines() == [
        "[image of type image/png, not shown]",
        "[audio of type audio/wav, not shown]",
        "[resource notes file:///notes.txt text/plain]",
        "[resource file:///a]",
        "inside",
        "[resource file:///b of type application/pdf, not shown]",
    ]


async def test_ten_megabytes_are_cut(client: McpClient) -> None:
    text, is_error, _ = await client.call("big", {})
    assert not is_error
    assert text[:MAX_TEXT] == "x" * MAX_TEXT
    assert text[MAX_TEXT:] == f"\n[The result was cut here: these are the first {MAX_TEXT} of 10000000 bytes.]"


async def test_error_of_a_tool_is_its_text(client: McpClient) -> None:
    assert await client.call("fails", {}) == ToolResult("out of paper", is_error=True)


async def test_unknown_tool_is_an_error(client: McpClient) -> None:
    result = await client.call("nope", {})
    assert result == ToolResult("desk could not run nope: Unknown tool: nope", is_error=True)


async def test_result_against_its_schema_is_an_error(client: McpClient) -> None:
    text, is_error, _ = await client.call("wrong", {})
    assert is_error and "'many' is not of type 'integer'" in text


async def test_time_out_ends_one_call_alone(client: McpClient, server: McpServer) -> None:
    await client.list_tools()
    client.server = client.server.model_copy(update={"timeout": 0.05})
    result = await client.call("slow", {})
    assert result == ToolResult("desk could not run slow: no answer within 0.05 seconds", is_error=True)
    client.server = client.server.model_copy(update={"timeout": 30.0})
    connects = sum("initialize" in str(headers) or "discover" in str(headers) for _, headers in server.requests)
    assert await client.call("add", {"a": 1, "b": 1}) == ToolResult("2")
    assert sum("initialize" in str(headers) or "discover" in str(headers) for _, headers in server.requests) == connects


async def test_time_out_holds_for_connecting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
        async with McpClient(HttpServer(url=url, timeout=0.1), name="desk") as client:
            with pytest.raises(ToolFailed, match=r"desk cannot be listed: no answer within 0\.1 seconds"):
                await client.list_tools()


async def test_server_gone_in_mid_conversation_and_back_again(client: McpClient, server: McpServer) -> None:
    assert await client.call("add", {"a": 1, "b": 1}) == ToolResult("2")
    during = asyncio.create_task(client.call("slow", {}))
    await server.started.wait()
    await server.stop()
    text, is_error, _ = await during
    assert is_error and "the connection broke; it is unknown whether the call took effect" in text
    assert (await client.call("add", {"a": 1, "b": 1})).is_error
    async with McpClient(server.url) as newcomer:
        with pytest.raises(ToolFailed, match=r"it cannot be reached \(ConnectError\)"):
            await newcomer.list_tools()
    await server.start()
    assert await client.call("add", {"a": 1, "b": 1}) == ToolResult("2")
    assert server.calls == ["add", "slow", "add"]


async def test_forgotten_session_is_begun_anew() -> None:
    async with mcp_server(era="2025") as server, McpClient(server.url) as client:
        assert await client.call("add", {"a": 1, "b": 1}) == ToolResult("2")
        await server.stop()
        await server.start()
        assert await client.call("add", {"a": 1, "b": 2}) == ToolResult("3")
        assert server.calls == ["add", "add"]


async def test_authorisation_is_sent_and_never_shown(era: Era, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)  # below, the SDK logs whole messages
    async with mcp_server(era=era, token=SECRET) as server:
        config = HttpServer(url=server.url, headers={"Authorization": SECRET})
        async with McpClient(config) as client:
            assert await client.call("add", {"a": 1, "b": 1}) == ToolResult("2")
            assert await client.call("tells", {}) == ToolResult("You sent [hidden].")
        assert {headers["authorization"] for _, headers in server.requests} == {SECRET}
        server.token = "Bearer something else"
        async with McpClient(config) as client:
            result = await client.call("add", {"a": 1, "b": 1})
            assert result == ToolResult("the MCP server could not run add: it answered 401 Unauthorized", is_error=True)
            with pytest.raises(ToolFailed, match="401") as failed:
                await client.list_tools()
    shown = " ".join([repr(config), str(failed.value), *caplog.messages])
    assert "correct-horse" not in shown


async def test_redirect_is_not_followed(client: McpClient, server: McpServer) -> None:
    await client.list_tools()
    async with counting_socket() as (elsewhere, connections):
        for place in (elsewhere, f"{server.url}/other"):
            server.redirect = place
            before = len(server.requests)
            text, is_error, _ = await client.call("add", {"a": 1, "b": 1})
            assert is_error and text.endswith("it answered 307 Temporary Redirect; redirects are not followed")
            assert len(server.requests) == before + 1
        assert connections == []
    assert server.calls == []


async def test_answer_that_is_no_message_is_an_error(client: McpClient, server: McpServer) -> None:
    await client.list_tools()
    server.garbage = True
    text, is_error, _ = await client.call("add", {"a": 1, "b": 1})
    assert is_error and "Failed to parse JSON response" in text and "{not json" not in text
    server.garbage = False
    assert await client.call("add", {"a": 1, "b": 1}) == ToolResult("2")


async def test_unused_connection_is_closed_and_made_anew() -> None:
    async with mcp_server(era="2025") as server, McpClient(server.url, idle=0.01) as client:
        call = asyncio.create_task(client.call("slow", {}))
        await server.started.wait()
        assert not server.left.is_set()
        server.go.set()
        assert await call == ToolResult("at last")
        async with asyncio.timeout(20):
            await server.left.wait()
        assert await client.call("add", {"a": 1, "b": 1}) == ToolResult("2")


async def test_closing_ends_what_is_running(client: McpClient, server: McpServer) -> None:
    call = asyncio.create_task(client.call("slow", {}))
    await server.started.wait()
    await client.close()
    async with asyncio.timeout(20):
        text, is_error, _ = await call
    assert is_error and "the connection broke" in text


async def test_cancelled_call_leaves_the_connection_to_the_others(client: McpClient, server: McpServer) -> None:
    cancelled, other = (asyncio.create_task(client.call("slow", {})) for _ in range(2))
    while len(server.calls) < 2:
        await server.started.wait()
        server.started.clear()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    server.go.set()
    assert await other == ToolResult("at last")


async def test_stdio_server_is_a_child_with_its_own_environment() -> None:
    clock = StdioServer(
        command="sh",
        args=["-c", 'exec "$PROGRAM" --local-timezone "$ZONE"'],
        env={"PROGRAM": CLOCK, "ZONE": "Asia/Kabul"},
    )
    async with McpClient(clock, name="clock") as client:
        tools = await client.list_tools()
        assert [tool.name for tool in tools] == ["get_current_time", "convert_time"]
        assert "Use 'Asia/Kabul' as local timezone" in str(tools[0].input_schema)
        result = await client.call("get_current_time", {"timezone": "Asia/Tokyo"})
        assert not result.is_error and '"timezone": "Asia/Tokyo"' in result.text


async def test_what_goes_wrong_with_a_stdio_server() -> None:
    tokyo = {"timezone": "Asia/Tokyo"}

    def child() -> psutil.Process:
        (found,) = [one for one in psutil.Process().children() if CLOCK in one.cmdline()]
        return found

    async with McpClient(StdioServer(command=CLOCK), name="clock") as client:
        for tool, arguments, said in [
            ("get_current_time", {"timezone": "Mars/Base"}, "Mars/Base"),
            ("get_current_time", {}, "Field required"),
            ("convert_time", {"source_timezone": "UTC", "time": "99:99", "target_timezone": "UTC"}, "HH:MM"),
            ("nope", {}, "clock could not run nope: Unknown tool: nope"),
        ]:
            text, is_error, _ = await client.call(tool, arguments)
            assert is_error and said in text
        child().suspend()
        client.server = client.server.model_copy(update={"timeout": 0.05})
        text, is_error, _ = await client.call("get_current_time", tokyo)
        assert is_error and text == "clock could not run get_current_time: no answer within 0.05 seconds"
        client.server = client.server.model_copy(update={"timeout": 30.0})
        during = asyncio.create_task(client.call("get_current_time", tokyo))
        child().kill()
        text, is_error, _ = await during
        assert is_error and "the connection broke; it is unknown whether the call took effect" in text
        assert not (await client.call("get_current_time", tokyo)).is_error


@pytest.mark.parametrize("command", ["/no/such/program", "/bin/true"])
async def test_stdio_server_that_does_not_start_is_an_error(command: str) -> None:
    async with McpClient(StdioServer(command=command), name="clock") as client:
        text, is_error, _ = await client.call("get_current_time", {})
        assert is_error and text.startswith("clock could not run get_current_time: it cannot be reached")


@pytest.fixture
def everything() -> Iterator[Everything]:
    server = Everything()
    server.start()
    yield server
    server.kill()


async def test_reference_server_of_npm(everything: Everything) -> None:
    async with McpClient(everything.url, name="everything") as client:
        assert {"echo", "get-sum", "get-tiny-image"} <= {tool.name for tool in await client.list_tools()}
        assert await client.call("get-sum", {"a": 2, "b": 3}) == ToolResult("The sum of 2 and 3 is 5.")
        assert "[image of type image/png, not shown]" in (await client.call("get-tiny-image", {})).text
        weather = await client.call("get-structured-content", {"location": "New York"})
        assert weather.text.startswith("{") and weather.text.count("temperature") == 1


async def test_what_goes_wrong_with_the_reference_server(everything: Everything) -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("get-sum", {"a": "x", "b": 1}, "expected number"),
        ("get-sum", {}, "expected number, received undefined"),
        ("get-resource-reference", {"resourceId": -1}, "Invalid resourceId: -1"),
        ("nope", {}, "Tool nope not found"),
    ]
    async with McpClient(everything.url, name="everything") as client:
        for tool, arguments, said in wrong:
            text, is_error, _ = await client.call(tool, arguments)
            assert is_error and said in text
        client.server = client.server.model_copy(update={"timeout": 0.05})
        slow = {"duration": 600, "steps": 1}
        text, is_error, _ = await client.call("trigger-long-running-operation", slow)
        assert is_error and text.endswith("-operation: no answer within 0.05 seconds")
        client.server = client.server.model_copy(update={"timeout": 30.0})
        assert await client.call("echo", {"message": "still"}) == ToolResult("Echo: still")
        during = asyncio.create_task(client.call("trigger-long-running-operation", slow))
        await asyncio.to_thread(everything.kill)
        assert (await during).is_error
        text, is_error, _ = await client.call("echo", {"message": "anyone?"})
        assert is_error and text == "everything could not run echo: it cannot be reached (ConnectError)"
        everything.start()
        assert await client.call("echo", {"message": "back"}) == ToolResult("Echo: back")
        everything.kill()
        everything.start()  # between two calls: the session is forgotten
        assert await client.call("echo", {"message": "again"}) == ToolResult("Echo: again")


@pytest.mark.parametrize(
    ("texts", "structured", "said"),
    [
        (["5"], {"result": 5}, "5"),
        (["hello"], {"result": "hello"}, "hello"),
        (["1", "2"], {"result": [1, 2]}, "1\n2"),
        (['{"a": 1}'], {"a": 1}, '{"a": 1}'),
        ([], {"a": "é"}, '{"a": "é"}'),
        ([], [1], "[1]"),
        (["see below"], {"a": 1}, 'see below\n{"a": 1}'),
        (["one", "two"], None, "one\ntwo"),
        ([], None, ""),
    ],
)
def test_structured_content_is_said_once(texts: list[str], structured: Any, said: str) -> None:
    content: list[types.ContentBlock] = [types.TextContent(text=text) for text in texts]
    assert result_text(types.CallToolResult(content=content, structured_content=structured)) == said


def test_tools_and_messages_go_both_ways() -> None:
    tool = TOOLS[0]
    (openai,) = openai_tools([tool])
    assert openai == {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": tool.input_schema},
    }
    assert mcp_tool(openai) == types.Tool(name="add", description="Adds.", input_schema=tool.input_schema)
    message = tool_message("call_1", ToolResult("5"))
    assert message == {"role": "tool", "tool_call_id": "call_1", "content": "5"}
    assert result_text(tool_result(message)) == "5"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert result_text(tool_result({**message, "content": parts})) == "a\nb"
