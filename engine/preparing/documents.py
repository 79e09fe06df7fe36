"""The documents of chat messages, read: a text or a PDF, base64 in the request, uploaded before or fetched from a URL,
becomes text between tags. For a model that sees, a page of a PDF that shows more than its text becomes an image."""

from __future__ import annotations

import asyncio
import base64
import binascii
import subprocess
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from threading import Lock
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

import orjson

from ...config.process import python
from ...schemas.errors import InvalidRequest
from ...schemas.openai.chat import ChatMessage, has_named_files
from ...schemas.openai.completions import ChatRequest
from ...schemas.openai.content import (
    NO_FILES,
    FileData,
    FilePart,
    ImagePart,
    ImageUrl,
    NamedFiles,
    TextPart,
    with_parts,
)
from ...schemas.openai.documents import document
from ..vision.chat import MOST_IMAGES
from ..vision.reading import ImageLimits, ShownPages

MOST_DOCUMENTS = 64  # of one request
KEPT = 32 << 20  # bytes of pages that are kept, for the next turn of a chat
READERS = 2  # requests whose documents are read at the same time
TIME = 20.0  # seconds that the PDFs of a request may take together

Request = TypeVar("Request")


class Page(NamedTuple):
    """Of a document: its text, and, where that is not all, a picture as a JPEG in base64, empty if it is not shown."""

    text: str = ""
    picture: str | None = None


_PDF = b"%PDF-"
_HEADER = 1024  # bytes within which a PDF says that it is one
_WHAT_TO_SEND = "send a text in UTF-8 or a PDF"
_BY_DETAIL: Mapping[str | None, ShownPages] = {"low": "scans", "high": "all"}

_kept: OrderedDict[tuple[bytes, int, ShownPages], bytes] = OrderedDict()  # pages of PDFs, the least recently used first
_kept_lock = Lock()
_readers = ThreadPoolExecutor(READERS, "documents")


def has_documents(request: object) -> bool:
    """Whether a request of any kind has documents, which take a while to read."""
    return isinstance(request, ChatRequest) and any(message.files for message in request.messages)


def has_files(request: object) -> TypeGuard[ChatRequest]:
    """Whether a request of any kind has documents, or names uploaded files: what has to be read before its prompt."""
    return has_documents(request) or has_named_files(request)


async def read_documents(request: Request, limits: ImageLimits | None, files: NamedFiles = NO_FILES) -> Request:
    """A request of any kind, as `with_contents` returns a chat; `READERS` are read at a time; nothing else waits."""
    if not has_documents(request):
        return request
    chat = cast(ChatRequest, request)
    loop = asyncio.get_running_loop()
    return cast(Request, await loop.run_in_executor(_readers, with_contents, chat, limits, files))


def with_contents(request: ChatRequest, limits: ImageLimits | None, files: NamedFiles = NO_FILES) -> ChatRequest:
    """The request with the contents of its documents in their places; `files` are those that it names by their ids or
    URLs. Blocks while PDFs are read.

    Pages that show more than their text become images as `limits` allows; they are None for a model that sees none. A
    model is told of what it is not shown. Of pages with text so many become images as the request may have with those
    without. Raises `InvalidRequest` where a document has nothing to show, cannot be read, or may not be.
    """
    if not document_parts(request.messages):
        return request
    end = time.monotonic() + TIME
    read = [_read(message, f"messages[{index}]", end, limits, files) for index, message in enumerate(request.messages)]
    pages = [page for documents in read for document in documents.values() for page in document.pages]
    others = sum(bool(page.picture) and not page.text for page in pages)
    others += sum(len(message.images) for message in request.messages)
    places = iter(range(others, MOST_IMAGES))
    messages = [_filled(message, documents, places) for message, documents in zip(request.messages, read, strict=True)]
    return request.model_copy(update={"messages": messages})


def document_parts(messages: Sequence[ChatMessage]) -> list[tuple[str, FilePart]]:
    """The documents of a chat, each with its path. Raises `InvalidRequest` where none may be, for too many, and for one
    that comes from nowhere or from several places."""
    found = []
    for index, message in enumerate(messages):
        for number, part in message.files:
            path = f"messages[{index}].content[{number}]"
            if message.role != "user":
                raise _refused(path, f"a message with the role {message.role} cannot have documents; send them as user")
            path += ".file"
            match part.file.sources:
                case []:
                    raise _refused(
                        path, f"there is no document; {_WHAT_TO_SEND}, in base64 as file_data, or as file_id"
                    )
                case [one, another, *_]:
                    raise _refused(path, f"there is both {one} and {another}; send one of the two")
            found.append((path, part))
    if len(found) > MOST_DOCUMENTS:
        raise InvalidRequest(
            f"The request has {len(found)} documents; send at most {MOST_DOCUMENTS}.",
            code="too_many_documents",
            param="messages",
        )
    return found


