"""Commands whose modules are imported when they are invoked: `penstock --help` need not wait for torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from ...config.process import import_structlog, uncollected


class CommandEntry(NamedTuple):
    """A command: its entry in `--help`, and the location of its function."""

    name: str
    home: str  # "module:name" below the package, of a function or a `typer.Typer`
    panel: str = ""  # of `--help`; without one the command is hidden
    help: str = ""  # the first line of its docstring

    def listed(self) -> TyperCommand:
        """A placeholder for the list of commands, which cannot be invoked."""
        return TyperCommand(self.name, callback=None, help=self.help, rich_help_panel=self.panel, hidden=not self.panel)

    def load(self) -> Any:
        """Import the command."""
        module, _, name = self.home.partition(":")
        with uncollected():
            import_structlog()
            found = getattr(import_module(f"...{module}", __package__), name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            alone.command(self.name)(found)
            found = alone
        command: Any = typer.main.get_command(found)
        command.name, command.hidden, command.rich_help_panel = self.name, not self.panel, self.panel
        return command


class LazyGroup(TyperGroup):
    """A group of the commands in `entries`, which a subclass sets."""

    entries: ClassVar[dict[str, CommandEntry]] = {}
    _is_listing = False

    @property
    def commands(self) -> dict[str, Any]:
        """All commands, each imported."""
        return {name: entry.load() for name, entry in self.entries.items()}

    @commands.setter
    def commands(self, _: object) -> None:
        """Ignored: Typer assigns an empty mapping."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        return entry.listed() if self._is_listing else entry.load()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False
