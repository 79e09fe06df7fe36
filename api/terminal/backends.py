"""`penstock backends`: which backends there are, what each can do here, and why another cannot."""

from __future__ import annotations

from typing import Annotated

import orjson
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from ...config.sources import Loaded, with_projector
from ...engine.planning.discovery import Found, find_backends, why_not
from .options import with_settings


@with_settings
def backends(
    loaded: Loaded,
    model: Annotated[
        str | None, Argument(help="Also say which of them run this directory, GGUF file or Hugging Face id.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the backends: Penstock's own and installed plug-ins, what each can do, and why another cannot run here."""
    settings = with_projector(loaded.settings)
    found = find_backends(settings.allowed_backends)
    reasons = {one.id + one.package: _reason(one, settings.model, settings.device) for one in found}
    if json:
        rows = [
            {
                "id": one.id,
                "package": one.package,
                "usable": not reasons[one.id + one.package],
                "reason": reasons[one.id + one.package],
                "manifest": None if one.manifest is None else one.manifest.model_dump(mode="json"),
            }
            for one in found
        ]
        print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
        return
    table = Table(box=None, pad_edge=False)
    for column in ("backend", "from", "licence", "formats", "architectures", "devices", "makes", "resumes"):
        table.add_column(column)
    table.add_column("runs here" if settings.model is None else f"runs {settings.model}", overflow="fold")
    for one in found:
        manifest, reason = one.manifest, reasons[one.id + one.package]
        cells = [""] * 6
        if manifest is not None:
            cells = [
                manifest.licence,
                ", ".join(manifest.formats) or "none needed",
                "any" if manifest.architectures is None else ", ".join(manifest.architectures),
                ", ".join(manifest.devices),
                ", ".join(manifest.modes),
                manifest.resume,
            ]
        table.add_row(one.id, one.package, *cells, f"no: {reason}" if reason else "yes")
    Console(soft_wrap=True, highlight=False, markup=False).print(table)


def _reason(one: Found, model: str | None, device: str) -> str:
    return one.fault if one.manifest is None else why_not(one.manifest, model, device)
