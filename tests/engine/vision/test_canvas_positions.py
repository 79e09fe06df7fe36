"""Where MiniCPM-V 4.7's images lie among the positions of a prompt, against transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

from penstock.engine import EngineRequest, GenerationParams
from penstock.engine.vision.canvas_positions import canvas_positions
from penstock.engine.vision.families.canvas import Canvas
from penstock.engine.vision.images import PromptImage
from penstock.engine.vision.layout import ImageLayout
from penstock.schemas.errors import ModelLoadError

IMAGE, SLICE, SLICE_END, START, END, LINE = range(1, 7)
CONFIG: dict[str, Any] = {
    "slice_start_id": SLICE,
    "slice_end_id": SLICE_END,
    "image_start_id": START,
    "image_end_id": END,
    "newline_id": LINE,
}
Size = tuple[int, int]
sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))
shown = st.tuples(
    st.lists(st.sampled_from([9, 8, LINE]), max_size=4), st.integers(0, 3), st.integers(1, 3), sizes, sizes
)


def written(parts: list[Any], merge: int) -> tuple[list[int], list[tuple[int, int, list[Size]]]]:
    """A prompt's ids, and of each image the offset, the length and the sizes in patches."""
    ids, images = [], []
    for text, rows, columns, whole, each in parts:
        ids += [*text, START]
        begin = len(ids)
        ids += [*[IMAGE] * (whole[0] * whole[1]), END]
        for row in range(rows):
            ids += [LINE] * (row > 0) + [SLICE, *[IMAGE] * (each[0] * each[1]), SLICE_END] * columns
        found = [whole, *[each] * (rows * columns)]
        last = len(ids) - 2
        images.append((begin, last - begin + 1, [(height * merge, width * merge) for height, width in found]))
    return ids, images


def expected(ids: list[int], sizes: list[Size], mode: str) -> tuple[list[list[int]], int]:
    model: Any = SimpleNamespace(config=SimpleNamespace(downsample_mode=mode, **CONFIG))
    for name in ("_group_visual_frames", "get_vision_position_ids", "get_rope_index"):
        setattr(model, name, getattr(MiniCPMV4_7Model, name).__get__(model))
    model._frame_end_idx = MiniCPMV4_7Model._frame_end_idx
    tokens: Any = torch.tensor([ids])
    found, deltas = model.get_rope_index(tokens, (tokens == IMAGE).int(), target_sizes=torch.tensor(sizes))
    return found[:, 0].tolist(), int(deltas[0, 0])


@pytest.mark.parametrize(("mode", "merge"), [("16x", 4), ("4x", 2)])
@given(parts=st.lists(shown, min_size=1, max_size=4), behind=st.lists(st.sampled_from([9, LINE]), max_size=5))
def test_positions_are_those_of_transformers(mode: str, merge: int, parts: list[Any], behind: list[int]) -> None:
    """Images with and without slices, text, ends of lines, or nothing between them."""
    ids, images = written(parts, merge)
    ids += behind
    whole = [size for *_, found in images for size in found]
    wanted, delta = expected(ids, whole, mode)
    canvas = Canvas.of(CONFIG | {"downsample_mode": mode})
    assert canvas_positions(np.array(ids), IMAGE, whole, canvas).tolist() == wanted
    shown = [
        PromptImage("0" * 64, offset - 1, length + 1, (0, 0, *(number for size in found for number in size)))
        for offset, length, found in images
    ]
    request = EngineRequest("r", tuple(ids), GenerationParams(), seed=0, images=tuple(shown))
    layout = ImageLayout.of(request, IMAGE, 0, canvas=canvas)
    middle = len(ids) // 2
    found = []
    for start, end in ((0, middle), (middle, len(ids) + 3)):
        if start < end:
            place = layout.place(start, end)
            plain = np.tile(np.arange(start, end) + place.shift, (3, 1))
            found.append(plain if place.positions is None else place.positions)
    later = np.tile(np.arange(len(ids), len(ids) + 3) + delta, (3, 1))
    assert np.concatenate(found, 1).tolist() == np.concatenate([wanted, later], 1).tolist()


@pytest.mark.parametrize(("count", "most"), [(1, 9), (4, 11), (15, 30), (15, 116)])
def test_a_whole_image_is_spread_over_its_slices_as_torch_rounds(count: int, most: int) -> None:
    ids = [START, *[IMAGE] * count, END, SLICE, *[IMAGE] * most, SLICE_END]
    sizes = [(4, 4 * count), (4, 4 * most)]
    found = canvas_positions(np.array(ids), IMAGE, sizes, Canvas.of(CONFIG))
    assert found.tolist() == expected(ids, sizes, "16x")[0]


def test_marks_that_a_config_leaves_out_are_named() -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json does not give slice_end_id, newline_id; the model's files"):
        Canvas.of(CONFIG | {"slice_end_id": None, "newline_id": None})
