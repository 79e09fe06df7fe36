"""The pages of a PDF, as text or as pictures: `python -m penstock.engine.preparing.pdf_pages PIXELS < FILE`.

Run in a process of its own, which may be killed, and limits itself. Prints JSON: of each page its text, or, where it
has none but shows something, a picture of it as a JPEG in base64.
"""

from __future__ import annotations

import base64
import io
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    import pypdfium2

MEMORY = 1 << 30  # bytes of addresses that reading may take in addition to what is loaded
SECONDS = 20  # of CPU time
MOST_PAGES = 1000
MOST_PICTURES = 64
DENSITY = 150 / 72  # pixels of a picture for each point of its page, of which an inch has 72
LONGEST, SHORTEST = 2048, 32  # pixels of a picture's side
QUALITY = 90  # of 100

_HYPHENS = str.maketrans({"\x02": "-", "\ufffe": "-", "\r": None, "\0": None})  # at the end of a line


def pages_of(data: bytes, most_pixels: int) -> list[dict[str, str]]:
    """Each page as `{"text": …}` or `{"picture": …}`, in their order; without `most_pixels` pictures are empty.

    Raises `ValueError` for a PDF that asks for a password, is damaged, or has too many pages, or more pictures than are
    shown.
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
    pages, pictures = list[dict[str, str]](), 0
    for index in range(count):
        page = file[index]
        if page.formenv is not None:  # what was filled into the form becomes text
            page.flatten()
            page.close()
            page = file[index]
        text = page.get_textpage().get_text_bounded().translate(_HYPHENS)
        if text.strip() or not any(page.get_objects(max_depth=1)):
            pages.append({"text": text})
        else:
            pictures += 1
            if pictures > MOST_PICTURES and most_pixels:
                raise ValueError(f"more than {MOST_PICTURES} of its pages are pictures")
            pages.append({"picture": _picture(page, most_pixels) if most_pixels else ""})
        page.close()
    return pages


def _picture(page: pypdfium2.PdfPage, most_pixels: int) -> str:
    width, height = page.get_size()
    scale = min(DENSITY, LONGEST / max(width, height), (most_pixels / (width * height)) ** 0.5)
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
        pages = pages_of(sys.stdin.buffer.read(), int(sys.argv[1]))
    except Exception as error:  # pdfium's and Pillow's, and some are Python's own
        sys.exit(str(error) or type(error).__name__)
    sys.stdout.buffer.write(orjson.dumps(pages))


if __name__ == "__main__":
    main()
