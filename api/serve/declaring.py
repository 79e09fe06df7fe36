"""The models that settings name, as their files describe them, for those who declare them before any worker runs."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ...config.catalogue import offered_models
from ...config.models import parse_adapters
from ...config.settings import Settings
from ...config.sources import Loaded, with_projector
from ...engine import resolve_model
from ...engine.adapters.files import adapter_source
from ...engine.models import BUNDLED, model_name, read_model_info
from ...engine.planning.discovery import modalities
from ...engine.text.forms import choose_form
from ...schemas.models.catalogue import CatalogueEntry
from ...schemas.registry import ModelCard
from ...schemas.sources import is_here
from .backends import check_backends

ECHO_CONTEXT = 131_072  # tokens; the echo backend without a model's files has this many


def with_model(settings: Settings) -> Settings:
    """The settings with the model's path, downloaded if necessary, and its name. Raises `Fatal` errors early."""
    check_backends(settings)
    settings = with_projector(settings)
    choose_form("", (), tool_format=settings.tool_format, reasoning_format=settings.reasoning_format)
    if settings.model is None and settings.backend == "echo":
        return settings.model_copy(update={"served_model_name": settings.served_model_name or "echo"})
    source = settings.model or BUNDLED
    path = resolve_model(source)
    read_model_info(path, source, settings.max_sequence_length)
    name = settings.served_model_name or (model_name(path) if is_here(source) else source)
    return settings.model_copy(update={"model": str(path), "served_model_name": name})


def named_models(loaded: Loaded) -> list[ModelCard] | None:
    """The cards of the models that the settings name; None if they name none. Raises `Fatal`.

    Requests wait for a model without a worker as long as they may wait at all, unless the file of models says less.
    """
    if (entries := offered_models(loaded)) is not None:
        return [_card_of_entry(entry, loaded.settings.allowed_backends) for entry in entries]
    given = loaded.settings
    if given.model is None and given.served_model_name is None and given.backend != "echo":
        return None
    settings = with_model(given)
    adapters = parse_adapters(settings.lora_modules).items()
    return [
        ModelCard(
            name=settings.served_model_name or "",
            source=settings.model or "echo",
            backend=settings.backend,
            **_shape(
                settings.model, settings.backend, settings.max_sequence_length, settings.allowed_backends
            )._asdict(),
            created=int(time.time()),
            tool_format=settings.tool_format,
            reasoning_format=settings.reasoning_format,
            adapters=tuple(adapter_source(*each) for each in adapters),
        )
    ]


def _card_of_entry(entry: CatalogueEntry, allowed: Collection[str] | None) -> ModelCard:
    is_made_up = entry.backend == "echo" and not is_here(entry.source)
    source = None if is_made_up else str(resolve_model(entry.source))
    own = {name: getattr(entry, name) for name in ("queue_limit", "wait_limit") if name in entry.model_fields_set}
    return ModelCard(
        name=entry.name,
        source=source or "echo",
        backend=entry.backend,
        **_shape(source, entry.backend, entry.max_sequence_length, allowed)._asdict(),
        created=int(time.time()),
        tool_format=entry.tool_format,
        reasoning_format=entry.reasoning_format,
        aliases=entry.aliases,
        defaults=entry.defaults,
        adapters=tuple(adapter_source(*each) for each in entry.adapters.items()),
        **own,
    )


class _Shape(NamedTuple):
    """What the files of a model say of its prompts."""

    context_length: int
    modalities: tuple[str, ...] = ("text",)
    ranks: bool = False


def _shape(source: str | None, backend: str, most: int | None, allowed: Collection[str] | None) -> _Shape:
    if source is None:
        return _Shape(most or ECHO_CONTEXT)
    info = read_model_info(Path(source), source, most)
    return _Shape(info.context_length, modalities(info, backend, allowed), info.ranks)
