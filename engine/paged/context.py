"""How long a request may be: as long as rotations stay valid, and tokens attend as the engine knows it."""

from __future__ import annotations

import logging
from pathlib import Path

from ...schemas.errors import ConfigurationError
from ..config import EngineConfig
from ..models import read_config
from ..plain.config import PlainConfig

_log = logging.getLogger(__name__)


def steady_length(config: EngineConfig, path: Path, length: int) -> int:
    """The context length up to which a token's rotation depends only on its position, and tokens see all before them.

    Some models rotate all tokens of a longer choice differently, which would invalidate the cached keys. Llama 4
    attends within chunks, and scales queries by their positions from some position on.
    Raises `ConfigurationError` if the configuration asks for more.
    """
    if PlainConfig.of(read_config(path)) is not None:
        return length
    from ..loading import load_config  # it imports transformers, which takes seconds

    steady = load_config(path).get_text_config()
    if "chunked_attention" in (getattr(steady, "layer_types", None) or ()):
        chunk = min(steady.attention_chunk_size, steady.floor_scale - 1)
        return _cut(config, length, chunk, "attends within chunks of tokens, which is not supported")
    rope = getattr(steady, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("longrope", "dynamic"):
        return length
    original = rope.get("original_max_position_embeddings") or steady.max_position_embeddings
    return _cut(config, length, int(original), "changes the rotations of all keys, which invalidates cached ones")


def _cut(config: EngineConfig, length: int, most: int, what: str) -> int:
    """`length`, or `most` if that is less, beyond which the model does `what`."""
    if length <= most:
        return length
    if config.max_sequence_length is not None:
        raise ConfigurationError(
            [
                f"max_sequence_length={length}: beyond {most} tokens this model {what}; "
                f"set at most {most}, or use --backend hf"
            ]
        )
    _log.warning("context cut from %d to %d tokens: only --backend hf supports more", length, most)
    return most
