"""What a tensor's numbers are multiplied by as a whole, which NVFP4 has beside its blocks. Needs no torch.

llama.cpp's converter writes it as a tensor of its own, `….scale` beside `….weight`, and one for activations,
`….input_scale`, which is left out of account. Beside weights of other types Gemma 4 has scales of its own. Source:
`_generate_nvfp4_tensors` in llama.cpp's `conversion/base.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ....schemas.errors import ModelLoadError
from .file import Gguf, GgufTensor

_OF_WEIGHTS, _OF_INPUTS = "scale", "input_scale"


def with_scales(gguf: Gguf) -> Gguf:
    """The file with the scales in the tensors that they belong to, and no others beside them.

    Raises `ModelLoadError` for a scale of another type or shape.
    """
    own = {"NVFP4"} if gguf.metadata.get("general.architecture") == "gemma4" else None
    found: dict[str, GgufTensor] = {}
    for name, tensor in gguf.tensors.items():
        stem, _, part = name.rpartition(".")
        beside = tensor if part == "weight" else gguf.tensors.get(f"{stem}.weight")
        if own and (beside is None or beside.type not in own):
            found[name] = tensor
            continue
        scale = gguf.tensors.get(f"{stem}.{_OF_WEIGHTS}")
        if part == "weight" and scale is not None:
            found[name] = tensor._replace(scale=_checked(gguf, tensor, scale))
        elif part not in (_OF_WEIGHTS, _OF_INPUTS) or f"{stem}.weight" not in gguf.tensors:
            found[name] = tensor
    return replace(gguf, tensors=found)


def _checked(gguf: Gguf, tensor: GgufTensor, scale: GgufTensor) -> GgufTensor:
    counts = {1, tensor.shape[0]} if len(tensor.shape) == 3 else {1}
    if scale.type != "F32" or len(scale.shape) != 1 or scale.shape[0] not in counts:
        raise ModelLoadError(
            f"{gguf.path}: {scale.name} has the type {scale.type} and the shape {list(scale.shape)}, which do not go "
            f"with those of {tensor.name}, {list(tensor.shape)}; convert the model again"
        )
    return scale
