"""How long a request may be: as long as rotations stay valid."""

from __future__ import annotations

import logging
from pathlib import Path

from ...schemas.errors import ConfigurationError
from ..config import EngineConfig
from ..models import read_config
from ..plain.config import PlainConfig

_log = logging.getLogger(__name__)


def steady_length(config: EngineConfig, path: Path, length: int) -> int:
    """The context length up to which a token's rotation depends only on its position.

    Some models rotate all tokens of a longer choice differently, which would invalidate the cached keys.
    Raises `ConfigurationError` if the configuration asks for more.
    """
    if PlainConfig.of(read_config(path)) is not None:
        return length
    from ..loading import load_config  # it imports transformers, which takes seconds

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
