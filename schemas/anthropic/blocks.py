"""The blocks of which messages of Anthropic's API consist, strictly typed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ..openai.body import OpenBody
from ..openai.documents import document, search_result


class Marked(OpenBody):
    cache_control: dict[str, Any] | None = None  # no effect: every prefix is cached


class TextBlock(Marked):
    type: Literal["text"]
    text: str
    citations: list[dict[str, Any]] | None = None  # of an earlier answer, by a server that cites

    @property
    def cites(self) -> bool:
        return bool(self.citations)


def as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[TextBlock], BeforeValidator(as_blocks, json_schema_input_type=str | list[TextBlock])]


class Base64Source(OpenBody):
    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def data_url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(OpenBody):
    type: Literal["url"]
    url: str


class FileSource(OpenBody):
    """A file that was uploaded before."""

    type: Literal["file"]
    file_id: str


class ImageBlock(Marked):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")]
        | Annotated[UrlSource, Tag("<url>")]
        | Annotated[FileSource, Tag("<file>")],
        Discriminator(
            lambda source: f"<{source.get('type')}>" if isinstance(source, dict) else None,
            custom_error_type="source_type",
            custom_error_message="Input should be a source of type base64, url or file",
        ),
    ]

    @property
    def part(self) -> dict[str, Any]:
        """The image as a part of a chat message."""
        match self.source:
            case FileSource() as own:
                image = {"file_id": own.file_id}
            case UrlSource() as own:
                image = {"url": own.url}
            case Base64Source() as own:
                image = {"url": own.data_url}
        return {"type": "image_url", "image_url": image}


def _given(source: Base64Source | UrlSource | FileSource) -> dict[str, str]:
    """Where a document's bytes are, as in a part of a chat message."""
    match source:
        case FileSource():
            return {"file_id": source.file_id}
        case UrlSource():
            return {"file_url": source.url}
        case Base64Source():
            return {"file_data": source.data_url}


class TextSource(OpenBody):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(OpenBody):
    type: Literal["content"]
    content: Texts


class Citations(OpenBody):
    """Without effect: an answer cites nothing."""

    enabled: bool | None = None


class DocumentBlock(Marked):
    type: Literal["document"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")]
        | Annotated[UrlSource, Tag("<url>")]
        | Annotated[FileSource, Tag("<file>")]
        | Annotated[TextSource, Tag("<text>")]
        | Annotated[ContentSource, Tag("<content>")],
        Discriminator(
            lambda source: f"<{source.get('type')}>" if isinstance(source, dict) else None,
            custom_error_type="source_type",
            custom_error_message="Input should be a source of type base64, url, file, text or content",
        ),
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None

    @property
    def cites(self) -> bool:
        return bool(self.citations and self.citations.enabled)

    @property
    def pieces(self) -> list[dict[str, Any]]:
        """The document as parts of a chat message."""
        match self.source:
            case Base64Source() | UrlSource() | FileSource() as own:
                about = [{"type": "text", "text": self.context}] if self.context else []
                return [*about, {"type": "file", "file": {"filename": self.title, **_given(own)}}]
            case TextSource() as own:
                text = own.data
            case ContentSource() as own:
                text = "\n".join(block.text for block in own.content)
        return [{"type": "text", "text": document(text, source=self.title, context=self.context)}]


class SearchResultBlock(Marked):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: Citations | None = None

    @property
    def cites(self) -> bool:
        return bool(self.citations and self.citations.enabled)

    @property
    def text(self) -> str:
        return search_result("\n".join(block.text for block in self.content), source=self.source, title=self.title)


class ThinkingBlock(Marked):
    """Nothing checks the `signature`, and proxies of other servers send thoughts without one."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


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
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolReference, Tag("<tool_reference>")],
    Discriminator(
        lambda block: f"<{block.get('type')}>" if isinstance(block, dict) else None,
        custom_error_type="block_type",
        custom_error_message="Input should be a block of type text, image, document, search_result or tool_reference",
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
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        lambda block: f"<{block.get('type')}>" if isinstance(block, dict) else None,
        custom_error_type="block_type",
        custom_error_message="Input should be a block of type text, image, document, search_result, thinking, "
        "redacted_thinking, tool_use or tool_result; server tools are not supported",
    ),
]
