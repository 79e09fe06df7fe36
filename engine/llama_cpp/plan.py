"""How many sequences a context has, and how long they are: the memory is divided among them once and for all."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from ...schemas.errors import ConfigurationError
from ..planning.sizing import SizedConfig, cache_of_model

_MOST_SEQUENCES = 256  # of a context: LLAMA_MAX_SEQ in llama.cpp
_UNIT = 256  # tokens: llama.cpp rounds the length of sequences up to a multiple
_ROWS = 4  # choices that run together, even if the whole context then does not fit for each


class Plan(NamedTuple):
    """`rows` choices run together. `length` is in tokens; `memory` in bytes, of all sequences.

    There are two sequences at least: a lone token may need a neighbour to have the same bits.
    """

    rows: int
    num_sequences: int
    length: int
    memory: int


def plan_sequences(config: SizedConfig, rows: int | None, context_length: int) -> Plan:
    """Divide `kv_cache_memory` among `rows` choices, if the configuration gave that number.

    Otherwise as many run together as fit with the whole context, but at least four. Raises `ConfigurationError`.
    """
    if rows is not None and rows > _MOST_SEQUENCES:
        raise ConfigurationError([f"max_batch_size={rows}: llama.cpp runs at most {_MOST_SEQUENCES}; set no more"])
    lengths = range(_UNIT, context_length + _UNIT, _UNIT)
    sizes = cache_of_model(config, lengths, _UNIT)
    if rows is None:
        rows = min(config.max_batch_size, _MOST_SEQUENCES, max(_ROWS, config.kv_cache_memory // sizes[-1]))
    num_sequences = max(rows, 2)
    fitting = bisect_right(sizes, config.kv_cache_memory // num_sequences)
    if not fitting:
        raise ConfigurationError(
            [
                f"kv_cache_memory={config.kv_cache_memory}: {num_sequences} sequences of {_UNIT} tokens take "
                f"{num_sequences * sizes[0]} bytes; set at least that, or a smaller max_batch_size"
            ]
        )
    return Plan(rows, num_sequences, lengths[fitting - 1], num_sequences * sizes[fitting - 1])
