"""`penstock models`: the models of a running server, and what an operator does with them."""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Never

import httpx2
import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ....config import sources
from ....schemas.sources import absolute_pair, looks_like_path
from ..measure import measure_backends
from ..measure import show as show_measured
from ..options import ApiKey, ServerUrl, fatal_errors
from .chat_client import ChatError, answer_of, server_at
from .chat_client import models as served_by

models = typer.Typer(
    help="List the models of a running server; load, unload, add, remove and swap them.",
    add_completion=False,
    invoke_without_command=True,
)

Name = Annotated[str, typer.Argument(help="A model's name or alias, from `penstock models list`.", metavar="NAME")]
_SOURCE = "Directory or GGUF file of the model, as the server's machine sees it, or a Hugging Face id."


@contextlib.contextmanager
def _server(url: str | None, api_key: str | None) -> Iterator[httpx2.Client]:
    """A client of the server; exits with code 2 where that refuses, or does not answer."""
    with fatal_errors(), server_at(url, api_key, sources.load().settings) as server:
        yield server


@models.callback()
def start(context: typer.Context, url: ServerUrl = None, api_key: ApiKey = None) -> None:
    """List the models of a running server; load, unload, add, remove and swap them.

    With API keys, all but `list` and `show` need a key with the word admin, in --api-key or PENSTOCK_API_KEY.
    """
    if context.invoked_subcommand is None:
        group: Any = context.command
        command = group.get_command(context, "list")
        given = {"--url": url, "--api-key": api_key}
        arguments = [each for flag, value in given.items() if value is not None for each in (flag, value)]
        with command.make_context("list", arguments, parent=context) as own:
            command.invoke(own)


@models.command("list")
def list_models(url: ServerUrl = None, api_key: ApiKey = None) -> None:
    """List the models of Penstock, with their states, or those of any server with OpenAI's API."""
    with _server(url, api_key) as server:
        served, states = served_by(server), _states(server)
    if not states:
        table = Table("model", "context", box=None, pad_edge=False)
        for name, model in served.items():
            table.add_row(name, f"{model.get('max_model_len') or ''}")
    else:
        table = Table("model", "state", "waiting", "revision", "context", "", box=None, pad_edge=False)
        for name in {**served, **states}:
            model, state = served.get(name, {}), states.get(name, {})
            table.add_row(
                name,
                _state(state),
                f"{state.get('queue_length', '')}",
                f"{state.get('revision', '')}",
                f"{model.get('max_model_len') or ''}",
                _note(state),
            )
    Console(soft_wrap=True).print(table)


@models.command()
def show(name: Name, url: ServerUrl = None, api_key: ApiKey = None) -> None:
    """Print all that the server says of one model, as JSON: its aliases, state, waiting requests, last error, swap."""
    with _server(url, api_key) as server:
        state = _states(server).get(name)
        if state is None or name in served_by(server):  # no host can load it otherwise
            found = answer_of(server, "GET", f"models/{name}")
            state = found | _states(server).get(str(found["id"]), {})
    typer.echo(orjson.dumps(state, option=orjson.OPT_INDENT_2))


@models.command()
def load(name: Name, url: ServerUrl = None, api_key: ApiKey = None) -> None:
    """Load a model ahead of its first request, and wait until it is ready. Exits with 1 if it cannot be loaded."""
    with _server(url, api_key) as server:
        name = _full_name(server, name)
        answer_of(server, "POST", _url(server, "load"), {"model": name})
        with _progress(f"{name} waits to be loaded") as progress:
            for news in _news(server, name):
                status = news["status"]
                match status["value"]:
                    case "loading":
                        _show(progress, f"{name} loads", status.get("progress"))
                    case "loaded":
                        break
                    case _:
                        _fail(f"{name} was not loaded: {_why(server, name)}")
    typer.echo(f"{name} is loaded")


@models.command()
def unload(name: Name, url: ServerUrl = None, api_key: ApiKey = None) -> None:
    """Unload a model, and wait until it has finished what it runs. What waits for it then loads it again."""
    with _server(url, api_key) as server:
        name = _full_name(server, name)
        answer_of(server, "POST", _url(server, "unload"), {"model": name})
        with _progress(f"{name} finishes what it runs"):
            for news in _news(server, name):
                if (value := news["status"]["value"]) != "loaded":
                    break
    typer.echo(f"{name} is unloaded" if value == "unloaded" else f"{name} is loaded again: requests wait for it")


