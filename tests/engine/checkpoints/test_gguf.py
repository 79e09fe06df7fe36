"""The header of a GGUF file: what it says, and each way in which it can be wrong, with one clear error."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.engine.checkpoints.gguf.file import read_gguf
from penstock.engine.checkpoints.gguf.types import BLOCKS
from penstock.schemas.errors import ModelLoadError
from penstock.schemas.sources import is_gguf


def write(path: Path, shards: int = 1, **tensors: tuple[int, ...]) -> Path:
    """A file with some metadata and tensors of zeros."""
    writer: Any = gguf.GGUFWriter(path, "llama", split_max_tensors=0 if shards == 1 else 1)
    writer.add_context_length(2048)
    writer.add_float32("llama.rope.freq_base", 500000.0)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bé", ""])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 6])
    for name, shape in (tensors or {"one": (2, 32), "two": (3,)}).items():
        writer.add_tensor(name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def header(*, version: int = 3, tensors: int = 0, pairs: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


def entry(name: str = "w", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's entry, its dimensions in the file's order."""
    text = name.encode()
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(text)) + text + dimensions + struct.pack("<IQ", kind, offset)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def test_metadata_and_tensors_are_those_that_were_written(tmp_path: Path) -> None:
    found = read_gguf(write(tmp_path / "a.gguf"))
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["llama.context_length"] == 2048
    assert found.metadata["llama.rope.freq_base"] == 500000.0
    assert found.metadata["tokenizer.ggml.token_type"] == [1, 3, 6]
    assert found.strings("tokenizer.ggml.tokens") == ["a", "bé", ""]
    assert found.strings("nothing") == []
    one = found.tensors["one"]
    assert (one.shape, one.type, one.nbytes) == ((2, 32), "F32", 256)
    assert found.floats("two") == [0.0, 1.0, 2.0]


def test_a_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    """One that does not is read once, whoever asks: a large vocabulary takes long to skip."""
    path = write(tmp_path / "a.gguf")
    old = path.read_bytes()
    before, after = (b"context_length" + struct.pack("<II", 4, length) for length in (2048, 4096))
    for second in (100, 200):
        assert read_gguf(path).metadata["llama.context_length"] == 2048
        written = path.stat()
        path.write_bytes(old.replace(before, after))
        os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))  # as within one tick of the clock
        assert read_gguf(path).metadata["llama.context_length"] == 4096
        os.utime(path, (second, second))
        first = read_gguf(path)
        assert first.metadata["llama.context_length"] == 4096 and read_gguf(path).metadata is first.metadata
        path.write_bytes(old)


