"""How many running states and images a cache has room for, beside keys and values of tokens."""

from __future__ import annotations

from typing import NamedTuple

from ....schemas.errors import ConfigurationError
from ...planning.model_files import LEAST_STATES, STATES
from ...planning.sizing import SizedConfig
from ..runner import Runner
from .slots import StateSlots


class Room(NamedTuple):
    """The slots, None if the model keeps no states, and the bytes that are left for keys and values of tokens."""

    slots: StateSlots | None
    left: int


def make_room(config: SizedConfig, runner: Runner) -> Room:
    """Give the running states their part of `kv_cache_memory`: `STATES` for each row, in at most half of it; and images
    theirs, if layers attend to them.

    Raises `ConfigurationError` if not even those that a full batch needs fit, and for settings that need blocks alone.
    """
    memory, rows = int(config.kv_cache_memory), config.max_batch_size
    if runner.vision is not None:
        memory = runner.vision.reserve(memory, rows)
    if not runner.states:
        return Room(None, memory)
    if config.prefix_cache_dir is not None:
        raise ConfigurationError(
            [
                f"prefix_cache_dir={str(config.prefix_cache_dir)!r}: {config.model} keeps running states, which the "
                "prefix cache on disk does not hold; leave it out"
            ]
        )
    size = runner.states.nbytes(runner.dtype)
    least = LEAST_STATES * rows
    if memory < least * size:
        fitting = memory // (LEAST_STATES * size)
        hint = f"or max_batch_size to at most {fitting}" if fitting else "which one request needs at least"
        raise ConfigurationError(
            [
                f"kv_cache_memory={memory}: the running states of max_batch_size={rows} requests take {least * size} "
                f"bytes; set it above {least * size if fitting else LEAST_STATES * size}, {hint}"
            ]
        )
    num_slots = max(least, min(STATES * rows, memory // 2 // size))
    runner.states.allocate(num_slots, rows, runner.dtype)
    return Room(StateSlots(num_slots, runner.block_size), memory - num_slots * size)
