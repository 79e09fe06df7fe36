"""The Triton kernels of layers with a running state, which the classes beside this file document.

A piece is a sequence's tokens of the packed row from `starts[piece]` to `ends[piece]`: it reads the slot
`sources[piece]` and leaves its state in `targets[piece]`, which no other piece of the launch reads or writes. One token
at a time makes the same states as all in one piece, bit for bit. All is computed in float32.
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
    starts,
    ends,
    sources,
    targets,
    tokens,
    owners,
    out,
    channels,
    num_taps: tl.constexpr,
    has_silu: tl.constexpr,
    block: tl.constexpr,
):
    """A convolution's output for one token of a launch, whose piece `owners` tells, and some channels; x, and where
    there are gates `before` and `after` it, have rows of this stride. The last token leaves the piece's last inputs."""
    token, piece = tl.load(tokens + tl.program_id(0)), tl.load(owners + tl.program_id(0))
    at = tl.program_id(1) * block + tl.arange(0, block)
    start, end = tl.load(starts + piece), tl.load(ends + piece)
    inside = at < channels
    source = tl.load(sources + piece) * (num_taps - 1)
    target = tl.load(targets + piece) * (num_taps - 1)
    sums = tl.zeros((block,), tl.float32)
    for tap in tl.static_range(num_taps):
        other = token - (num_taps - 1) + tap
        is_new = inside & (at * 0 + other >= start)
        number = tl.load(x + other * stride + at, mask=is_new, other=0.0)
        if before is not None:
            number *= tl.load(before + other * stride + at, mask=is_new, other=0.0)
        number = number.to(inputs.dtype.element_ty)
        if tap < num_taps - 1:
            kept = source + num_taps - 1 + other - start
            is_old = inside & (at * 0 + other < start)
            number += tl.load(inputs + kept * channels + at, mask=is_old, other=0.0)
        sums += number.to(tl.float32) * tl.load(taps + tap * channels + at, mask=inside, other=0.0)
        if tap > 0:
            is_last = inside & (at * 0 + token + 1 == end)
            tl.store(inputs + (target + tap - 1) * channels + at, number, mask=is_last)
    if bias is not None:
        sums += tl.load(bias + at, mask=inside, other=0.0)
    if has_silu:
        sums *= tl.sigmoid(sums)
    if after is not None:
        sums *= tl.load(after + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * channels + at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _softplus(x):
    power = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20, x, tl.where(x < -9, power, tl.log(1 + power)))  # behind 1 a small power would be lost


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _columns(size: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, block: tl.constexpr):
    """This program's rows and columns of a state, whether they are there, their places, and whether these are."""
    dim, column = tl.arange(0, padded), tl.program_id(2) * block + tl.arange(0, block)
    inside, there = dim < size, column < width
    return dim, column, inside, there, dim[:, None] * width + column[None, :], inside[:, None] & there[None, :]


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
    starts,
    ends,
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
    """The delta rule for one piece, one head and some columns of its state [size, width]. `given` are queries and keys
    of `keys` heads, each for `shared` heads of values, and the values."""
    piece, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    dim, column, inside, there, at, both = _columns(size, width, padded, block)
    channels = 2 * keys * size + heads * width
    own = given + (head // shared) * size + dim
    values = given + 2 * keys * size + head * width + column
    bias, fading = tl.load(dt_bias + head), tl.load(decay + head)
    source = (tl.load(sources + piece) * heads + head) * (size * width)
    state = tl.load(states + source + at, mask=both, other=0.0)
    for token in range(tl.load(starts + piece), tl.load(ends + piece)):
        query = _unit(tl.load(own + token * channels, mask=inside, other=0.0)) * scale
        key = _unit(tl.load(own + token * channels + keys * size, mask=inside, other=0.0))
        value = tl.load(values + token * channels, mask=there, other=0.0)
        rate = tl.sigmoid(tl.load(rates + token * rate_stride + head).to(tl.float32))
        step = _softplus(tl.load(decays + token * decay_stride + head).to(tl.float32) + bias)
        state *= tl.exp(step * fading)
        change = (value - tl.sum(state * key[:, None], 0)) * rate
        state += key[:, None] * change[None, :]
        found = tl.sum(state * query[:, None], 0)
        tl.store(out + (token * heads + head) * width + column, found, mask=there)
    target = (tl.load(targets + piece) * heads + head) * (size * width)
    tl.store(states + target + at, state, mask=both)


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
    starts,
    ends,
    sources,
    targets,
    out,
    groups: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """Mamba-2's rule for one piece, one head and some columns of its state [size, width]. `given` are the heads'
    values, and the keys and queries of `groups`."""
    piece, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    dim, column, inside, there, at, both = _columns(size, width, padded, block)
    channels = heads * width + 2 * groups * size
    shared = given + heads * width + (head // (heads // groups)) * size + dim
    values = given + head * width + column
    bias, fading, share = tl.load(dt_bias + head), tl.load(rate + head), tl.load(direct + head)
    source = (tl.load(sources + piece) * heads + head) * (size * width)
    state = tl.load(states + source + at, mask=both, other=0.0)
    for token in range(tl.load(starts + piece), tl.load(ends + piece)):
        key = tl.load(shared + token * channels, mask=inside, other=0.0)
        query = tl.load(shared + token * channels + groups * size, mask=inside, other=0.0)
        value = tl.load(values + token * channels, mask=there, other=0.0)
        step = _softplus(tl.load(steps + token * stride + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, least), most)
        state = state * tl.exp(step * fading) + key[:, None] * (value * step)[None, :]
        found = tl.sum(state * query[:, None], 0) + value * share
        tl.store(out + (token * heads + head) * width + column, found, mask=there)
    target = (tl.load(targets + piece) * heads + head) * (size * width)
    tl.store(states + target + at, state, mask=both)


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
