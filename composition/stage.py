"""`penstock stage`: a process of named stages."""

from __future__ import annotations

from typing import Annotated

import typer

from ..api.terminal.options import with_settings
from ..config.logs.setup import configure_logging
from ..config.sources import Loaded
from ..schemas.errors import StartupError
from ..stages import Filter, Stage
from ..stages.catalogue import built_in, find_stage
from .parts import run_parts
from .process import run_process


@with_settings
def stage(
    loaded: Loaded,
    names: Annotated[
        list[str], typer.Argument(help="validate, queue, batch, stream, tools, or your own: file.py:Class.")
    ],
) -> None:
    """Run only the named stages, in one process, with the broker of a deployment.

    Filters run inside the stage stream, which is added for them: name all filters of the pipeline together.
    """
    found = [find_stage(name) for name in names]
    if twice := [kind.name for place, kind in enumerate(found) if kind.name in {one.name for one in found[:place]}]:
        raise StartupError(f"the stage {twice[0]} is named twice; start a process for each copy")
    filters = [kind for kind in found if issubclass(kind, Filter)]
    stages = [kind for kind in found if issubclass(kind, Stage)]
    if filters and not any(kind.name == "stream" for kind in stages):
        stages.append(built_in("stream"))
    configure_logging(loaded.settings, process="stage")
    run_process(run_parts(loaded, lambda _: stages, filters=filters))
