"""How long a request may be: as long as rotations stay valid, and as the cache has room."""

from __future__ import annotations

import logging
from pathlib import Path

from ...schemas.errors import ConfigurationError
from ..config import EngineConfig
from ..loading import load_config
from ..sizing import SizedConfig

_log = logging.getLogger(__name__)


def steady_length(config: EngineConfig, path: Path, length: int) -> int:
    """The context length up to which a token's rotation depends only on its position.

    Some models rotate all tokens of a longer choice differently, which would invalidate the cached keys.
    Raises `ConfigurationError` if the configuration asks for more.
    """
    steady = load_config(path).get_text_config()
    rope = getattr(steady, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("longrope", "dynamic"):
        return length
    original = rope.get("original_max_position_embeddings") or steady.max_position_embeddings
    if length <= original:
        return length
    if config.max_sequence_length is not None:
        raise ConfigurationError(
            [
                f"max_sequence_length={length}: beyond {original} tokens this model changes the rotations of all "
                f"keys, which invalidates cached ones; set at most {original}, or use --backend hf"
            ]
        )
    _log.warning("context cut from %d to %d tokens: only --backend hf supports more", length, original)
    return int(original)


def fitting_length(config: SizedConfig, length: int, capacity: int) -> int:
    """The model's context length, or as much of it as one request can have within `kv_cache_memory`.

    `capacity` is in tokens. Raises `ConfigurationError` if the configuration asks for more.
    """
    if length <= capacity:
        return length
    if config.max_sequence_length is not None:
        raise ConfigurationError(
            [
                f"kv_cache_memory={config.kv_cache_memory}: holds {capacity} tokens of one request, fewer than "
                f"max_sequence_length={length}; set about {config.kv_cache_memory * length // capacity}"
            ]
        )
    _log.warning("context cut from %d to %d tokens by kv_cache_memory", length, capacity)
    return capacity
