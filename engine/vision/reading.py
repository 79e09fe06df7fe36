"""Reads images that strangers send: checked by their headers before anything is decoded."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self

from ...schemas.bounds import shortened
from ...schemas.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
ShownPages = Literal["scans", "figures", "all"]
TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
MOST_DECODED = 170_000_000  # pixels; Pillow refuses more
MOST_SCANS = 100  # of a JPEG; cameras and programs write a dozen, and each is decoded over the whole picture
LEAST_SIDE, MOST_SIDE = 8, 65_500  # pixels; processors take thinner pictures for something else


class ImageSettings(Protocol):
    """The settings of `ImageLimits`, under their names there."""

    @property
    def max_decoded_pixels(self) -> int: ...

    @property
    def min_pixels(self) -> int | None: ...

    @property
    def max_pixels(self) -> int | None: ...

    @property
    def shown_pages(self) -> ShownPages: ...


class ImageLimits(NamedTuple):
    """What an image may be. `decoded` is how many pixels its file may hold; one with fewer than `fewest` pixels is
    enlarged before the model sees it, one with more than `most` reduced; None leaves that to the model's processor.
    `pages` says which pages of PDFs become images: scans, those with figures too, or all."""

    decoded: int = 40_000_000
    fewest: int | None = None
    most: int | None = None
    pages: ShownPages = "figures"

    @classmethod
    def of(cls, settings: ImageSettings) -> Self:
        return cls(settings.max_decoded_pixels, settings.min_pixels, settings.max_pixels, settings.shown_pages)

    @property
    def pixels(self) -> tuple[int | None, int | None]:
        return self.fewest, self.most


ANY = ImageLimits()
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]")  # of a segment; the others have no length, or are data
_SCAN, _END = 0xDA, 0xD9


def check_image(data: bytes, limits: ImageLimits, path: str, kind: str | None = None) -> tuple[int, int]:
    """The width and height that an image's header gives; nothing is decoded.

    `path` names it in errors, `kind` is the media type that its sender gave; of several for images, the bytes decide.
    Raises `InvalidRequest` for bytes that are no image of `FORMATS`, and for one that is animated, too large or small,
    or comes in too many scans.
    """
    if kind is not None and kind not in TYPES:
        raise refused(path, f"the type {shortened(kind, 50)!r} is not supported; send one of {', '.join(TYPES)}")
    with _opened(data, path) as image:
        width, height = image.size
        if width * height > limits.decoded or max(width, height) > MOST_SIDE:
            raise of_wrong_size(
                path,
                f"the image has {width} x {height} pixels, and {limits.decoded} are allowed; send a smaller one",
            )
        if min(width, height) < LEAST_SIDE:
            raise of_wrong_size(
                path,
                f"the image has {width} x {height} pixels, and each side needs {LEAST_SIDE}; send a larger one",
            )
        if getattr(image, "is_animated", False):
            raise refused(path, "the image is animated; send one picture of it")
        if image.format in ("JPEG", "MPO") and _scans(data) > MOST_SCANS:
            raise refused(path, f"the image is a JPEG of more than {MOST_SCANS} scans; send one of fewer")
    return width, height


def _scans(data: bytes) -> int:
    """How many scans a JPEG has, as far as its segments can be followed; at most one above `MOST_SCANS`."""
    count, place = 0, 2
    while count <= MOST_SCANS and (found := _MARKER.search(data, place)):
        kind = data[found.end() - 1]
        if kind == _END:
            break
        count += kind == _SCAN
        place = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
    return count


def decode_image(data: bytes, limits: ImageLimits, path: str) -> Image.Image:
    """The picture in RGB, turned upright, transparent parts on white. Raises `InvalidRequest` for a damaged file."""
    from PIL import Image, ImageOps

    check_image(data, limits, path)
    with _opened(data, path) as image:
        try:
            image.load()
            upright = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                ground = Image.new("RGBA", upright.size, "white")
                return Image.alpha_composite(ground, upright).convert("RGB")
            return upright.convert("RGB")
        except (OSError, ValueError, SyntaxError, IndexError, MemoryError) as error:
            raise refused(path, f"the image is damaged ({error}); send it again") from None


def within(image: Image.Image, limits: ImageLimits) -> Image.Image:
    """The picture, enlarged or reduced to the pixels that `limits` ask for; its proportions stay."""
    width, height = image.size
    count = width * height
    wanted = max(count, limits.fewest or 0)
    wanted = min(wanted, limits.most or wanted)
    if wanted == count:
        return image
    from PIL import Image

    factor = (wanted / count) ** 0.5
    size = max(round(width * factor), 1), max(round(height * factor), 1)
    return image.resize(size, Image.Resampling.BICUBIC)


def refused(path: str, fault: str) -> InvalidRequest:
    """The error for the image at `path`."""
    return InvalidRequest(f"{path}: {fault}.", code="invalid_image", param=path)


def of_wrong_size(path: str, fault: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {fault}.", code="image_size", param=path)


def not_fetched(path: str, fault: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {fault}.", code="remote_image", param=path)


def _opened(data: bytes, path: str) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise of_wrong_size(path, "the image has too many pixels; send a smaller one") from None
    except UnidentifiedImageError:
        raise refused(path, "this is no PNG, JPEG, WebP or GIF image; send one of these") from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise refused(path, f"the image is damaged ({error}); send it again") from None
