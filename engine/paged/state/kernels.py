"""The Triton kernels of rows of one token each, which the classes beside this file document.

A row reads the slot `sources[row]` and writes `targets[row]`, which no row of the step reads. All is computed in
float32.
"""

import triton
import triton.language as tl


@triton.jit
def convolve(
    x,
    stride,
    before,
    after,
    taps,
    bias,
    inputs,
    sources,
    targets,
    out,
    channels,
    num_taps: tl.constexpr,
    has_silu: tl.constexpr,
    block: tl.constexpr,
):
    """A convolution's output for one token of some channels; x, and where there are gates `before` and `after` it,
    have rows of this stride."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = at < channels
    source = tl.load(sources + row) * (num_taps - 1)
    target = tl.load(targets + row) * (num_taps - 1)
    sums = tl.zeros((block,), tl.float32)
    for tap in tl.static_range(num_taps - 1):
        number = tl.load(inputs + (source + tap) * channels + at, mask=inside, other=0.0)
        sums += number.to(tl.float32) * tl.load(taps + tap * channels + at, mask=inside, other=0.0)
        if tap > 0:
            tl.store(inputs + (target + tap - 1) * channels + at, number, mask=inside)
    number = tl.load(x + row * stride + at, mask=inside, other=0.0)
    if before is not None:
        number *= tl.load(before + row * stride + at, mask=inside, other=0.0)
    number = number.to(inputs.dtype.element_ty)
    tl.store(inputs + (target + num_taps - 2) * channels + at, number, mask=inside)
    sums += number.to(tl.float32) * tl.load(taps + (num_taps - 1) * channels + at, mask=inside, other=0.0)
    if bias is not None:
        sums += tl.load(bias + at, mask=inside, other=0.0)
    if has_silu:
        sums *= tl.sigmoid(sums)
    if after is not None:
        sums *= tl.load(after + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * channels + at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _softplus(x):
    return tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def delta(
    given,
    rates,
    rate_stride,
    decays,
    decay_stride,
    decay,
    dt_bias,
    states,
    sources,
    targets,
    out,
    scale,
    keys: tl.constexpr,
    shared: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """The delta rule for one token, one head and some columns of its state [size, width]. `given` are queries and keys
    of `keys` heads, each for `shared` heads of values, and the values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    dim, column = tl.arange(0, padded), tl.program_id(2) * block + tl.arange(0, block)
    inside, there = dim < size, column < width
    channels = 2 * keys * size + heads * width
    own = given + row * channels + (head // shared) * size + dim
    query = _unit(tl.load(own, mask=inside, other=0.0)) * scale
    key = _unit(tl.load(own + keys * size, mask=inside, other=0.0))
    value = tl.load(given + row * channels + 2 * keys * size + head * width + column, mask=there, other=0.0)
    rate = tl.sigmoid(tl.load(rates + row * rate_stride + head).to(tl.float32))
    step = _softplus(tl.load(decays + row * decay_stride + head).to(tl.float32) + tl.load(dt_bias + head))
    at = dim[:, None] * width + column[None, :]
    both = inside[:, None] & there[None, :]
    source = (tl.load(sources + row) * heads + head) * (size * width)
    state = tl.load(states + source + at, mask=both, other=0.0) * tl.exp(step * tl.load(decay + head))
    change = (value - tl.sum(state * key[:, None], 0)) * rate
    state += key[:, None] * change[None, :]
    target = (tl.load(targets + row) * heads + head) * (size * width)
    tl.store(states + target + at, state, mask=both)
    found = tl.sum(state * query[:, None], 0)
    tl.store(out + (row * heads + head) * width + column, found, mask=there)


@triton.jit
def mamba(
    given,
    steps,
    stride,
    rate,
    dt_bias,
    least,
    most,
    direct,
    states,
    sources,
    targets,
    out,
    groups: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """Mamba-2's rule for one token, one head and some columns of its state [size, width]. `given` are the heads'
    values, and the keys and queries of `groups`."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    dim, column = tl.arange(0, padded), tl.program_id(2) * block + tl.arange(0, block)
    inside, there = dim < size, column < width
    own = given + row * (heads * width + 2 * groups * size)
    shared = own + heads * width + (head // (heads // groups)) * size + dim
    key = tl.load(shared, mask=inside, other=0.0)
    query = tl.load(shared + groups * size, mask=inside, other=0.0)
    value = tl.load(own + head * width + column, mask=there, other=0.0)
    step = _softplus(tl.load(steps + row * stride + head).to(tl.float32) + tl.load(dt_bias + head))
    step = tl.minimum(tl.maximum(step, least), most)
    at = dim[:, None] * width + column[None, :]
    both = inside[:, None] & there[None, :]
    source = (tl.load(sources + row) * heads + head) * (size * width)
    state = tl.load(states + source + at, mask=both, other=0.0) * tl.exp(step * tl.load(rate + head))
    state += key[:, None] * (value * step)[None, :]
    target = (tl.load(targets + row) * heads + head) * (size * width)
    tl.store(states + target + at, state, mask=both)
    found = tl.sum(state * query[:, None], 0) + value * tl.load(direct + head)
    tl.store(out + (row * heads + head) * width + column, found, mask=there)


@triton.jit
def gated_norm(x, gates, stride, weight, epsilon, out, size, padded: tl.constexpr, is_gated_first: tl.constexpr):
    """The norm of one group of a row times SiLU of its gates, which may come first; without a weight, the gates
    alone. The weight is that of one group, or of all where gates come first."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, padded)
    inside = at < size
    own = (row * tl.num_programs(1) + group) * size + at
    number = tl.load(x + own, mask=inside, other=0.0)
    gate = tl.load(gates + row * stride + group * size + at, mask=inside, other=0.0).to(tl.float32)
    gate *= tl.sigmoid(gate)
    if is_gated_first or weight is None:
        number *= gate
    if weight is not None:
        number *= tl.rsqrt(tl.sum(number * number, 0) / size + epsilon)
        first = group * size if is_gated_first else 0
        number *= tl.load(weight + first + at, mask=inside, other=0.0).to(tl.float32)
        if not is_gated_first:
            number *= gate
    tl.store(out + own, number.to(out.dtype.element_ty), mask=inside)
