"""Documents of chats become text: PDFs and plain texts, whatever they are called, and clear words for all others."""

from __future__ import annotations

import base64
import subprocess
from typing import Any

import pytest
from pdf_files import pdf

from penstock.engine.preparing import documents
from penstock.engine.preparing.documents import has_documents, with_texts, without_documents
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.openai.completions import parse_request


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def chat(*parts: dict[str, Any], role: str = "user") -> Any:
    return parse_request("/v1/chat/completions", {"model": "m", "messages": [{"role": role, "content": list(parts)}]})


def file(data: str | None, **more: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": data, **more}}


QUESTION = {"type": "text", "text": "What colour?"}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (encoded(pdf("The grass is green.")), "The grass is green."),
        (f"data:application/pdf;base64,{encoded(pdf('Roses are red.'))}", "Roses are red."),
        (f"data:text/plain;base64,{encoded('Grün 🙂'.encode())}", "Grün 🙂"),
        (encoded(b"\xef\xbb\xbfa,b\n1,2\n"), "a,b\n1,2"),
    ],
)
def test_a_document_is_read(data: str, said: str) -> None:
    request = with_texts(chat(file(data, filename="notes.txt"), QUESTION))
    assert request.messages[0].text == (
        f"<document>\n<source>notes.txt</source>\n<content>\n{said}\n</content>\n</document>\nWhat colour?"
    )
    assert not has_documents(request)


def test_a_document_may_stand_behind_the_question_and_have_no_name() -> None:
    request = with_texts(chat(QUESTION, file(encoded(b"Grass"))))
    assert request.messages[0].text == "What colour?\n<document>\n<content>\nGrass\n</content>\n</document>"


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (file("not base64!"), "file.file_data: this is not valid base64"),
        (file("data:text/plain,hello"), "the data: URL is not in base64"),
        (file("data:text/plain;base64"), "the data: URL is not in base64"),
        (file(encoded(b"\x89PNG\r\n\x1a\n\0\0")), "neither a text in UTF-8 nor a PDF"),
        (file(encoded(b"")), "has no text"),
        (file(encoded(pdf(""))), "has no text; if its pages are pictures, send them as images"),
        (file(encoded(b"%PDF-1.4 and then nothing")), "this PDF cannot be read"),
        (
            file(None),
            "file: there is no document; send a text in UTF-8 or a PDF, in base64 as file_data, or as file_id",
        ),
        (file(None, file_id="file-1"), "file.file_id: uploaded files are not known here"),
    ],
)
def test_what_cannot_be_read_is_refused(part: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        with_texts(chat(QUESTION, part))
    assert told in str(refused.value) and refused.value.code == "invalid_document"
    assert str(refused.value.param).startswith("messages[0].content[1].file")


def test_only_users_have_documents() -> None:
    with pytest.raises(InvalidRequest, match="the role system cannot have documents"):
        with_texts(chat(file(encoded(b"x")), role="system"))


def test_a_request_has_so_many_documents() -> None:
    with pytest.raises(InvalidRequest, match="send at most 64"):
        with_texts(chat(*[file(encoded(b"x"))] * 65))


def test_a_pdf_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn of a chat sends it again."""
    request = chat(file(encoded(pdf("Once."))))
    first = with_texts(request)
    monkeypatch.setattr(subprocess, "run", None)
    assert with_texts(request) == first


def test_a_pdf_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "TIME", 0.001)
    with pytest.raises(InvalidRequest, match="send its text"):
        with_texts(chat(file(encoded(pdf("Slow.")))))


def test_a_job_goes_on_without_the_bytes() -> None:
    body = chat(file(encoded(pdf("Long.")), filename="a.pdf"), QUESTION).model_dump(exclude_none=True)
    lean = without_documents(body)
    assert lean["messages"][0]["content"] == [
        {"type": "file", "file": {"filename": "a.pdf", "file_data": ""}},
        QUESTION,
    ]
    assert parse_request("/v1/chat/completions", lean)
