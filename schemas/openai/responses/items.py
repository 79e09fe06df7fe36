"""The items of OpenAI's Responses API, strictly typed as clients send them, and their stored form.

The output items of a response are valid input items. A null field counts as missing, and unknown fields are ignored, as
clients add their own. Stored items are JSON: each has a type, an id and, where OpenAI's have one, a status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, Tag, model_validator

from ...errors import InvalidRequest
from ...loops import Items
from .base import PREFIXES, Id, Item, Part, Status, by_type
from .built_in_items import (
    ApplyPatchCall,
    ApplyPatchCallOutput,
    LocalShellCall,
    LocalShellCallOutput,
    ShellCall,
    ShellCallOutput,
)


class InputText(Part):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None  # no effect: every prefix is cached


class InputImage(Part):
    """`image_url` is a data URL with base64, or one that the server may fetch; `file_id`, in its place, names an
    uploaded file; `detail` as in `content.ImageUrl`."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> InputImage:
        if (self.image_url is None) == (self.file_id is None):
            raise ValueError("must have either image_url or file_id")
        return self


class InputFile(Part):
    """A document, as in `content.FileData`."""

    type: Literal["input_file"]
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> InputFile:
        if sum(given is not None for given in (self.file_data, self.file_id, self.file_url)) != 1:
            raise ValueError("must have one of file_data, file_id and file_url")
        return self


class OutputText(Part):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]] = Field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None


class Refusal(Part):
    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[InputFile, Tag("<input_file>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[Refusal, Tag("<refusal>")],
    by_type(
        "part_kind",
        "a part of type input_text, input_image, input_file, output_text or refusal; audio is not supported",
    ),
]
Content = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[list[ContentPart], Tag("<list>")],
    by_type("content_type", "a string or a list of parts"),
]


class MessageItem(Item):
    """`phase` has no effect."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    @model_validator(mode="after")
    def _who_refuses(self) -> MessageItem:
        if self.role != "assistant" and any(isinstance(part, Refusal) for part in self.content):
            raise ValueError("must not have a refusal unless its role is assistant")
        if self.role != "user" and any(isinstance(part, InputImage | InputFile) for part in self.content):
            raise ValueError("must not have an image or a file unless its role is user")
        return self


class SummaryText(Part):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Part):
    type: Literal["reasoning_text"]
    text: str


class Reasoning(Item):
    """A thought in plain text; Penstock cannot read one that another server has encrypted."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None

    @model_validator(mode="after")
    def _readable(self) -> Reasoning:
        if self.encrypted_content and not (self.content or self.summary):
            raise ValueError("is encrypted by another server; leave the item out")
        return self


class FunctionCall(Item):
    type: Literal["function_call"]
    call_id: Id
    name: Id
    namespace: Id | None = None
    arguments: str
    status: Status | None = None


class FunctionCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: Id
    output: Content
    status: Status | None = None


class CustomToolCall(Item):
    type: Literal["custom_tool_call"]
    call_id: Id
    name: Id
    input: str
    status: Status | None = None


class CustomToolCallOutput(Item):
    type: Literal["custom_tool_call_output"]
    call_id: Id
    output: Content
    status: Status | None = None


class ListedTool(Part):
    name: str
    input_schema: Any
    description: str | None = None
    annotations: Any = None


class McpListTools(Item):
    type: Literal["mcp_list_tools"]
    server_label: str
    tools: list[ListedTool]
    error: str | dict[str, Any] | None = None


class McpCall(Item):
    type: Literal["mcp_call"]
    server_label: str
    name: Id
    arguments: str
    output: str | None = None
    images: list[str] | None = None  # the ids of their files, whose marks are in the output
    error: str | dict[str, Any] | None = None
    approval_request_id: str | None = None
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"] | None = None


class McpApprovalRequest(Item):
    type: Literal["mcp_approval_request"]
    id: Id
    server_label: str
    name: Id
    arguments: str


class McpApprovalResponse(Item):
    type: Literal["mcp_approval_response"]
    approval_request_id: str
    approve: bool
    reason: str | None = None


