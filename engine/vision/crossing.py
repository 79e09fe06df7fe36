"""Models some of whose layers attend to images: Llama 3.2 Vision (`mllama`), whose language model skips them in text.

What these layers attend to, the keys and values of an image, is made once, when the image has passed the tower, and
kept beside the blocks of keys and values of tokens, in a part of their memory. A request needs those of all of its
images in each of its steps, so it begins only once they fit beside those of the requests that run.

Source: `MllamaCrossAttentionDecoderLayer`, `_prepare_cross_attention_mask` and `get_cross_attention_token_mask` in
transformers. There the tokens before the first image attend to all images, black tiles included, but add nothing in
the second half of such a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...schemas.errors import ConfigurationError
from ..request import EngineRequest
from .layout import CrossLayout, ImageLayout, Placed
from .pictures import Arrays
from .processor import VisionProcessor
from .tower import LanguageModel, Probe, Vision

_SHARE = 4  # the part of the memory for keys and values that images have at most, unless one needs more
_EACH = 2  # images that a request has, for the rest of the estimate


class Span(NamedTuple):
    """Tokens of a step that attend to the same: the last of them is the `stop`-th of those that attend to images.
    `states` are those of the images, [2 L, H, S, D] each."""

    stop: int
    states: Sequence[Tensor]


class Crossed(NamedTuple):
    """What the tokens `rows` [K] of a step attend to, and where [K, 1] is 0 before the first image, else 1."""

    rows: Tensor
    spans: Sequence[Span]
    behind: Tensor


class CrossLayer:
    """A layer of transformers that attends to images, for packed tokens of several requests."""

    def __init__(self, module: Any, number: int) -> None:
        """`number` is its place among such layers. Its calls with a `Crossed` come here from now on."""
        self._module, self._number = module, number
        own = module.forward

        def forward(hidden_states: Tensor, cross_attention_states: Any, **given: Any) -> Tensor:
            if isinstance(cross_attention_states, Crossed):
                return self._attend(hidden_states, cross_attention_states)
            made: Tensor = own(hidden_states, cross_attention_states=cross_attention_states, **given)
            return made

        module.forward = forward

    def states(self, features: Tensor) -> Tensor:
        """The keys and values of an image, [S, E] → [2, H, S, D]."""
        own = self._module.cross_attn
        keys, values = (
            product(features).view(len(features), own.num_key_value_heads, own.head_dim)
            for product in (own.k_proj, own.v_proj)
        )
        return torch.stack((own.k_norm(keys), values)).transpose(1, 2)

    def _attend(self, hidden: Tensor, crossed: Crossed) -> Tensor:
        """[1, T, E] → [1, T, E]."""
        module, own = self._module, self._module.cross_attn
        x = hidden[0, crossed.rows]  # [K, E]
        query = own.q_norm(own.q_proj(module.input_layernorm(x)).view(len(x), own.num_heads, own.head_dim))
        mixed, start = [], 0
        for span in crossed.spans:
            mixed.append(self._mix(query[start : span.stop], span.states))
            start = span.stop
        x = x + module.cross_attn_attn_gate.tanh() * own.o_proj(torch.cat(mixed))
        added = crossed.behind.to(x.dtype) * module.mlp(module.post_attention_layernorm(x))
        return hidden.index_copy(1, crossed.rows, (x + module.cross_attn_mlp_gate.tanh() * added)[None])

    def _mix(self, query: Tensor, states: Sequence[Tensor]) -> Tensor:
        """[Q, Hq, D] → [Q, Hq · D]. Queries that share a head's keys and values are rows of one product."""
        count, own = len(query), self._module.cross_attn
        parts = [one[2 * self._number : 2 * self._number + 2] for one in states]
        keys, values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        rows = query.transpose(0, 1).reshape(1, own.num_key_value_heads, -1, own.head_dim)  # [1, H, G · Q, D]
        mixed = functional.scaled_dot_product_attention(rows, keys[None], values[None], scale=own.scaling)
        return mixed.view(own.num_heads, count, own.head_dim).transpose(0, 1).reshape(count, -1)


class CrossModel(LanguageModel):
    """The language model of one whose layers attend to images."""

    def show(self, input_ids: Tensor, embedded: Tensor, seen: Any, more: dict[str, Any]) -> Tensor:
        """`seen` is a `Crossed`."""
        more["cross_attention_states"] = seen
        return embedded


