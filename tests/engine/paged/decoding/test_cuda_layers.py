"""The kernels of the layers against torch's operations: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.paged.decoding import cuda_layers as on_cuda
from penstock.engine.paged.decoding.decoder import through
from penstock.engine.paged.decoding.heads import Angles
from penstock.engine.paged.decoding.layer import Layer
from penstock.engine.paged.decoding.linear import Views
from penstock.engine.vision.seen import Seen

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, HEADS, GROUP, WIDE = 24, 2, 3, 40  # of a row; heads of keys, queries that share one; of the gate


def norm(size: int) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.rand(size) + 0.5, variance_epsilon=1e-5)


def layer(head_dim: int, before: Sequence[Layer], *, has_head_norms: bool) -> Layer:
    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False).requires_grad_(False)

    queries, keys = HEADS * GROUP * head_dim, HEADS * head_dim
    attention = SimpleNamespace(
        head_dim=head_dim,
        q_proj=linear(SIZE, queries),
        k_proj=linear(SIZE, keys),
        v_proj=linear(SIZE, keys),
        o_proj=linear(queries, SIZE),
    )
    if has_head_norms:
        attention.q_norm, attention.k_norm = norm(head_dim), norm(head_dim)
    mlp = SimpleNamespace(
        gate_proj=linear(SIZE, WIDE), up_proj=linear(SIZE, WIDE), down_proj=linear(WIDE, SIZE), act_fn=nn.SiLU()
    )
    norms = {"input_layernorm": norm(SIZE), "post_attention_layernorm": norm(SIZE)}
    return Layer(SimpleNamespace(self_attn=attention, mlp=mlp, **norms), Views, None, before)


@pytest.mark.parametrize("has_head_norms", [False, True])
@pytest.mark.parametrize("head_dim", [8, 12])
@pytest.mark.parametrize("deep", [[], [1], [2]])
@torch.inference_mode()
def test_layers_compute_what_torch_does(head_dim: int, deep: list[int], *, has_head_norms: bool) -> None:
    torch.manual_seed(head_dim)
    with torch.device(DEVICE):
        own: list[Layer] = []
        for _ in range(2):
            own.append(layer(head_dim, own, has_head_norms=has_head_norms))
        x, turns = torch.randn(3, SIZE), torch.rand(1, 3, head_dim // 2) * 6
        half = turns.sin()
        angles = Angles(turns.cos().repeat(1, 1, 2), torch.cat((-half, half), dim=-1))
        rows = torch.tensor([0, 2])
        seen = Seen(rows, torch.empty(0), {number: torch.randn(2, SIZE) for number in deep}) if deep else None
    given: list[Tensor] = []

    def attention(index: int, query: Tensor, keys_values: Tensor | None) -> Tensor:
        assert keys_values is not None
        given.append(torch.cat((query, keys_values)).clone())
        return query.transpose(0, 1).flatten(1) * (index + 1)

    before = x.clone()
    want = through(own, x, {None: angles}, attention, seen)
    found = on_cuda.through(own, x, {None: angles}, attention, seen)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    for one, other in zip(given[: len(own)], given[len(own) :], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    assert torch.equal(x, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [4096, 5120, 8192])
def test_a_norm_in_bfloat16_is_rounded_once(size: int) -> None:
    x, update = torch.randn(2, 7, size, device=DEVICE).bfloat16()
    one = SimpleNamespace(weight=torch.rand(size, device=DEVICE).bfloat16(), epsilon=1e-5)
    total, normed = on_cuda.add_norm(x, on_cuda.Update(update), one)  # type: ignore[arg-type]
    assert torch.equal(total, x + update)
    want = nn.functional.rms_norm(total.double(), (size,), one.weight.double(), 1e-5)
    assert ((normed.double() - want).abs() <= want.abs() * 2**-8).all()
