"""Converts MCP's tools and results to OpenAI's format and back, and a result to text for a model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import mcp_types as mcp

from ...schemas.loops import KeepImage, ToolResult

MOST_IMAGES = 8  # of one result


def openai_tools(tools: Iterable[mcp.Tool]) -> list[dict[str, Any]]:
    """The value of `tools` in a chat request."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in tools
    ]


def mcp_tool(tool: Mapping[str, Any]) -> mcp.Tool:
    """A tool of a chat request, as an MCP server would list it."""
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return mcp.Tool(name=function["name"], description=function.get("description"), input_schema=schema)


def tool_message(call_id: str, result: ToolResult) -> dict[str, Any]:
    """The message that answers a model's tool call."""
    return {"role": "tool", "tool_call_id": call_id, "content": result.text}


def tool_result(message: Mapping[str, Any]) -> mcp.CallToolResult:
    """A tool message of a chat, as an MCP server would answer."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return mcp.CallToolResult(content=[mcp.TextContent(text=text) for text in texts])


async def read_result(result: mcp.CallToolResult, keep: KeepImage | None = None) -> tuple[str, tuple[str, ...]]:
    """A result as text, and the files of its images: `keep` stores each, and without it they are described."""
    if keep is None:
        return result_text(result), ()
    marks: dict[int, str] = {}
    files: list[str] = []
    for place, part in enumerate(result.content):
        kind, data = _image(part)
        if data is None:
            continue
        if len(files) == MOST_IMAGES:
            marks[place] = f"[image of type {kind}, not shown: these are more than {MOST_IMAGES}]"
            continue
        marks[place], file = await keep(data, kind)
        files += [] if file is None else [file]
    return result_text(result, marks), tuple(files)


def result_text(result: mcp.CallToolResult, marks: Mapping[int, str] = MappingProxyType({})) -> str:
    """A result as text. Structured content is added as JSON unless the texts hold it; `marks` stand for the content at
    these places, and other content is described."""
    texts = [part.text for part in result.content if isinstance(part, mcp.TextContent)]
    parts = [marks.get(place) or _part(part) for place, part in enumerate(result.content)]
    structured = result.structured_content
    if structured is not None:
        # A server that turns a function's value into an object does so with this single key.
        value = structured["result"] if isinstance(structured, dict) and [*structured] == ["result"] else structured
        read = [_read(text) for text in texts]
        said = [*read[:1], read, texts, "\n".join(texts)] if texts else []
        if value not in said and structured not in said:
            parts.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(parts)


def _part(part: mcp.ContentBlock) -> str:
    match part:
        case mcp.TextContent():
            return part.text
        case mcp.ImageContent() | mcp.AudioContent():
            return f"[{part.type} of type {part.mime_type}, not shown]"
        case mcp.ResourceLink():
            return " ".join(filter(None, ["[resource", part.name, part.uri, part.mime_type, part.description])) + "]"
        case mcp.EmbeddedResource(resource=mcp.TextResourceContents() as resource):
            return f"[resource {resource.uri}]\n{resource.text}"
        case mcp.EmbeddedResource(resource=resource):
            return f"[resource {resource.uri} of type {resource.mime_type}, not shown]"


def _image(part: mcp.ContentBlock) -> tuple[str, bytes | None]:
    """The media type and the bytes of an image; None if the part is something else, or no base64."""
    match part:
        case mcp.ImageContent(data=encoded, mime_type=kind):
            pass
        case mcp.EmbeddedResource(resource=mcp.BlobResourceContents(blob=encoded, mime_type=str(kind))) if (
            kind.startswith("image/")
        ):
            pass
        case _:
            return "", None
    try:
        return kind, base64.b64decode(encoded, validate=True)
    except ValueError:
        return kind, None


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
