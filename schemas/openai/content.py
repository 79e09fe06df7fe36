"""What the messages of a chat contain: texts, images and documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Tag, model_validator

from .body import OpenBody


class NamedFile(NamedTuple):
    """A file that a request names by the id of its upload, or by its URL: its own name, and its bytes."""

    name: str
    data: bytes


NamedFiles = Mapping[str, NamedFile]  # by id or URL
NO_FILES: NamedFiles = MappingProxyType({})


class TextPart(OpenBody):
    type: Literal["text"]
    text: str


class ImageUrl(OpenBody):
    """`url` is a data URL with base64, or one that the server may fetch; `file_id`, in its place, names an uploaded
    file, and is Penstock's own. `detail` "low" shows the model fewer pixels, the others as many as it takes."""

    url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ImageUrl:
        if (self.url is None) == (self.file_id is None):
            raise ValueError("must have either url or file_id")
        return self


class ImagePart(OpenBody):
    type: Literal["image_url"]
    image_url: ImageUrl


class FileData(OpenBody):
    """A document: `file_data` is its bytes in base64, alone or in a data URL; `file_id` names an uploaded file;
    `file_url`, which the server may fetch, is Penstock's own. So is `detail`: "low" shows a model that sees no page of
    a PDF that has text, "high" all."""

    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None

    @property
    def sources(self) -> list[str]:
        """The fields that say what the document is."""
        return [name for name in ("file_data", "file_id", "file_url") if getattr(self, name) is not None]


class FilePart(OpenBody):
    type: Literal["file"]
    file: FileData


def _part_kind(part: object) -> str | None:
    if isinstance(part, OpenBody):
        return f"<{getattr(part, 'type', None)}>"
    return f"<{part.get('type', 'text')}>" if isinstance(part, dict) else "<text>"


ContentPart = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")] | Annotated[FilePart, Tag("<file>")],
    Discriminator(
        _part_kind,
        custom_error_type="part_kind",
        custom_error_message="Input should be a part of type 'text', 'image_url' or 'file'; audio is not supported",
    ),
]


def _content_kind(value: object) -> str | None:
    return "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None


# With the tags pydantic reports only the faults of one member; `_path` drops them.
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Tag("<parts>")],
    Discriminator(
        _content_kind,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of parts",
    ),
]


def with_parts(
    body: Mapping[str, Any], kind: str, replaced: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The body of a chat request with others in place of its parts of a type, in their order."""

    def part_of(part: Any) -> Any:
        return replaced(part) if isinstance(part, dict) and part.get("type") == kind else part

    messages = [
        message | {"content": [part_of(part) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in body["messages"]
    ]
    return {**body, "messages": messages}