@models.command()
def add(
    name: Annotated[str, typer.Argument(help="The name by which clients are to ask for it.")],
    source: Annotated[str, typer.Argument(help=_SOURCE)],
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A key of `models.toml`, such as quantization=int8; repeat it.", metavar="KEY=VALUE"
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="First run the model on every backend that can, here, and take the fastest."),
    ] = False,
    url: ServerUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Offer one more model, until `penstock serve` ends: put it into the file of models to keep it.

    Exits with 1 if its files cannot be used. The model stays listed, and its files are read again now and then.
    `--measure` runs on this machine, beside what it serves: that takes the model's memory again, and a quiet moment.
    """
    with _server(url, api_key) as server:
        body = {"model": name, "source": _resolved(source)} | dict(map(_pair, values or ()))
        if measure:
            body["backend"] = _fastest(body)
        answer_of(server, "POST", _url(server, "add"), body)
        with _progress(f"the server reads the files of {name}"):
            status = next(_news(server, name))["status"]
    if status.get("failed"):
        _fail(f"{name} was added, but cannot be loaded: {status['error']}")
    typer.echo(f"{name} is offered")


@models.command()
def remove(name: Name, url: ServerUrl = None, api_key: ApiKey = None) -> None:
    """Offer a model no longer.

    What runs is finished. If the model is not loaded, what waits for it is refused with the reason.
    """
    with _server(url, api_key) as server:
        answer_of(server, "POST", _url(server, "remove"), {"model": name})
    typer.echo(f"{name} is removed")


@models.command()
def swap(
    name: Name,
    to: Annotated[str, typer.Option("--to", help=_SOURCE, metavar="SOURCE")],
    url: ServerUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Replace a model while it serves, and wait until that is done.

    The new one is loaded beside the old one and must answer a test request. Then new requests go to it; earlier ones
    finish on the old one. If it fails, the old one serves on, and the command exits with 1. The way back is a swap to
    the former directory.
    """
    with _server(url, api_key) as server:
        body = {"model": name, "source": _resolved(to)}
        revision = answer_of(server, "POST", _url(server, "swap"), body)["revision"]
        name = _full_name(server, name)
        with _progress(f"{name} waits for its new revision") as progress:
            for news in _news(server, name):
                own = news.get("swap") or {}
                if news["revision"] >= revision:
                    break
                match own.get("state"):
                    case "failed":
                        _fail(f"{name} was not swapped, and serves on as before: {own['error']}")
                    case "loading":
                        _show(progress, f"{name}: the new revision loads", own.get("progress"))
                    case "switching":
                        _show(progress, f"{name}: requests begin to go to the new revision", 100)
                    case "probing":
                        _show(progress, f"{name}: the new revision answers a test request", 100)
                    case None:
                        _fail(f"{name} was not swapped: it was removed, or swapped by somebody else")
    typer.echo(f"{name} is swapped: requests go to revision {revision}")


def _fastest(body: dict[str, Any]) -> str:
    """The backend that is the fastest here for the model of a body."""
    if "backend" in body:
        raise ChatError("--measure chooses the backend: leave out --set backend, or --measure")
    with _progress(f"{body['model']} runs on each backend"):
        measured = measure_backends(body["source"], body, sources.load().settings)
    show_measured(measured)
    if not measured or measured[0].seconds is None:
        _fail(f"{body['model']} was not added: no backend runs it here")
    return measured[0].backend


def _url(server: httpx2.Client, verb: str) -> str:
    """The URL of a path that lies beside `/v1`."""
    return f"{str(server.base_url).rstrip('/').removesuffix('/v1')}/models/{verb}"


def _states(server: httpx2.Client) -> dict[str, dict[str, Any]]:
    """What Penstock says of its models, by name; nothing from another server."""
    try:
        response = server.get("models/status")
        return {} if response.is_error else {model["id"]: model for model in response.json()["models"]}
    except (httpx2.HTTPError, ValueError, LookupError, TypeError):
        return {}


def _full_name(server: httpx2.Client, name: str) -> str:
    """The name of the model that may be called by an alias."""
    return str(answer_of(server, "GET", f"models/{name}")["id"])


def _why(server: httpx2.Client, name: str) -> str:
    return str(_states(server).get(name, {}).get("last_error") or "the server's log says why")


def _state(state: dict[str, Any]) -> str:
    return f"loading {state['progress']} %" if state.get("progress") is not None else str(state.get("state", ""))


def _note(state: dict[str, Any]) -> str:
    """What an operator should know: a swap that goes on or has failed, or the last error."""
    swap = state.get("swap") or {}
    if swap.get("state") == "failed":
        return f"swap to {swap['source']} failed: {swap['error']}"
    if swap:
        return f"swap to {swap['source']}: {swap['state']}"
    return str(state.get("last_error") or "")


def _news(server: httpx2.Client, name: str) -> Iterator[dict[str, Any]]:
    """The news of one model, the first at once. Raises `ChatError`."""
    try:
        with server.stream("GET", _url(server, "sse")) as response:
            response.raise_for_status()
            for event in httpx2.EventSource(response):
                if event.data and (news := orjson.loads(event.data)).get("model") == name:
                    yield news
    except (httpx2.HTTPError, ValueError) as error:
        raise ChatError(f"the server's news ended ({error}); `penstock models list` shows how it goes") from None
    raise ChatError("the server is stopping; `penstock models list` shows how it goes once it is back")


def _progress(begin: str) -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, transient=True, console=Console(stderr=True))
    progress.add_task(begin, total=None)
    return progress


def _show(progress: Progress, text: str, percent: int | None) -> None:
    task = progress.task_ids[0]
    progress.update(task, description=text, total=None if percent is None else 100, completed=percent or 0)


def _fail(message: str) -> Never:
    Console(stderr=True, soft_wrap=True).print("error:", message, highlight=False, markup=False)
    raise typer.Exit(1)


def _resolved(source: str) -> str:
    """What is here as an absolute path; what else may be on the server's machine, or a Hugging Face id."""
    if (pair := absolute_pair(source)) is not None:
        return str(pair)
    path = Path(source).expanduser()
    if os.path.exists(path):  # false for what may not be looked at here: the server may
        return str(path.resolve() if path.is_dir() else path.absolute())
    if looks_like_path(source) and not path.is_absolute():
        raise ChatError(f"no such directory or file: {path}; give an absolute path if it is on another machine")
    return str(path) if path.is_absolute() else source


def _pair(text: str) -> tuple[str, object]:
    """A key and its value, in TOML or a plain word."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ChatError(f"--set {text}: write KEY=VALUE, such as quantization=int8")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
