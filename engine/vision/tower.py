"""A model that sees images, in two parts: the tower that makes features of pictures, and the language model.

Both are transformers' own modules, but for Gemma 3n's tower. The features take the place of the embeddings of an
image's tokens; with "deepstack" (Qwen 3 VL, Granite 4 Vision) further features are added before some layers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.backends import cudnn

from ..request import EngineRequest
from .blocks import Blocks, blocks_of
from .bodies import seeing_body
from .embeddings import APART, further_embeddings, replaced_tokens
from .families.names import SCALING, is_of_tower
from .features import ORDER, arranged, passes, stacked
from .images import Key, PromptImage
from .layout import ImageLayout, Placed
from .pictures import Arrays, Pictures
from .processor import VisionProcessor
from .seen import Seen

_log = logging.getLogger(__name__)

CACHE_BYTES = 256 << 20  # of features that are kept for the next chunk, request or takeover
_TILES = {"cpu": 1}  # that pass the tower together, for an image in tiles; more are no faster there
_MANY_TILES = 4
_BUDGET = {"cpu": 2.5e11}  # floating-point operations between two steps, for an image that is seen as a whole
_LARGE_BUDGET = 2e12


class Logits(NamedTuple):
    logits: Tensor


class Probe(NamedTuple):
    """A prompt with an image, and the logits [1, V] of its last token."""

    ids: list[int]
    image: PromptImage
    logits: Tensor


class LanguageModel(nn.Module):
    """The language model of one that sees, with the structure and face of transformers' causal language models."""

    def __init__(self, whole: Any, text: Any, head: nn.Module, vision: Vision | None) -> None:
        super().__init__()
        self.model = text
        self.lm_head = head
        self.config = text.config
        self.vision = vision
        self.name = type(whole).__name__
        self.replaced = replaced_tokens(whole.config)
        self._further = further_embeddings(whole) if vision is not None else None
        self._has_layer_inputs = bool(getattr(text, "hidden_size_per_layer_input", 0))  # Gemma 4's E2B and E4B have
        self._deep = vision is not None and bool(vision.processor.deep)
        self._softcap: float | None = getattr(text.config, "final_logit_softcapping", None)
        self.logit_scale: float = getattr(text.config, "output_multiplier", None) or 1.0  # of Muse, before the cap
        if power := SCALING.get(whole.config.model_type):
            self.logit_scale *= text.config.logits_scaling**power
        self.dtype: torch.dtype = text.dtype
        self.device: torch.device = text.device
        self._supports_attention_backend = bool(text._supports_attention_backend)
        self._is_stateful = bool(text._is_stateful)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        use_cache: bool,
        penstock: Callable[..., Tensor] | None = None,
        seen: Seen | None = None,
        **more: Any,
    ) -> Logits:
        """The logits [1, K, V] of packed tokens [1, T] at positions [1, T] or, in D dimensions, [1, D, T].

        `more` is for the layers.
        """
        for id, other in self.replaced.items():
            input_ids = input_ids.where(input_ids != id, other)
        embedded = self.model.get_input_embeddings()(input_ids)
        if self._further is not None:
            embedded = self._further(input_ids, embedded)
        if self._has_layer_inputs:
            more["per_layer_inputs"] = self.model.get_per_layer_inputs(input_ids)
        if seen is not None:
            embedded = self.show(input_ids, embedded, seen, more)
        positions = position_ids.transpose(0, 1) if position_ids.ndim == 3 else position_ids
        hidden = self.model(
            inputs_embeds=embedded, position_ids=positions, use_cache=use_cache, penstock=penstock, **more
        ).last_hidden_state
        return Logits(self.logits(hidden[:, logits_to_keep]))

    def show(self, input_ids: Tensor, embedded: Tensor, seen: Seen, more: dict[str, Any]) -> Tensor:
        """The tokens [1, T, E] with what they show of images; adds to `more` what the layers are given of it."""
        more |= seen.further(input_ids, by_layer=self._deep)
        return embedded.index_copy(1, seen.rows, seen.features.to(embedded.dtype)[None])

    def logits(self, hidden: Tensor) -> Tensor:
        """What the last layer makes, […, E] → [..., V]."""
        made: Tensor = self.lm_head(hidden) if self.logit_scale == 1 else self.lm_head(hidden) * self.logit_scale
        return made if self._softcap is None else self._softcap * (made / self._softcap).tanh()


class Vision:
    """Makes features of images, each once as long as they are kept. The engine's thread calls it.

    Steps see features of `pictures`, which passes them through this tower part by part.
    """

    def __init__(self, whole: Any, text: Any, processor: VisionProcessor, cache_bytes: int = CACHE_BYTES) -> None:
        """`whole` is transformers' model, `text` its language model."""
        self.processor = processor
        self._masks: Callable[..., Any] | None = getattr(whole, "create_masks_for_generate", None)
        self._text = text
        self._body = seeing_body(whole)
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[Key, Tensor] = OrderedDict()  # [features and deep ones, K, E]
        self._used = 0  # bytes
        self.num_encoded = 0  # images that passed the tower
        self.budget = _BUDGET.get(self._device.type, _LARGE_BUDGET)
        self._blocks: Blocks | None = None  # set by `probe` or `pause`
        self.pictures = Pictures(processor.inputs, self.encode, self._cache.__contains__)

    def widen(self) -> None:
        """Make features in float32 from now on, with the numbers that the weights have."""
        text = {*self._text.modules()}
        for module in self._body.modules():
            if module not in text:
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    if tensor.is_floating_point():
                        tensor.data = tensor.data.float()

    def layout(self, request: EngineRequest) -> ImageLayout | None:
        if not request.images:
            return None
        known = self.processor
        first, *marks = known.shown
        how = known.merge, known.mutual > 0, known.canvas, marks, known.is_prefix, known.axes, known.apart
        return ImageLayout.of(request, first, *how)

    def see(self, placed: Sequence[Placed], device: torch.device) -> Seen | None:
        """What the tokens of a step see, by their rows in it; None if there is no image."""
        if not placed:
            return None
        shown = [one for one in placed if len(one.rows)]
        features = self._gather(shown)
        parts = [features[one.key][:, one.first : one.first + len(one.rows)] for one in shown]
        rows = torch.from_numpy(np.concatenate([one.rows for one in placed])).to(device)
        nothing = torch.zeros((1, 0, self._text.config.hidden_size), device=device)
        seen, *deep = (torch.cat(parts, dim=1) if parts else nothing).unbind(0)
        apart = None
        if self.processor.apart:
            apart = torch.cat((rows, torch.from_numpy(np.concatenate([one.around for one in placed])).to(device)))
        return Seen(rows, seen, dict(zip(self.processor.deep or range(1, len(deep) + 1), deep, strict=True)), apart)

    def _gather(self, placed: Sequence[Placed]) -> dict[Key, Tensor]:
        """What `encode` has made of these images."""
        found: dict[Key, Tensor] = {}
        for one in placed:
            if one.key in self._cache:
                self._cache.move_to_end(one.key)
                found[one.key] = self._cache[one.key]
        for one in placed:  # only now: a new one may push out what is kept
            if one.key not in found:
                found[one.key] = self._features(one)
        return found

    def reserve(self, memory: int, rows: int) -> int:
        """How many of `memory` bytes are left for keys and values of tokens, beside what `rows` requests need of
        images. Raises `ConfigurationError`."""
        return memory

    def probe(self, ids: Sequence[int], logits: Callable[[Tensor], Tensor]) -> Probe:
        """A picture between some text of `ids`, and what transformers' own code, attention included, makes of it."""
        image, shown = self.processor.sample()
        inputs = self.processor.inputs(image)
        before, count = len(ids) // 2, len(shown)
        whole = [*ids[:before], *shown, *ids[before:]]
        image = replace(image, offset=before, length=count)
        config = self._text.config
        is_capped = getattr(config, "attn_logit_softcapping", None) is not None
        own, config._attn_implementation = config._attn_implementation, "eager" if is_capped else "sdpa"
        try:
            tokens = torch.tensor([whole], device=self._device)
            named = self.processor.types
            types = {named: self.processor.type_ids(tokens)} if named else {}
            if self.processor.apart:
                types[APART] = self.processor.type_ids(tokens)
            features: Tensor | None = None
            if self.processor.is_rigid and self._body.dtype != torch.float32:
                embedded = self._text.get_input_embeddings()(tokens)
                features = self._encode_at_once(inputs)
                embedded[0, before : before + count] = features[0].to(embedded.dtype)
                made = self._text(inputs_embeds=embedded, use_cache=False)
            else:
                with self._noting() as noted:
                    given = {name: array for name, array in inputs.items() if name != ORDER}
                    more = types | self._masks_for(tokens, types)
                    made = self._body(input_ids=tokens, use_cache=False, **self._to_device(given), **more)
                if noted:
                    self._blocks, features = self._blocks_of(self._to_device(inputs), noted[0])
            if self._blocks is not None and features is not None:
                self._keep(("", image.identity), features)
            return Probe(whole, image, logits(made.last_hidden_state[:, -1]))
        finally:
            config._attn_implementation = own

    def _masks_for(self, tokens: Tensor, types: dict[str, Tensor]) -> dict[str, Any]:
        """Those with which transformers generates; without them Gemma 4 12B lets an image's tokens see each other in
        all layers."""
        if self._masks is None or not self.processor.in_windows:
            return {}
        embedded = self._text.get_input_embeddings()(torch.zeros_like(tokens))
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return {"attention_mask": self._masks(self._body.config, embedded, None, None, places, **types)}

    @property
    def pauses(self) -> bool:
        """Whether an image that the tower sees as a whole passes it in parts."""
        return self._blocks is not None

    def pause(self) -> None:
        """Do so from now on, without trying it."""
        self._blocks = self._find_blocks()

    def encode(self, arrays: Arrays) -> Iterator[Tensor | None]:
        """Pass an image through the tower; yields None after each part but the last, and then the features and the deep
        ones, [F, K, E].

        A part is a tile, or so many, or as many blocks of the tower as take about as long.
        """
        if self._blocks is not None:
            inputs = self._to_device(arrays)
            yield from self._blocks.run(lambda: self._pass(inputs), self.budget)
            return
        arrays = dict(arrays)
        order, made = arrays.pop(ORDER, None), []
        size = _TILES.get(self._device.type, _MANY_TILES)
        parts = passes(arrays, self.processor.tiles, self.processor.crops, size)
        for index, part in enumerate(parts):
            if index:
                yield None
            made.append(self._pass(self._to_device(part.arrays))[:, : part.end])
        features = torch.cat(made, dim=1)
        yield features if order is None else arranged(features, order, self._body.visual_embeddings_table.weight)

    def _encode_at_once(self, arrays: Arrays) -> Tensor:
        *_, features = self.encode(arrays)
        assert features is not None
        return features

    def _pass(self, inputs: dict[str, Tensor]) -> Tensor:
        is_cuda = self._device.type == "cuda"  # whose convolutions of float32 have ten bits by default
        with cudnn.flags(enabled=True, allow_tf32=False) if is_cuda else nullcontext():
            return self._shown(inputs)

    def _shown(self, inputs: dict[str, Tensor]) -> Tensor:
        return stacked(self._body.get_image_features(**inputs, return_dict=True))

    @contextmanager
    def _noting(self) -> Iterator[list[Tensor]]:
        """Yields a list, to which the features are added that the model itself makes of images inside."""
        noted: list[Tensor] = []
        own = self._body.get_image_features

        def get_image_features(*arguments: Any, **options: Any) -> Any:
            made = own(*arguments, **options)
            noted.append(stacked(made))
            return made

        self._body.get_image_features = get_image_features
        try:
            yield noted
        finally:
            del self._body.get_image_features

    def _blocks_of(self, inputs: dict[str, Tensor], whole: Tensor) -> tuple[Blocks | None, Tensor | None]:
        """The tower's blocks, if they can run one by one, and what they make of `inputs`, of which the model makes the
        features `whole`."""
        if (found := self._find_blocks()) is None:
            return None, None
        try:
            *_, one_by_one = found.run(lambda: self._pass(inputs), 0)
            if one_by_one is not None and torch.equal(one_by_one, whole):
                return found, one_by_one
        except (AttributeError, TypeError, RuntimeError) as error:  # a block takes or returns something else
            _log.info("its blocks cannot run one by one: %r", error)
        _log.warning("the vision tower of %s cannot pause within an image", type(self._body).__name__)
        return None, None

    def _find_blocks(self) -> Blocks | None:
        return blocks_of(self._body, self.processor.blocks)

    def _to_device(self, arrays: Arrays) -> dict[str, Tensor]:
        made = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        if self.processor.narrows:
            dtype = next(one.dtype for name, one in self._body.named_parameters() if is_of_tower(name))
            made |= {name: one.to(dtype) for name, one in made.items() if one.is_floating_point()}
        return made

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._body.parameters()).device
        return device

    def _features(self, placed: Placed) -> Tensor:
        """The features of a picture that are not kept yet. Raises `InvalidRequest`."""
        found = self.pictures.take(placed.key)
        if found is None:  # it was kept, until others of the same step pushed it out
            found = self._encode_at_once(self.processor.inputs(placed.image))
        self.num_encoded += 1
        self._keep(placed.key, found)
        return found

    def _keep(self, key: Key, found: Tensor) -> None:
        self._cache[key] = found
        self._used += found.nbytes
        while self._used > self._cache_bytes and len(self._cache) > 1:
            self._used -= self._cache.popitem(last=False)[1].nbytes
