"""Reads the header of a GGUF file: its metadata, and where each tensor lies. Reads no weights, and needs no torch.

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every size in the header is checked
against the file before anything is allocated for it.
"""

from __future__ import annotations

import mmap
import re
import struct
import time
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ....schemas.errors import ModelLoadError
from ....schemas.sources import split_pair
from .types import BLOCKS, TYPES

_MAGIC = b"GGUF"
_TICK = 10**9  # nanoseconds, and more than a tick of any system
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_length_at = struct.Struct("<Q").unpack_from
_ENTRY = 8 + 4 + 8 + 4 + 8  # the least bytes of a tensor's entry: name, rank, one dimension, type and offset
_PAIR = 8 + 4 + 1  # the least bytes of a key, its type and its value
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_GROUP = 32  # the most weights that share a scale
_ROUTER = ".ffn_gate_inp.weight"  # ends the name of what chooses experts, which transformers computes
_SHARD = re.compile(r"(.*)-00001-of-(\d{5})(\.gguf)", re.IGNORECASE)


class GgufTensor(NamedTuple):
    """`shape` is in torch's order, rows first; `start` is the offset of its first byte in `path`.

    `scale` has what its numbers are multiplied by: one for all, or one for each index into the first dimension.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    path: Path
    start: int
    nbytes: int
    scale: GgufTensor | None = None


class Tiles(NamedTuple):
    """An order of rows or columns: from `start` on, [repeats, groups, size] in the file and [groups, repeats, size] in
    the model."""

    start: int
    repeats: int
    groups: int
    size: int
    by_columns: bool


class Groups(NamedTuple):
    """An order of rows: in the file part after part, each with as many rows for each group as `sizes` says; in the
    model group after group."""

    num_groups: int
    sizes: tuple[int, ...]


class GgufWeight(NamedTuple):
    """Where a weight comes from. `heads`: the rows of each are interleaved in the file, or, of its first `apart`, those
    in even places of the model lie before the others. `offset` is to be added.

    `expert` is an index into the tensor's first dimension, and `shape` what the model has. `more` are the tensors of
    further rows or, if `is_split_in_time`, of further frames: a new third dimension. `sees`: it is no language model's.
    With `is_decay` the file has -exp of the numbers. A weight of all experts of a layer is `is_transposed`, outputs
    last; its outputs are those of both tensors, one behind the other or, `in_turns`, one of each. `groups` is the order
    of the rows of all. `is_latent`: of two tensors by head, the first has a head's rows transposed. `is_by_colour`: of
    a patch all pixels of a colour lie together, and in the model all colours of a pixel. `is_by_axis`: its first
    dimension is the model's second. The model has so many `leading` rows before, of zeros.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    heads: int | None = None
    offset: int = 0
    apart: int = 0
    expert: int | None = None
    more: tuple[GgufTensor, ...] = ()
    is_split_in_time: bool = False
    sees: bool = False
    tiles: Tiles | None = None
    is_decay: bool = False
    is_transposed: bool = False
    in_turns: bool = False
    groups: Groups | None = None
    is_latent: bool = False
    is_by_colour: bool = False
    is_by_axis: bool = False
    leading: int = 0

    @property
    def types(self) -> set[str]:
        """Those of all its tensors."""
        return {tensor.type for tensor in (self.tensor, *self.more)}

    @property
    def keeps_levels(self) -> bool:
        """Whether it can be used in the form that it has in the file, if its type has levels."""
        in_groups = self.tiles is None or not self.tiles.by_columns or not self.tiles.size % _GROUP
        is_product = (len(self.shape) == 2 or self.is_transposed) and not self.tensor.name.endswith(_ROUTER)
        return is_product and in_groups and not (self.sees or self.is_latent or self.is_by_axis)


