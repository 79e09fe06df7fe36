"""The command line: which commands there are, and where each one lives."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Annotated, ClassVar

import typer

from .api.serve.ahead import await_environment, start_ahead
from .api.terminal.lazy import CommandEntry, LazyGroup
from .schemas.version import __version__

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

COMMANDS = (
    CommandEntry(
        "serve",
        "composition.serve:serve",
        "Run",
        help="Serve a model: broker, pipeline, engine and HTTP bridge in one command.",
    ),
    CommandEntry(
        "worker",
        "composition.worker:worker",
        "Run",
        help="Run only the stage infer: an engine that takes batches from the broker.",
    ),
    CommandEntry(
        "stage",
        "composition.stage:stage",
        "Run",
        help="Run only the named stages, in one process, with the broker of a deployment.",
    ),
    CommandEntry(
        "agent",
        "api.terminal.over_nats.agent:agent",
        "Run",
        help="Load and unload models on this host as they are asked for, with the broker of a deployment.",
    ),
    CommandEntry(
        "bridge",
        "composition.bridge:bridge",
        "Run",
        help="Run only the HTTP bridge, with the broker of a deployment.",
    ),
    CommandEntry(
        "front",
        "composition.bridge:front",
        help="Run the bridge and the light stages in one process; `serve` starts it.",
    ),
    CommandEntry(
        "chat",
        "api.terminal.over_http.chat:chat",
        "Use",
        help="Chat with a model of Penstock or of any server with OpenAI's API.",
    ),
    CommandEntry(
        "submit",
        "api.terminal.over_nats.submit:submit",
        "Use",
        help="Publish a chat job on NATS and print its answer as it arrives.",
    ),
    CommandEntry(
        "top",
        "api.terminal.over_http.top:top",
        "Look",
        help="Watch a running server: its pipeline, workers and requests.",
    ),
    CommandEntry(
        "models",
        "api.terminal.over_http.models:models",
        "Look",
        help="List the models of a running server; load, unload, add, remove and swap them.",
    ),
    CommandEntry(
        "backends",
        "api.terminal.backends:backends",
        "Look",
        help="List the backends: Penstock's own and installed plug-ins, what each can do, and why another cannot run "
        "here.",
    ),
    CommandEntry(
        "plug-ins",
        "api.terminal.plug_ins:plug_ins",
        "Look",
        help="List the installed generation plug-ins, what each takes, whether requests may use it, and why not.",
    ),
    CommandEntry(
        "scheduling",
        "api.terminal.over_nats.look:scheduling",
        "Look",
        help="Show the strategy that chooses a worker for each batch, or change it in the running deployment.",
    ),
    CommandEntry(
        "trace",
        "api.terminal.over_http.trace:trace",
        "Look",
        help="Show where a request has been: its stages, workers, takeovers, tool calls and its end.",
    ),
    CommandEntry(
        "dead", "api.terminal.over_nats.dead:dead", "Look", help="Look after the messages that could not be handled."
    ),
    CommandEntry(
        "key",
        "api.terminal.keys:make_key",
        "Look",
        help="Make an API key and print its line for the file of --api-keys-file.",
    ),
    CommandEntry(
        "config",
        "api.terminal.over_nats.deployment:config",
        "Look",
        help="Print every setting with its value and origin, or the settings that a deployment has agreed on.",
    ),
    CommandEntry(
        "nats",
        "api.terminal.over_nats.nats:nats",
        "Look",
        help="Set up the streams of a deployment, save them, and write NATS users.",
    ),
    CommandEntry(
        "schema",
        "api.terminal.over_nats.look:schema",
        "Look",
        help="Print the NATS messages and subjects as an AsyncAPI document, or only the messages as JSON Schemas.",
    ),
    CommandEntry(
        "quantize",
        "api.terminal.quantize:quantize",
        "Look",
        help="Quantize a model with calibration, and save it as a checkpoint that `penstock serve OUT` loads.",
    ),
    CommandEntry(
        "simulate",
        "api.terminal.simulate:simulate",
        "Measure",
        help="Run a deployment of any size in virtual time: the real pipeline, with workers that compute nothing.",
    ),
    CommandEntry("bench", "api.bench.commands:bench", "Measure", help="Measure a server, or a part of Penstock."),
)


class Commands(LazyGroup):
    entries: ClassVar = {entry.name: entry for entry in COMMANDS}


app = typer.Typer(
    name="penstock",
    cls=Commands,
    help="Penstock: an LLM server that loses no request. `penstock serve MODEL` is the whole of it on one machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def _hold_standard_files() -> None:
    """Open what of the standard input and output was closed before this process began: libuv ends a process in which a
    socket has such a number, and Python has no streams for it."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _take_any_text() -> None:
    """Read and write what the encoding of the terminal or locale lacks as question marks, instead of failing there."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def main() -> None:
    """Entry point of the console script."""
    _hold_standard_files()
    _take_any_text()
    await_environment(next(entry for entry in COMMANDS if entry.name == "worker").load)
    start_ahead(sys.argv[1:])
    try:
        try:
            app(prog_name="penstock")
        finally:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.flush()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if isinstance(error, OSError) and error.errno in _FULL:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or else Python tries again to write what is left
            sys.exit(f"error: {error.filename or 'The output'} cannot be written: {os.strerror(error.errno)}.")
        from .schemas.threads import ADVICE, lacks_threads  # not needed for --help

        if not lacks_threads(error):
            raise
        sys.exit(f"error: {ADVICE}")


if __name__ == "__main__":
    main()
