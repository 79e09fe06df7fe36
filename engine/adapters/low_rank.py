"""Applies adapters to the linear layers of a transformers model: to each token of a step, the one that it asks for.

The products are computed in float32 from matrices in the dtype of the model, whatever form its own weights have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...schemas.errors import InvalidRequest
from ..cpu.machine import memory_of_machine
from ..transfer import upload
from .files import AdapterFiles, check_room
from .loaded import Adapter, AdapterInfo, LowRank, Target, Targets


class Part(NamedTuple):
    """A layer whose outputs are those from `start` to `end` of a product."""

    name: str
    start: int
    end: int


class Users(NamedTuple):
    """The tokens of a step that use an adapter, by index; None: all of them."""

    adapter: Adapter
    tokens: Tensor | None


def users(adapters: Sequence[Adapter | None], counts: Sequence[int], device: torch.device) -> list[Users]:
    """Group the tokens of a step by adapter: `counts` of them in a row use the same one, or none."""
    found: list[Users] = []
    if not any(adapters):
        return found
    if len(set(adapters)) == 1 and adapters[0] is not None:
        return [Users(adapters[0], None)]
    each = torch.arange(len(adapters)).repeat_interleave(torch.tensor(counts))
    for adapter in dict.fromkeys(adapters):
        if adapter is not None:
            own = torch.tensor([other is adapter for other in adapters])
            found.append(Users(adapter, upload(own[each].nonzero()[:, 0], device)))
    return found


class Adaptation:
    """The layers of one model that adapters may change, and who uses them in the current step.

    Only layers that every token of a step passes can be changed: an expert sees some tokens, in an order of its own.
    """

    def __init__(self, model: Any) -> None:
        self.is_active = False
        self.orders: dict[str, Tensor] = {}  # of outputs that have another one than the module's; set by `parts`
        self._names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self._head: nn.Module | None = model.get_output_embeddings()
        self._observed: dict[nn.Module, bool] = {}  # whether all tokens passed; set by `observe`
        self._users: Sequence[Users] = ()
        self._num_tokens = 0

    @property
    def targets(self) -> Targets:
        linear = {self._names[module]: _size(module) for module, passed in self._observed.items() if passed}
        return Targets(linear, frozenset(self._names.values()) - linear.keys())

    @contextmanager
    def observe(self, num_tokens: int) -> Iterator[None]:
        """Run the model inside, once, on `num_tokens` tokens."""

        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            passed = inputs[0].numel() == num_tokens * inputs[0].shape[-1]
            self._observed[module] = passed and self._observed.get(module, True)

        with ExitStack() as hooks:
            for module in self._names:
                if (type(module) is nn.Linear or _is_conv(module)) and module is not self._head:
                    hooks.callback(module.register_forward_pre_hook(note).remove)
            yield

    def hook(self, model: nn.Module) -> None:
        """Add adapters' products in those layers of `model` that are still its own."""
        for module in model.modules():
            if self._observed.get(module):
                part = Part(self._names[module], 0, _size(module).outputs)
                module.register_forward_hook(partial(self._after, [part]))

    def parts(self, modules: Sequence[nn.Module], orders: Sequence[Tensor] = ()) -> list[Part]:
        """The layers of a product of all `modules`, their outputs side by side; empty if they cannot be changed.

        The outputs of the first modules have other `orders` [O], for adapters to have the same: see `place`.
        """
        parts, end = [], 0
        for module in modules:
            if not self._observed.get(module):
                return []
            start, end = end, end + _size(module).outputs
            parts.append(Part(self._names[module], start, end))
        self.orders |= {part.name: order for part, order in zip(parts, orders, strict=False)}
        return parts

    @contextmanager
    def using(self, users: Sequence[Users], num_tokens: int) -> Iterator[None]:
        """Inside, a forward pass of `num_tokens` tokens uses these adapters."""
        self._users, self._num_tokens, self.is_active = users, num_tokens, bool(users)
        try:
            yield
        finally:
            self._users, self.is_active = (), False

    def add(self, parts: Sequence[Part], x: Tensor, y: Tensor) -> Tensor:
        """Add the products of inputs [T, I] to outputs [T, O], in place; returns the outputs."""
        if not self.is_active:
            return y
        inputs, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        if len(inputs) != self._num_tokens:
            raise RuntimeError(f"{parts[0].name} sees {len(inputs)} of {self._num_tokens} tokens; it cannot be adapted")
        for adapter, tokens in self._users:
            pairs = [(part, adapter.pairs[part.name]) for part in parts if part.name in adapter.pairs]
            if not pairs:
                continue
            own = (inputs if tokens is None else inputs[tokens]).float()
            for (_, start, end), (a, b, scale) in pairs:
                product = (own @ a.float())[:, : len(b)] * scale @ b.float()
                if tokens is None:
                    outputs[:, start:end] += product
                else:
                    outputs[tokens, start:end] += product
        return y

    def _after(self, parts: Sequence[Part], module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return self.add(parts, inputs[0], output)


def place(
    files: AdapterFiles,
    dtype: torch.dtype,
    device: torch.device,
    rank_unit: int = 1,
    orders: Mapping[str, Tensor] = MappingProxyType({}),
) -> Adapter:
    """Put an adapter's matrices on `device`: `a` becomes [I, R], R in whole units, padded with zeros, and `b` [r, O].

    The outputs of the modules in `orders` get these.

    Raises `InvalidRequest` if there is no room, or for numbers that are not finite in `dtype`.
    """
    needed = sum(pair.a.numel() + pair.b.numel() for pair in files.pairs.values()) * dtype.itemsize
    if device.type == "cuda":
        check_room(needed, torch.cuda.mem_get_info(device)[0], str(device))
    else:
        check_room(needed, memory_of_machine().available, "this machine")
    pairs, memory = {}, 0
    for module, (a, b, scale) in files.pairs.items():
        padded = functional.pad(a.T, (0, -len(a) % rank_unit)).to(device, dtype).contiguous()
        other = (b[orders[module]] if module in orders else b).T.to(device, dtype).contiguous()
        if not (padded.isfinite().all() and other.isfinite().all()):
            raise InvalidRequest(
                f"the adapter in {files.source} has numbers for {module} that are not finite in {dtype}; train or "
                "save it again",
                code="invalid_adapter",
                param="adapter",
            )
        pairs[module] = LowRank(padded, other, scale)
        memory += padded.nbytes + other.nbytes
    return Adapter(AdapterInfo(files.name, files.source, files.digest, files.rank, len(pairs), memory), pairs)


def _is_conv(module: nn.Module) -> bool:
    """Whether it is transformers' linear layer whose weight is [I, O]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _size(module: Any) -> Target:
    if _is_conv(module):
        return Target(module.nx, module.nf)
    return Target(module.in_features, module.out_features)
