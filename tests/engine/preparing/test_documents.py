"""Documents of chats become text: PDFs and plain texts, whatever they are called, and clear words for all others."""

from __future__ import annotations

import base64
import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pdf_files import both, filled_form, joined, pdf, photograph, scan
from PIL import Image
from vision_models import picture

from penstock.engine.preparing import documents
from penstock.engine.preparing.documents import has_documents, with_contents, without_documents
from penstock.engine.vision.reading import ImageLimits, ShownPages
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.openai.completions import parse_request
from penstock.schemas.openai.content import ImagePart, TextPart


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
    request = with_contents(chat(file(data, filename="notes.txt"), QUESTION), None)
    assert request.messages[0].text == (
        f"<document>\n<source>notes.txt</source>\n<content>\n{said}\n</content>\n</document>\nWhat colour?"
    )
    assert not has_documents(request)


def test_a_document_may_stand_behind_the_question_and_have_no_name() -> None:
    request = with_contents(chat(QUESTION, file(encoded(b"Grass"))), None)
    assert request.messages[0].text == "What colour?\n<document>\n<content>\nGrass\n</content>\n</document>"


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (file("not base64!"), "file.file_data: this is not valid base64"),
        (file("data:text/plain,hello"), "the data: URL is not in base64"),
        (file("data:text/plain;base64"), "the data: URL is not in base64"),
        (file(encoded(b"\x89PNG\r\n\x1a\n\0\0")), "neither a text in UTF-8 nor a PDF"),
        (file(encoded(b"")), "has no text"),
        (file(encoded(pdf(""))), "the document has no text"),
        (file(encoded(scan(picture(), picture()))), "its pages are pictures, without text; ask a model that sees"),
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
        with_contents(chat(QUESTION, part), None)
    assert told in str(refused.value) and refused.value.code == "invalid_document"
    assert str(refused.value.param).startswith("messages[0].content[1].file")


LIMITS = ImageLimits(decoded=1 << 20)


def parts_of(data: bytes, limits: ImageLimits | None = LIMITS, **more: str) -> list[tuple[str, Any]]:
    """What becomes of a document: texts, and pictures, decoded."""
    return contents(chat(file(encoded(data), **more), QUESTION), limits)


def contents(request: Any, limits: ImageLimits | None = LIMITS) -> list[tuple[str, Any]]:
    parts: list[tuple[str, Any]] = []
    for part in with_contents(request, limits).messages[0].content or ():
        if isinstance(part, ImagePart) and part.image_url.url:
            head, _, image = part.image_url.url.partition(",")
            assert head == "data:image/jpeg;base64"
            parts.append(("image", Image.open(io.BytesIO(base64.b64decode(image)))))
        elif isinstance(part, TextPart):
            parts.append(("text", part.text))
    return parts


def plain(colour: str, width: int, height: int) -> bytes:
    Image.new("RGB", (width, height), colour).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def test_pages_without_text_are_shown_where_they_stand_to_models_that_see() -> None:
    data = both("The colours:", plain("red", 300, 200), plain("blue", 300, 200))
    first, (_, one), second, (_, two), last, question = parts_of(data, filename="c.pdf")
    assert first == ("text", "<document>\n<source>c.pdf</source>\n<content>\nThe colours:\n\n")
    assert second == ("text", "\n")
    assert (last, question) == (("text", "\n</content>\n</document>\n"), ("text", "What colour?"))
    assert [image.getpixel((150, 100)) for image in (one, two)] == [(254, 0, 0), (0, 0, 254)]
    assert one.size == (300, 200), "in the density of the scan"
    (told, _) = parts_of(data, None, filename="c.pdf")
    pages = "[page 3 is a picture, which is not shown]\n\n[page 4 is a picture, which is not shown]"
    assert f"The colours:\n\n{pages}\n</content>" in told[1]


def test_a_page_is_shown_with_so_many_pixels() -> None:
    (_, (_, large), *_) = parts_of(scan(plain("red", 3000, 3000)))
    (_, (_, small), *_) = parts_of(scan(plain("red", 3000, 3000)), ImageLimits(decoded=10_000))
    assert large.size == (1024, 1024) and small.size == (100, 100)


FIGURE = pdf("A red square:", photograph(100, 100))


