"""The input file of a batch: one request a line, each checked before the first of them runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from math import inf
from typing import Any

from ...schemas.bounds import LONG, load_json, parse_json
from ...schemas.errors import InvalidRequest
from ...schemas.openai.batches import MESSAGES, RESPONSES, BatchEndpoint, Fault
from ...schemas.openai.completions import KINDS
from ...schemas.openai.responses.request import ResponsesRequest
from ...schemas.openai.responses.tools import hosted

MOST_LINES = 50_000
MOST_FAULTS = 100  # that are reported
_TEXTS = ("custom_id", "method", "url")
_NOTES = {"metadata", "user"}  # parameters without effect, which may also stand beside a body

# Values that a line may hold because they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "timeout": (None,),
    "keep_alive": (None,),
    "background": (None, False),
    "priority": (None, "low"),
    "service_tier": (None, "auto", "default", "flex", "standard_only"),
}


def read_line(raw: bytes, endpoint: BatchEndpoint) -> dict[str, Any]:
    """One line of an input file, with its `custom_id` and `body`. Raises `InvalidRequest` with OpenAI's `code`."""
    try:
        value: Any = load_json(raw)
    except ValueError as error:
        raise InvalidRequest(f"This line {error}", code="invalid_json_line") from None
    if not isinstance(value, dict):
        raise InvalidRequest("This line is not a JSON object.", code="invalid_json_line")
    for name, kind, word in (*((each, str, "a string") for each in _TEXTS), ("body", dict, "an object")):
        if name not in value:
            raise InvalidRequest(f"{name} is missing.", code="missing_required_parameter", param=name)
        if not isinstance(value[name], kind) or not value[name]:
            raise InvalidRequest(f"{name} must be {word} that is not empty.", param=name)
    if beside := value.keys() & _parameters(endpoint) - _NOTES:
        name = min(beside)
        fault = f"{name} stands beside body, where it has no effect; move it into body."
        raise InvalidRequest(fault, code="unsupported_parameter", param=name)
    if value["method"] != "POST":
        raise InvalidRequest("method must be POST.", code="invalid_method", param="method")
    if value["url"] != endpoint:
        raise InvalidRequest(f"url must be the batch's endpoint, {endpoint}.", code="invalid_url", param="url")
    if value["body"].get("stream"):
        raise InvalidRequest("A line of a batch cannot stream; leave stream out.", param="body.stream")
    for name, neutral in _NEUTRAL.items():
        if value["body"].get(name) not in neutral:
            raise InvalidRequest(
                f"{name} has no effect in a batch, which runs at low priority until its window ends; leave it out.",
                code="unsupported_parameter",
                param=f"body.{name}",
            )
    if endpoint == RESPONSES:
        _check_tools(value["body"].get("tools"))
    return value


def _parameters(endpoint: BatchEndpoint) -> frozenset[str]:
    """The parameters of requests, of which none may stand beside their bodies. Lines of Anthropic's are made here."""
    if endpoint == MESSAGES:
        return frozenset()
    return ResponsesRequest.field_names() if endpoint == RESPONSES else KINDS[endpoint].field_names()


def _check_tools(tools: object) -> None:
    """Raise `InvalidRequest` for tools of a response that a batch cannot have."""
    if kinds := hosted(tools):
        fault = f"tools of type {kinds[0]} are run by OpenAI's servers alone; leave them out."
        raise InvalidRequest(fault, code="unsupported_parameter", param="body.tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and any(tool.get(name) for name in ("headers", "authorization", "sealed")):
            fault = "tools: a file would keep headers and authorization as they are; name a configured server."
            raise InvalidRequest(fault, code="unsupported_parameter", param="body.tools")


async def line_of(raw: bytes, endpoint: BatchEndpoint) -> dict[str, Any]:
    """`read_line`, in a thread where the line is long."""
    return read_line(raw, endpoint) if len(raw) <= LONG else await asyncio.to_thread(read_line, raw, endpoint)


async def checked_line(raw: bytes) -> dict[str, Any]:
    """A line that `check_lines` has found right before, perhaps under other settings or in another release."""
    line: dict[str, Any] = parse_json(raw) if len(raw) <= LONG else await asyncio.to_thread(parse_json, raw)
    return line


async def read_lines(data: AsyncIterable[bytes], limit: float = inf) -> AsyncIterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1; reading ends with a line longer than `limit` bytes."""
    rest, number = b"", 0
    async for chunk in data:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number += 1
            if line.strip():
                yield number, line
        if len(rest) > limit:
            break
    if rest.strip():
        yield number + 1, rest


async def check_lines(
    data: AsyncIterable[bytes], limit: int, endpoint: BatchEndpoint, most: int = MOST_LINES
) -> tuple[int, list[Fault]]:
    """The number of requests in the file, and the faults found; `limit` is in bytes a line, `most` in lines."""
    faults: list[Fault] = []
    seen: set[str] = set()
    total = 0
    async for number, raw in read_lines(data, limit):
        total += 1
        try:
            if len(raw) > limit:
                raise InvalidRequest(f"This line has more than {limit} bytes.", code="line_too_long")
            if total > most:
                raise InvalidRequest(f"A batch has {most:,} requests at most.", code="too_many_requests")
            name = (await line_of(raw, endpoint))["custom_id"]
            if name in seen:
                raise InvalidRequest("Another line has this custom_id.", code="duplicate_custom_id", param="custom_id")
            seen.add(name)
        except InvalidRequest as error:
            faults.append(Fault(code=error.code, message=str(error), param=error.param, line=number))
        if len(faults) == MOST_FAULTS or total > most:
            break
    if not total:
        faults.append(Fault(code="empty_file", message="The input file holds no request."))
    return total, faults
