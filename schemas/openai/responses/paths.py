"""What a Responses request calls that which a refusal of a turn, a chat request, calls by the chat's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...errors import InvalidRequest
from ...events import ErrorBody
from ...loops import LoopTool
from .request import ResponsesRequest
from .tools import McpTool, NamespaceTool, Offered

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
_tool = re.compile(r"tools\[([0-9]+)\](?:\.function|\.custom)?").match
_name = re.compile(r"response_format\.json_schema|[a-z_]+").match


def in_response(fault: ErrorBody, asked: ResponsesRequest, tools: Sequence[LoopTool], *, first: bool) -> ErrorBody:
    """The fault of a turn with the names of the response's own body. `tools` and `first` are those of `chat_body`."""
    if fault.param is None or (own := _own(fault.param, asked, tools, first)) == fault.param:
        return fault
    return replace(fault, message=fault.message.replace(fault.param, own), param=own)


def refused_in_response(refusal: InvalidRequest, asked: ResponsesRequest) -> InvalidRequest:
    """The same for a refusal of the first turn of a response without tools that are run here."""
    fault = in_response(ErrorBody.of(refusal), asked, (), first=True)
    return InvalidRequest(fault.message, code=fault.code, param=fault.param)


def _own(param: str, asked: ResponsesRequest, tools: Sequence[LoopTool], first: bool) -> str:
    if (found := _tool(param)) is not None:
        offered = asked.offered(tools, first=first)
        index = int(found[1])
        return _path_of(offered[index], asked) + param[found.end() :] if index < len(offered) else param
    if param.startswith("messages["):  # the model's messages are not the response's items
        return "input"
    found = _name(param)
    return param if found is None else _NAMES.get(found[0], found[0]) + param[found.end() :]


def _path_of(offered: Offered, asked: ResponsesRequest) -> str:
    """Where a tool is that the model may call; behind the place of a server the name that it has there."""
    space = asked.namespaced.get(offered.name)
    for index, tool in enumerate(asked.tools or ()):
        match tool, offered:
            case McpTool(server_label=label), LoopTool() if label == offered.label:
                return f"tools[{index}].{offered.tool}"
            case NamespaceTool(name=name), _ if space is not None and name == space[0]:
                return f"tools[{index}].tools[{[each.name for each in tool.tools].index(space[1])}]"
            case _ if space is None and not isinstance(offered, LoopTool) and getattr(tool, "name", "") == offered.name:
                return f"tools[{index}]"
    return "tools"
