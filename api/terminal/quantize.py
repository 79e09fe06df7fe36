"""`penstock quantize`: rounds a model's weights on a text and saves the result as a checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryFile
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Argument, Option

from ...config.sources import Loaded, with_projector
from ...engine import EngineConfig
from ...engine.checkpoints.files import read_json
from ...engine.cpu.process import prepare_process, worker_threads
from ...engine.models import count_parameters, read_model_info, resolve_model
from ...engine.progress import loading_bar
from ...schemas.errors import StartupError
from .options import with_settings
from .texts import read_chunks, split

LENGTH, MOST = 256, 64  # tokens of a chunk of the calibration text, and chunks that are read


@with_settings
def quantize(
    loaded: Loaded,
    model: Annotated[str | None, Argument(help="Directory or Hugging Face id of the model.")] = None,
    out: Annotated[Path | None, Argument(help="Directory to write; it must not exist, or be empty.")] = None,
    calibration: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help=f"UTF-8 text like those that the model will see; {MOST * LENGTH:,} tokens of it are read.",
            show_default="English about Python",
        ),
    ] = None,
) -> None:
    """Quantize a model with calibration, and save it as a checkpoint that `penstock serve OUT` loads.

    --quantization is int4, the default, or int8. Rounds each layer so that it computes nearly
    the same on a text (GPTQ), which loses about a third of what `serve --quantization int4`
    does while loading. That takes about a minute for each 100 million weights on two cores,
    and memory for the weights and the inputs of a layer. Compare the result with the original:

        penstock quantize MODEL OUT

        penstock bench quality OUT --against MODEL
    """
    given = with_projector(loaded.settings)
    if given.model is None or out is None:
        raise StartupError("name a model and a directory to write: penstock quantize MODEL OUT")
    model, method = given.model, given.quantization or "int4"
    if method not in ("int4", "int8"):
        raise StartupError(f"--quantization {method}: must be int4 or int8")
    if os.path.exists(out) and (not out.is_dir() or any(out.iterdir())):
        raise StartupError(f"{out} exists and is not empty; name another directory")
    source = resolve_model(model)
    if not source.is_dir():
        raise StartupError(f"{model} is a file; name a model directory in Hugging Face's format")
    if "quantization_config" in read_json(source / "config.json"):
        raise StartupError(f"{model} is quantized already; name the model that it was made from")
    info = read_model_info(source, model)
    count_parameters(source)
    length = min(LENGTH, info.context_length)
    if calibration is None:
        chunks = split("\n\n".join(topics.values()), model, length)
    else:
        chunks = read_chunks(calibration, "--calibration", model, length)
    chunks = chunks[:: max(1, len(chunks) // MOST)][:MOST]
    _try_to_write(out)
    prepare_process(given.threads or worker_threads(source, 1))
    import torch  # only now: `prepare_process` comes before it
    from safetensors import SafetensorError

    from ...engine.checkpoints.rounded import save_quantized
    from ...engine.loading import load_causal_lm
    from ...engine.paged.quantization.apart import set_apart
    from ...engine.paged.quantization.calibrate import calibrate
    from ...engine.paged.quantization.quantize import quantizable

    config = EngineConfig(model=model, dtype="auto", device="cpu")
    begin = time.monotonic()
    with loading_bar(f"loading {model}") as progress:
        loaded_model = load_causal_lm(
            config, source, info.architecture, torch.device("cpu"), progress, None, sees=info.sees
        )
    set_apart(loaded_model)
    methods = {name: own for name, _, own in quantizable(loaded_model, method)}
    columns = (TextColumn("rounding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("", total=len(methods))
        found = calibrate(loaded_model, methods, chunks, lambda done: bars.update(bar, completed=done))
    try:
        save_quantized(source, out, loaded_model, found)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"{out} cannot be written to its end: {error}") from error
    before, after = (sum(file.stat().st_size for file in one.glob("*.safetensors")) for one in (source, out))
    Console(highlight=False, soft_wrap=True).print(
        f"{out}: {method}, {after / 1e6:,.0f} MB of {before / 1e6:,.0f}, in {time.monotonic() - begin:,.0f} s"
    )


def _try_to_write(out: Path) -> None:
    """Raise `StartupError` if the directory cannot be written, before the rounding takes its minutes or hours."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()
    except OSError as error:
        raise StartupError(f"{out} cannot be written: {error.strerror}; name another directory") from error
