"""`penstock bench quality`: how much of a model's quality a dtype or a quantisation keeps.

The reference and one candidate at a time are in memory, and of their distributions those at one position of each text.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from rich.table import Table
from typer import Argument, Option

from ...config.settings import Settings
from ...config.sources import Loaded, with_projector
from ...engine import EngineConfig
from ...engine.cpu.process import prepare_process, worker_threads
from ...engine.models import read_model_info, read_quantized, resolve_model
from ...engine.progress import loading_bar
from ...schemas.errors import StartupError
from ..terminal.options import with_settings
from ..terminal.texts import read_chunks
from . import report as bench_report

if TYPE_CHECKING:  # it needs torch
    from ...engine.paged.quality import Quality, Reader

NONE = "none"
BUNDLED_TEXT = Path(__file__).with_name("quality.txt")
DTYPES = ("bfloat16", "float16", "float32")


@with_settings
def bench_quality(
    loaded: Loaded,
    model: Annotated[str | None, Argument(help="Directory or Hugging Face id of the model.")] = None,
    against: Annotated[
        str | None,
        Option(
            metavar="REFERENCE",
            help="What to compare with: a dtype or a quantization of MODEL, or another model, in float32.",
            show_default="MODEL in float32",
        ),
    ] = None,
    text: Annotated[
        Path | None, Option(metavar="FILE", help="UTF-8 text to read.", show_default="4,000 tokens of English")
    ] = None,
    length: Annotated[int, Option(min=2, help="Tokens of the chunks that the text is read in.")] = 256,
    json: bench_report.Json = None,
) -> None:
    """Measure what a dtype or a quantization costs in quality: perplexity, and the distance from float32.

    Reads a text token by token, by the same kernels as requests do, and compares each predicted
    distribution with the reference's: the mean and the 99th percentile of the divergence
    (Kullback-Leibler, in nats), and how often both think the same token the most likely.

    --quantization may name several, such as none,int8,int4, which is the default on a CPU.
    `none` is the model in --dtype. --against compares with something else than float32:

        penstock bench quality MODEL --quantization int4 --against int8

        penstock bench quality OUT --against MODEL    # OUT is from `penstock quantize MODEL OUT`

    A divergence below 0.01 is hard to notice; one above 0.1 shows in the answers.
    """
    given = with_projector(loaded.settings)
    if given.model is None:
        raise StartupError("name a model: penstock bench quality MODEL (a directory, a GGUF file or a Hugging Face id)")
    if given.backend != "paged":
        raise StartupError(f"--backend {given.backend}: only the backend paged is measured; leave --backend out")
    directory = resolve_model(given.model)
    context = read_model_info(directory, given.model).context_length
    if length > context:
        raise StartupError(f"--length {length}: the context of {given.model} has {context} tokens; set no more")
    chunks = read_chunks(text or BUNDLED_TEXT, "--text", given.model, length)
    prepare_process(given.threads or worker_threads(directory, given.workers))
    # Only now: these import torch, which `prepare_process` comes before.
    from ...engine.paged.quantization.quantize import METHODS
    from ...engine.planning.device import resolve_device

    shared = {name: getattr(given, name) for name in EngineConfig.model_fields.keys() & Settings.model_fields.keys()}
    base = EngineConfig(**shared | {"model": given.model, "quantization": None, "max_sequence_length": length})
    is_cpu = resolve_device(base.device).type == "cpu"
    saved = read_quantized(directory)
    names = (given.quantization or (f"{NONE},int8,int4" if is_cpu and not saved else NONE)).split(",")
    names = list(dict.fromkeys(name.strip() for name in names))
    if unknown := [name for name in names if name not in (NONE, *METHODS)]:
        raise StartupError(
            f"--quantization {unknown[0]}: must be {NONE}, {' or '.join(METHODS)}, or several with commas"
        )
    whole = saved.method if saved else base.dtype
    candidates = {
        whole if name == NONE else name: base.model_copy(update={"quantization": None if name == NONE else name})
        for name in names
    }
    reference = _reference(base, against, METHODS)
    found = _measure(reference, candidates, chunks)
    first = next(iter(found.values())).quality
    title = (
        f"{given.model}, {first.positions:,} predictions in chunks of {length} tokens of {text or 'the bundled text'}"
    )
    title += f"\nreference: {_name(reference, base)}, perplexity {first.reference_perplexity:.2f}"
    title += "".join(f"\n{name}: slow: {why}" for name, one in found.items() for why in one.slow_paths)
    options = {"against": against, "text": str(text or "bundled"), "length": length, "engine": base.model_dump()}
    results = {
        name: {"weight_bytes": one.weight_bytes, "slow_paths": one.slow_paths, **one.quality._asdict()}
        for name, one in found.items()
    }
    details = {"reference": reference.model_dump(), "results": results}
    bench_report.publish(json, "quality", options, details, title, _table(found))


class Result(NamedTuple):
    """A candidate's `quality`; `weight_bytes` are those that a decoding step reads."""

    weight_bytes: int
    slow_paths: tuple[str, ...]
    quality: Quality


def _reference(base: EngineConfig, against: str | None, methods: tuple[str, ...]) -> EngineConfig:
    if against in methods:
        return base.model_copy(update={"quantization": against})
    if against in DTYPES or against is None:
        return base.model_copy(update={"dtype": against or "float32"})
    other = base.dtype if against == NONE else "float32"
    source = base.model if against == NONE else against
    resolve_model(source)
    return base.model_copy(update={"model": source, "dtype": other})


def _name(config: EngineConfig, base: EngineConfig) -> str:
    how = config.quantization or config.dtype
    return how if config.model == base.model else f"{config.model} in {how}"


def _measure(
    reference: EngineConfig, candidates: dict[str, EngineConfig], chunks: list[list[int]]
) -> dict[str, Result]:
    from ...engine.paged.quality import compare

    length, found = len(chunks[0]), {}
    with closing(_load(reference, length, "the reference")) as right:
        for name, config in candidates.items():
            with closing(_load(config, length, name)) as other, bench_report.bars() as bars:
                bar = bars.add_task(name, total=len(chunks) * (length - 1), news="predictions")
                quality = compare(right, other, chunks, partial(bars.advance, bar))
                found[name] = Result(other.weight_bytes, other.slow_paths, quality)
    return found


def _load(config: EngineConfig, length: int, name: str) -> Reader:
    from ...engine.paged.quality import Reader

    with loading_bar(f"loading {config.model}, {name}") as progress:
        return Reader(config, length, progress)


def _table(found: dict[str, Result]) -> Table:
    head = ("weights, MB", "perplexity", "divergence", "±", "99th percentile", "same best token")
    table = bench_report.numbers_table(("",), head)
    for name, (weight_bytes, _, one) in found.items():
        divergences = (one.divergence, one.divergence_error, one.divergence_p99)
        table.add_row(
            name,
            f"{weight_bytes / 1e6:,.1f}",
            f"{one.perplexity:.3f}",
            *(f"{value:.5f}" for value in divergences),
            f"{one.same_best:.2%}",
        )
    return table