class GgufStrings(NamedTuple):
    """An array of strings that has been skipped: see `Gguf.strings`."""

    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Gguf:
    """What the header of a model's file says, or those of all its shards; arrays of strings are `GgufStrings`. Whoever
    reads the same file gets the same dictionaries: change none.

    `projector` is the file of its vision part, if it has one.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor] = field(repr=False)
    projector: Gguf | None = field(default=None, repr=False)

    def floats(self, name: str) -> list[float]:
        """The numbers of a small tensor of 32-bit floats."""
        tensor = self.tensors[name]
        if tensor.type != "F32":
            raise ModelLoadError(f"{self.path}: {name} has the type {tensor.type}, and must have F32; convert it again")
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            return list(struct.unpack(f"<{prod(tensor.shape)}f", file.read(tensor.nbytes)))

    def strings(self, key: str) -> list[str]:
        """The strings of an array in the metadata; none if it is missing."""
        array = self.metadata.get(key)
        if not isinstance(array, GgufStrings):
            return []
        found, at = [], array.start
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for _ in range(array.length):
                end = at + 8 + _length_at(data, at)[0]
                found.append(data[at + 8 : end].decode("utf-8", errors="replace"))
                at = end
        return found


def read_gguf(path: Path) -> Gguf:
    """Read the header of a file and of its other shards, and that of its projector where `path` names both.

    Raises `ModelLoadError` for a file that is incomplete or not GGUF, for a missing shard, and for a tensor whose type
    is not supported.
    """
    text, projector = split_pair(path)
    found = _read_shards(text)
    return found if projector is None else replace(found, projector=_read_shards(projector))


def _read_shards(path: Path) -> Gguf:
    first = _read_file(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    if first.metadata.get("split.no"):
        raise ModelLoadError(f"{path} is not the first of {count} shards; name the one with 00001 in its name")
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match[2]) != count:
        raise ModelLoadError(
            f"{path} is one of {count} shards, whose names must end in -00001-of-{count:05}.gguf; rename them"
        )
    others = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}{match[3]}") for number in range(2, count + 1)]
    if missing := [other.name for other in others if not other.is_file()]:
        raise ModelLoadError(f"{path} lacks its shards {', '.join(missing)}; put them into the same directory")
    tensors = dict(first.tensors)
    for other in others:
        for name, tensor in _read_file(other).tensors.items():
            if name in tensors:
                raise _broken(other, f"the tensor {name} is also in {tensors[name].path.name}")
            tensors[name] = tensor
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise _broken(path, f"its shards have {len(tensors)} tensors instead of {expected}")
    return Gguf(path, first.metadata, tensors)


def _broken(path: Path, why: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is not a complete GGUF file: {why}; download it again")


def _read_file(path: Path) -> Gguf:
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    # Within a tick of the system's clock, a file can change without a new time.
    is_settled = time.time_ns() - found.st_mtime_ns > _TICK
    return _read_version(path, version) if is_settled else _read_version.__wrapped__(path, version)


@lru_cache(maxsize=32)
def _read_version(path: Path, version: tuple[int, ...]) -> Gguf:
    """A load asks for the same header some twenty times, and to skip the tokens of a large vocabulary takes 0.1 s."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise _broken(path, "it does not begin with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ModelLoadError:
    return ModelLoadError(f"{path} cannot be read: {error}; check its permissions")


class _Reader:
    """Reads a header from its start to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self._at = len(_MAGIC)  # the next byte

    def read(self) -> Gguf:
        version = self._scalar("I")
        if version not in _VERSIONS:
            kind = "big-endian" if version and not version & 0xFFFF else f"GGUF of version {version}"
            raise ModelLoadError(
                f"{self._path} is {kind}, which cannot be read; convert the model again with a current llama.cpp"
            )
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        self._check_count(num_pairs, _PAIR, "entries of metadata")
        self._check_count(num_tensors, _ENTRY, "tensors")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"), key)
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise _broken(self._path, f"its alignment is {alignment!r}, which is no power of two")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise _broken(self._path, f"the tensor {name} is there twice")
            tensors[name] = self._tensor(name, shape, kind, start + offset, alignment)
        return Gguf(self._path, metadata, tensors)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: str, start: int, alignment: int) -> GgufTensor:
        if kind not in BLOCKS:
            raise ModelLoadError(
                f"{self._path}: the tensor {name} has the type {kind}, which is not supported; use a file whose types "
                f"are among {', '.join(BLOCKS)}"
            )
        weights, size = BLOCKS[kind]
        if shape[-1] % weights:
            raise _broken(self._path, f"the rows of {name} have {shape[-1]} numbers, which is no multiple of {weights}")
        nbytes = prod(shape) // weights * size
        if start % alignment or start + nbytes > len(self._data):
            raise _broken(self._path, f"the tensor {name} ends at byte {start + nbytes} of {len(self._data)}")
        return GgufTensor(name, shape, kind, self._path, start, nbytes)

    def _entry(self) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape, type and offset of a tensor."""
        name, rank = self._string(), self._scalar("I")
        if not 1 <= rank <= _MOST_DIMENSIONS:
            raise _broken(self._path, f"the tensor {name} has {rank} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(rank))[::-1]
        if not all(shape):
            raise _broken(self._path, f"the tensor {name} has the shape {list(shape)}")
        number = self._scalar("I")
        return name, shape, TYPES.get(number, f"number {number}"), self._scalar("Q")

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _broken(self._path, f"its metadata {key} has the unknown type {kind}")
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            self._check_count(count, 8, f"strings in {key}")
            return self._skip_strings(count)
        if kind not in _SCALARS:
            raise _broken(self._path, f"the array {key} has items of the type {kind}")
        code = _SCALARS[kind]
        size = struct.calcsize(code)
        self._check_count(count, size, f"items in {key}")
        values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += count * size
        return list(values)

    def _scalar(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        except struct.error:
            raise _broken(self._path, f"its header ends after {len(self._data)} bytes") from None
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        self._check_count(length, 1, "bytes in a string")
        text = self._data[self._at : self._at + length]
        self._at += length
        return text.decode("utf-8", errors="replace")

    def _skip_strings(self, count: int) -> GgufStrings:
        data, at = self._data, self._at
        found = GgufStrings(at, count)
        try:
            for _ in range(count):
                at += 8 + _length_at(data, at)[0]
        except (struct.error, OverflowError):
            at = len(data) + 1
        if at > len(data):
            raise _broken(self._path, f"its header ends after {len(data)} bytes, within an array of strings")
        self._at = at
        return found

    def _check_count(self, count: int, size: int, what: str) -> None:
        """`count` items of at least `size` bytes each must fit into the rest of the file."""
        if count * size > len(self._data) - self._at:
            raise _broken(self._path, f"its header names {count} {what}, and the file has {len(self._data)} bytes")
