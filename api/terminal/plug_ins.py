"""`penstock plug-ins`: which generation plug-ins are installed, what they take, and why one cannot be used."""

from __future__ import annotations

from typing import Annotated

import orjson
from rich.console import Console
from rich.table import Table
from typer import Option

from ...config.sources import Loaded
from ...engine.plug_ins.found import find_plug_ins
from .options import with_settings


@with_settings
def plug_ins(loaded: Loaded, json: Annotated[bool, Option("--json", help="Print JSON.")] = False) -> None:
    """List the installed generation plug-ins, what each takes, whether requests may use it, and why not.

    Imports all of them to find out; a server imports those alone that --allowed-plug-ins lists.
    """
    allowed = loaded.settings.allowed_plug_ins
    found = find_plug_ins()
    rows = [
        {
            "name": one.name,
            "package": one.package,
            "parameter": one.param,
            "arguments": one.arguments,
            "usable": not one.fault,
            "reason": one.fault,
            "allowed": one.name in allowed,
        }
        for one in found
    ]
    if json:
        print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
        return
    if not rows:
        print("no generation plug-ins are installed")
        return
    console, table = Console(soft_wrap=True, highlight=False, markup=False), Table(box=None, pad_edge=False)
    for column in ("plug-in", "from", "parameter", "arguments", "allowed", "usable"):
        table.add_column(column, no_wrap=column != "arguments", overflow="fold")
    for row in rows:
        own = [str(row[name]) for name in ("name", "package", "parameter", "arguments")]
        table.add_row(*own, *("yes" if row[name] else "no" for name in ("allowed", "usable")))
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(f"{row['name']} cannot be used: {row['reason']}")
