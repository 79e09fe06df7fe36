"""Runs the tower of a whole image a few blocks at a time, with the bits of one run.

Each run goes through transformers' own code from the start, but the modules that an earlier run has computed return at
once, and the run ends before the block that would exceed its budget. Bits cannot change: every operation has the inputs
that it would have had in one run. Whether a model's tower is built so is tried when it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

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

            def forward(*arguments: Any, **options: Any) -> Tensor:
                nonlocal spent
                hidden: Tensor = arguments[0] if arguments else options["hidden_states"]
                if module in made:
                    known = made[module]
                    return hidden if known is None else known
                if is_block:
                    cost = _cost(module, hidden)
                    if spent and spent + cost > budget:
                        raise _Paused
                    spent += cost
                computed: Tensor = own(*arguments, **options)
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


def blocks_of(body: Any, names: Sequence[str]) -> Blocks | None:
    """Those of the tower in `body` whose name is first, or names with + between, and what computes further features of
    them; None if it has none."""
    if not names:
        return None
    first, *others = names
    blocks = [block for name in first.split("+") for block in _descendants(body, name)]
    return Blocks(blocks, [one for name in others for one in _descendants(body, name)], _used(body)) if blocks else None


def _used(body: Any) -> int | Sequence[int] | None:
    """The numbers of the hidden states that are used beside the last ones, counted as transformers counts them."""
    if (index := getattr(body, "global_attn_index", None)) is not None:  # DeepSeek-VL, whose second tower follows
        count = len(body.vision_model.encoder.layers)
        return count, count + index + 1
    if (
        read := getattr(getattr(body, "vision_model", None), "intermediate_layers_indices", None)
    ) is not None:  # Llama's
        return [range(len(body.vision_model.transformer.layers))[layer] + 1 for layer in read]
    if deep := getattr(body.config, "deepstack_layer_map", None):  # Granite 4 Vision's
        return [*(layer for layer, _ in deep), body.config.spatial_vision_layer]
    used: int | Sequence[int] | None = getattr(body.config, "vision_feature_layer", None)
    return getattr(getattr(body, "vision_tower", None), "used_blocks", used)


def _descendants(module: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules of a list, or of lists in it, inside another, in order, or the one of this name; none if it is
    missing."""
    for part in name.split("."):
        found = getattr(module, part, None)
        if found is None:
            return
        module = found
    yield from _leaves(module)


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(module, nn.ModuleList):
        yield module
        return
    for one in module:
        yield from _leaves(one)


def _cost(block: nn.Module, hidden: Tensor) -> float:
    """The floating-point operations of a block; windows of attention are counted as if there were none, and attention
    among convolutions, of [B, C, H, W], not at all: it is the smallest part."""
    numbers, size = sum(parameter.numel() for parameter in block.parameters()), hidden.shape[-1]
    if hidden.ndim == 4 and any(parameter.ndim == 4 for parameter in block.parameters()):
        return 2.0 * hidden.numel() / hidden.shape[1] * numbers
    count = hidden.shape[:-1].numel()
    return 2.0 * count * numbers + 4.0 * count * count * size