def test_all_shards_are_read(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", shards=3, one=(2, 32), two=(3,), three=(4,))
    found = read_gguf(tmp_path / "m-00001-of-00003.gguf")
    assert {name: tensor.path.name for name, tensor in found.tensors.items()} == {
        "one": "m-00001-of-00003.gguf",
        "two": "m-00002-of-00003.gguf",
        "three": "m-00003-of-00003.gguf",
    }
    assert found.floats("three") == [0.0, 1.0, 2.0, 3.0]


def test_a_missing_shard_is_named_and_another_than_the_first_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", shards=3, one=(2, 32), two=(3,), three=(4,))
    with pytest.raises(ModelLoadError, match="is not the first of 3 shards; name the one with 00001"):
        read_gguf(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks its shards m-00003-of-00003\.gguf; put them"):
        read_gguf(tmp_path / "m-00001-of-00003.gguf")
    (tmp_path / "m-00001-of-00003.gguf").rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelLoadError, match=r"names must end in -00001-of-00003\.gguf; rename"):
        read_gguf(tmp_path / "renamed.gguf")


def test_a_file_that_ends_anywhere_is_truncated(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    whole, last = path.read_bytes(), read_gguf(path).tensors["two"]
    ends = last.start + last.nbytes
    for end in (*range(4, ends, 7), ends - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelLoadError, match=r"a\.gguf is not a complete GGUF file: .*; download it again"):
            read_gguf(path)
    path.write_bytes(whole[:ends])  # what pads the last tensor may be missing
    assert read_gguf(path).floats("two") == [0.0, 1.0, 2.0]


FAULTS = [
    (b"PK\3\4" + bytes(60), "it does not begin with GGUF"),
    (header(version=1), "GGUF of version 1, which cannot be read; convert the model again"),
    (header(version=3 << 24), "big-endian, which cannot be read"),
    (header(tensors=1 << 60), f"its header names {1 << 60} tensors, and the file has 24 bytes"),
    (header(pairs=1 << 60), f"its header names {1 << 60} entries of metadata"),
    (header(pairs=1, rest=struct.pack("<Q", 1 << 62) + bytes(40)), f"names {1 << 62} bytes in a string"),
    (header(pairs=1, rest=pair("a", 9, struct.pack("<IQ", 5, 1 << 61)) + bytes(40)), f"names {1 << 61} items in a"),
    (header(pairs=1, rest=pair("a", 9, struct.pack("<IQ", 8, 1 << 61)) + bytes(40)), f"names {1 << 61} strings in a"),
    (header(pairs=1, rest=pair("a", 9, struct.pack("<IQQ", 8, 2, 1 << 63)) + bytes(40)), "within an array of strings"),
    (header(pairs=1, rest=pair("a", 9, struct.pack("<IQ", 9, 2)) + bytes(40)), "the array a has items of the type 9"),
    (header(pairs=1, rest=pair("a", 77, bytes(40))), "its metadata a has the unknown type 77"),
    (header(pairs=1, rest=pair("general.alignment", 4, struct.pack("<I", 48))), "its alignment is 48"),
    (header(tensors=1, rest=entry(shape=(1,) * 9) + bytes(64)), "the tensor w has 9 dimensions"),
    (header(tensors=1, rest=entry(shape=(32, 0)) + bytes(64)), r"the tensor w has the shape \[0, 32\]"),
    (header(tensors=1, rest=entry(shape=(1 << 40,)) + bytes(64)), "the tensor w ends at byte .* of "),
    (header(tensors=1, rest=entry(shape=(1 << 62, 1 << 62)) + bytes(64)), "the tensor w ends at byte .* of "),
    (header(tensors=1, rest=entry(offset=7) + bytes(400)), "the tensor w ends at byte"),
    (
        header(tensors=1, rest=entry(shape=(33,), kind=8) + bytes(64)),
        "the rows of w have 33 numbers, .* multiple of 32",
    ),
    (header(tensors=2, rest=entry() * 2 + bytes(400)), "the tensor w is there twice"),
    (header(tensors=1, rest=entry(kind=15) + bytes(400)), "the tensor w has the type Q8_K, which is not supported"),
    (header(tensors=1, rest=entry(kind=999) + bytes(400)), "the tensor w has the type number 999, which is not"),
]


@pytest.mark.parametrize(("content", "fault"), FAULTS, ids=[fault[:40] for _, fault in FAULTS])
def test_a_header_that_lies_is_refused(content: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=fault):
        read_gguf(path)


def test_a_file_is_known_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    blob = write(tmp_path / "a.GGUF").rename(tmp_path / "sha256-0123")
    assert is_gguf(blob) and is_gguf(tmp_path / "missing.gguf")
    (tmp_path / "other").write_bytes(b"no")
    (tmp_path / "folder.gguf").mkdir()
    assert not is_gguf(tmp_path / "other") and not is_gguf(tmp_path / "folder.gguf") and not is_gguf(tmp_path)
    with pytest.raises(ModelLoadError, match=r"missing\.gguf cannot be read: .*check its permissions"):
        read_gguf(tmp_path / "missing.gguf")


def test_the_sizes_of_blocks_are_those_of_the_reference() -> None:
    for name, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes
