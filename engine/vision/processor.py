"""A model's image processor: pictures to tensors, and the text that stands for them in a prompt.

transformers' own processors do the work on pictures, in their version for Pillow, where there is one; importing them
takes seconds, so nothing is loaded before the first image.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from itertools import count as count_up
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ...schemas.errors import InvalidRequest, ModelLoadError, prompt_too_long
from ...schemas.sources import is_gguf
from ..checkpoints.files import read_json
from ..checkpoints.gguf.file import read_gguf
from ..checkpoints.gguf.pairs import processor_of
from ..models import read_config, seeing_family
from ..text.tokenizer_port import TokenizerLike, encode_within
from .chat import GivenImage
from .families.form import PROCESSORS, Family
from .families.writing import Grid, image_token
from .features import ORDER
from .images import PromptImage
from .reading import ImageLimits, decode_image, refused, within

if TYPE_CHECKING:  # light processes do without it
    from numpy.typing import NDArray
    from torch import Tensor

MOST_GRIDS = 4096  # images whose grids are remembered; a chat sends the same ones with every turn
_MODEL_INPUTS = (
    *("pixel_values", "pixel_attention_mask", "pixel_mask", "spatial_shapes", "target_sizes"),
    *("image_grid_thw", "image_sizes", "image_position_ids", "batch_num_images", "tile_fine_mask"),
    *("image_merge_sizes", "pixel_values_local", "num_local_patches", "high_res_pixel_values"),
    *("aspect_ratio_ids", "aspect_ratio_mask"),
)


class ImagePrompt(NamedTuple):
    """A prompt in tokens, and its images."""

    ids: list[int]
    images: tuple[PromptImage, ...]


class VisionProcessor:
    """The processor of one model; safe to use from several threads."""

    def __init__(self, path: Path, config: Mapping[str, Any], family: Family) -> None:
        self._path, self._config, self._family = path, config, family
        self._grids: OrderedDict[tuple[str, ImageLimits, bool], Grid] = OrderedDict()
        self._lock = Lock()  # guards the grids, and the loading of transformers' processor
        self.image_token, self._place = image_token(config), family.place(config)
        self._marks = family.marks(config)
        self.shown = self.image_token, *self._marks.values()  # tokens that show something of an image
        self.mutual, self.in_windows = family.mutual(config), family.in_windows
        self.merge = family.merge(config)
        self.axes, self.deep = family.axes(config), family.deep(config)
        self.canvas = None if family.canvas is None else family.canvas(config)
        self.is_rigid, self.tiles, self.blocks = family.is_rigid, family.tiles, family.blocks
        self.narrows, self.crops, self.is_prefix = family.narrows, family.crops, family.is_prefix
        self.crosses, self.apart = family.crosses, tuple(family.apart(config))

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """The processor of the model at `path`; None if it is not one of the families that see. Raises
        `ModelLoadError`."""
        if not path.is_dir() and not is_gguf(path):
            return None
        config = read_config(path)
        family = seeing_family(path, config)
        return None if family is None else cls(path, config, family)

    @cached_property
    def opening(self) -> str:
        """The text before each chat."""
        file = self._path / PROCESSORS[1]
        asks = self._family.opening and file.is_file() and read_json(file).get("use_default_system_prompt")
        return self._family.opening if asks else ""

    @property
    def types(self) -> str:
        """The name under which transformers' model takes which tokens stand for images; empty if it need not know."""
        if self.merge or self.in_windows or self.canvas or self.axes:
            return "mm_token_type_ids"
        return "token_type_ids" if self.mutual else ""

    def type_ids(self, tokens: Tensor) -> Tensor:
        """What it takes under that name of a prompt with these tokens."""
        return (tokens == self.image_token).int() * (not self.is_prefix)

    def mark(self, tokenizer: TokenizerLike) -> str:
        """The text, mostly of a token, by which a prompt's text says where its images stand."""
        return self._family.mark or tokenizer.decode([self._place])

    def insert(
        self,
        text: str,
        given: Sequence[GivenImage],
        tokenizer: TokenizerLike,
        *,
        context_length: int,
        add_special_tokens: bool = False,
    ) -> ImagePrompt:
        """The tokens of a prompt whose text has one mark for each of the images.

        Raises `InvalidRequest` for an image that cannot be used, for other marks in the text, and for a prompt that is
        far too long.
        """
        mark, part = self.mark(tokenizer), tokenizer.decode([self.image_token])
        _check_marks(text, mark, len(given))
        for other in {part, *self._marks} - {mark}:
            _check_marks(text, other, 0)
        parts = text.split(mark)
        grids = [self._grid(*one, self._family.by_count and len(given) > 1) for one in given]
        written = [self._family.write(self._config, grid, part) for grid in grids]
        if self._family.numbers is not None:
            written = [self._family.numbers(self._images, number) + one for number, one in enumerate(written)]
        counts = [sum(map(one.count, (part, *self._marks))) for one in written]
        if sum(counts) >= context_length:
            raise prompt_too_long(
                f"its images alone take {sum(counts)}",
                context_length,
                param="messages",
                advice="send fewer or smaller ones",
            )
        whole = parts[0] + "".join(one + after for one, after in zip(written, parts[1:], strict=True))
        whole, adds = self._family.join(whole), add_special_tokens and not self.is_prefix
        ids = encode_within(tokenizer, whole, context_length, "messages", add_special_tokens=adds)
        places = [place for place, id in enumerate(ids) if id in self.shown]
        if len(places) != sum(counts):
            named = " and ".join(map(repr, (part, *self._marks)))
            raise ModelLoadError(f"the tokenizer in {self._path} does not know {named} as one token each")
        images = []
        for (begin, end), one, grid in zip(pairwise((0, *accumulate(counts))), given, grids, strict=True):
            first, last = places[begin], places[end - 1]
            digest = hashlib.sha256(one.data).hexdigest()
            first -= self.canvas is not None  # the mark before it has a position that text has not
            images.append(PromptImage(digest, first, last - first + 1, grid, one.limits.pixels, one.data))
        return ImagePrompt(ids, tuple(images))

    def inputs(self, image: PromptImage) -> dict[str, NDArray[Any]]:
        """What the model's tower takes for an image. Raises `InvalidRequest` if the prompt was made for another."""
        limits = ImageLimits(1 << 62, *image.pixels)  # it was let in before
        is_one_of_several = self._family.by_count and image.grid[-1] > 1
        made = self._process(image.data, limits, "image", is_one_of_several)
        if self._family.grid(self._config, made) != image.grid:
            raise InvalidRequest("The image was prepared by another version of the model's processor; send it again.")
        import numpy as np

        found = {name: np.ascontiguousarray(made[name]) for name in _MODEL_INPUTS if name in made}
        if self._marks:
            found[ORDER] = np.array(self._order(self.tokens(image.grid)))
        return {name: array[:1] for name, array in found.items()} if self._family.by_count else found

    def tokens(self, grid: Grid) -> list[int]:
        """The tokens that show a picture."""
        text = self._family.write(self._config, grid, "\0")
        found = re.findall("|".join(map(re.escape, ("\0", *self._marks))), text)
        return [self._marks.get(one, self.image_token) for one in found]

    def _order(self, tokens: Sequence[int]) -> list[int]:
        """The number of the feature of each of these tokens, where those of marks are behind the picture's own."""
        own, count = count_up(), tokens.count(self.image_token)
        return [next(own) if id == self.image_token else count + self.shown.index(id) - 1 for id in tokens]

    def sample(self) -> tuple[PromptImage, list[int]]:
        """A small picture to try the model with, and the tokens that show it."""
        from PIL import Image

        file = io.BytesIO()
        Image.linear_gradient("L").resize(self._family.sample).convert("RGB").save(file, "PNG")
        data, limits = file.getvalue(), ImageLimits()
        grid = self._grid(data, limits, "image")
        tokens = self.tokens(grid)
        return PromptImage(hashlib.sha256(data).hexdigest(), 0, len(tokens), grid, limits.pixels, data), tokens

    def _grid(self, data: bytes, limits: ImageLimits, path: str, is_one_of_several: bool = False) -> Grid:
        key = hashlib.sha256(data).hexdigest(), limits, is_one_of_several
        with self._lock:
            if (known := self._grids.get(key)) is not None:
                self._grids.move_to_end(key)
                return known
        grid = self._family.grid(self._config, self._process(data, limits, path, is_one_of_several))
        with self._lock:
            self._grids[key] = grid
            if len(self._grids) > MOST_GRIDS:
                self._grids.popitem(last=False)
        return grid

    def _process(self, data: bytes, limits: ImageLimits, path: str, is_one_of_several: bool) -> Mapping[str, Any]:
        picture = decode_image(data, limits, path)
        options = self._family.options(self._config)
        if self._family.bounded is not None:
            options |= self._family.bounded(self._images, limits.fewest, limits.most)
        else:
            picture = within(picture, limits)
        # A small picture stands for the others; what is made of it is not used.
        pictures = [[picture, picture.resize((8, 8))]] if is_one_of_several else [picture]
        try:
            found: Mapping[str, Any] = self._images(images=pictures, return_tensors="np", **options)
        except ValueError as error:
            raise refused(path, f"the model's processor refuses the image ({error}); send another one") from None
        return found

    @cached_property
    def _images(self) -> Any:
        with self._lock:
            if self._family.prepares is not None:
                with self._settings() as directory:
                    return self._family.prepares(directory)
            import transformers

            library: Any = transformers  # most of it is not typed
            try:
                with self._settings() as directory:
                    found = library.AutoImageProcessor.from_pretrained(directory, backend="pil", local_files_only=True)
            except (OSError, ValueError, ImportError) as error:
                raise ModelLoadError(f"{self._path} has no image processor that can be used: {error}") from error
            for name, value in self._family.defaults.items():
                if getattr(found, name, None) is None:
                    setattr(found, name, value)
            return found

    @contextmanager
    def _settings(self) -> Iterator[Path]:
        """A directory with the processor's settings, which those of a GGUF file are written into."""
        if is_gguf(self._path):
            found = processor_of(read_gguf(self._path))
        elif self._family.settings is None or any((self._path / name).is_file() for name in PROCESSORS):
            yield self._path
            return
        else:
            found = self._family.settings(self._config)
        with TemporaryDirectory() as directory:
            file = Path(directory) / PROCESSORS[0]
            file.write_text(json.dumps(found), "utf-8")
            yield file.parent


def _check_marks(text: str, mark: str, count: int) -> None:
    """Raises `InvalidRequest` unless the text has the mark so many times."""
    if (found := text.count(mark)) != count:
        raise InvalidRequest(
            f"The prompt has {found} times the text {mark!r}, by which this model finds its images, where {count} are "
            "expected; send that text only where an image stands.",
            code="image_mark",
            param="messages",
        )


def processor_digest(path: Path) -> str:
    """Identifies the settings of a model's image processor."""
    found = [read_json(path / name) if (path / name).is_file() else {} for name in PROCESSORS]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
