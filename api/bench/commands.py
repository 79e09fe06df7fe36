"""`penstock bench`: its commands."""

from __future__ import annotations

import typer

from .chaos.command import bench_chaos
from .engine import bench_engine
from .pipeline import pipeline
from .quality import bench_quality
from .serve import bench_serve

bench = typer.Typer(help="Measure a server, or a part of Penstock.", no_args_is_help=True, add_completion=False)
bench.command()(pipeline)
bench.command("serve")(bench_serve)
bench.command("engine")(bench_engine)
bench.command("quality")(bench_quality)
bench.command("chaos")(bench_chaos)
