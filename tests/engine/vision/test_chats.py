"""Chats with images, against the prompts and inputs that transformers' own processors make of them."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from vision_models import FAMILIES, make_vision_model, picture

from penstock.engine.preparing.prepare import load_preparer
from penstock.engine.vision.processor import VisionProcessor
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.openai.completions import ChatRequest, parse_request

# What each processor is told of its tiny model.
TOLD: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "granite_docling": ("GraniteDoclingProcessor", {"image_seq_len": 1}, {}),
    "qianfan_ocr": (
        "QianfanOCRProcessor",
        {"image_seq_length": 4},
        {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"},
    ),
    "deepseek_vl": ("DeepseekVLProcessor", {"num_image_tokens": 16}, {"image_token": "<image_placeholder>"}),
    "deepseek_vl_hybrid": (
        "DeepseekVLHybridProcessor",
        {"num_image_tokens": 16},
        {"image_token": "<image_placeholder>"},
    ),
    "deepseek_ocr2": ("DeepseekOcr2Processor", {"patch_size": 1}, {}),
    "janus": (
        "JanusProcessor",
        {"num_image_tokens": 16, "use_default_system_prompt": True},
        {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "paligemma": ("PaliGemmaProcessor", {}, {"image_token": "<image>", "bos_token": "<bos>"}),
    "gemma3n": (
        "Gemma3nProcessor",
        {"image_seq_length": 16},
        {
            **{"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
            **{"audio_token": "<|endoftext|>", "boa_token": "<|endoftext|>", "eoa_token": "<|endoftext|>"},
        },
    ),
    "hunyuan_vl": (
        "HunYuanVLProcessor",
        {},
        {
            "image_token": "<\uff5chy_place\u2581holder\u2581no\u2581102\uff5c>",
            "image_start_token": "<\uff5chy_place\u2581holder\u2581no\u2581100\uff5c>",
            "image_end_token": "<\uff5chy_place\u2581holder\u2581no\u2581101\uff5c>",
            **{"pad_token": "<|endoftext|>"},
        },
    ),
    "idefics2": ("Idefics2Processor", {"image_seq_len": 3}, {}),
    "mllama": ("MllamaProcessor", {}, {"bos_token": "<|im_start|>"}),
    "ovis2": ("Ovis2Processor", {"image_seq_length": 4}, {}),
}
WORDS = "Which of them is larger?"


def chat(files: Sequence[bytes], words: str) -> ChatRequest:
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts += [{"type": "text", "text": words}] if words else []
    request = parse_request("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert isinstance(request, ChatRequest)
    return request


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("chats")
    return cache(lambda family: make_vision_model(root / family, family))


def test_a_got_ocr_without_a_template_takes_pages(
    directory_of: Callable[[str], Path],
) -> None:
    """As transformers' processor does of a page alone."""
    import transformers

    directory, library = directory_of("got_ocr2"), transformers  # type: Path, Any
    (directory / "chat_template.jinja").unlink()
    images = library.AutoImageProcessor.from_pretrained(directory, backend="pil")
    tokenizer = library.AutoTokenizer.from_pretrained(directory)
    theirs = library.GotOcr2Processor(images, tokenizer)
    wanted = theirs(Image.open(io.BytesIO(picture())), num_image_tokens=9, return_tensors="pt")
    prepared = load_preparer(str(directory), "paged", "none", "none").prepare(
        chat([picture()], ""), context_length=3000, name="m", seed=1
    )
    assert tokenizer.decode(prepared.prompts[0]) == tokenizer.decode(wanted["input_ids"][0])
    own = VisionProcessor.of(directory)
    assert own is not None
    assert torch.equal(torch.from_numpy(own.inputs(prepared.images[0])["pixel_values"]), wanted["pixel_values"])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of PaliGemma's processor
