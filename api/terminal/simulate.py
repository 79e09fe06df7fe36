"""The command `penstock simulate`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ...config.logs.setup import configure_logging
from ...config.settings import Settings
from ...schemas.errors import Fatal
from .options import fatal_errors

LOOK = 0.2  # seconds between two changes of the progress
LINE = 60.0  # seconds between two lines of it, where no terminal shows it


def simulate(
    scenario: Annotated[Path, typer.Argument(help="TOML file: workers, tenants, events; see docs/simulator.md.")],
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures there, equal for equal scenarios.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write plots there as SVG, and a page with all of them.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draw requests and events by this seed, not the scenario's.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="So many requests, not as long as the scenario says.")] = None,
) -> None:
    """Run a deployment of any size in virtual time: the real pipeline, with workers that compute nothing.

    Shows throughput, times to the first token, refusals and takeovers, by tenant. Each request must end exactly once,
    its tokens must come in order, each once, and tenants must get their shares: exit code 1 if any of that is broken.
    """
    from ...simulation.figures import document, tables
    from ...simulation.found import Moment
    from ...simulation.plots import write_plots
    from ...simulation.run import simulate as run
    from ...simulation.scenario import load_scenario

    configure_logging(Settings(log_level="error"))
    began, computed = time.monotonic(), time.process_time()
    with fatal_errors():
        loaded = load_scenario(scenario)
        change: dict[str, object] = {} if seed is None else {"seed": seed}
        change |= {"jobs": jobs, "seconds": None} if jobs is not None else {}
        loaded = loaded._replace(scenario=loaded.scenario.model_copy(update=change))
        for file in (json, plots and plots / "index.html"):
            _check_writable(file)
        total, told = loaded.scenario.jobs, began
        with _bar() as bar:
            task = bar.add_task("simulating", total=total or loaded.scenario.seconds, news="")
            look = LOOK if bar.console.is_terminal else LINE

            def tell(moment: Moment) -> None:
                nonlocal told
                if time.monotonic() - told >= look:
                    told = time.monotonic()
                    news = f"{moment.at:,.0f} s, {moment.ended:,} of {moment.sent:,} requests, {moment.waiting:,} wait"
                    bar.update(task, completed=moment.ended if total else moment.at, news=news)
                    if look == LINE:
                        bar.console.print(f"simulated {news}", highlight=False, soft_wrap=True)

            found = run(loaded, tell)
        figures = document(found)
        console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
        console.print(*tables(figures), sep="\n")
        if json is not None:
            json.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")
        if plots is not None:
            console.print(f"plots: {write_plots(found, plots)[-1]}")
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    each = 1000 * (time.process_time() - computed) / figures["requests"] if figures["requests"] else 0.0
    errors.print(f"took {time.monotonic() - began:,.1f} s, {each:.2f} ms of CPU time for each request")
    laws = figures["laws"]
    for line in laws["first"]:
        errors.print(f"broken: {line}", style="red")
    if laws["broken"]:
        errors.print(f"{laws['broken']:,} laws were broken", style="bold red")
        raise typer.Exit(1)


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[news]}"))
    return Progress(*columns, console=Console(stderr=True), refresh_per_second=2, transient=True)


def _check_writable(file: Path | None) -> None:
    """Raise `Fatal` now if a file cannot be written when all is done."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
    except OSError as error:
        raise Fatal(f"{file} cannot be written: {error.strerror}") from None
