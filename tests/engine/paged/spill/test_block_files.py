"""Blocks on disk: bounded, the least recently used first, found whole or not at all, whoever else writes there."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.paged.spill.block_files import BlockFiles, DamagedBlock

SIZE = 200
IDENTITY, OTHER = b"i" * 16, b"o" * 16
Keys = st.integers(0, 9)


def key_of(number: int) -> bytes:
    return blake2b(bytes([number]), digest_size=16).digest()


def content_of(number: int) -> bytes:
    return bytes([number]) * SIZE


def write(files: BlockFiles, number: int) -> bool:
    return files.write(key_of(number), memoryview(content_of(number)))


def read(files: BlockFiles, number: int) -> bytes | None:
    content = bytearray(files.size)
    return bytes(content) if files.read(key_of(number), memoryview(content)) else None


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*.kv"))


def path_of(directory: Path, number: int, identity: bytes = IDENTITY) -> Path:
    return directory / identity.hex() / f"{key_of(number).hex()}.kv"


@contextmanager
def fresh(root: Path, counter: Iterator[int] = itertools.count()) -> Iterator[Path]:  # noqa: B008
    """A directory for one example."""
    directory = root / str(next(counter))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@settings(max_examples=200, deadline=None)
@given(
    limit=st.integers(0, 6).map(lambda count: count * 280 + 100),
    script=st.lists(st.tuples(st.sampled_from("wwwrt"), st.lists(Keys, min_size=1, max_size=3)), max_size=40),
)
def test_the_limit_holds_and_the_least_recently_used_goes_first(
    tmp_path_factory: pytest.TempPathFactory, limit: int, script: list[tuple[str, list[int]]]
) -> None:
    clock = itertools.count(10**18, 1000)
    with fresh(tmp_path_factory.getbasetemp()) as directory:
        files = BlockFiles(directory, IDENTITY, SIZE, limit, lambda: next(clock))
        used: dict[int, float] = {}  # the blocks that should be there, and when each was used, in steps
        for step, (verb, numbers) in enumerate(script):
            if verb == "w":
                wrote = write(files, numbers[0])
                assert wrote == (numbers[0] not in used and files.file_size <= limit)
                if wrote:
                    used[numbers[0]] = step
            elif verb == "t":
                files.touch(map(key_of, numbers))
                for index, number in reversed(list(enumerate(numbers))):
                    if number in used:
                        used[number] = step - index / 10
            else:
                assert read(files, numbers[0]) == (content_of(numbers[0]) if numbers[0] in used else None)
            present = {number for number in used if files.has(key_of(number))}
            if gone := used.keys() - present:
                assert verb == "w"
                assert max(used[number] for number in gone) < min((used[number] for number in present), default=step)
                assert size_of(directory) + files.file_size > limit - limit // 16 - files.file_size, "too much removed"
            used = {number: used[number] for number in present}
            assert size_of(directory) == files.file_size * len(present) <= limit


@settings(max_examples=60, deadline=None)
@given(script=st.lists(st.tuples(st.sampled_from([0, 1]), Keys), max_size=60), blocks=st.integers(1, 8))
def test_workers_share_one_limit(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[int, int]], blocks: int
) -> None:
    """Of two identities, so that each also makes room by removing the other's."""
    with fresh(tmp_path_factory.getbasetemp()) as directory:
        limit = blocks * 280
        workers = [BlockFiles(directory, identity, SIZE, limit) for identity in (IDENTITY, OTHER)]
        for worker, number in script:
            write(workers[worker], number)
            assert read(workers[worker], number) in (content_of(number), None)
            assert size_of(directory) <= limit + limit // 16 + workers[0].file_size


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    fault=st.sampled_from(["flip", "cut", "extend", "empty", "another key", "another identity", "another size"]),
)
def test_a_file_that_is_no_whole_block_is_removed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, fault: str
) -> None:
    with fresh(tmp_path_factory.getbasetemp()) as directory:
        files = BlockFiles(directory, IDENTITY, SIZE, 10**6)
        assert write(files, 1) and write(files, 2)
        path = path_of(directory, 1)
        content = bytearray(path.read_bytes())
        match fault:
            case "flip":
                content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del content[data.draw(st.integers(0, len(content) - 1)) :]
            case "extend":
                content += b"x"
            case "empty":
                content.clear()
            case "another key":
                content[:] = path_of(directory, 2).read_bytes()
            case "another identity" | "another size":
                size = SIZE if fault == "another identity" else SIZE + 1
                other = BlockFiles(directory, OTHER, size, 10**6)
                assert other.write(key_of(1), memoryview(bytes(size)))
                content[:] = path_of(directory, 1, OTHER).read_bytes()
        path.write_bytes(content)
        with pytest.raises(DamagedBlock, match=str(path)):
            read(files, 1)
        assert not path.exists() and read(files, 1) is None
        assert read(files, 2) == content_of(2)
        assert write(files, 1) and read(files, 1) == content_of(1)


