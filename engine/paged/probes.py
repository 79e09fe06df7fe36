"""The short prompts with which a runner tries a model when it loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...schemas.params import GenerationParams
from ..request import EngineRequest
from ..vision.tower import LanguageModel, Probe, Vision
from .packing import Segment
from .verdicts import Verdict

SPLIT, ALONE, STRIDE, BLOCKS = 5, 8, 7, 6
TOLERANCE = 1e-3  # for results in float32


class ImageProbe(NamedTuple):
    """Some text, and a second request with an image; `logits` [1, V] are those that its last token should have."""

    segments: list[Segment]
    num_blocks: int
    logits: Tensor


def stride_of(context_length: int) -> int:
    """How far apart the probes' tokens are said to be: up to the end of the context, where some models attend in
    another way."""
    return max(STRIDE, context_length // (SPLIT + ALONE))


def probe_ids(vocabulary: int, device: torch.device) -> Tensor:
    return torch.arange(1, SPLIT + ALONE + 1, device=device) * 7919 % vocabulary


def probes(ids: Sequence[int], num_groups: int) -> list[Segment]:
    """Two requests; the logits of the second are wanted."""
    first, second = [[block] * num_groups for block in ([0], [1])]
    return [Segment(ids[:SPLIT], 0, first, False), Segment(ids[SPLIT:], 0, second, True)]


def probes_apart(ids: Sequence[int], num_groups: int) -> list[Segment]:
    """One more request, token by token at distant positions, in the blocks after those of `probes`."""
    tables = [list(range(2, BLOCKS))] * num_groups
    return [Segment([id], index * STRIDE, tables, True) for index, id in enumerate(ids[:ALONE])]


@torch.inference_mode()
def look(model: LanguageModel, ids: Tensor, known: Verdict | None) -> Probe | None:
    """What transformers' own layers make of a picture between some text, as long as none of them is replaced; None for
    a model that is `known`, and one that takes text alone, of which a text is tried."""
    from ..vision.blind import BlindModel  # transformers takes seconds to import
    from .state.layers import without_advice

    if isinstance(model, BlindModel):
        with without_advice():
            model.check(ids)
        return None
    if known is not None:
        if model.vision is not None and known.pauses:
            model.vision.pause()
        return None
    assert model.vision is not None
    with without_advice():
        return model.vision.probe(ids.tolist(), model.logits)


def image_probe(vision: Vision, probe: Probe, ids: Sequence[int], num_groups: int, block_size: int) -> ImageProbe:
    """How to compute what transformers' own code has made of a picture, a `probe` of `vision`."""
    request = EngineRequest("", tuple(probe.ids), GenerationParams(), seed=0, images=(probe.image,))
    layout = vision.layout(request)
    assert layout is not None
    place = layout.place(0, len(probe.ids))
    num_blocks = 1 - (-len(probe.ids) // block_size)
    tables = [list(range(1, num_blocks))] * num_groups
    seen = Segment(probe.ids, 0, tables, True, False, None, None, *place)
    return ImageProbe([probes(ids, num_groups)[0], seen], num_blocks, probe.logits)
