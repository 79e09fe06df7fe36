"""The tokenizer, the template, and that a training run may be stopped and goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import corpus
import pytest
import torch
import transformers
from batches import batches, conversations
from export import export
from network import Network, Shape
from recipe import Phase, Recipe
from tokenizers import Tokenizer
from train import Trainer
from vocabulary import TAGS, Codec, train_tokenizer

SHAPE = Shape(400, 32, 32, 1, num_attention_heads=2, head_dim=16)
RECIPE = Recipe(phases=(Phase(2), Phase(4, prompt_weight=0.0, decay=2)), shape=SHAPE, batch_size=3, warmup=1)
library: Any = transformers  # most of it is not typed


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    codec = Codec()
    samples = (corpus.sample(0, index) for index in range(60))
    return train_tokenizer((codec.render(one.messages, one.tools) for one in samples), SHAPE.vocab_size)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained network, exported."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("nano") / "model"
    export(Network(SHAPE), tokenizer, directory)
    return directory


def test_every_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in ('He said "Zürich", 47 + 38\n\t{"a": [1, -2.5]} 東京 🙂', '<tool_call>\n{"name": "f"}\n</tool_call>'):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_word_is_the_same_token_after_a_space_and_a_quote(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("zebra").ids
    assert tokenizer.encode(" zebra").ids[1:] == word
    assert tokenizer.encode('"zebra').ids[1:] == word
    assert len(tokenizer.encode("4821").ids) == 4


def test_only_the_assistant_s_tokens_are_learnt(tokenizer: Tokenizer) -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": '{"a": 1}'},
    ]
    encoded = Codec(tokenizer).encode(corpus.Sample("chat", said))
    learnt = [token for token, own in zip(encoded.ids, encoded.said, strict=True) if own]
    assert tokenizer.decode(learnt, skip_special_tokens=False) == '{"a": 1}<|im_end|>'


def test_a_prompt_is_the_beginning_of_what_was_learnt(tokenizer: Tokenizer) -> None:
    codec = Codec(tokenizer)
    for skill in corpus.SKILLS:
        case = corpus.case(skill, 0, 0)
        prompt = codec.render(case.messages[:-1], case.tools, add_generation_prompt=True, enable_thinking=case.thinking)
        whole = codec.render(case.messages, case.tools)
        assert whole.startswith(prompt)
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        assert codec.encode(case).ids[: len(ids)] == ids


@pytest.mark.parametrize("skill", corpus.SKILLS)
def test_transformers_renders_what_was_trained(skill: str, model: Path) -> None:
    tokenizer = library.AutoTokenizer.from_pretrained(model)
    case = corpus.case(skill, 0, 0)
    for prompt in (False, True):
        rendered = tokenizer.apply_chat_template(
            case.messages, tools=case.tools, tokenize=False, add_generation_prompt=prompt, enable_thinking=case.thinking
        )
        switches = {"add_generation_prompt": prompt, "enable_thinking": case.thinking}
        assert rendered == Codec().render(case.messages, case.tools, **switches)


def test_transformers_computes_what_was_trained(model: Path) -> None:
    network = Network(SHAPE)
    exported = library.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    missing = network.load_state_dict(exported.state_dict(), strict=False)
    assert missing.unexpected_keys in ([], ["lm_head.weight"])
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        ours = network.logits(network.hidden(ids, torch.float32))
        torch.testing.assert_close(ours, exported(ids).logits, rtol=1e-4, atol=1e-4)


def test_tags_are_not_special(model: Path) -> None:
    tokenizer = library.AutoTokenizer.from_pretrained(model)
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert not any(added[tag] for tag in TAGS)
    assert added["<|im_end|>"]


def test_every_conversation_has_its_row(tokenizer: Tokenizer) -> None:
    codec = Codec(tokenizer)
    stack = batches(conversations(codec, 0, range(8), corpus.MIX, 1024), 2000, 0.2, 0)
    assert {round(weight, 1) for batch in stack for weight in batch.weights.flatten().tolist()} == {0.0, 0.2, 1.0}
    assert all(batch.ids.shape[1] % 16 == 0 for batch in stack)
    assert sum(len(batch.ids) for batch in stack) == 8


def test_a_run_goes_on_where_it_was_stopped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole = Trainer(RECIPE, tokenizer)
    whole.run(4)
    first = Trainer(RECIPE, tokenizer)
    first.run(3)
    first.save(tmp_path / "checkpoint.pt")
    second = Trainer(RECIPE, tokenizer)
    second.load(tmp_path / "checkpoint.pt")
    second.run(4)
    for name, weight in whole.network.state_dict().items():
        assert torch.equal(weight, second.network.state_dict()[name]), name


def test_rates_rise_stay_and_fall_in_every_phase() -> None:
    recipe = Recipe(phases=(Phase(20), Phase(100, decay=50), Phase(120, peak=0.5, decay=10)), warmup=10)
    assert [recipe.rate(step) for step in (0, 9, 20, 49, 75, 99)] == [0.1, 1.0, 1.0, 1.0, 0.5, 0.02]
    assert [recipe.rate(step) for step in (100, 109, 115, 119)] == [0.05, 0.5, 0.25, 0.05]