class CrossVision(Vision):
    """Makes keys and values of images, and keeps those of as many as `reserve` has given room."""

    def __init__(self, whole: Any, text: Any, processor: VisionProcessor) -> None:
        super().__init__(whole, text, processor)
        self._layers = [CrossLayer(text.layers[index], n) for n, index in enumerate(text.cross_attention_layers)]
        self._most_tiles: int = whole.config.vision_config.max_num_tiles
        self._patches: int = self._body.vision_model.num_patches  # of a tile
        config = text.config
        numbers = 2 * len(self._layers) * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
        self._image_bytes: int = numbers * self._most_tiles * self._patches * text.dtype.itemsize

    def reserve(self, memory: int, rows: int) -> int:
        size = self._image_bytes
        if memory < 2 * size:
            raise ConfigurationError(
                [
                    f"kv_cache_memory={memory}: what the layers read of one image takes {size} bytes, in at most half "
                    f"of it; set at least {2 * size}"
                ]
            )
        count = max(1, min(_EACH * rows, memory // _SHARE // size))
        self._cache.clear()  # what a probe has left, in another dtype
        self._used, self._cache_bytes, self.pictures.most_held = 0, count * size, count
        return memory - count * size

    def layout(self, request: EngineRequest) -> ImageLayout | None:
        return CrossLayout(request) if request.images else None

    def see(self, placed: Sequence[Placed], device: torch.device) -> Any:
        """What the tokens of a step attend to, a `Crossed`; None if there is no image."""
        if not placed:
            return None
        states, spans, rows, behind = self._gather(placed), list[Span](), list[Tensor](), list[bool]()
        for _, group in groupby(placed, lambda one: int(one.rows[0])):
            first, *_ = images = [*group]
            is_behind = first.tiles > 0
            shown = [states[one.key] for one in images]
            if is_behind:
                shown = [one[:, :, : image.tiles * self._patches] for one, image in zip(shown, images, strict=True)]
            rows.append(torch.from_numpy(first.rows))
            behind += [is_behind] * len(first.rows)
            spans.append(Span(len(behind), shown))
        return Crossed(torch.cat(rows).to(device), spans, torch.tensor(behind, device=device)[:, None])

    @torch.inference_mode()
    def probe(self, ids: Sequence[int], logits: Callable[[Tensor], Tensor]) -> Probe:
        """A picture between some text of `ids`, and what transformers' own layers make of it."""
        from transformers.models.mllama import modeling_mllama

        library: Any = modeling_mllama  # it is not typed
        image, shown = self.processor.sample()
        before = len(ids) // 2
        whole = [*ids[:before], *shown, *ids[before:]]
        inputs = self._to_device(self.processor.inputs(image))
        made = self._pass(inputs)
        self._blocks, one_by_one = self._blocks_of(inputs, made)
        made = made if one_by_one is None else one_by_one
        config = self._text.config
        own, config._attn_implementation = config._attn_implementation, "sdpa"
        try:
            embedded = self._text.get_input_embeddings()(torch.tensor([whole], device=self._device))
            tiles = torch.zeros((1, len(whole), 1, self._most_tiles), device=self._device)
            tiles[:, before:, :, : image.grid[0]] = 1
            mask, rows = library._prepare_cross_attention_mask(tiles, self._patches, embedded.dtype)
            states = made.to(embedded.dtype)
            found = self._text(
                inputs_embeds=embedded,
                cross_attention_states=states,
                cross_attention_mask=mask,
                full_text_row_masked_out_mask=rows,
                use_cache=False,
            )
        finally:
            config._attn_implementation = own
        return Probe(whole, replace(image, offset=before), logits(found.last_hidden_state[:, -1]))

    def encode(self, arrays: Arrays) -> Iterator[Tensor | None]:
        """Pass an image through the tower, and then through what makes keys and values of each layer; yields None after
        each part but the last, and then these, [2 L, H, S, D]."""
        features = None
        for features in super().encode(arrays):
            if features is None:
                yield None
        assert features is not None
        some = torch.zeros((1, 1), dtype=torch.long, device=self._device)
        features = features[0].to(self._text.get_input_embeddings()(some).dtype)
        found = []
        for layer in self._layers:
            yield None
            found.append(layer.states(features))
        yield torch.cat(found)

    def _shown(self, inputs: dict[str, Tensor]) -> Tensor:
        """The features of all tiles of an image, [1, S, E]."""
        made = self._body.vision_model(**inputs).last_hidden_state
        features: Tensor = self._body.multi_modal_projector(made).flatten(0, -2)[None]
        return features
