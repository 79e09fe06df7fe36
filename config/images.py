"""The settings of images and documents in requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from ..schemas.base import not_above
from .models import UrlPrefix, split_commas


class ImageSettings(BaseModel):
    """A part of `Settings`."""

    image_allowed_urls: Annotated[tuple[UrlPrefix, ...], BeforeValidator(split_commas)] = Field(
        (), description="Beginnings of URLs from which requests may have images fetched; none by default."
    )
    document_allowed_urls: Annotated[tuple[UrlPrefix, ...], BeforeValidator(split_commas)] = Field(
        (), description="Beginnings of URLs from which requests may have documents fetched; none by default."
    )
    mmproj: str | None = Field(
        None,
        min_length=1,
        description="GGUF file with the vision part of the model, or none; by default the one beside the model's file.",
    )
    max_pixels: int | None = Field(
        None, ge=1, description="Images with more pixels are reduced before the model sees them; by default as it says."
    )
    min_pixels: Annotated[int | None, not_above("max_pixels")] = Field(
        None,
        ge=1,
        description="Images with fewer pixels are enlarged before the model sees them; by default as it says.",
    )
    max_decoded_pixels: int = Field(
        40_000_000, ge=1, le=170_000_000, description="Pixels of an image's file; one with more is refused unread."
    )
    shown_pages: Literal["scans", "figures", "all"] = Field(
        "figures",
        description="Pages of PDFs that a model sees as images: those without text, those with figures too, or all.",
    )
