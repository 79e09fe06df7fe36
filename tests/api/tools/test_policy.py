"""The operator says which tenant may use which tools, and which may run without approval; no request says otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from mcp_servers import McpServer, mcp_server

from penstock.api.tools.functions import tool
from penstock.api.tools.mcp_config import HttpServer
from penstock.api.tools.policy import ToolPolicy
from penstock.api.tools.toolbox import Toolbox
from penstock.config.settings import Settings
from penstock.config.sources import load
from penstock.schemas.errors import ConfigurationError, InvalidRequest
from penstock.schemas.loops import LoopTool, Source, ToolResult

URL = "https://tools.example.org/mcp"


@tool
def halve(n: int) -> int:
    return n // 2


@pytest.fixture
async def server() -> AsyncIterator[McpServer]:
    async with mcp_server() as server:
        yield server


def source(label: str, tenant: str = "acme", url: str | None = None, **rest: Any) -> Source:
    return Source(label=label, tenant=tenant, url=url, **rest)


@pytest.mark.parametrize(
    ("grants", "found", "tool", "allowed"),
    [
        (None, source("desk"), None, True),
        ([], source("desk"), None, False),
        (["acme=desk"], source("desk"), None, True),
        (["acme=desk"], source("desk"), "add", True),
        (["acme=desk"], source("desk", "other"), None, False),
        (["acme=desk"], source("functions"), None, False),
        (["acme=desk/add"], source("desk"), None, True),
        (["acme=desk/add"], source("desk"), "add", True),
        (["acme=desk/add"], source("desk"), "fails", False),
        (["other=desk", "acme=functions/halve"], source("functions"), "halve", True),
        (["*=desk"], source("desk", "anybody"), "add", True),
        (["acme=*"], source("functions"), "halve", True),
        (["acme=*"], source("x", url=URL), "any", True),
        (["acme=*"], source("desk", "other"), None, False),
        # The label beside a URL is what a request calls it.
        (["acme=desk"], source("desk", url=URL), None, False),
        ([f"acme={URL}"], source("desk", url=URL), "any", True),
        ([f"acme={URL}"], source("desk", url=f"{URL}/more?x"), None, True),
        ([f"acme={URL}"], source("desk", url=f"{URL}more"), None, False),
        ([f"acme={URL}"], source("desk", "other", url=URL), None, False),
        ([f"acme={URL}"], source("desk"), None, False),
    ],
)
def test_a_tenant_has_the_tools_that_it_was_granted(
    grants: Sequence[str] | None, found: Source, tool: str | None, allowed: bool
) -> None:
    assert ToolPolicy(grants).may_use(found, tool) is allowed


@pytest.mark.parametrize(
    ("spared", "found", "needed"),
    [
        (None, source("desk", approval="never"), False),
        (None, source("desk", approval="always"), True),
        ([], source("desk", approval="never"), True),
        (["desk"], source("desk", approval="never"), False),
        (["desk"], source("desk", approval="always"), True),
        (["desk/add"], source("desk", approval="never"), False),
        (["desk/fails"], source("desk", approval="never"), True),
        (["desk/fails"], source("desk", approval=("fails",)), True),
        (["desk"], source("desk", url=URL, approval="never"), True),
        ([URL], source("desk", url=URL, approval="never"), False),
        (["*"], source("x", url=URL, approval="never"), False),
    ],
)
def test_the_operators_word_on_approval_wins(spared: Sequence[str] | None, found: Source, needed: bool) -> None:
    assert ToolPolicy(None, spared).needs_approval(found, "add") is needed


async def test_the_toolbox_lists_and_calls_by_the_policy(server: McpServer) -> None:
    policy = ToolPolicy(["acme=desk/add", "acme=functions", "*=desk/fails"], ["desk/add"])
    toolbox = Toolbox({"desk": HttpServer(url=server.url)}, [halve], (), None, policy)

    async def listed(found: Source) -> dict[str, bool]:
        return {tool.name: tool.approval for tool in await toolbox.tools(found)}

    assert await listed(source("desk", approval="never")) == {"add": False, "fails": True}
    assert await listed(source("desk", "other", approval="never")) == {"fails": True}
    assert await listed(source("functions", approval="never")) == {"halve": True}
    with pytest.raises(InvalidRequest, match=r"may not use the tools of .*; the setting tool_grants"):
        toolbox.check(source("functions", "other"))
    server.requests.clear()
    adding = LoopTool(name="add", label="desk", tool="add", parameters={"type": "object"})
    for found, said in (
        (source("desk", "other"), "The tool add is not allowed; call another one."),
        (source("functions", "other"), "This tenant may not use the tools of functions"),
    ):
        result = await toolbox.call(found, adding, "{}")
        assert result.is_error and result.text.startswith(said)
    assert server.requests == []
    assert await toolbox.call(source("desk"), adding, '{"a": 1, "b": 2}') == ToolResult("3")
    await toolbox.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("entry", ["desk", "=desk", "a b=desk", "acme=", "acme=a b", "acme=desk/", "acme=https://a/?b"])
def test_a_grant_that_cannot_be_read_is_a_fault(entry: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ToolPolicy([entry, "acme=desk", entry])
    assert len(caught.value.faults) == 2


def test_the_settings_may_be_empty_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOOL_GRANTS", "")
    monkeypatch.setenv("PENSTOCK_TOOLS_WITHOUT_APPROVAL", "desk, functions/halve")
    settings = load().settings
    assert (settings.tool_grants, settings.tools_without_approval) == ((), ("desk", "functions/halve"))
    assert (Settings().tool_grants, Settings().tools_without_approval) == (None, None)
