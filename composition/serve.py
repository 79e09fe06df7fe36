"""`penstock serve`: the supervisor of all processes."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated

import typer

from ..api.serve.adapters import check_adapters
from ..api.serve.backends import report_refused
from ..api.serve.declaring import with_model
from ..api.serve.supervisor import Supervisor
from ..api.terminal.options import with_settings
from ..config.catalogue import offered_models
from ..config.logs.setup import configure_logging
from ..config.sources import Loaded
from .checks import check_front
from .process import run_process


@with_settings
def serve(
    loaded: Loaded,
    model: Annotated[str | None, typer.Argument(help="Directory, GGUF file or Hugging Face id of the model.")] = None,
) -> None:
    """Serve a model: broker, pipeline, engine and HTTP bridge in one command.

    Prints `penstock ready URL` as soon as it can answer a request. Ctrl-C lets running requests finish.
    """
    configure_logging(loaded.settings)
    check_front(loaded.settings)
    report_refused(loaded.settings)
    settings, entries = loaded.settings, offered_models(loaded)
    if entries is None:
        settings = with_model(settings)
    check_adapters(settings, entries)
    sealed = {"secret_key": settings.secret_key or secrets.token_hex(32)}
    run_process(Supervisor(replace(loaded, settings=settings.model_copy(update=sealed)), entries).run())
