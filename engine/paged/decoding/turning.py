"""Rotations of neighbouring numbers of a head, as those of its halves.

GLM 4, ERNIE 4.5 and Helium rotate numbers 0 and 1 of a head together, 2 and 3, and so on; the decoder rotates the first
half with the second. Both are the same where the even numbers come first, and then the odd ones. Queries and keys in
one such order have the same products, so it is enough to exchange the rows of what makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...checkpoints.rounded import Blocks, ReadRounded, Rounded, blocks_of, is_absent

Orders = Sequence[Tensor]
"""For modules, which of its outputs each is to have at which place, [O]."""


def by_halves(num_heads: int, head_dim: int, rotated: int) -> Tensor:
    """The order [heads · D] in which the first `rotated` numbers of a head are even ones and then odd ones."""
    heads = torch.arange(num_heads * head_dim).view(num_heads, head_dim)
    turning = heads[:, :rotated]
    return torch.cat((turning[:, ::2], turning[:, 1::2], heads[:, rotated:]), dim=1).flatten()


def turned(parts: Sequence[nn.Linear], orders: Orders) -> list[nn.Linear]:
    """The modules, those that have `orders` as copies with their outputs in these."""
    count = len(orders)
    return [*(_turned(part, order) for part, order in zip(parts[:count], orders, strict=True)), *parts[count:]]


def _turned(part: nn.Linear, order: Tensor) -> nn.Linear:
    weight, bias = part.weight.detach(), part.bias
    found = nn.Linear(part.in_features, part.out_features, bias=bias is not None, device="meta")
    found.weight = nn.Parameter(weight if is_absent(weight) else weight[order], requires_grad=False)
    if bias is not None:
        found.bias = nn.Parameter(bias.detach()[order], requires_grad=False)
    if (read := vars(part).get("rounded")) is not None:
        vars(found)["rounded"] = _Turned(read, order)
    return found


@dataclass(frozen=True, slots=True)
class _Turned:
    """Reads the levels of a weight, rows in another order."""

    read: ReadRounded
    order: Tensor

    def __call__(self) -> Rounded:
        return self.read().reordered(self.order)

    def blocks(self) -> list[Blocks]:
        """As the file has them, but for the order; none unless it has all rows side by side."""
        found = blocks_of([self.read])
        return [one._replace(data=one.data[self.order]) for one in found] if len(found) == 1 else []
