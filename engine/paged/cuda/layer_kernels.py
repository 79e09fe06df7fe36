"""The Triton kernels of `cuda_layers`, documented there. Numbers are float32 while they are in registers."""

import triton
import triton.language as tl

SILU, GELU = tl.constexpr(0), tl.constexpr(1)
_ROOT = tl.constexpr(1.5957691216057308)  # 2 · sqrt(2 / π)


@triton.jit
def _normed(number, weight, at, inside, size, epsilon):
    """RMSNorm of one row."""
    scale = tl.rsqrt(tl.sum(number * number, 0) / size + epsilon)
    return number * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def add_norm(
    x,
    update,
    after,
    after_epsilon,
    factor,
    scalar,
    total,
    normed,
    weight,
    epsilon,
    size,
    padded: tl.constexpr,
):
    """One row of `total` = (x + factor · update) · scalar, the update's norm if there are weights `after` of it, and of
    the norm of that if there is a `weight`; without an update, of the norm of x."""
    at = tl.arange(0, padded)
    inside = at < size
    row = tl.program_id(0).to(tl.int64) * size + at
    number = tl.load(x + row, mask=inside, other=0.0)
    if update is not None:
        added = tl.load(update + row, mask=inside, other=0.0).to(tl.float32)
        if after is not None:
            added = _normed(added, after, at, inside, size, after_epsilon)
        number = ((number.to(tl.float32) + factor * added) * scalar).to(number.dtype)
        tl.store(total + row, number, mask=inside)
    if weight is not None:
        found = _normed(number.to(tl.float32), weight, at, inside, size, epsilon)
        tl.store(normed + row, found.to(number.dtype), mask=inside)


@triton.jit
def rotate(
    heads,
    head_stride,
    token_stride,
    queries,
    spread,
    turning,
    cosines,
    sines,
    weights,
    epsilon,
    norms: tl.constexpr,
    head_dim: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    rest: tl.constexpr,
):
    """Norm and rotate one head of one token in place: the first `size` of its numbers, both halves together, where
    there are `cosines`, and nothing of the heads from `turning` on, which are normed without weights. Each of the
    `queries` takes the room of `spread` heads."""
    token, head = tl.program_id(0), tl.program_id(1)
    place = tl.where(head < queries, head * spread, queries * (spread - 1) + head).to(tl.int64)
    at = tl.arange(0, padded)
    inside, half = at < size // 2, size // 2
    known = inside & (at * 0 + head < turning)
    begin = heads + place * head_stride + token.to(tl.int64) * token_stride
    number = begin + at
    first = tl.load(number, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(number + half, mask=inside, other=0.0).to(tl.float32)
    if norms:
        sums = tl.sum(first * first, 0) + tl.sum(second * second, 0)
        behind = size + tl.arange(0, rest)
        if head_dim > size:
            others = tl.load(begin + behind, mask=behind < head_dim, other=0.0).to(tl.float32)
            sums += tl.sum(others * others, 0)
        scale = tl.rsqrt(sums / head_dim + epsilon)
        weight = weights + head * head_dim
        first *= scale * tl.load(weight + at, mask=known, other=1.0).to(tl.float32)
        second *= scale * tl.load(weight + half + at, mask=known, other=1.0).to(tl.float32)
        if head_dim > size:
            there = behind < head_dim
            weighted = there & (behind * 0 + head < turning)
            others *= scale * tl.load(weight + behind, mask=weighted, other=1.0).to(tl.float32)
            tl.store(begin + behind, others.to(heads.dtype.element_ty), mask=there)
    if cosines is not None:
        angle = token * size + at
        cos = tl.load(cosines + angle, mask=known, other=1.0).to(tl.float32)
        sin = tl.load(sines + angle, mask=known, other=0.0).to(tl.float32)
        turned = first * cos + second * sin
        cos = tl.load(cosines + angle + half, mask=known, other=1.0).to(tl.float32)
        sin = tl.load(sines + angle + half, mask=known, other=0.0).to(tl.float32)
        second = second * cos + first * sin
        first = turned
    tl.store(number, first.to(heads.dtype.element_ty), mask=inside)
    tl.store(number + half, second.to(heads.dtype.element_ty), mask=inside)


@triton.jit
def gate(gates, gate_stride, ups, up_stride, out, size, kind: tl.constexpr, block: tl.constexpr):
    """One block of a row of SiLU or GELU (gates) · ups."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    wide = tl.load(gates + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    inner = wide if kind == SILU else (wide + 0.044715 * wide * wide * wide) * _ROOT
    tl.store(out + row * size + at, (wide * tl.sigmoid(inner) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def open_gates(found, gates, head_stride, token_stride, size, padded: tl.constexpr):
    """What one head found for a token times the sigmoid of its gate, in place."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, padded)
    inside = at < size
    own = found + (token * tl.num_programs(1) + head) * size + at
    gate = tl.load(gates + head * head_stride + token * token_stride + at, mask=inside, other=0.0).to(tl.float32)
    number = tl.load(own, mask=inside, other=0.0)
    tl.store(own, (number.to(tl.float32) * tl.sigmoid(gate)).to(number.dtype), mask=inside)
