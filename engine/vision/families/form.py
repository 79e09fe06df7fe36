"""How a family of models that see images writes an image among its tokens. Knows no torch and no transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from .canvas import Canvas
from .writing import Config, Grid, image_token

PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # files with the settings of an image processor


class Family(NamedTuple):
    """How a family's processor describes an image, and how its model sees. A `grid` are the numbers of an image."""

    # Preparation: how pixels become the inputs of the tower.
    grid: Callable[[Config, Mapping[str, Any]], Grid]  # of the inputs of an image
    write: Callable[[Config, Grid, str], str]  # the text that stands for it, given that of one image token
    options: Callable[[Config], dict[str, Any]] = lambda _: {}  # for the image processor
    defaults: Mapping[str, Any] = MappingProxyType({})  # settings that the processor's file may leave open
    settings: Callable[[Config], dict[str, Any]] | None = None  # those of a checkpoint without such a file
    prepares: Callable[[Path], Callable[..., Mapping[str, Any]]] | None = None
    """Makes the image processor of a model's directory, where transformers has none for Pillow."""
    bounded: Callable[[Any, int | None, int | None], dict[str, Any]] | None = None
    """Options by which a picture has at least and at most so many pixels, where the processor chooses its size."""
    narrows: bool = False  # the tower takes pixels in the dtype of its weights alone
    by_count: bool = False  # a picture is prepared in another way where there are several; its last number is then > 1
    may_be_blind: bool = False  # a checkpoint without an image processor is one of the language model
    sample: tuple[int, int] = (64, 48)  # width and height of a picture without parts, which shows how the model sees

    # The tower.
    tiles: int | None = None  # the axis of its inputs along which tiles lie that do not see each other; None: no tiles
    blocks: tuple[str, ...] = ()
    """Without tiles, the names of the tower's blocks, and of what computes further features of them."""
    is_rigid: bool = False  # transformers converts features to the dtype of the weights, whatever runs in float32
    deep: Callable[[Config], Sequence[int]] = lambda _: ()
    """The layers before which further features are added, ascending; else one after the other from the second on."""

    # The prompt.
    place: Callable[[Config], int] = image_token  # the token by which a prompt's text says where an image stands
    mark: str = ""  # the text that does, if it is no token
    numbers: Callable[[Any, int], str] | None = None  # the text before an image of its number, given the processor
    marks: Callable[[Config], Mapping[str, int]] = lambda _: {}
    """Texts and ids of tokens between those of an image that have features, the last rows of the tower's table."""
    crops: str = ""
    """The input with crops of a picture. Each is seen like a whole one, and before it, but for the feature that ends a
    picture."""
    opening: str = ""  # a text before each chat, where the processor's file asks for a default system prompt
    join: Callable[[str], str] = str  # makes the text of a prompt of what has been written into it
    template: str = ""  # the chat template of models that are published without one

    # Layers, attention and positions.
    apart: Callable[[Config], Sequence[int]] = lambda _: ()
    """The tokens that begin and end images, where these and image tokens pass experts of their own."""
    merge: Callable[[Config], int] = lambda _: 0
    """The side of the square of patches that make a token, for positions in three dimensions; 0 for plain ones."""
    axes: Callable[[Config], int] = lambda _: 0
    """In how many dimensions tokens have positions, the last three being column, row and number of an image; 0: not."""
    canvas: Callable[[Config], Canvas] | None = None  # where images lie whose tokens and marks each have a position
    mutual: Callable[[Config], int] = lambda _: 0
    """How many tokens of an image, in a row, see each other in both directions; 0 if they are causal like others."""
    in_windows: bool = False  # they do so in layers with a window alone
    is_prefix: bool = False  # all tokens of a prompt with images see each other
    crosses: bool = False  # some layers attend to the images, each of which has one token
