"""The images of chat messages: found, read from their URLs, and marked in what a chat template gets."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ...schemas.errors import InvalidRequest
from ...schemas.openai.chat import ChatMessage
from ...schemas.openai.completions import ChatRequest
from ...schemas.openai.content import ImagePart, with_parts
from ..text.chat_messages import reads_parts
from .reading import ImageLimits, check_image, not_fetched, refused

MOST_IMAGES = 64  # of one request
LOW = 512 * 512  # pixels that the model sees of an image with detail "low"
Fetched = Mapping[str, bytes]  # by URL, or the id of an uploaded file
NOTHING: Fetched = MappingProxyType({})

_data_url = re.compile(r"data:(?P<kind>[\w.+-]+/[\w.+-]+)?(?P<options>(?:;[^,;]*)*),", re.ASCII).match


class GivenImage(NamedTuple):
    """An image of a request: its file, what it may be, and where in the request it stands."""

    data: bytes
    limits: ImageLimits
    path: str


def is_remote(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def has_images(request: object) -> bool:
    """Whether a request of any kind has images."""
    return isinstance(request, ChatRequest) and any(message.images for message in request.messages)


def image_parts(messages: Sequence[ChatMessage]) -> list[tuple[str, ImagePart]]:
    """The images of a chat, each with its path. Raises `InvalidRequest` where none may be, and for too many."""
    found = []
    for index, message in enumerate(messages):
        for number, part in message.images:
            path = f"messages[{index}].content[{number}]"
            if message.role != "user":
                raise refused(path, f"a message with the role {message.role} cannot have images; send them as user")
            found.append((f"{path}.image_url.{'file_id' if part.image_url.url is None else 'url'}", part))
    if len(found) > MOST_IMAGES:
        raise InvalidRequest(
            f"The request has {len(found)} images; send at most {MOST_IMAGES}.",
            code="too_many_images",
            param="messages",
        )
    return found


def given_images(messages: Sequence[ChatMessage], limits: ImageLimits, fetched: Fetched = NOTHING) -> list[GivenImage]:
    """The images of a chat, their headers checked. `fetched` has the files of those that are not in it.

    Raises `InvalidRequest`.
    """
    images = []
    for path, part in image_parts(messages):
        url, kind = part.image_url.url, None
        key = part.image_url.file_id if url is None else url if is_remote(url) else None
        if key is None or (data := fetched.get(key)) is None:
            if url is None:
                raise refused(path, "uploaded files are not known here; send a data: URL with base64 as url")
            data, kind = read_data_url(url, path)
        check_image(data, limits, path, kind)
        most = min(limits.most or LOW, LOW) if part.image_url.detail == "low" else limits.most
        images.append(GivenImage(data, limits._replace(most=most), path))
    return images


def read_data_url(url: str, path: str) -> tuple[bytes, str | None]:
    """The bytes of a data URL with base64, and the media type that it names. Raises `InvalidRequest`."""
    if is_remote(url):
        raise not_fetched(path, "images are not fetched here; send a data: URL with base64")
    if (head := _data_url(url[:300])) is None:
        raise refused(path, "this is no data: URL; send data:image/png;base64,… with the image's bytes")
    if not head["options"].lower().endswith(";base64"):
        raise refused(path, "the data: URL is not in base64; send data:image/png;base64,…")
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(path, f"the data: URL is not valid base64 ({error}); encode the image again") from None
    if not data:
        raise refused(path, "the image is empty; send its bytes")
    return data, head["kind"] and head["kind"].lower()


def marked(content: Sequence[Mapping[str, Any]], template: str, mark: str) -> str | list[dict[str, Any]]:
    """Content parts as a chat template takes them: images as marks without data. A template that does not read parts
    gets one text, with the model's own `mark` in each image's place."""
    if reads_parts(template):
        return [
            {"type": "image"} if part["type"] == "image_url" else {"type": "text", "text": part["text"]}
            for part in content
        ]
    return "\n".join(mark if part["type"] == "image_url" else part["text"] for part in content)


def without_images(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat request without the bytes of its images."""
    return with_parts(body, "image_url", lambda part: part | {"image_url": {"url": ""}})
