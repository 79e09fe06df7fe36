"""Checks the adapters that a server is to offer, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...config.models import parse_adapters
from ...config.settings import Settings
from ...engine import find_backend, find_backends
from ...engine.adapters.files import check_adapter
from ...schemas.errors import ConfigurationError, InvalidRequest
from ...schemas.models.catalogue import CatalogueEntry
from ...schemas.sources import is_here


def check_adapters(settings: Settings, entries: Sequence[CatalogueEntry] | None) -> None:
    """Check the adapters of `entries`, or of the one model of `settings`.

    Raises `ConfigurationError` with every fault: of names, of files, and of sizes as far as the files of the models
    tell them.
    """
    faults: list[str] = []
    if entries is None:
        name, source = settings.served_model_name or "", settings.model or ""
        served = [(name, source, settings.backend, parse_adapters(settings.lora_modules))]
    else:
        served = [(entry.name, entry.source, entry.backend, entry.adapters) for entry in entries]
    for model, source, backend, adapters in served:
        if adapters and not find_backend(backend, settings.allowed_backends).adapters:
            able = ", ".join(one.id for one in find_backends(()) if one.manifest and one.manifest.adapters)
            faults.append(f"adapters of {model}: the backend {backend} runs none; use one of {able}")
            continue
        base = Path(source).expanduser()
        for name, path in adapters.items():
            if name == model:
                faults.append(f"adapter {name!r}: the model has the same name; choose another")
            try:
                check_adapter(Path(path).expanduser().resolve(), base if is_here(base) else None)
            except InvalidRequest as error:
                faults.append(f"adapter {name!r} of {model}: {error}")
    if faults:
        raise ConfigurationError(faults)
