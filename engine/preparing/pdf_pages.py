"""The pages of a PDF, as texts and pictures: `python -m penstock.engine.preparing.pdf_pages PIXELS PAGES < FILE`.

Run in a process of its own, which may be killed, and limits itself. Prints JSON: of each page its text, and, where that
is not all that it shows, a picture of it as a JPEG in base64.
"""

from __future__ import annotations

import base64
import io
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import orjson

from .pdf_figures import has_figures

if TYPE_CHECKING:
    import pypdfium2

    from ..vision.reading import ShownPages

MEMORY = 1 << 30  # bytes of addresses that reading may take in addition to what is loaded
SECONDS = 20  # of CPU time
MOST_PAGES = 1000
MOST_PICTURES = 64
DENSITY = 150 / 72  # pixels of a picture for each point of its page, of which an inch has 72
BESIDE_TEXT = 100 / 72  # where the text need not be read from it
LONGEST, SHORTEST = 2048, 32  # pixels of a picture's side
QUALITY = 90  # of 100

_HYPHENS = str.maketrans({"\x02": "-", "\ufffe": "-", "\r": None, "\0": None})  # at the end of a line


def pages_of(data: bytes, most_pixels: int, shown: ShownPages) -> list[dict[str, str]]:
    """Each page's `text`, and its `picture` if the text is not all: empty where that is not shown.

    Pictures are of `most_pixels`; without any none is shown. Of pages with text, `shown` says which have one, as long
    as there are not `MOST_PICTURES`. Raises `ValueError` for a PDF that asks for a password, is damaged, or has too
    many pages, or too many without text.
    """
    import pypdfium2

    try:
        file = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        is_locked = "password" in str(error).lower()
        raise ValueError("it asks for a password" if is_locked else "it is damaged, or no PDF") from None
    file.init_forms()
    if (count := len(file)) > MOST_PAGES:
        raise ValueError(f"it has {count} pages, and may have {MOST_PAGES}")
    pages, scans, figures = list[dict[str, str]](), 0, 0
    for index in range(count):
        page = file[index]
        if page.formenv is not None:  # what was filled into the form becomes text
            page.flatten()
            page.close()
            page = file[index]
        text = page.get_textpage().get_text_bounded().translate(_HYPHENS)
        if not any(page.get_objects(max_depth=1)):
            pages.append({"text": text})
        elif not text.strip():
            scans += 1
            if scans > MOST_PICTURES and most_pixels:
                raise ValueError(f"more than {MOST_PICTURES} of its pages are pictures")
            pages.append({"text": "", "picture": _picture(page, most_pixels, DENSITY) if most_pixels else ""})
        elif shown == "all" or has_figures(page):
            figures += 1
            is_shown = most_pixels and shown != "scans" and figures <= MOST_PICTURES
            density = DENSITY if shown == "all" else BESIDE_TEXT
            pages.append({"text": text, "picture": _picture(page, most_pixels, density) if is_shown else ""})
        else:
            pages.append({"text": text})
        page.close()
    return pages


def _picture(page: pypdfium2.PdfPage, most_pixels: int, density: float) -> str:
    width, height = page.get_size()
    scale = min(density, LONGEST / max(width, height), (most_pixels / (width * height)) ** 0.5)
    scale = max(scale, SHORTEST / min(width, height))
    if max(width, height) * scale > 100 * SHORTEST:
        raise ValueError("a page is much longer than wide, or wider than long")
    file = io.BytesIO()
    page.render(scale=scale).to_pil().convert("RGB").save(file, "JPEG", quality=QUALITY, subsampling=0)
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    import PIL.Image
    import pypdfium2  # noqa: F401  what is loaded does not count

    PIL.Image.preinit()
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    if sys.platform == "linux":
        loaded = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (loaded + MEMORY, loaded + MEMORY))
    try:
        pages = pages_of(sys.stdin.buffer.read(), int(sys.argv[1]), cast("ShownPages", sys.argv[2]))
    except Exception as error:  # pdfium's and Pillow's, and some are Python's own
        sys.exit(str(error) or type(error).__name__)
    sys.stdout.buffer.write(orjson.dumps(pages))


if __name__ == "__main__":
    main()
