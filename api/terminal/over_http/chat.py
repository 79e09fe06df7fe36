"""`penstock chat`: a conversation in the terminal."""

from __future__ import annotations

import atexit
import contextlib
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import httpx2
import typer
from rich.console import Console

from ....config.sources import load
from ..options import ApiKey, ServerUrl, as_text, fatal_errors
from .chat_client import ChatError, ask, models, server_at

PROMPT, MORE = "\001\033[1;36m\002> \001\033[0m\002", ". "
HELP = '''/reset starts a new conversation, Ctrl-D ends it. Ctrl-C stops an answer and keeps what has arrived of it.
Put a question of several lines between """.'''


def chat(
    prompt: Annotated[str | None, typer.Argument(help="Ask only this, and exit after the answer.")] = None,
    url: ServerUrl = None,
    model: Annotated[str | None, typer.Option(help="Name of the model.", show_default="the first served")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    api_key: ApiKey = None,
) -> None:
    """Chat with a model of Penstock or of any server with OpenAI's API.

    Without a prompt it starts a conversation; /help shows its commands.

    `git diff | penstock chat "Write a commit message."` asks one question:
    text on standard input is appended to the prompt. If the output is not a
    terminal, it gets only the answer. The exit code is 1 without an answer,
    and 130 after Ctrl-C.
    """
    with fatal_errors():
        settings = load().settings
    if not sys.stdin.isatty():
        prompt = "\n\n".join(part for part in (prompt, sys.stdin.read().strip()) if part)
    with fatal_errors(1), server_at(url, api_key, settings) as server:
        served = models(server)
        if not served:
            raise ChatError(f"{server.base_url} serves no model yet; try again in a moment.")
        if model not in (None, *served):
            raise ChatError(f"{server.base_url} does not serve {model}; choose one of: {', '.join(served)}.")
        talk = Talk(server, model or next(iter(served)), system and as_text(system))
        if prompt is not None:
            talk.ask(as_text(prompt))
        else:
            talk.converse(settings.state_dir / "chat_history")


def _keep(history: Path) -> None:
    import readline

    try:
        readline.write_history_file(history)
    except OSError as error:
        print(f"The history was not kept in {history}: {error.strerror}.", file=sys.stderr)


class Talk:
    """A conversation with one model."""

    def __init__(self, server: httpx2.Client, model: str, system: str | None) -> None:
        self._server = server
        self._model = model
        self._head = [{"role": "system", "content": system}] if system else []
        self._turns: list[dict[str, Any]] = []
        self._console = Console()

    def ask(self, text: str) -> None:
        """Show the answer, and remember both unless it is empty. Raises `ChatError`, and `Exit` after Ctrl-C."""
        from .chat_screen import AnswerView, show  # imports Markdown, which only this needs

        asked, answer = {"role": "user", "content": text}, AnswerView()
        body = {"model": self._model, "messages": [*self._head, *self._turns, asked], "stream": True}
        body["stream_options"] = {"include_usage": True}
        try:
            with contextlib.closing(ask(self._server, body)) as stream:
                show(stream, answer, self._console)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        finally:
            if answer.text or answer.calls:
                self._turns += [asked, answer.turn()]

    def converse(self, history: Path) -> None:
        """Ask each question that the user types, until the end of the input. `history` is the file of earlier lines,
        which only the user can read."""
        import readline  # affects every `input` of the process

        try:
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(0o600)
            readline.read_history_file(history)
        except OSError as error:
            self._note(f"without a history: {history} cannot be written ({error.strerror})")
        else:
            readline.set_history_length(1000)
            atexit.register(_keep, history)
        self._note(f"{self._model} at {self._server.base_url}; /help shows the commands, Ctrl-D ends")
        while True:
            try:
                text = input(PROMPT)
                while text.count('"""') % 2:
                    text += "\n" + input(MORE)
            except EOFError:
                break
            except KeyboardInterrupt:
                self._note("\nCtrl-D ends")
                continue
            text = text.strip().removeprefix('"""').removesuffix('"""').strip()
            if text == "/reset":
                self._turns.clear()
                self._note("new conversation")
            elif re.fullmatch("/[a-z]*", text):
                self._note(HELP)
            elif text:
                with contextlib.suppress(typer.Exit), fatal_errors():
                    self.ask(text)
        self._console.print()

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False)
