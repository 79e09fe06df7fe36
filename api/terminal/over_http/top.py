"""`penstock top`: a running server in the terminal, from the same events as the page."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from queue import Queue
from typing import Annotated, Any

import httpx2
import orjson
import typer
from rich.console import Console
from rich.live import Live

from ....config.sources import load
from ....schemas.wire.merge_patch import Document, patched
from ..options import ApiKey, ServerUrl, fatal_errors
from .chat_client import ChatError, answer_of, server_at, silent
from .top_screen import TopScreen

AGAIN = 1.0  # seconds between two attempts to connect
_ESCAPES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"\x1b": "escape"}
_KEYS = {b"\r": "enter", b"\n": "enter", b"\x7f": "backspace", b"\x08": "backspace"}


def top(
    url: ServerUrl = None,
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen, and exit.")] = False,
) -> None:
    """Watch a running server: its pipeline, workers and requests.

    s sorts, r turns the order round, / filters, e shows the ended ones, too,
    c cancels the chosen request, q ends it. With API keys it needs one with
    the word admin. If the output is not a terminal, it prints one screen.
    """
    with fatal_errors(), server_at(url, api_key, load().settings) as server:
        screen, console = TopScreen(), Console()
        if once or not (sys.stdin.isatty() and console.is_terminal):
            screen.show(next(_documents(server)))
            console.print(screen.render(console.width, 50))
        else:
            _Watching(server, screen, console).run()


class _Watching:
    """The screen, and the two threads that bring what is new: the server's documents and the keys pressed."""

    def __init__(self, server: httpx2.Client, screen: TopScreen, console: Console) -> None:
        self._server, self._screen, self._console = server, screen, console
        self._news = Queue[Document | str | Exception]()  # documents, keys, and why there is no document

    def run(self) -> None:
        """Watch until q or Ctrl-C. Raises `ChatError` where the server refuses."""
        threading.Thread(target=self._follow, daemon=True).start()
        with _raw_keys(), Live(console=self._console, screen=True, auto_refresh=False) as live:
            threading.Thread(target=self._read_keys, daemon=True).start()
            while True:
                live.update(self._screen.render(self._console.width, self._console.height), refresh=True)
                try:
                    match self._news.get():
                        case "q" if not self._screen.typing:
                            return
                        case str(key):
                            self._press(key)
                        case Exception() as error:
                            raise error
                        case document:
                            self._screen.show(document)
                except KeyboardInterrupt:
                    return

    def _press(self, key: str) -> None:
        if (chosen := self._screen.press(key)) is None:
            return
        path = self._server.base_url.join(f"/v1/streams/{chosen['id']}").copy_with(params={"tenant": chosen["tenant"]})
        try:
            cancelled = answer_of(self._server, "DELETE", str(path))["cancelled"]
            self._screen.note = f"{chosen['id']} {'is cancelled' if cancelled else 'had ended already'}"
        except ChatError as error:
            self._screen.note = str(error)

    def _follow(self) -> None:
        while True:
            try:
                for document in _documents(self._server):
                    self._news.put(document)
            except ChatError as error:
                if self._screen.document.get("server") is None:
                    self._news.put(error)
                    return
            self._news.put({**self._screen.document, "is_stale": True})
            time.sleep(AGAIN)

    def _read_keys(self) -> None:
        descriptor = sys.stdin.fileno()
        while data := os.read(descriptor, 64):
            if data in _ESCAPES:
                self._news.put(_ESCAPES[data])
                continue
            for byte in data:
                self._news.put(_KEYS.get(bytes([byte])) or chr(byte))


def _documents(server: httpx2.Client) -> Iterator[Document]:
    """The server's state, each time that it has changed, until the connection breaks. Raises `ChatError`."""
    document: Document = {}
    try:
        with server.stream("GET", str(server.base_url.join("/server/events")), timeout=30.0) as response:
            if response.is_error:
                response.read()
                raise ChatError(_reason(response))
            for event in httpx2.EventSource(response):
                found: dict[str, Any] = orjson.loads(event.data)
                document = found if event.event == "snapshot" else patched(document, found)
                yield document
    except httpx2.HTTPError as error:
        raise silent(server, error) from None


def _reason(response: httpx2.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"{response.url} answers with status {response.status_code}: it is no Penstock of this version."
    if response.status_code in (401, 403):
        message += " Give a key with --api-key, or in PENSTOCK_API_KEY."
    return message


@contextlib.contextmanager
def _raw_keys() -> Iterator[None]:
    """Each key arrives when it is pressed, and is not shown."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
