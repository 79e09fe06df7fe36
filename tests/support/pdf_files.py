"""A PDF of one page, made in the test."""

from __future__ import annotations


def pdf(text: str) -> bytes:
    """A page that says `text`, which has no brackets and no backslash."""
    page = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    bodies = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 200]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(page), page),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    file, offsets = b"%PDF-1.4\n", b"0000000000 65535 f \n"
    for number, body in enumerate(bodies, 1):
        offsets += b"%010d 00000 n \n" % len(file)
        file += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    end = b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % len(file)
    return file + b"xref\n0 6\n" + offsets + end
