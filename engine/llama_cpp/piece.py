"""What a call of llama.cpp computes of a sequence. Needs no llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class Piece(NamedTuple):
    """Consecutive tokens of one sequence, the first at `position`; `wanted` asks for the logits of each of them."""

    sequence: int
    position: int
    tokens: Sequence[int]
    wanted: bool = False