def test_a_page_with_a_figure_is_shown_behind_its_text() -> None:
    before, (kind, image), after, _ = parts_of(joined(pdf("One."), FIGURE, pdf("Three.")))
    assert before == ("text", "<document>\n<content>\nOne.\n\nA red square:\n\n")
    assert (kind, image.size) == ("image", (417, 278)), "100 dots an inch"
    red, _, blue = image.getpixel((70, 200))
    assert red > 250 and blue < 5
    assert after == ("text", "\nThree.\n</content>\n</document>\n")


@pytest.mark.parametrize(
    ("pages", "detail", "shown"),
    [
        ("scans", None, 1),
        ("figures", None, 2),
        ("figures", "auto", 2),
        ("all", None, 3),
        ("all", "low", 1),
        ("scans", "high", 3),
    ],
)
def test_which_pages_are_shown(pages: ShownPages, detail: str | None, shown: int) -> None:
    data = joined(pdf("Text."), FIGURE, scan(plain("red", 300, 200)))
    more = {} if detail is None else {"detail": detail}
    parts = parts_of(data, LIMITS._replace(pages=pages), **more)
    assert [kind for kind, _ in parts].count("image") == shown
    told = "A red square:\n\n[pictures on page 2 are not shown]"
    assert any(told in said for kind, said in parts if kind == "text") == (shown == 1)


@pytest.mark.parametrize("detail", ["low", "high"])
def test_a_model_that_sees_nothing_is_told_of_figures(detail: str) -> None:
    ((_, told), _) = parts_of(joined(pdf("Text."), FIGURE), None, detail=detail)
    assert told.count("not shown") == 1
    assert "Text.\n\nA red square:\n\n[pictures on page 2 are not shown]\n<" in told


def test_figures_leave_room_for_scans_and_images() -> None:
    """A request has at most 64 images: figures beyond are told of."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{encoded(plain('blue', 9, 9))}"}}
    figures, scans = encoded(joined(*[FIGURE] * 30)), encoded(scan(*[picture()] * 20))
    parts = contents(chat(*[image] * 10, file(figures), file(scans), file(figures), QUESTION))
    assert [kind for kind, _ in parts].count("image") == 64
    told = "".join(said for kind, said in parts if kind == "text")
    assert told.count("are not shown]") == 26 and "[pictures on page 5 are not shown]" in told


def test_a_pdf_has_so_many_pictures_and_no_page_that_is_a_line() -> None:
    for data, told in (
        (scan(*[picture()] * 65), "more than 64 of its pages"),
        (scan(plain("red", 2, 9000)), "than wide"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            parts_of(data)


def test_what_was_filled_into_a_form_is_read() -> None:
    assert parts_of(filled_form("Ada Lovelace"))[0][1].count("Name:\nAda Lovelace") == 1


def test_only_users_have_documents() -> None:
    with pytest.raises(InvalidRequest, match="the role system cannot have documents"):
        with_contents(chat(file(encoded(b"x")), role="system"), None)


def test_a_request_has_so_many_documents() -> None:
    with pytest.raises(InvalidRequest, match="send at most 64"):
        with_contents(chat(*[file(encoded(b"x"))] * 65), None)


def test_a_pdf_is_read_wherever_the_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base64.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert "Anywhere." in with_contents(chat(file(encoded(pdf("Anywhere.")))), None).messages[0].text


def test_a_pdf_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn of a chat sends it again."""
    request = chat(file(encoded(pdf("Once."))))
    first = with_contents(request, None)
    monkeypatch.setattr(subprocess, "run", None)
    assert with_contents(request, None) == first


def test_a_pdf_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "TIME", 0.001)
    with pytest.raises(InvalidRequest, match="send its text"):
        with_contents(chat(file(encoded(pdf("Slow.")))), None)


def test_a_job_goes_on_without_the_bytes() -> None:
    body = chat(file(encoded(pdf("Long.")), filename="a.pdf"), QUESTION).model_dump(exclude_none=True)
    lean = without_documents(body)
    assert lean["messages"][0]["content"] == [
        {"type": "file", "file": {"filename": "a.pdf", "file_data": ""}},
        QUESTION,
    ]
    assert parse_request("/v1/chat/completions", lean)
