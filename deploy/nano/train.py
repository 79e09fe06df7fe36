"""Train the bundled model from nothing: tokenizer, network, export, by one command.

    python deploy/nano/train.py --work /tmp/nano --output deploy/nano/model

It makes its data as it goes. Stopped at any moment and started again, it goes on from its last checkpoint and ends with
the weights it would have had. On a CPU one process a core shares the work, each with a part of every step's
conversations: on a machine that does other things too, threads would wait for each other in every layer.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from batches import Batch, batches, conversations
from corpus import sample
from export import export
from network import Network
from recipe import RECIPES, Recipe
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor, distributed
from vocabulary import SPECIAL, Codec, train_tokenizer


@dataclass(frozen=True)
class Report:
    """A step's number, and its loss and count of tokens over all processes."""

    step: int
    loss: float
    tokens: int


@dataclass(frozen=True)
class Options:
    """The command line. `work` holds checkpoints, the tokenizer and the log; `every` so many steps it is written to."""

    recipe: str
    work: Path
    output: Path
    device: str
    processes: int
    every: int


class Trainer:
    """A network, its optimisers and how many steps it has made; one of `world` that stay alike."""

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, device: str = "cpu", rank: int = 0, world: int = 1
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.codec = Codec(tokenizer)
        self.device, self.rank, self.world = device, rank, world
        self.network = Network(recipe.shape).to(device)
        self.padding = int(tokenizer.token_to_id(SPECIAL[0]) or 0)
        self.step = 0
        matrices = [p for name, p in self.network.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.network.named_parameters() if p.ndim != 2 or "embed" in name]
        decay = recipe.weight_decay
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=recipe.vector_rate, weight_decay=0.0, betas=(0.9, 0.98)),
        ]

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"network": self.network.state_dict(), "optimizers": optimizers, "step": self.step}
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def run(self, until: int, report: Callable[[Report], None] = lambda report: None) -> None:
        """Make steps until this one; `report` hears of each."""
        recipe = self.recipe
        while self.step < until:
            phase = recipe.phase(self.step)
            first = self.step * recipe.batch_size
            indices = range(first + self.rank, first + recipe.batch_size, self.world)
            data = conversations(self.codec, recipe.seed, indices, phase.mix, recipe.longest)
            stack = batches(data, recipe.batch_tokens, phase.prompt_weight, self.padding)
            loss = sum(self._backward(batch) for batch in stack)
            tokens = sum(batch.ids.numel() for batch in stack)
            weight = sum(float(batch.weights.sum()) for batch in stack)
            mean, tokens = self._share(loss, tokens, weight)
            self._update(recipe.rate(self.step))
            self.step += 1
            report(Report(self.step, mean, tokens))

    def _backward(self, batch: Batch) -> float:
        ids, targets, weights = (part.to(self.device) for part in batch)
        loss: Tensor = self.network(ids, targets, weights)
        torch.autograd.backward(loss)
        return float(loss.detach())

    def _share(self, loss: float, tokens: int, weight: float) -> tuple[float, int]:
        """Make the gradients those of the mean over all processes' tokens; returns the mean loss and all tokens."""
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        counts = torch.tensor([loss, tokens, weight], device=self.device)
        everything = torch.cat([*(gradient.flatten() for gradient in gradients), counts])
        if self.world > 1:
            distributed.all_reduce(everything)
        loss, tokens, weight = everything[-3:].tolist()
        everything /= weight
        place = 0
        for gradient in gradients:
            gradient.copy_(everything[place : place + gradient.numel()].view_as(gradient))
            place += gradient.numel()
        return loss / weight, int(tokens)

    def _update(self, rate: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        rates = (self.recipe.matrix_rate, self.recipe.vector_rate)
        for optimizer, full in zip(self.optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * rate
            optimizer.step()
            optimizer.zero_grad()


def make_tokenizer(recipe: Recipe, path: Path) -> Tokenizer:
    """The tokenizer at `path`, trained first if there is none."""
    if not path.exists():
        codec = Codec()
        samples = (sample(recipe.seed, index) for index in range(recipe.tokenizer_samples))
        tokenizer = train_tokenizer((codec.render(one.messages, one.tools) for one in samples), recipe.shape.vocab_size)
        part = path.with_suffix(".part")
        tokenizer.save(str(part))
        os.replace(part, path)
    return Tokenizer.from_file(str(path))


def work(rank: int, options: Options) -> None:
    """One process of a training run; the first writes and shows how far it is."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which it gets when the first process dies
    recipe = RECIPES[options.recipe]
    tokenizer = Tokenizer.from_file(str(options.work / "tokenizer.json"))
    if options.processes > 1:
        torch.set_num_threads(1)
        meeting = f"file://{options.work.resolve()}/meeting"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=options.processes)
    trainer = Trainer(recipe, tokenizer, options.device, rank, options.processes)
    checkpoint = options.work / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    if rank > 0:
        return trainer.run(recipe.steps)
    console = Console()
    count = sum(p.numel() for p in trainer.network.parameters())
    console.print(f"{count:,} parameters, steps {trainer.step} to {recipe.steps} of {recipe.batch_size} conversations")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress, (options.work / "log.txt").open("a") as log:
        task = progress.add_task("", total=recipe.steps, completed=trainer.step)
        mean, tokens, since = 0.0, 0, time.monotonic()

        def show(report: Report) -> None:
            nonlocal mean, tokens
            mean = report.loss if not mean else 0.95 * mean + 0.05 * report.loss
            tokens += report.tokens
            speed = tokens / (time.monotonic() - since)
            progress.update(task, completed=report.step, description=f"loss {mean:.3f}  {speed:,.0f} tokens/s")
            if report.step % 20 == 0:
                print(f"{report.step} loss {mean:.4f} {speed:.0f} tokens/s", file=log, flush=True)

        while trainer.step < recipe.steps:
            trainer.run(min(recipe.steps, trainer.step + options.every), show)
            trainer.save(checkpoint)
            export(trainer.network, tokenizer, options.output)
    console.print(f"written to {options.output}")


def settle() -> None:
    """Start this program again with settings that can only be made before it starts.

    Memory given back is kept for the next tensor instead of being asked of the system again.
    """
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        os.environ.update({"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)})
        os.environ.update({"MALLOC_TOP_PAD_": str(2**28), "OMP_WAIT_POLICY": "PASSIVE"})
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--recipe", choices=sorted(RECIPES), default="nano", help="which run of recipe.py (default: nano)"
    )
    parser.add_argument("--work", type=Path, default=Path(".cache/nano"), help="checkpoints and the log go here")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("model"), help="the model's directory")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, help="that share the work (default: one a core, one for a GPU)")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints (default: %(default)s)")
    values = vars(parser.parse_args())
    alone = values["device"] != "cpu"
    options = Options(**{**values, "processes": values["processes"] or (1 if alone else os.cpu_count() or 1)})
    settle()
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / "meeting").unlink(missing_ok=True)
    make_tokenizer(RECIPES[options.recipe], options.work / "tokenizer.json")
    if options.processes == 1:
        work(0, options)
    else:
        processes: Any = torch.multiprocessing  # not typed
        processes.spawn(work, (options,), nprocs=options.processes)


if __name__ == "__main__":
    main()
