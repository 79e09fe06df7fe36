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
    """How a family's processor describes an image: `grid` are numbers, of which `write` makes the text that stands for
    it, where `mark` is the text of one image token. `options` are for the image processor; `merge` is the side of the
    square of patches that make one token of a model with positions in three dimensions, 0 for plain positions.
    `is_rigid`: transformers' code for it converts features to the dtype of the weights, whatever runs in float32.
    `tiles` is the axis of the tower's inputs along which an image lies in tiles that do not see each other, None where
    the tower sees an image as a whole; then `blocks` names its blocks, and what computes further features of them.
    `place` is the id of the token by which a prompt's text says where an image stands. `mutual` is how many tokens of
    an image, in a row, see each other in both directions; 0 if they are causal like all others. `in_windows`: only in
    layers with a window. `defaults` are settings of the image processor for those that its file leaves open. `bounded`,
    of a family whose processor chooses the size of pictures by itself, are options for that processor, by which a
    picture has at least and at most so many pixels. `settings` are those of the processor of a checkpoint without a
    file for it. `may_be_blind`: a checkpoint without an image processor is one of its language model. `prepares` makes
    the image processor of a model's directory where transformers has none for Pillow. `narrows`: the tower takes pixels
    in the dtype of its weights alone. `by_count`: a picture is prepared in another way where a prompt has several; the
    last number of its grid is above 1 there. `mark` is the text by which a prompt says where an image stands, if it is
    no token. `numbers` makes the text before an image of its number in the prompt, given the image processor. `canvas`
    says where images lie if each of their tokens and marks has a position of its own. `sample` is the width and height
    of a picture that shows how the model sees, without parts. `crops` names the input with crops of a picture, each of
    which is seen like a whole one, and before it, but for the feature that ends a picture. `marks` are texts and ids
    of tokens between those of an image that have features, too: the last rows of the tower's table, in this order.
    `is_prefix`: all tokens of a prompt with images see each other; `join` writes how such a prompt begins. `template`
    is the chat template of models that are published without one.
    `axes` is in how many dimensions tokens have positions, the last three of which are an image's columns, its rows and
    its number in the prompt; 0 for others. `deep` are the numbers of layers before which further features are added, in
    ascending order, where it is not one layer after the other from the second on.
    `opening` is a text before each chat, where the processor's file asks for a default system prompt. `join` makes the
    text of a prompt of what has been written into it."""

    grid: Callable[[Config, Mapping[str, Any]], Grid]
    write: Callable[[Config, Grid, str], str]
    options: Callable[[Config], dict[str, Any]] = lambda _: {}
    merge: Callable[[Config], int] = lambda _: 0
    is_rigid: bool = False
    tiles: int | None = None
    blocks: tuple[str, ...] = ()
    place: Callable[[Config], int] = image_token
    mutual: Callable[[Config], int] = lambda _: 0
    in_windows: bool = False
    defaults: Mapping[str, Any] = MappingProxyType({})
    may_be_blind: bool = False
    bounded: Callable[[Any, int | None, int | None], dict[str, Any]] | None = None
    settings: Callable[[Config], dict[str, Any]] | None = None
    prepares: Callable[[Path], Callable[..., Mapping[str, Any]]] | None = None
    narrows: bool = False
    by_count: bool = False
    mark: str = ""
    numbers: Callable[[Any, int], str] | None = None
    canvas: Callable[[Config], Canvas] | None = None
    sample: tuple[int, int] = (64, 48)
    crops: str = ""
    marks: Callable[[Config], Mapping[str, int]] = lambda _: {}
    opening: str = ""
    join: Callable[[str], str] = str
    is_prefix: bool = False
    template: str = ""
    axes: Callable[[Config], int] = lambda _: 0
    deep: Callable[[Config], Sequence[int]] = lambda _: ()
