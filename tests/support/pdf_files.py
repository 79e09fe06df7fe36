"""PDFs, made in the test."""

from __future__ import annotations

import io

import pypdfium2
from PIL import Image


def pdf(text: str, drawing: bytes = b"") -> bytes:
    """A page of 300 to 200 points that says `text`, which has no brackets and no backslash; `drawing` is operators."""
    return _file(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET\n".encode() + drawing)


def photograph(width: int, height: int) -> bytes:
    """Operators that draw a red picture of so many points in the lower left corner."""
    return b"q %d 0 0 %d 5 5 cm BI /W 1 /H 1 /CS /RGB /BPC 8 ID \xff\0\0 EI Q" % (width, height)


def bars(count: int) -> bytes:
    """Operators that draw a chart of blue bars."""
    return b"0 0 1 rg " + b"".join(b"%d 10 8 %d re f " % (10 + 12 * bar, 5 + 3 * bar) for bar in range(count))


def points(count: int, size: int = 3) -> bytes:
    """Operators that draw triangles, as marks of measurements."""
    places = [(10 + 13 * point, 10 + 60 * (point % 3)) for point in range(count)]
    return b"".join(b"%d %d m %d %d l %d %d l f " % (x, y, x + size, y, x, y + size) for x, y in places)


def cells(rows: int, columns: int) -> bytes:
    """Operators that draw a table of grey boxes, of which every third column is wider."""
    return b"0.8 g " + b"".join(
        b"%d %d %d 10 re f " % (10 + 40 * column, 10 + 12 * row, 24 + 10 * (column % 3 == 0))
        for row in range(rows)
        for column in range(columns)
    )


def round_box() -> bytes:
    """Operators that draw a box with round corners, most of the page."""
    return (
        b"20 10 m 280 10 l 290 10 290 10 290 20 c 290 180 l 290 190 290 190 280 190 c "
        b"20 190 l 10 190 10 190 10 180 c 10 20 l 10 10 10 10 20 10 c S"
    )


def rules(count: int) -> bytes:
    """Operators that draw lines from side to side."""
    return b"".join(b"10 %d 280 0.5 re f " % (10 * line) for line in range(count))


def underlines(count: int) -> bytes:
    """Operators that draw lines of different lengths."""
    return b"".join(b"10 %d %d 1 re f " % (20 * line, 40 + 30 * line) for line in range(count))


def scribble(strokes: int) -> bytes:
    """Operators that draw a line which goes to and fro in a corner."""
    return b"5 5 m " + b"".join(b"%d %d l " % ((5, 5) if stroke % 2 else (30, 30)) for stroke in range(strokes)) + b"S"


def curve(points: int) -> bytes:
    """Operators that draw a line through so many points."""
    return (
        b"10 10 m " + b"".join(b"%d %d l " % (10 + 9 * point, 10 + 7 * (point % 9)) for point in range(points)) + b"S"
    )


def pdf_with_form(text: str, drawing: bytes, scale: float) -> bytes:
    """A page as `pdf` makes it, with `drawing` in a form of its own, as programs include the figures of others."""
    form = b"<</Type/XObject/Subtype/Form/BBox[0 0 300 200]/Length %d>>stream\n%s\nendstream" % (len(drawing), drawing)
    shown = b"q %g 0 0 %g 0 0 cm /X1 Do Q" % (scale, scale)
    return _file(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET\n".encode() + shown, b"", b"", form)


def scan(*pictures: bytes) -> bytes:
    """A PDF with a page for each picture, and no text."""
    first, *others = (Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures)
    file = io.BytesIO()
    first.save(file, "PDF", resolution=150, save_all=True, append_images=others)
    return file.getvalue()


def both(text: str, *pictures: bytes) -> bytes:
    """A page that says `text`, an empty one, and pages with pictures."""
    return joined(pdf(text), pdf(""), scan(*pictures))


def joined(*files: bytes) -> bytes:
    """A PDF of the pages of others."""
    whole = pypdfium2.PdfDocument.new()
    for part in files:
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


_RESOURCES = b"/Resources<</Font<</F1 5 0 R>>/XObject<</X1 6 0 R>>>>"


def _file(page: bytes, root: bytes = b"", more: bytes = b"", *objects: bytes) -> bytes:
    """A page of these operators; `root` and `more` are further keys of the catalogue and the page."""
    bodies = [
        b"<</Type/Catalog/Pages 2 0 R%s>>" % root,
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 200]/Contents 4 0 R%s>>" % (_RESOURCES + more),
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
