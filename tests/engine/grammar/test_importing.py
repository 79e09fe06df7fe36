"""The process that checks grammars reads a vocabulary as xgrammar does with transformers, without it and torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers

from penstock.engine.models import BUNDLED, resolve_model
from penstock.engine.text.tokenizer import Tokenizer

# Prints what xgrammar made of each tokenizer, and what else is imported by then. The first argument says what of the
# tokenizers transformers itself has to make, as where their files are not the whole of them.
SCRIPT = """
import json, sys
from pathlib import Path
from penstock.engine.grammar.importing import for_xgrammar, import_alone
import_alone()
import xgrammar
from penstock.engine.text import tokenizer_files
from penstock.engine.text.tokenizer import Tokenizer
if sys.argv[1] == "made":
    tokenizer_files._is_whole = lambda own, text: False
    tokenizer_files._read = lambda file: None
seen = []
for path in sys.argv[2:]:
    tokenizer = Tokenizer(Path(path))
    info = xgrammar.TokenizerInfo.from_huggingface(
        for_xgrammar(tokenizer), vocab_size=tokenizer.vocabulary_size, stop_token_ids=list(tokenizer.eos_token_ids)
    )
    seen.append(info.serialize_json())
imported = [name for name in ("torch", "transformers") if name in sys.modules]
import torch, transformers
print(json.dumps([imported, seen, torch.zeros(2).tolist(), transformers.PreTrainedTokenizerFast.__module__]))
"""


@pytest.fixture(scope="module")
def byte_fallback(model_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vocabulary as SentencePiece makes them."""
    directory = Path(shutil.copytree(model_directory("llama"), tmp_path_factory.mktemp("models") / "fallback"))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    own = Fast(
        models.BPE({text: id for id, text in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    own.add_special_tokens(["<unk>", "<s>", "</s>"])
    own.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("how", ["kept", "made"])
def test_a_vocabulary_is_read_as_with_transformers(
    how: str, byte_fallback: Path, model_directory: Callable[[str], Path]
) -> None:
    import xgrammar

    paths = [resolve_model(BUNDLED), model_directory("llama"), byte_fallback]
    expected = []
    for path in paths:
        tokenizer = Tokenizer(path)  # kept from now on
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer.huggingface, vocab_size=tokenizer.vocabulary_size, stop_token_ids=list(tokenizer.eos_token_ids)
        )
        expected.append(info.serialize_json())
    assert len({json.loads(text)["vocab_type"] for text in expected}) == 2, "of both kinds"
    run = subprocess.run([sys.executable, "-c", SCRIPT, how, *map(str, paths)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    imported, seen, tensor, module = json.loads(run.stdout)
    assert seen == expected
    assert imported == ([] if how == "kept" else ["torch", "transformers"])
    assert tensor == [0, 0] and module.startswith("transformers."), "whoever needs them has them"
