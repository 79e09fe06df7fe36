"""Every architecture that GGUF files may hold, by the name that they have for it. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable

from .....schemas.errors import ModelLoadError
from ..file import Gguf
from ..keys import Keys
from .architecture import Architecture
from .delta_nets import DELTA_NETS
from .dense import DENSE
from .gemma import GEMMAS
from .granite import GRANITES
from .latent import LATENTS
from .mamba import MAMBAS
from .older import OLDER
from .recurrent import HYBRIDS
from .sparse import SPARSE


def architecture_of(gguf: Gguf) -> Architecture:
    """Raises `ModelLoadError` for one that is not supported."""
    name = gguf.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{gguf.path} has the architecture {name!r}, which is not supported in GGUF files; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}. Use the model's safetensors files instead"
        )
    found = ARCHITECTURES[name]
    return found if isinstance(found, Architecture) else found(Keys(gguf))


ARCHITECTURES: dict[str, Architecture | Callable[[Keys], Architecture]] = {
    **SPARSE,
    **DENSE,
    **DELTA_NETS,
    **GEMMAS,
    **GRANITES,
    **HYBRIDS,
    **LATENTS,
    **MAMBAS,
    **OLDER,
}
