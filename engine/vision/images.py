"""What a prompt knows of its images: where they stand, and which ones they are."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

Key = tuple[str, bytes]
"""A picture of which features are kept: the salt of the cache that they belong to, and `PromptImage.identity`."""


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt. Its tokens, from the first that stands for a part of it to the last, are `length` ones from
    `offset` on; between them may be tokens that mark rows.

    `digest` is the sha256 of the bytes of its file, `data`, in hexadecimal; `grid` is what the model's processor made
    of it, and `pixels` the limits of (fewest, most) pixels that it kept to, None for those of the model.
    """

    digest: str
    offset: int
    length: int
    grid: tuple[int, ...]
    pixels: tuple[int | None, int | None] = (None, None)
    data: bytes = field(default=b"", repr=False, compare=False)

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def identity(self) -> bytes:
        """16 bytes that differ wherever the model would see another picture."""
        seen = f"{self.digest} {self.grid} {self.pixels}"
        return blake2b(seen.encode(), digest_size=16, person=b"image").digest()


def marks(images: Sequence[PromptImage], begin: int, end: int) -> bytes:
    """What the tokens from `begin` to `end` show beside their ids: which images, and from which of their tokens on.

    Empty for tokens without an image. Blocks of keys and values with other marks are other blocks.
    """
    return b"".join(
        image.identity + struct.pack("<q", begin - image.offset)
        for image in images
        if image.offset < end and begin < image.end
    )
