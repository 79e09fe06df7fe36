"""PDFs, made in the test."""

from __future__ import annotations

import io

import pypdfium2
from PIL import Image


def pdf(text: str) -> bytes:
    """A page that says `text`, which has no brackets and no backslash."""
    return _file(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode())


def scan(*pictures: bytes) -> bytes:
    """A PDF with a page for each picture, and no text."""
    first, *others = (Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures)
    file = io.BytesIO()
    first.save(file, "PDF", resolution=150, save_all=True, append_images=others)
    return file.getvalue()


def both(text: str, *pictures: bytes) -> bytes:
    """A page that says `text`, an empty one, and pages with pictures."""
    whole = pypdfium2.PdfDocument.new()
    for part in (pdf(text), pdf(""), scan(*pictures)):
        whole.import_pages(pypdfium2.PdfDocument(part))
    file = io.BytesIO()
    whole.save(file)
    return file.getvalue()


def filled_form(value: str) -> bytes:
    """A page with a field, into which `value` has been filled."""
    fields = b"<</Fields[6 0 R]/DR<</Font<</F1 5 0 R>>>>/DA(/F1 12 Tf 0 g)>>"
    field = (
        f"<</Type/Annot/Subtype/Widget/FT/Tx/T(name)/V({value})/Rect[60 140 250 165]/DA(/F1 12 Tf 0 g)/F 4/P 3 0 R>>"
    )
    return _file(b"BT /F1 12 Tf 20 150 Td (Name:) Tj ET", b"/AcroForm" + fields, b"/Annots[6 0 R]", field.encode())


def _file(page: bytes, root: bytes = b"", more: bytes = b"", *objects: bytes) -> bytes:
    """A page of these operators; `root` and `more` are further keys of the catalogue and the page."""
    bodies = [
        b"<</Type/Catalog/Pages 2 0 R%s>>" % root,
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 200]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>%s>>" % more,
        b"<</Length %d>>stream\n%s\nendstream" % (len(page), page),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        *objects,
    ]
    file, offsets = b"%PDF-1.4\n", b"0000000000 65535 f \n"
    for number, body in enumerate(bodies, 1):
        offsets += b"%010d 00000 n \n" % len(file)
        file += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    count = len(bodies) + 1
    end = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (count, len(file))
    return file + b"xref\n0 %d\n" % count + offsets + end
