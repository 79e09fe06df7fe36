"""Write a model in another basis of its residual stream: the same answers, from other weights.

    python deploy/rotation.py MODEL OUT [--seed 0] [--dtype bfloat16]
    penstock bench quality OUT --quantization none,int8,int4

Multiplies all that adds to the residual stream by a random orthogonal matrix, and all that reads it by the inverse, and
folds the gains of the norms into the readers, so that tied embeddings become two. In exact arithmetic that changes
nothing, and in float32 next to nothing: the script says how much. But a weight that was on a grid, as those of a
dequantised file are, no longer is, so that rounding it again shows what a format loses. MODEL is a directory in the
safetensors format, of a plain decoder with RMSNorm before attention and before the MLP: llama, mistral, qwen2 or qwen3.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

KINDS = ("llama", "mistral", "qwen2", "qwen3")
READERS = {  # by the norm before them
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
EMBEDDING, LAST_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def rotate(weights: dict[str, Tensor], layers: int, basis: Tensor) -> dict[str, Tensor]:
    """The weights of the same function whose residual stream is multiplied by `basis` [H, H], in float64."""
    found = {name: weight.double() for name, weight in weights.items()}

    def read(names: list[str], norm: str) -> None:
        for name in names:
            found[name] = (found[name] * found[norm]) @ basis  # [outputs, H]
        found[norm] = torch.ones_like(found[norm])

    found.setdefault(HEAD, found[EMBEDDING])
    read([HEAD], LAST_NORM)
    found[EMBEDDING] = found[EMBEDDING] @ basis
    for layer in (f"model.layers.{number}." for number in range(layers)):
        for norm, readers in READERS.items():
            read([f"{layer}{reader}.weight" for reader in readers], f"{layer}{norm}.weight")
        for name in (f"{layer}{writer}.{part}" for writer in WRITERS for part in ("weight", "bias")):
            if name in found:
                found[name] = basis.T @ found[name]  # [H, inputs] or [H]
    return found


def random_basis(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix [size, size] in float64, all directions being equally likely."""
    normal = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, r = torch.linalg.qr(normal)
    basis: Tensor = q * r.diagonal().sign()
    return basis


@torch.inference_mode()
def largest_difference(first: Path, second: Path) -> float:
    """Of the logits of two models in float32 after the same random tokens."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (first, second)]
    ids = torch.randint(models[0].config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    one, other = (model(ids).logits for model in models)
    return float((one - other).abs().max())


def write(model: Path, out: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Replace the weights in `out`, with the other files of `model`."""
    out.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.is_file() and ".safetensors" not in file.suffixes and not file.name.endswith(".index.json"):
            shutil.copyfile(file, out / file.name)
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False}
    named = str(dtype).removeprefix("torch.")
    config |= {key: named for key in ("dtype", "torch_dtype") if key in config}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    rounded = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
    save_file(rounded, out / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a directory")
    parser.add_argument("out", type=Path, help="a directory, which is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of what is written")
    given = parser.parse_args()
    config = json.loads((given.model / "config.json").read_text())
    if (kind := config["model_type"]) not in KINDS:
        raise SystemExit(f"{given.model} is of the kind {kind}: must be {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if given.out.resolve() == given.model.resolve():
        raise SystemExit(f"{given.out} is the model itself: name another directory")
    weights = {name: one for file in given.model.glob("*.safetensors") for name, one in load_file(file).items()}
    rotated = rotate(weights, config["num_hidden_layers"], random_basis(config["hidden_size"], given.seed))
    write(given.model, given.out, rotated, torch.float32)
    difference = largest_difference(given.model, given.out)
    print(f"in float32 the logits of {given.out} differ from those of {given.model} by at most {difference:.6f}")
    if given.dtype != "float32":
        write(given.model, given.out, rotated, getattr(torch, given.dtype))


if __name__ == "__main__":
    main()