def without_documents(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat request without the bytes of its documents."""
    return with_parts(body, "file", lambda part: part | {"file": part["file"] | {"file_data": ""}})


class _Document(NamedTuple):
    name: str | None
    pages: list[Page]


def _read(
    message: ChatMessage, path: str, end: float, limits: ImageLimits | None, files: NamedFiles
) -> dict[int, _Document]:
    """The documents of a message by their places in it; at `end` on the monotonic clock their time is over."""
    found: dict[int, _Document] = {}
    for index, part in message.files:
        name, data, origin = _given(part.file, f"{path}.content[{index}].file", files)
        shown = _BY_DETAIL.get(part.file.detail, limits.pages) if limits else "scans"
        found[index] = _Document(name, _pages(data, origin, end, limits.decoded if limits else 0, shown))
    return found


def _filled(message: ChatMessage, documents: Mapping[int, _Document], places: Iterator[int]) -> ChatMessage:
    """The message with the contents of its documents; of pages with text as many become images as there are places."""
    if not documents:
        return message
    parts: list[Any] = []
    content: Sequence[Any] = message.content or ()
    for index, part in enumerate(content):
        if (found := documents.get(index)) is None:
            parts.append(part)
            continue
        pages = [
            page._replace(picture="") if page.text and page.picture and next(places, None) is None else page
            for page in found.pages
        ]
        before, behind = "\n" * (index > 0), "\n" * (index < len(content) - 1)  # templates join parts without a space
        parts += _shown(pages, found.name, before, behind)
    return message.model_copy(update={"content": parts})


def _shown(pages: Sequence[Page], name: str | None, before: str, behind: str) -> Iterator[TextPart | ImagePart]:
    """A document as parts of a message: its text between tags, and in it, as parts of their own, its pictures."""
    head, _, tail = document("\0", source=name).rpartition("\0")
    text, gap = before + head, ""
    for number, page in enumerate(pages, 1):
        said = page.text.strip("\n")
        if page.picture == "":
            told = (
                f"pictures on page {number} are not shown"
                if said
                else f"page {number} is a picture, which is not shown"
            )
            said = f"{said}\n\n[{told}]".lstrip("\n")
        if said:
            text, gap = f"{text}{gap}{said}", "\n\n"
        if page.picture:
            yield TextPart(type="text", text=f"{text}{gap}")
            yield ImagePart(type="image_url", image_url=ImageUrl(url=f"data:image/jpeg;base64,{page.picture}"))
            text, gap = "", "\n"
    yield TextPart(type="text", text=f"{text}{tail}{behind}")


def _given(file: FileData, path: str, files: NamedFiles) -> tuple[str | None, bytes, str]:
    """What a document is called, its bytes, and the path of the parameter that they come from."""
    if file.file_data is not None:
        path += ".file_data"
        return file.filename, _decoded(file.file_data, path), path
    if (named := files.get(file.file_id or file.file_url or "")) is not None:
        return file.filename or named.name, named.data, f"{path}.{file.sources[0]}"
    if file.file_url is not None:
        fault = "documents are not fetched here; send the document in base64"
        raise document_not_fetched(f"{path}.file_url", fault)
    fault = "uploaded files are not known here; send the document in base64 as file_data"
    raise _refused(f"{path}.file_id", fault)


def _decoded(given: str, path: str) -> bytes:
    head, comma, rest = given.partition(",") if given[:5].lower() == "data:" else ("", ",", given)
    if not comma or (head and not head.lower().endswith(";base64")):
        raise _refused(path, "the data: URL is not in base64; send data:application/pdf;base64,…")
    try:
        return base64.b64decode(rest, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(path, f"this is not valid base64 ({error}); encode the document again") from None


def _pages(data: bytes, path: str, end: float, most_pixels: int, shown: ShownPages) -> list[Page]:
    if _PDF in data[:_HEADER]:
        pages = _pages_of_pdf(data, path, end, most_pixels, shown)
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise _refused(path, f"this is neither a text in UTF-8 nor a PDF; {_WHAT_TO_SEND}")
        pages = [Page(text)]
    if not any(page.text.strip() or page.picture for page in pages):
        if any(page.picture is not None for page in pages):
            raise _refused(path, "its pages are pictures, without text; ask a model that sees images, or send its text")
        raise _refused(path, "the document has no text")
    return pages


def _pages_of_pdf(data: bytes, path: str, end: float, most_pixels: int, shown: ShownPages) -> list[Page]:
    """Read in a process of its own, which may be killed: some PDFs take for ever, or all memory."""
    key = sha256(data).digest(), most_pixels, shown
    with _kept_lock:
        if pages := _kept.get(key):
            _kept.move_to_end(key)
    if pages is None:
        command = python(f"{__package__}.pdf_pages", str(most_pixels), shown)
        try:
            left = max(0.0, end - time.monotonic())
            child = subprocess.run(command, input=data, capture_output=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            told = f"reading the PDFs up to this one takes longer than {TIME:g} s; send its text"
            raise _refused(path, told) from None
        if child.returncode:
            said = child.stderr.decode(errors="replace").strip().splitlines()
            why = said[-1] if child.returncode == 1 and said else "it takes too much time or memory"
            raise _refused(path, f"this PDF cannot be read ({why}); send its text")
        pages = child.stdout
        with _kept_lock:
            _kept[key] = pages
            while sum(map(len, _kept.values())) > KEPT:
                _kept.popitem(last=False)
    return [Page(**page) for page in orjson.loads(pages)]


def document_not_fetched(path: str, fault: str) -> InvalidRequest:
    """The error for a URL at `path` that leads to no document."""
    return InvalidRequest(f"{path}: {fault}.", code="remote_document", param=path)


def _refused(path: str, fault: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {fault}.", code="invalid_document", param=path)
