"""Checks the backends that a server is to use, before anything starts."""

from __future__ import annotations

import structlog

from ...config.settings import Settings
from ...engine import find_backend, find_backends, find_plug_ins
from ...schemas.errors import ConfigurationError

_EMBEDDING = "sentence_transformers"  # the one backend for embeddings whose tokenizer the pipeline knows

log = structlog.get_logger(__name__)


def check_backends(settings: Settings) -> None:
    """Raise `ConfigurationError` unless the backend and the fallback of `settings` can be used here, and together."""
    backend = find_backend(settings.backend, settings.allowed_backends)
    if "text" not in backend.modes and backend.id != _EMBEDDING:
        raise ConfigurationError([f"backend={backend.id!r}: a server takes plug-ins that make text; this one does not"])
    names = [backend]
    if settings.fallback_backend is not None:
        names.append(fallback := find_backend(settings.fallback_backend, settings.allowed_backends))
        if fallback.id == backend.id:
            raise ConfigurationError([f"fallback_backend={fallback.id!r}: it is the backend itself; name another one"])
        if settings.lora_modules and not fallback.adapters:
            raise ConfigurationError(
                [f"fallback_backend={fallback.id!r}: it runs no adapters, and lora_modules has some; name another one"]
            )
    if faults := [f"the backend {one.id!r} cannot run here: {one.missing}" for one in names if one.missing]:
        raise ConfigurationError(faults)


def report_refused(settings: Settings) -> None:
    """Log each installed plug-in that cannot be used; it does not affect what can.

    Raises `ConfigurationError` for generation plug-ins that are allowed and not installed.
    """
    for found in find_backends(settings.allowed_backends):
        if found.fault:
            log.warning("backend plug-in refused", backend=found.id, package=found.package, reason=found.fault)
    allowed = settings.allowed_plug_ins
    known = {one.name: one for one in find_plug_ins(allowed)} if allowed else {}
    if faults := [
        f"allowed_plug_ins: no package brings a generation plug-in {name!r}; installed: {', '.join(known) or 'none'}"
        for name in allowed
        if name not in known
    ]:
        raise ConfigurationError(faults)
    for name in allowed:
        if known[name].fault:
            log.warning(
                "generation plug-in refused", plug_in=name, package=known[name].package, reason=known[name].fault
            )