@pytest.mark.parametrize("family", TOLD)
def test_a_chat_becomes_the_prompt_of_transformers_own_processor(
    family: str, directory_of: Callable[[str], Path]
) -> None:
    """With one image, and with two beside each other; the numbers that the tower gets are the same, too."""
    import transformers

    directory, library = directory_of(family), transformers  # type: Path, Any
    name, told, tokens = TOLD[family]
    tokenizer = library.AutoTokenizer.from_pretrained(directory)
    for attribute, token in tokens.items():
        setattr(tokenizer, attribute, token)
        setattr(tokenizer, f"{attribute}_id", tokenizer.convert_tokens_to_ids(token))
    images = library.AutoImageProcessor.from_pretrained(directory, backend="pil")
    hearing = [library.Gemma3nAudioFeatureExtractor()] if family == "gemma3n" else []
    theirs = getattr(library, name)(*hearing, images, tokenizer, **told)
    if "use_default_system_prompt" in told:
        (directory / "processor_config.json").write_text(json.dumps(told))
    preparer, own = load_preparer(str(directory), "paged", "none", "none"), VisionProcessor.of(directory)
    assert own is not None and {*FAMILIES[family][0]} <= {*tokenizer.get_vocab()}
    for files in ([picture()], [picture(80, 30, 1), picture(40, 90, 2)]):
        prepared = preparer.prepare(chat(files, WORDS), context_length=3000, name="m", seed=1)
        content = [*[{"type": "image"}] * len(files), {"type": "text", "text": WORDS}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        pictures = [Image.open(io.BytesIO(file)) for file in files]
        wanted = theirs(images=pictures, text=[text], return_tensors="pt", add_special_tokens=False)
        assert [*prepared.prompts[0]] == wanted["input_ids"][0].tolist()
        if family == "idefics2" and len(files) > 1:
            continue  # which pads the smaller one
        found = [own.inputs(image)["pixel_values"] for image in prepared.images]
        axis = 1 if family in ("granite_docling", "mllama") else 0
        assert torch.equal(torch.from_numpy(np.concatenate(found, axis)), wanted["pixel_values"])
        if family == "deepseek_vl_hybrid":
            found = [own.inputs(image)["high_res_pixel_values"] for image in prepared.images]
            assert torch.equal(torch.from_numpy(np.concatenate(found)), wanted["high_res_pixel_values"])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of PaliGemma's processor
def test_a_paligemma_without_a_template_takes_images_and_a_prompt(
    directory_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """As transformers' processor does; a chat of another kind is refused."""
    import transformers

    library, own = transformers, directory_of("paligemma")  # type: Any, Path
    for file in own.iterdir():
        if file.name != "chat_template.jinja":
            shutil.copy(file, tmp_path)
    tokenizer = library.AutoTokenizer.from_pretrained(tmp_path)
    assert not tokenizer.chat_template
    begin = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", tokenizer.get_vocab()["<bos>"])])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.save_pretrained(tmp_path)
    tokenizer.bos_token, tokenizer.image_token = "<bos>", "<image>"
    tokenizer.image_token_id = tokenizer.get_vocab()["<image>"]
    theirs = library.PaliGemmaProcessor(library.AutoImageProcessor.from_pretrained(tmp_path, backend="pil"), tokenizer)
    preparer = load_preparer(str(tmp_path), "paged", "none", "none")
    files = [picture(), picture(80, 30, 1)]
    wanted = theirs(
        images=[Image.open(io.BytesIO(file)) for file in files],
        text="<image><image>caption en",
        return_tensors="pt",
        add_special_tokens=False,
    )
    prepared = preparer.prepare(chat(files, "caption en"), context_length=3000, name="m", seed=1)
    assert [*prepared.prompts[0]] == wanted["input_ids"][0].tolist()
    alone = chat([], "caption en")
    twice = chat(files, "caption en")
    twice.messages.extend(alone.messages)
    for refused in (alone, twice):
        with pytest.raises(InvalidRequest, match="takes one message of the user and no others, with images"):
            preparer.prepare(refused, context_length=3000, name="m", seed=1)


@pytest.mark.parametrize("template", ["", "{{ bos_token }}"])
def test_a_chat_begins_as_with_transformers_own_processor(
    template: str, directory_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Which lets the tokenizer begin it where the template does not."""
    import transformers

    library, own = transformers, directory_of("deepseek_vl")  # type: Any, Path
    tokenizer = library.AutoTokenizer.from_pretrained(own)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.chat_template = template + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(own / name, tmp_path)
    tokenizer = library.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.image_token = "<image_placeholder>"
    images = library.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    told = {"num_image_tokens": 16, "chat_template": tokenizer.chat_template}
    theirs = library.DeepseekVLProcessor(images, tokenizer, **told)
    preparer = load_preparer(str(tmp_path), "paged", "none", "none")
    for files in ([], [picture()]):
        shown = [{"type": "image", "image": Image.open(io.BytesIO(file))} for file in files]
        messages = [{"role": "user", "content": [*shown, {"type": "text", "text": WORDS}]}]
        wanted = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=True)
        prepared = preparer.prepare(chat(files, WORDS), context_length=3000, name="m", seed=1)
        assert [*prepared.prompts[0]] == torch.as_tensor(wanted["input_ids"]).flatten().tolist()
        assert prepared.prompts[0][:2].count(tokenizer.bos_token_id) == 1
        assert all(
            prepared.prompts[0][one.offset] == preparer.tokenizer.vocabulary["<image_placeholder>"]
            for one in prepared.images
        )
