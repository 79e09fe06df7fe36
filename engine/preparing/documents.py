"""The documents of chat messages, read: a text or a PDF, uploaded before or base64 in the request, becomes text between
tags."""

from __future__ import annotations

import asyncio
import base64
import binascii
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from threading import Lock
from typing import Any, TypeVar, cast

from ...schemas.errors import InvalidRequest
from ...schemas.openai.chat import ChatMessage
from ...schemas.openai.completions import ChatRequest
from ...schemas.openai.content import NO_FILES, FileData, NamedFiles, TextPart, with_parts
from ...schemas.openai.documents import document

MOST_DOCUMENTS = 64  # of one request
KEPT = 32 << 20  # characters of texts that are kept, for the next turn of a chat
TIME = 20.0  # seconds that the PDFs of a request may take together

Request = TypeVar("Request")

_PDF = b"%PDF-"
_HEADER = 1024  # bytes within which a PDF says that it is one
_WHAT_TO_SEND = "send a text in UTF-8 or a PDF"

_texts: OrderedDict[bytes, str] = OrderedDict()  # of PDFs by digest, the least recently used first
_texts_lock = Lock()
_readers = ThreadPoolExecutor(2, "documents")


def has_documents(request: object) -> bool:
    """Whether a request of any kind has documents, which take a while to read."""
    return isinstance(request, ChatRequest) and any(message.files for message in request.messages)


async def read_documents(request: Request, files: NamedFiles = NO_FILES) -> Request:
    """A request of any kind, as `with_texts` returns a chat; two at a time are read, while others wait for nothing."""
    if not has_documents(request):
        return request
    chat = cast(ChatRequest, request)
    return cast(Request, await asyncio.get_running_loop().run_in_executor(_readers, with_texts, chat, files))


def with_texts(request: ChatRequest, files: NamedFiles = NO_FILES) -> ChatRequest:
    """The request with the texts of its documents in their places; `files` are those that it names by their ids. Blocks
    while PDFs are read.

    Raises `InvalidRequest` where a document has no text, cannot be read, or may not be.
    """
    count = sum(len(message.files) for message in request.messages)
    if not count:
        return request
    if count > MOST_DOCUMENTS:
        raise InvalidRequest(
            f"The request has {count} documents; send at most {MOST_DOCUMENTS}.",
            code="too_many_documents",
            param="messages",
        )
    end = time.monotonic() + TIME
    messages = [_read(message, f"messages[{index}]", end, files) for index, message in enumerate(request.messages)]
    return request.model_copy(update={"messages": messages})


def without_documents(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat request without the bytes of its documents."""
    return with_parts(body, "file", lambda part: part | {"file": part["file"] | {"file_data": ""}})


def _read(message: ChatMessage, path: str, end: float, files: NamedFiles) -> ChatMessage:
    """The message without documents; at `end` on the monotonic clock their time is over."""
    if not message.files:
        return message
    parts: list[Any] = list(message.content or ())
    for index, part in message.files:
        where = f"{path}.content[{index}]"
        if message.role != "user":
            raise _refused(where, f"a message with the role {message.role} cannot have documents; send them as user")
        name, data, origin = _given(part.file, f"{where}.file", files)
        text = document(_text(data, origin, end), source=name)
        before, behind = "\n" * (index > 0), "\n" * (index < len(parts) - 1)  # templates join parts without a space
        parts[index] = TextPart(type="text", text=f"{before}{text}{behind}")
    return message.model_copy(update={"content": parts})


def _given(file: FileData, path: str, files: NamedFiles) -> tuple[str | None, bytes, str]:
    """What a document is called, its bytes, and the path of the parameter that they come from."""
    if file.file_id is None and file.file_data is None:
        raise _refused(path, f"there is no document; {_WHAT_TO_SEND}, in base64 as file_data, or as file_id")
    if file.file_data is not None:
        if file.file_id is not None:
            raise _refused(path, "there is both file_data and file_id; send one of the two")
        path += ".file_data"
        return file.filename, _decoded(file.file_data, path), path
    path += ".file_id"
    if (named := files.get(file.file_id or "")) is None:
        raise _refused(path, "uploaded files are not known here; send the document in base64 as file_data")
    return file.filename or named.name, named.data, path


def _decoded(given: str, path: str) -> bytes:
    head, comma, rest = given.partition(",") if given[:5].lower() == "data:" else ("", ",", given)
    if not comma or (head and not head.lower().endswith(";base64")):
        raise _refused(path, "the data: URL is not in base64; send data:application/pdf;base64,…")
    try:
        return base64.b64decode(rest, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(path, f"this is not valid base64 ({error}); encode the document again") from None


def _text(data: bytes, path: str, end: float) -> str:
    if _PDF in data[:_HEADER]:
        text = _text_of_pdf(data, path, end)
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise _refused(path, f"this is neither a text in UTF-8 nor a PDF; {_WHAT_TO_SEND}")
    if not text.strip():
        raise _refused(path, "the document has no text; if its pages are pictures, send them as images")
    return text


def _text_of_pdf(data: bytes, path: str, end: float) -> str:
    """Read in a process of its own, which may be killed: some PDFs take for ever, or all memory."""
    key = sha256(data).digest()
    with _texts_lock:
        if key in _texts:
            _texts.move_to_end(key)
            return _texts[key]
    command = [sys.executable, "-m", f"{__package__}.pdf_text"]
    try:
        left = max(0.0, end - time.monotonic())
        child = subprocess.run(command, input=data, capture_output=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        raise _refused(path, f"reading the PDFs up to this one takes longer than {TIME:g} s; send its text") from None
    if child.returncode:
        said = child.stderr.decode(errors="replace").strip().splitlines()
        why = said[-1] if child.returncode == 1 and said else "it takes too much time or memory"
        raise _refused(path, f"this PDF cannot be read ({why}); send its text")
    text = child.stdout.decode()
    with _texts_lock:
        _texts[key] = text
        while sum(map(len, _texts.values())) > KEPT:
            _texts.popitem(last=False)
    return text


def _refused(path: str, fault: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {fault}.", code="invalid_document", param=path)
