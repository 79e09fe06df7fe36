"""Makes every setting a flag of a command, and prints fatal errors without a traceback."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ...config.settings import Settings
from ...config.sources import flag, load, variable
from ...schemas.errors import ConfigurationError, Fatal

ServerUrl = Annotated[
    str | None, typer.Option("--url", help="URL of the server.", show_default="where `serve` listens")
]
ApiKey = Annotated[str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="API key, if the server needs one.")]

# Panels of `--help`, each by the first of its settings.
PANELS = {
    "image_allowed_urls": "Images and documents",
    "allowed_backends": "Plug-ins",
    "models": "Models",
    "host": "Serving",
    "nats_url": "Broker",
    "pipeline": "Pipeline",
    "mcp_config": "Tools",
    "backend": "Engine",
}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command`, whose first parameter is `loaded: Loaded`, a flag for every setting and `--config`.

    A parameter of the command named `model` is its MODEL argument and sets the setting. Exits with code 2
    after a fault of the configuration or another `Fatal` error.
    """
    hints = get_type_hints(command, include_extras=True)
    own = list(inspect.signature(command).parameters.values())[1:]

    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in _flags()}
        if arguments.get("model") is not None:
            given["model"] = arguments["model"]
        with fatal_errors():
            texts = {
                name: ",".join(value) if isinstance(value, list) else value
                for name, value in given.items()
                if value not in (None, [])
            }
            loaded = load(texts, config=arguments.pop("config"))
            arguments.pop("model", None)
            command(loaded, **arguments)

    keyword = inspect.Parameter.KEYWORD_ONLY
    config = inspect.Parameter(
        "config",
        keyword,
        default=None,
        annotation=Annotated[
            Path | None, typer.Option(help="TOML file of settings; ./penstock.toml by default.", show_default=False)
        ],
    )
    own = [parameter.replace(kind=keyword, annotation=hints[parameter.name]) for parameter in own]
    parameters = [*own, config, *_flags().values()]
    # Typer reads the name, docstring, signature and annotations.
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def as_text(argument: str) -> str:
    """An argument of the command line as Unicode: bytes that Python could not decode are read as UTF-8, if they are."""
    return argument.encode(errors="surrogateescape").decode(errors="replace")


@contextlib.contextmanager
def fatal_errors(exit_code: int = 2) -> Iterator[None]:
    """Turn a `Fatal` into its message on standard error, with a line for each fault, and an exit code."""
    error: BaseException | None = None
    try:
        yield
    except* Fatal as group:
        error = group
    while isinstance(error, BaseExceptionGroup):  # of tasks
        error = error.exceptions[0]
    if error is None:
        return
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for fault in error.faults if isinstance(error, ConfigurationError) else [str(error)]:
        console.print(f"[bold red]error:[/] {_escaped(fault)}")
    raise typer.Exit(exit_code)


@functools.cache
def _flags() -> dict[str, inspect.Parameter]:
    """A keyword parameter for each setting; those of several values may be repeated.

    Values stay text: pydantic parses them and reports all faults at once.
    """
    flags = {}
    panel = ""
    for name, field in Settings.model_fields.items():
        panel = PANELS.get(name, panel)
        if name == "model":  # an argument
            continue
        default = field.get_default(call_default_factory=True)
        text = ",".join(default) if isinstance(default, tuple) else str(default)
        option = typer.Option(
            flag(name),
            help=_escaped(f"{field.description} [{text}]" if default is not None else str(field.description)),
            metavar=name.split("_")[-1].upper(),
            envvar=None,
            show_default=False,
            rich_help_panel=f"{panel} (also {variable('name').replace('NAME', '…')} and TOML)",
        )
        is_repeated = tuple in {get_origin(kind) for kind in (field.annotation, *get_args(field.annotation))}
        annotation: Any = Annotated[list[str] | None, option] if is_repeated else Annotated[str | None, option]
        flags[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    return flags


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
