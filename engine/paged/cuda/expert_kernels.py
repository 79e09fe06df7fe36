"""The Triton kernels of `experts`, documented there. Sums are float32."""

import triton
import triton.language as tl

SILU, GELU, CLAMPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_ROOT = tl.constexpr(1.5957691216057308)  # 2 · sqrt(2 / π)


@triton.jit
def place(chosen, order, bounds, pairs, experts, own: tl.constexpr, others: tl.constexpr):
    """The pairs in the order of their experts, and where each expert's begin: of `own` pairs and experts each."""
    mine = tl.program_id(0) * own + tl.arange(0, own)
    expert = tl.load(chosen + mine, mask=mine < pairs, other=0)
    rank = tl.zeros((own,), tl.int32)
    before = tl.zeros((own,), tl.int32)
    for start in range(0, pairs, others):
        other = start + tl.arange(0, others)
        found = tl.load(chosen + other, mask=other < pairs, other=experts)[None, :]
        is_earlier = (found < expert[:, None]) | ((found == expert[:, None]) & (other[None, :] < mine[:, None]))
        rank += tl.sum(is_earlier.to(tl.int32), 1)
        before += tl.sum((found < mine[:, None]).to(tl.int32), 1)
    tl.store(order + rank, mine, mask=mine < pairs)
    tl.store(bounds + mine, before, mask=mine <= experts)


@triton.jit
def _block(bounds, experts, padded: tl.constexpr, rows: tl.constexpr):
    """The expert of this program's block of rows, or one too many, and its first and last row + 1."""
    block = tl.program_id(1)
    at = tl.arange(0, padded)
    first = tl.load(bounds + at, mask=at < experts, other=0)
    last = tl.load(bounds + at + 1, mask=at < experts, other=0)
    blocks = (last - first + rows - 1) // rows
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    mine = at == expert
    start = tl.sum(tl.where(mine, first + (block - ends + blocks) * rows, 0), 0)
    return expert, start, tl.sum(tl.where(mine, last, 0), 0)


@triton.jit
def inner(
    x,
    order,
    bounds,
    weight,
    bias,
    out,
    used,
    inputs,
    outputs,
    experts,
    alpha,
    limit,
    kind: tl.constexpr,
    padded: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """Gates times ups of a block of one expert's rows, each of the token that chose it, for some outputs. Ups are
    `outputs` behind their gates."""
    expert, start, last = _block(bounds, experts, padded, rows)
    if expert >= experts:
        return
    row, column, k = start + tl.arange(0, rows), tl.program_id(0) * columns + tl.arange(0, columns), tl.arange(0, depth)
    there, inside = row < last, column < outputs
    token = tl.load(order + row, mask=there, other=0) // used
    own = weight + (expert.to(tl.int64) * 2 * outputs + column) * inputs
    given = x + token.to(tl.int64) * inputs
    gates = tl.zeros((rows, columns), tl.float32)
    ups = tl.zeros((rows, columns), tl.float32)
    for at in range(0, inputs, depth):
        here = at + k
        a = tl.load(given[:, None] + here[None, :], mask=there[:, None] & (here < inputs)[None, :], other=0.0)
        mask = (here < inputs)[:, None] & inside[None, :]
        b = tl.load(own[None, :] + here[:, None], mask=mask, other=0.0)
        gates = tl.dot(a, b, gates, input_precision="ieee")
        b = tl.load((own + outputs * inputs)[None, :] + here[:, None], mask=mask, other=0.0)
        ups = tl.dot(a, b, ups, input_precision="ieee")
    if bias is not None:
        of_gate = bias + expert * 2 * outputs + column
        gates += tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)[None, :]
        ups += tl.load(of_gate + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
    if kind == CLAMPED:
        gates = tl.minimum(gates, limit)
        ups = tl.minimum(tl.maximum(ups, -limit), limit) + 1
        found = gates * tl.sigmoid(gates * alpha) * ups
    elif kind == GELU:
        found = gates * tl.sigmoid((gates + 0.044715 * gates * gates * gates) * _ROOT) * ups
    else:
        found = gates * tl.sigmoid(gates) * ups
    to = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(to, found.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def outer(
    x,
    order,
    bounds,
    weight,
    bias,
    shares,
    out,
    inputs,
    outputs,
    experts,
    padded: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """A block of one expert's rows times its second weight and each row's share, for some outputs, in the order of the
    pairs."""
    expert, start, last = _block(bounds, experts, padded, rows)
    if expert >= experts:
        return
    row, column, k = start + tl.arange(0, rows), tl.program_id(0) * columns + tl.arange(0, columns), tl.arange(0, depth)
    there, inside = row < last, column < outputs
    own = weight + (expert.to(tl.int64) * outputs + column) * inputs
    given = x + row.to(tl.int64) * inputs
    sums = tl.zeros((rows, columns), tl.float32)
    for at in range(0, inputs, depth):
        here = at + k
        a = tl.load(given[:, None] + here[None, :], mask=there[:, None] & (here < inputs)[None, :], other=0.0)
        mask = (here < inputs)[:, None] & inside[None, :]
        sums = tl.dot(a, tl.load(own[None, :] + here[:, None], mask=mask, other=0.0), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + expert * outputs + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(order + row, mask=there, other=0)
    sums *= tl.load(shares + pair, mask=there, other=0.0).to(tl.float32)[:, None]
    to = out + pair.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])
