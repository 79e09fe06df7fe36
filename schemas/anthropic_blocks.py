"""The blocks of which messages of Anthropic's API consist, strictly typed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from .openai.chat import OpenBody


class Marked(OpenBody):
    cache_control: dict[str, Any] | None = None  # no effect: every prefix is cached


class TextBlock(Marked):
    type: Literal["text"]
    text: str
    citations: None = None


class Base64Source(OpenBody):
    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(OpenBody):
    type: Literal["url"]
    url: str


class ImageBlock(Marked):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
        Discriminator(
            lambda source: f"<{source.get('type')}>" if isinstance(source, dict) else None,
            custom_error_type="source_type",
            custom_error_message="Input should be a source of type base64 or url; files are not supported",
        ),
    ]

    @property
    def part(self) -> dict[str, Any]:
        """The image as a part of a chat message."""
        own = self.source
        url = own.url if isinstance(own, UrlSource) else f"data:{own.media_type};base64,{own.data}"
        return {"type": "image_url", "image_url": {"url": url}}


class ThinkingBlock(Marked):
    type: Literal["thinking"]
    thinking: str
    signature: str


class RedactedThinkingBlock(Marked):
    """Thoughts that Anthropic's models alone can read, in the history of a session that one of them began."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Marked):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


def as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[TextBlock], BeforeValidator(as_blocks, json_schema_input_type=str | list[TextBlock])]


class ToolReference(Marked):
    """A tool of the same request that a client's tool search has found."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return f"Tool found: {self.tool_name}"


Result = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ToolReference, Tag("<tool_reference>")],
    Discriminator(
        lambda block: f"<{block.get('type')}>" if isinstance(block, dict) else None,
        custom_error_type="block_type",
        custom_error_message="Input should be a block of type text, image or tool_reference; "
        "documents are not supported in the result of a tool",
    ),
]


class ToolResultBlock(Marked):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: Annotated[list[Result], BeforeValidator(as_blocks, json_schema_input_type=str | list[Result])] = Field(
        default_factory=list
    )
    is_error: bool | None = None


# The tags keep pydantic from naming the block's type in the path of a fault.
Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        lambda block: f"<{block.get('type')}>" if isinstance(block, dict) else None,
        custom_error_type="block_type",
        custom_error_message="Input should be a block of type text, image, thinking, redacted_thinking, "
        "tool_use or tool_result; documents and server tools are not supported",
    ),
]
