"""Puts Penstock's MCP client before the public conformance suite: lists a server's tools and calls each once.

    npm install @modelcontextprotocol/conformance bun
    npx bun node_modules/@modelcontextprotocol/conformance/dist/index.js client \
        --scenario tools_call --command "python deploy/examples/conformance_client.py"

The suite adds the server's URL to the command.
"""

from __future__ import annotations

import asyncio
import sys

from penstock.api.tools.mcp_client import McpClient


async def main(url: str) -> None:
    async with McpClient(url) as client:
        for tool in await client.list_tools():
            numbers = {name: 2 for name, kind in tool.input_schema["properties"].items() if kind["type"] == "number"}
            print(tool.name, await client.call(tool.name, numbers))


asyncio.run(main(sys.argv[1]))