class ItemReference(Part):
    type: Literal["item_reference"] = "item_reference"
    id: Id


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[Reasoning, Tag("<reasoning>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[CustomToolCall, Tag("<custom_tool_call>")]
    | Annotated[CustomToolCallOutput, Tag("<custom_tool_call_output>")]
    | Annotated[ShellCall, Tag("<shell_call>")]
    | Annotated[ShellCallOutput, Tag("<shell_call_output>")]
    | Annotated[LocalShellCall, Tag("<local_shell_call>")]
    | Annotated[LocalShellCallOutput, Tag("<local_shell_call_output>")]
    | Annotated[ApplyPatchCall, Tag("<apply_patch_call>")]
    | Annotated[ApplyPatchCallOutput, Tag("<apply_patch_call_output>")]
    | Annotated[McpListTools, Tag("<mcp_list_tools>")]
    | Annotated[McpCall, Tag("<mcp_call>")]
    | Annotated[McpApprovalRequest, Tag("<mcp_approval_request>")]
    | Annotated[McpApprovalResponse, Tag("<mcp_approval_response>")]
    | Annotated[ItemReference, Tag("<item_reference>")]
    | Annotated[ItemReference, Tag("<dict>")],
    by_type(
        "item_kind",
        "an item of type message, reasoning, function_call, function_call_output, custom_tool_call, "
        "custom_tool_call_output, shell_call, shell_call_output, local_shell_call, local_shell_call_output, "
        "apply_patch_call, apply_patch_call_output, mcp_list_tools, mcp_call, mcp_approval_request, "
        "mcp_approval_response or item_reference; others belong to tools that are not supported",
    ),
]

_WITHOUT_STATUS = (Reasoning, McpListTools, McpCall, McpApprovalRequest, McpApprovalResponse, ItemReference)


class Approval(NamedTuple):
    """A person's answer to an `mcp_approval_request`."""

    request: dict[str, Any]
    approve: bool
    reason: str | None


def input_items(given: str | Sequence[InputItem] | None, owner: str) -> Items:
    """The items as they are stored and shown. One without an id gets one from the id of its `owner` and its position;
    the caller resolves references."""
    items = [MessageItem(role="user", content=given)] if isinstance(given, str) else given or ()
    return [_in_full(item, f"{owner.rpartition('_')[2]}i{index}") for index, item in enumerate(items)]


def _in_full(item: InputItem, stem: str) -> dict[str, Any]:
    own = f"{PREFIXES.get(item.type)}_{stem}"
    whole = {"id": own} | item.model_dump(exclude_none=True)
    if isinstance(item, LocalShellCallOutput) and item.call_id is None:
        whole |= {"id": own, "call_id": item.id}
    if not isinstance(item, _WITHOUT_STATUS):
        whole.setdefault("status", "completed")
    if isinstance(item, MessageItem):
        kind = {"type": "output_text", "annotations": []} if item.role == "assistant" else {"type": "input_text"}
        parts = [{"type": "", "text": item.content}] if isinstance(item.content, str) else whole["content"]
        kept = ("refusal", "input_image", "input_file", kind["type"])
        whole["content"] = [part if part["type"] in kept else kind | {"text": part["text"]} for part in parts]
    return whole


def approved_calls(history: Items, given: Items) -> list[Approval]:
    """The approvals in the request's input, `given`, in order. One whose call the input has, too, was handled before
    and is left out.

    Raises `InvalidRequest` for an approval without its request, and for a second one.
    """
    asked = {item["id"]: item for item in history if item["type"] == "mcp_approval_request"}
    answered = {item["approval_request_id"] for item in history if item.get("approval_request_id")}
    made = {item.get("approval_request_id") for item in given if item["type"] == "mcp_call"}
    found = []
    for index, item in enumerate(given):
        if item["type"] == "mcp_approval_request":
            asked.setdefault(item["id"], item)  # a stored request takes precedence
        if item["type"] != "mcp_approval_response":
            continue
        request, param = item["approval_request_id"], f"input[{index}].approval_request_id"
        if request not in asked:
            raise InvalidRequest(f"{param}: there is no approval request {request!r} before it.", param=param)
        if request in answered:
            raise InvalidRequest(f"{param}: {request!r} was answered before.", param=param)
        answered.add(request)
        if request not in made:
            found.append(Approval(asked[request], item["approve"], item.get("reason")))
    return found
