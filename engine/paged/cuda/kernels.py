"""The Triton kernels of `PagedAttention`, documented there; scores are exponents of 2."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_KEYS = tl.constexpr(128)  # the least keys of a split


@triton.jit
def store(
    given, head_stride, token_stride, slots, pool, values, heads, head_dim, rows: tl.constexpr, padded: tl.constexpr
):
    """Store one token's keys and values in its slot."""
    token = tl.program_id(0)
    row, dim = tl.arange(0, rows)[:, None], tl.arange(0, padded)[None, :]
    inside = (row < 2 * heads) & (dim < head_dim)
    numbers = tl.load(given + row * head_stride + token * token_stride + dim, mask=inside)
    to = tl.load(slots + token) * (heads * head_dim) + (row % heads) * head_dim + dim
    tl.store(tl.where(row < heads, pool + to, values + to), numbers, mask=inside)


@triton.jit
def _attend(
    q,
    pools,
    slot,
    head,
    dim,
    scaling,
    softcap: tl.constexpr,
    there,
    seen,
    most,
    total,
    sums,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
):
    """Add the keys and values in those slots that are `there` to the running results of queries [R, D]: the largest
    score [R], the sum of weights [R], the sum of weighted values [R, D]. `seen` [R, K] may mask some keys."""
    at = slot[:, None] * (heads * head_dim) + head * head_dim + dim[None, :]
    inside = (dim < head_dim)[None, :] if there is None else there[:, None] & (dim < head_dim)[None, :]
    k = tl.load(pools[0] + at, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if softcap is not None:  # softcap · tanh(score / softcap)
        scores = (2 * tl.sigmoid(scores * (2 / (softcap * LOG2_E))) - 1) * (softcap * LOG2_E)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    greatest = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(greatest == float("-inf"), 0.0, greatest)  # a query may have seen no key yet
    shrink = tl.exp2(most - base)
    weights = tl.exp2(scores - base[:, None])
    v = tl.load(pools[1] + at, mask=inside, other=0.0)
    sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return greatest, total * shrink + tl.sum(weights, 1), sums


@triton.jit
def _split(length, window: tl.constexpr, splits: tl.constexpr):
    """The first key that a decoding row attends to, and the number of keys in each of its splits."""
    first = length * 0 if window is None else tl.maximum(length - window, 0)
    return first, tl.maximum(tl.cdiv(length - first, splits), LEAST_KEYS)


@triton.jit(do_not_specialize=["width"])  # else a longer table might be compiled for
def decode(
    query,
    head_stride,
    token_stride,
    keys,
    values,
    lengths,
    tables,
    width,
    mixed,
    sinks,
    scaling,
    softcap: tl.constexpr,
    window: tl.constexpr,
    parts,
    heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    splits: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Attend with the queries of one token that share a head's keys, over one split of them; stores the result, or with
    several splits a part of it."""
    token, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + token)
    first, count = _split(length, window, splits)
    start = first + split * count
    stop = tl.minimum(start + count, length)
    row, dim = tl.arange(0, rows), tl.arange(0, padded)
    of_query = (row < group)[:, None] & (dim < head_dim)[None, :]
    number = head * group + row
    q = tl.load(query + number[:, None] * head_stride + token * token_stride + dim[None, :], mask=of_query, other=0.0)
    most = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    sums = tl.zeros((rows, padded), tl.float32)
    for at in range(start, stop, columns):
        key = at + tl.arange(0, columns)
        page = tl.load(tables + token * width + key // block, mask=key < stop, other=0).to(tl.int64)
        slot = page * block + key % block
        there = key < stop
        most, total, sums = _attend(
            q,
            (keys, values),
            slot,
            head,
            dim,
            scaling,
            softcap,
            there,
            there[None, :],
            most,
            total,
            sums,
            heads,
            head_dim,
        )
    if splits == 1:
        if sinks is not None:
            total += tl.exp2(tl.load(sinks + number, mask=row < group, other=0.0).to(tl.float32) * LOG2_E - most)
        to = mixed + (token * heads * group + number[:, None]) * head_dim + dim[None, :]
        tl.store(to, (sums / total[:, None]).to(mixed.dtype.element_ty), mask=of_query)
    elif start < length:
        to = parts + ((token * heads * group + number) * splits + split) * (padded + 2)
        tl.store(to[:, None] + dim[None, :], sums, mask=of_query)
        tl.store(to + padded, most, mask=row < group)
        tl.store(to + padded + 1, total, mask=row < group)


@triton.jit
def combine(
    parts,
    lengths,
    mixed,
    sinks,
    window: tl.constexpr,
    head_dim: tl.constexpr,
    padded: tl.constexpr,
    splits: tl.constexpr,
):
    """Combine the splits of one query."""
    token, number = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + token)
    first, count = _split(length, window, splits)
    split, dim = tl.arange(0, splits), tl.arange(0, padded)
    used = first + split * count < length
    query = token * tl.num_programs(1) + number
    begin = parts + (query * splits + split) * (padded + 2)
    most = tl.load(begin + padded, mask=used, other=float("-inf"))
    greatest = tl.max(most, 0)
    shares = tl.exp2(most - greatest)
    total = tl.sum(tl.load(begin + padded + 1, mask=used, other=0.0) * shares, 0)
    inside = used[:, None] & (dim < head_dim)[None, :]
    sums = tl.sum(tl.load(begin[:, None] + dim[None, :], mask=inside, other=0.0) * shares[:, None], 0)
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + number).to(tl.float32) * LOG2_E - greatest)
    tl.store(mixed + query * head_dim + dim, (sums / total).to(mixed.dtype.element_ty), mask=dim < head_dim)


@triton.jit(do_not_specialize=["width"])  # else a longer table might be compiled for
def prefill(
    query,
    head_stride,
    token_stride,
    keys,
    values,
    lengths,
    tables,
    width,
    mixed,
    sinks,
    scaling,
    softcap: tl.constexpr,
    window: tl.constexpr,
    bounds,
    tiles,
    ends,
    heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Attend with a tile of one sequence's queries, for one head. Only tiles of keys on the diagonal are masked, and
    those behind it that queries with `ends` see."""
    tile, number = tl.program_id(0), tl.program_id(1)
    head = number // group
    sequence, begin = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    end, length = tl.load(bounds + sequence + 1), tl.load(lengths + sequence)
    token, dim = begin + tl.arange(0, rows), tl.arange(0, padded)
    of_query = (token < end)[:, None] & (dim < head_dim)[None, :]
    at = query + number * head_stride + token.to(tl.int64)[:, None] * token_stride + dim[None, :]
    q = tl.load(at, mask=of_query, other=0.0)
    position = length - end + token
    earliest = length - end + begin
    last = position
    stop = tl.minimum(earliest + rows, length)
    if ends is not None:
        last = tl.load(ends + token, mask=token < end, other=0) - 1
        stop = tl.max(last, 0) + 1
    most = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    sums = tl.zeros((rows, padded), tl.float32)
    start = earliest * 0 if window is None else tl.maximum(earliest - window + 1, 0) // columns * columns
    plain = start if window is not None else earliest // columns * columns  # before it every query sees every key
    for at in range(start, plain, columns):
        key = at + tl.arange(0, columns)
        slot = tl.load(tables + sequence * width + key // block).to(tl.int64) * block + key % block
        most, total, sums = _attend(
            q, (keys, values), slot, head, dim, scaling, softcap, None, None, most, total, sums, heads, head_dim
        )
    for at in range(plain, stop, columns):
        key = at + tl.arange(0, columns)
        page = tl.load(tables + sequence * width + key // block, mask=key < stop, other=0).to(tl.int64)
        slot = page * block + key % block
        seen = key[None, :] <= last[:, None]
        if window is not None:
            seen = seen & (key[None, :] > position[:, None] - window)
        most, total, sums = _attend(
            q, (keys, values), slot, head, dim, scaling, softcap, key < stop, seen, most, total, sums, heads, head_dim
        )
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + number).to(tl.float32) * LOG2_E - most)
    total = tl.where(token < end, total, 1)  # rows past the tile's end may have seen no key
    to = mixed + (token.to(tl.int64)[:, None] * heads * group + number) * head_dim + dim[None, :]
    tl.store(to, (sums / total[:, None]).to(mixed.dtype.element_ty), mask=of_query)
