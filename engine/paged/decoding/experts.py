"""Mixtures of experts on a CPU: the rows of a step are sorted by expert, and each expert multiplies its own.

transformers keeps the weights of all experts of a layer as one tensor and multiplies slices of it, which oneDNN has to
repack at each call. Here each expert's weights become products of their own, packed once, and quantised like others.
The compiled kernels compute all experts of a step in one call, if they know how those are gated.
The experts' sizes, gates and biases are read as transformers' own functions read them (`integrations/moe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ...checkpoints.rounded import is_absent
from ...cpu.library import Kernels, span
from ...cpu.mixture import Clamp, Experts, Rooms
from ...plain.mixture import ClampedExperts, by_expert
from ...plain.mixture import Experts as PlainExperts
from ..state.layer import is_silu
from .linear import Linear
from .structure import GELU

MakeProduct = Callable[[Sequence[nn.Linear], str, bool], Linear]

_MARKS = ("has_gate", "has_bias", "is_transposed", "num_experts", "_apply_gate", "down_proj")
"""What a class has whose experts transformers can compute with other functions."""


def pack_experts(model: Any, make: MakeProduct, kernels: Kernels | None = None) -> list[PackedExperts]:
    """Put packed experts in the place of transformers'; returns all."""
    for _ in packing_experts(model, make, kernels, lambda experts: True):
        pass
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


def packing_experts(
    model: Any, make: MakeProduct, kernels: Kernels | None, chosen: Callable[[Any], bool]
) -> Iterator[PackedExperts]:
    """Put packed experts in the place of those of transformers' that are `chosen`; yields each when it is there."""
    rooms = Rooms()
    num_used = used_by(model)
    for name, parent in list(model.named_modules()):
        for own, module in list(parent.named_children()):
            if is_experts(module) and chosen(module):
                packed = PackedExperts(module, make, f"{name}.{own}", num_used)
                if kernels is not None:
                    packed.compile(kernels, rooms)
                setattr(parent, own, packed)
                yield packed


def used_by(model: Any) -> int:
    """How many experts a token passes in each layer that has some."""
    config: Any = model.config.get_text_config()
    used: int = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1
    return used


def is_experts(module: nn.Module) -> bool:
    """Whether it is transformers' experts of a layer, or a plain decoder's, with their weights."""
    return all(hasattr(module, mark) for mark in _MARKS)


class PackedExperts(nn.Module):
    """Takes over the weights of transformers' experts, one product at a time."""

    def __init__(self, experts: Any, make: MakeProduct, name: str, num_used: int) -> None:
        """`make` makes a product of a module's weight; `name` is that of `experts` in the model."""
        super().__init__()
        self._num_experts: int = experts.num_experts
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        self.activate: Callable[[Tensor], Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
        has_norm = getattr(experts, "has_post_expert_norm", False)
        self._norm: Callable[[Tensor], Tensor] | None = experts.post_expert_norm if has_norm else None
        self._kind, self._clamp = kind_of(experts), clamp_of(experts)
        self.compiled: Experts | None = None  # set by `compile`
        self._share = num_used / self._num_experts
        self.num_weights = 0
        self._inner = self._take(experts, first, make, name)
        self._outer = self._take(experts, "down_proj", make, name)

    def compile(self, kernels: Kernels, rooms: Rooms) -> None:
        """Compute by the kernels from now on, if they know how."""
        inner, outer = ([product.product for product in products] for products in (self._inner, self._outer))
        if self._kind:
            self.compiled = Experts.of(inner, outer, self._clamp, kernels, rooms, self._kind == "gelu")

    @property
    def pairs(self) -> list[tuple[Linear, Linear]]:
        """Each expert's two products."""
        return list(zip(self._inner, self._outer, strict=True))

    @property
    def num_active_weights(self) -> int:
        """The numbers of the weights that a token passes."""
        return int(self.num_weights * self._share)

    @property
    def active_bytes(self) -> int:
        """The bytes of the weights that a decoding step of one row reads."""
        return int(sum(product.nbytes for product in (*self._inner, *self._outer)) * self._share)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The addresses and sizes of the weights."""
        return [span(product.weight) for product in (*self._inner, *self._outer)]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, E], and for each token its experts and their weights, [T, K] each → [T, E]."""
        if not len(hidden_states):  # of a step whose tokens all pass other experts
            return hidden_states
        if self.compiled is not None and self.compiled.take(hidden_states.dtype):
            return self.compiled(hidden_states, top_k_index, top_k_weights)
        return by_expert(self._mix, self._num_experts, hidden_states, top_k_index, top_k_weights)

    def _mix(self, expert: int, rows: Tensor) -> Tensor:
        mixed = self._outer[expert](self.activate(self._inner[expert](rows)))
        return mixed if self._norm is None else self._norm(mixed)

    def _take(self, experts: Any, kind: str, make: MakeProduct, name: str) -> list[Linear]:
        """A product for each expert; frees the weights of all of them."""
        weights = getattr(experts, kind).detach()
        biases = getattr(experts, f"{kind}_bias").detach() if experts.has_bias else None
        readers = vars(experts).get("rounded", {}).get(kind)
        products: list[Linear] = []
        for expert in range(self._num_experts):
            weight = weights[expert].T if experts.is_transposed else weights[expert]
            part = _Part(weight.shape[1], weight.shape[0], bias=biases is not None, device="meta")
            part.weight = nn.Parameter(weight if is_absent(weight) else weight.contiguous(), requires_grad=False)
            if readers is not None:
                vars(part)["rounded"] = readers[expert]
            if biases is not None:
                part.bias = nn.Parameter(biases[expert].contiguous(), requires_grad=False)
            products.append(make([part], f"{name}.{kind}", False))
        self.num_weights += weights.numel()
        setattr(experts, kind, None)
        return products


class _Part(nn.Linear):
    """One expert's, as a product is made of it. No numbers are drawn for what gets others: that takes long for many."""

    def reset_parameters(self) -> None:
        pass


def kind_of(experts: Any) -> str:
    """How experts are gated: "silu", "gelu" or "clamped"; empty if otherwise, or with more behind their products."""
    if not experts.has_gate or getattr(experts, "has_post_expert_norm", False):
        return ""
    if clamp_of(experts) is not None:  # its gates and ups are in turns
        return "clamped"
    is_usual = isinstance(experts, PlainExperts) or type(experts)._apply_gate.__name__ == "_default_apply_gate"
    if not is_usual:  # gates before ups
        return ""
    return "gelu" if type(experts.act_fn).__name__ in GELU else "silu" if is_silu(experts.act_fn) else ""


def clamp_of(experts: Any) -> Clamp | None:
    """The numbers of gates like gpt-oss's; None for others."""
    is_clamped = isinstance(experts, ClampedExperts) or type(experts).__name__ == "GptOssExperts"
    return Clamp(experts.alpha, experts.limit) if is_clamped else None