def test_only_the_user_can_read_what_names_do_not_tell(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = tmp_path / "a" / "b"
        files = BlockFiles(directory, IDENTITY, SIZE, 10**6)
        write(files, 1)
    finally:
        os.umask(before)
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*")}
    assert modes == {"": 0o700, ".kv": 0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (directory / IDENTITY.hex()).chmod(0o750)
    with pytest.raises(PermissionError, match="mode 0700"):
        BlockFiles(directory, IDENTITY, SIZE, 10**6)


def test_other_files_in_the_directory_stay(tmp_path: Path) -> None:
    """Somebody may name a directory that holds something else."""
    (tmp_path / "thesis.txt").write_bytes(bytes(5000))
    (tmp_path / ("a" * 32)).write_bytes(bytes(5000))
    files = BlockFiles(tmp_path, IDENTITY, SIZE, 600)
    own = tmp_path / IDENTITY.hex()
    (own / "notes.kv").write_bytes(bytes(5000))
    for number in range(9):
        write(files, number)
    assert files.total <= 600
    assert all(
        path.stat().st_size == 5000 for path in (tmp_path / "thesis.txt", tmp_path / ("a" * 32), own / "notes.kv")
    )


def test_a_full_disk_leaves_no_part_of_a_block(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, IDENTITY, SIZE, 10**6)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))
    try:
        with pytest.raises(OSError):
            write(files, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / IDENTITY.hex()).iterdir()) == []
    assert write(files, 1)


def test_a_room_that_another_removed_is_made_again(tmp_path: Path) -> None:
    """The other has made room by removing all of this one's blocks."""
    files = BlockFiles(tmp_path, IDENTITY, SIZE, 10**6)
    write(files, 1)
    other = BlockFiles(tmp_path, OTHER, SIZE, 300)
    assert write(other, 1) and not path_of(tmp_path, 1).parent.exists()
    assert read(files, 1) is None
    assert write(files, 1) and read(files, 1) == content_of(1)


WRITER = """
import sys
from pathlib import Path
from penstock.engine.paged.spill.block_files import BlockFiles
files = BlockFiles(Path(sys.argv[1]), b"i" * 16, 1 << 20, 1 << 30)
number = 0
while True:
    number += 1
    files.write(number.to_bytes(16), memoryview(number.to_bytes(8) * (1 << 17)))
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_blocks(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child:
        written = [int(child.stdout.readline()) for _ in range(20)]
        child.send_signal(signal.SIGKILL)
        written += map(int, child.stdout.read().split())
    files = BlockFiles(tmp_path, IDENTITY, 1 << 20, 1 << 30)
    content = bytearray(1 << 20)
    for number in written:
        assert files.read(number.to_bytes(16), memoryview(content)) and content == number.to_bytes(8) * (1 << 17)
    room = tmp_path / IDENTITY.hex()
    for path in room.glob("*.kv"):
        assert files.read(bytes.fromhex(path.stem), memoryview(content)), "what has its name is whole"


def test_the_part_of_a_dead_writer_is_removed_once_it_is_old(tmp_path: Path) -> None:
    young, old = (tmp_path / IDENTITY.hex() / f"{number}-1.part" for number in (1, 2))
    files = BlockFiles(tmp_path, IDENTITY, SIZE, 10**6)
    young.write_bytes(b"x")
    old.write_bytes(b"x")
    os.utime(old, (0, 0))
    files.trim()
    assert young.exists() and not old.exists()
    assert files.total == 1, "what a living writer has begun counts"
