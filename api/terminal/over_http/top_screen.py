"""What `penstock top` shows, and what its keys do. Knows neither the server nor the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....schemas.wire.merge_patch import Document

MOST_WORKERS = 6
_STYLES = {
    "waiting": "yellow",
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "expired": "red",
    "cancelled": "dim",
    "live": "green",
    "leaving": "yellow",
    "dead": "red",
}
_OPEN = ("waiting", "running")
SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "age": lambda row: row["created"],
    "tokens": lambda row: -row["tokens"],
    "state": lambda row: row["state"],
    "model": lambda row: row.get("model", ""),
    "tenant": lambda row: row["tenant"],
    "position": lambda row: row.get("position", 1 << 30),
}
HELP = "↑↓ choose   s sort   r reverse   / filter   e ended   c cancel   q quit"


class TopScreen:
    """`document` is the newest state of the server, set by `show`."""

    def __init__(self) -> None:
        self.document: Document = {}
        self.typing = False  # the filter; set by press
        self.note = ""  # how the last action went
        self._words = ""
        self._sort = "age"
        self._is_reversed = False
        self._shows_ended = False
        self._chosen = ""  # the key of a request
        self._asks = False  # whether to cancel the chosen request

    def show(self, document: Document) -> None:
        self.document = document

    def press(self, key: str) -> dict[str, Any] | None:
        """Take a key; returns the request that it cancels, if it does."""
        self.note = ""
        if self.typing:
            self._type(key)
        elif self._asks:
            self._asks = False
            if key == "y":
                return self._rows().get(self._chosen)
        else:
            self._command(key)
        return None

    def render(self, width: int, height: int) -> RenderableType:
        if "pipeline" not in self.document:
            return Text("The server waits for its message broker." if self.document else "Connecting…", style="yellow")
        workers = sorted(self.document["workers"].items())
        head: list[RenderableType] = [self._title(width), self._pipeline(), self._figures(), Text()]
        if workers:
            head += [_workers(workers[:MOST_WORKERS]), Text()]
        used = 4 + (min(len(workers), MOST_WORKERS) + 2 if workers else 0) + 3
        return Group(*head, self._requests(max(3, height - used)), self._foot())

    def _type(self, key: str) -> None:
        match key:
            case "enter":
                self.typing = False
            case "escape":
                self.typing, self._words = False, ""
            case "backspace":
                self._words = self._words[:-1]
            case _ if len(key) == 1 and key.isprintable():
                self._words += key

    def _command(self, key: str) -> None:
        names = list(SORTS)
        match key:
            case "s":
                self._sort = names[(names.index(self._sort) + 1) % len(names)]
            case "r":
                self._is_reversed = not self._is_reversed
            case "e":
                self._shows_ended = not self._shows_ended
            case "/" | "f":
                self.typing = True
            case "escape":
                self._words = ""
            case "up" | "k":
                self._move(-1)
            case "down" | "j":
                self._move(1)
            case "c" if self._rows().get(self._chosen, {}).get("state") in _OPEN:
                self._asks = True
            case "c":
                self.note = "choose a request that waits or runs first, with ↑ and ↓"

    def _move(self, steps: int) -> None:
        keys = list(self._rows())
        if keys:
            index = keys.index(self._chosen) + steps if self._chosen in keys else 0
            self._chosen = keys[max(0, min(len(keys) - 1, index))]

    def _rows(self) -> dict[str, dict[str, Any]]:
        """The requests that fit the filter, in the chosen order, by key."""
        words = self._words.lower().split()
        fitting = {
            key: row
            for key, row in self.document.get("requests", {}).items()
            if (self._shows_ended or row["state"] in _OPEN) and all(word in _text(row) for word in words)
        }
        order = sorted(fitting.items(), key=lambda item: item[0])
        order.sort(key=lambda item: SORTS[self._sort](item[1]), reverse=self._is_reversed)
        return dict(order)

    def _title(self, width: int) -> Text:
        server = self.document["server"]
        is_live = server["connected"] and not self.document.get("is_stale")
        title = Text.assemble(("penstock ", "bold"), (server["version"], "dim"), "  ")
        title.append("live" if is_live else "reconnecting", "green" if is_live else "yellow")
        for name, number in sorted(self.document["counts"].items()):
            title.append(f"   {name} ", "dim").append(str(number), f"bold {_STYLES.get(name, '')}")
        letters = len(self.document["letters"])
        title.append("   dead letters ", "dim").append(str(letters), "bold red" if letters else "bold")
        title.truncate(width)
        return title

    def _pipeline(self) -> Text:
        line = Text()
        stages = sorted(self.document["pipeline"].items(), key=lambda item: item[1]["index"])
        for name, stage in stages:
            line.append(" ▸ " if line and name != "tools" else "   " if line else "", "dim")
            line.append(name, "bold" if stage["copies"] else "bold red")
            number = stage.get("active", stage.get("waiting"))
            line.append(f" {number}" if number is not None else "").append(f" {stage['rate']:g}/s", "dim")
        return line

    def _figures(self) -> Text:
        line = Text()
        for label, name, unit in (
            ("tokens/s", "tokens_per_second", ""),
            ("requests/s", "completed", ""),
            ("first token", "ttft_p50", "s"),
            ("p99", "ttft_p99", "s"),
            ("between tokens", "between_p50", "s"),
            ("kv cache", "kv_cache", "%"),
            ("oldest wait", "oldest_waiting", "s"),
        ):
            if (value := self.document["figures"].get(name)) is not None:
                text = _seconds(value) if unit == "s" else f"{value:.0%}" if unit == "%" else f"{value:.3g}"
                line.append(f"{label} ", "dim").append(f"{text}   ", "bold")
        return line

    def _requests(self, most: int) -> Table:
        mark = " ▲" if self._is_reversed else " ▼"
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True, show_edge=False)
        for name in ("request", "state", "model", "tenant", "worker", "position", "tokens", "age"):
            right = name in ("position", "tokens", "age")
            header = f"{name}{mark}" if name == self._sort else name
            table.add_column(header, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
        rows = self._rows()
        keys = list(rows)
        at = keys.index(self._chosen) if self._chosen in rows else 0
        begin = max(0, min(at - most // 2, len(keys) - most))
        for key in keys[begin : begin + most]:
            row = rows[key]
            state = Text(row["state"], _STYLES.get(row["state"], ""))
            if row.get("takeovers"):
                state.append(" taken over", "magenta")
            age = row.get("took") or max(0.0, self.document["server"]["now"] - row["created"])
            table.add_row(
                row["id"],
                state,
                row.get("model", ""),
                row["tenant"],
                row.get("worker", ""),
                str(row.get("position", "")),
                str(row["tokens"]),
                _seconds(age),
                style="reverse" if key == self._chosen else "",
            )
        return table

    def _foot(self) -> Text:
        if self.typing:
            return Text.assemble(
                ("filter: ", "bold"), self._words, ("█", "blink"), ("   Enter keeps it, Esc drops it", "dim")
            )
        if self._asks:
            return Text(
                f"Cancel {self._chosen.partition('/')[2]}? y cancels it, any other key does not.", "bold yellow"
            )
        if self.note:
            return Text(self.note, "bold")
        return Text(HELP + (f"   filter: {self._words}" if self._words else ""), "dim")


def _workers(workers: list[tuple[str, dict[str, Any]]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("worker", "state", "model", "running", "kv cache", "tokens/s", "taken over"):
        table.add_column(name, no_wrap=True)
    for id, worker in workers:
        cache = f"{worker['kv_cache']:.0%}" if "kv_cache" in worker else ""
        table.add_row(
            id,
            Text(worker["state"], _STYLES.get(worker["state"], "")),
            worker["model"],
            f"{_bar(worker.get('active', 0) / worker['capacity'])} {worker.get('active', 0):g}/{worker['capacity']}",
            cache,
            f"{worker.get('tokens_per_second', 0):.3g}",
            f"{worker.get('takeovers', 0):g}",
        )
    return table


def _bar(share: float, width: int = 10) -> str:
    full = round(max(0.0, min(1.0, share)) * width)
    return "━" * full + "·" * (width - full)


def _text(row: dict[str, Any]) -> str:
    return " ".join(str(row.get(name, "")) for name in ("id", "tenant", "model", "state", "worker", "reason")).lower()


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"
