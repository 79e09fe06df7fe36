"""Runs the tower of a whole image a few blocks at a time, with the bits of one run.

Each run goes through transformers' own code from the start, but the modules that an earlier run has computed return at
once, and the run ends before the block that would exceed its budget. Bits cannot change: every operation has the inputs
that it would have had in one run. Whether a model's tower is built so is tried when it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn


class _Paused(Exception):
    """A run has spent its budget."""


class Blocks:
    """`blocks` follow one another, each on the hidden states of the last; `others` compute something else of them.
    `layers` are the numbers of the hidden states that the model uses, counted as transformers counts them; 0 are those
    before the first block, and negative ones count from the end."""

    def __init__(
        self, blocks: Sequence[nn.Module], others: Sequence[nn.Module] = (), layers: int | Sequence[int] | None = None
    ) -> None:
        self._blocks, self._others = list(blocks), list(others)
        used = [layers] if isinstance(layers, int) else layers or ()
        self._used = {self._blocks[layer - (layer > 0)] for layer in used if layer}  # whose results are kept

    def run(self, encode: Callable[[], Tensor], budget: float) -> Iterator[Tensor | None]:
        """Yield None after each run of at most `budget` floating-point operations, or of one block, and at last what
        `encode` returns, which runs the tower."""
        made: dict[nn.Module, Tensor | None] = {}  # what each module returned; None where a later block went on from it
        while True:
            try:
                with self._limited(made, budget):
                    encoded = encode()
            except _Paused:
                yield None
            else:
                yield encoded
                return

    @contextmanager
    def _limited(self, made: dict[nn.Module, Tensor | None], budget: float) -> Iterator[None]:
        spent = 0.0

        def replace(module: nn.Module, before: nn.Module | None, is_block: bool) -> None:
            own = module.forward

            def forward(hidden: Tensor, *arguments: object, **options: object) -> Tensor:
                nonlocal spent
                if module in made:
                    known = made[module]
                    return hidden if known is None else known
                if is_block:
                    cost = _cost(module, hidden)
                    if spent and spent + cost > budget:
                        raise _Paused
                    spent += cost
                computed: Tensor = own(hidden, *arguments, **options)
                made[module] = computed
                if before is not None and before not in self._used:
                    made[before] = None
                return computed

            module.forward = forward
            stack.callback(module.__dict__.pop, "forward")

        with ExitStack() as stack:
            for index, block in enumerate(self._blocks):
                replace(block, self._blocks[index - 1] if index else None, True)
            for other in self._others:
                replace(other, None, False)
            yield


def _cost(block: nn.Module, hidden: Tensor) -> float:
    """The floating-point operations of a block; windows of attention are counted as if there were none."""
    count, size = hidden.shape[:-1].numel(), hidden.shape[-1]
    return 2.0 * count * sum(parameter.numel() for parameter in block.parameters()) + 4.0 * count * count * size
