"""Splits a memory budget for keys and values into blocks for each group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....schemas.errors import ConfigurationError
from ...cpu.machine import memory_of_machine
from ...planning.model_files import Weights
from .blocks import GroupSpec
from .kv_cache import LayerSpec


def plan_blocks(
    memory: int,
    groups: Sequence[tuple[int | None, int]],
    specs: Sequence[LayerSpec],
    *,
    token_block: int,
    number_size: int,
    max_batch_size: int,
    max_step_tokens: int,
) -> list[GroupSpec]:
    """Split `memory` bytes among `groups` of (window, heads).

    A sliding group gets twice what a full batch sees at once, so that some prefixes stay cached; the layers with full
    attention get the rest. Raises `ConfigurationError` if not even one block of each fits.
    """
    sizes = [
        token_block * number_size * sum(spec.numbers for spec in specs if (spec.window, spec.num_heads) == group)
        for group in groups
    ]
    even = memory // sum(sizes)
    if even < 1:
        raise ConfigurationError(
            [f"kv_cache_memory={memory}: one block of {token_block} tokens takes {sum(sizes)} bytes; set at least that"]
        )
    counts = [even] * len(groups)
    full = [index for index, (window, _) in enumerate(groups) if window is None]
    if full:
        for index, (window, _) in enumerate(groups):
            if window is not None:
                seen = (window + max_step_tokens) // token_block + 2
                counts[index] = min(even, 2 * max_batch_size * seen)
        left = memory - sum(counts[index] * sizes[index] for index in range(len(groups)) if index not in full)
        for index in full:
            counts[index] = left // sum(sizes[index] for index in full)
    return [GroupSpec(count, window) for count, (window, _) in zip(counts, groups, strict=True)]


def check_memory(memory: int, weights: Weights, model: str, device: torch.device) -> None:
    """Raise `ConfigurationError` if the device has no room for the weights, or none for `memory` bytes besides."""
    if device.type == "cuda":
        total, owner = torch.cuda.get_device_properties(device).total_memory, str(device)
    else:
        total, owner = memory_of_machine().total, "this machine"
    if (most := max(weights.read, weights.kept)) > total:
        raise ConfigurationError(
            [
                f"the weights of {model} take {most} bytes while they load, and {owner} has {total} bytes of "
                "memory; choose a smaller model or a machine with more memory"
            ]
        )
    if memory + weights.kept > total:
        raise ConfigurationError(
            [
                f"kv_cache_memory={memory}: {owner} has {total} bytes of memory, and the weights take {weights.kept}; "
                f"set at most {total - weights.kept}"
            ]
        )
