"""The text of a PDF: `python -m penstock.engine.preparing.pdf_text < FILE`. It may be killed, and limits itself."""

from __future__ import annotations

import io
import logging
import resource
import sys
from pathlib import Path

MEMORY = 1 << 30  # bytes of addresses that reading may take in addition to what is loaded
SECONDS = 20  # of CPU time
MOST_PAGES = 1000


def text_of(data: bytes) -> str:
    """The text of all pages, in their order.

    Raises `ValueError` for a PDF that asks for a password or has too many pages, and whatever pypdf raises for others
    that it cannot read.
    """
    from pypdf import PdfReader  # loaded by those that read a PDF alone

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it asks for a password")
    if (count := len(reader.pages)) > MOST_PAGES:
        raise ValueError(f"it has {count} pages, and may have {MOST_PAGES}")
    return "\n\n".join(page.extract_text() for page in reader.pages)


def main() -> None:
    import pypdf  # noqa: F401  what is loaded does not count

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    if sys.platform == "linux":
        loaded = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (loaded + MEMORY, loaded + MEMORY))
    try:
        text = text_of(sys.stdin.buffer.read())
    except Exception as error:  # pypdf's are many, and some are Python's own
        sys.exit(str(error) or type(error).__name__)
    sys.stdout.buffer.write(text.encode(errors="replace"))


if __name__ == "__main__":
    main()
