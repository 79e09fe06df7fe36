"""Blocks of keys and values as files: named by their content's hash, checksummed, bounded in size. Knows no tensor.

    DIRECTORY/IDENTITY/KEY.kv        a block: the header below, then its numbers
    DIRECTORY/IDENTITY/PID-N.part    a block that a process writes; it takes its name when it is complete

Processes share a directory without locks: a file appears by a rename, complete, and whatever else the others did to it
is a missing file. The time of modification is that of the last use, so that all agree on what was used least recently.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

_HEADER = struct.Struct("<8s16s16sQ")  # magic, identity, key, bytes of content; their checksum and the content follow
_MAGIC = b"PSTKKV01"
_CHECKSUM = 32
_ROOM = re.compile(r"[0-9a-f]{32}")
_BLOCK = re.compile(r"[0-9a-f]{32}\.kv")
_PART = re.compile(r"\d+-\d+\.part")
_ABANDONED = 600 * 10**9  # nanoseconds after which a part is one that a dead process left
_SLACK = 16  # a trim frees this fraction of the limit besides, and others' writes are looked up after as much


class DamagedBlock(Exception):
    """A file that is no whole block of its name; it has been removed."""


class _File(NamedTuple):
    used: int  # nanoseconds since 1970
    path: str
    size: int


class BlockFiles:
    """The blocks of one identity in a directory that others may share: at most `limit` bytes, for all together.

    A limit is kept by every process by itself: while several write, it may be exceeded by a 16th for each. One thread
    writes, touches and trims; any may call the other methods.
    """

    def __init__(
        self,
        directory: Path,
        identity: bytes,
        size: int,
        limit: int,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        """`identity` has 16 bytes and a block `size` bytes. `now` is in nanoseconds since 1970.

        Raises `OSError` if the directory cannot be used, and `PermissionError` if others could read the blocks.
        """
        self.size = size
        self.total = 0  # bytes of all files, as far as this process knows; set by `trim` and `write`
        self._directory, self._room = directory, directory / identity.hex()
        self._identity, self._limit, self._now = identity, limit, now
        self._unseen = limit  # bytes written since the last look at the directory
        self._count = 0
        self._open()

    @property
    def file_size(self) -> int:
        return _HEADER.size + _CHECKSUM + self.size

    def has(self, key: bytes) -> bool:
        """Whether there is a file of this name; `read` says whether it is a block."""
        return self._path(key).exists()

    def read(self, key: bytes, content: memoryview) -> bool:
        """Read a block into `content`; returns whether it was there.

        Raises `DamagedBlock`, after removing the file, if it is no whole block of this key and identity, and `OSError`.
        """
        path = self._path(key)
        try:
            with path.open("rb") as file:
                header, checksum = file.read(_HEADER.size), file.read(_CHECKSUM)
                length, rest = file.readinto(content), file.read(1)
        except FileNotFoundError:
            return False
        whole = length == self.size and not rest and header == self._header(key)
        if not whole or checksum != _checksum(header, content):
            path.unlink(missing_ok=True)
            raise DamagedBlock(str(path))
        return True

    def expect(self, keys: Iterable[bytes]) -> None:
        """Have the system read these blocks ahead, where it can: a disk is faster at many than at one after another."""
        if not hasattr(os, "posix_fadvise"):
            return
        for key in keys:
            with suppress(FileNotFoundError), self._path(key).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def write(self, key: bytes, content: memoryview) -> bool:
        """Store a block, trimming the directory first if need be; returns whether it was missing and fits.

        Raises `OSError`.
        """
        path = self._path(key)
        if path.exists():
            return False
        if self._unseen * _SLACK >= self._limit or self.total + self.file_size > self._limit:
            self.trim(self.file_size)
        if self.total + self.file_size > self._limit:
            return False
        header = self._header(key)
        self._count += 1
        part = self._room / f"{os.getpid()}-{self._count}.part"
        try:
            with self._create(part) as file:
                file.write(header + _checksum(header, content))
                file.write(content)
            now = self._now()
            os.utime(part, ns=(now, now))
            part.rename(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        self.total += self.file_size
        self._unseen += self.file_size
        return True

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that these blocks, the start of a sequence, were used now; what follows them is forgotten before them.

        Raises `OSError`; a missing block is no error.
        """
        now = self._now()
        for index, key in enumerate(keys):
            with suppress(FileNotFoundError):
                os.utime(self._path(key), ns=(now - index, now - index))

    def trim(self, room: int = 0) -> None:
        """Look what the directory holds, and remove what was used least recently until `room` bytes fit."""
        files = self._look()
        self.total = sum(file.size for file in files)
        self._unseen = 0
        if self.total + room <= self._limit:
            return
        most = self._limit - self._limit // _SLACK - room
        for file in sorted(files):
            if self.total <= most:
                break
            with suppress(FileNotFoundError):
                os.unlink(file.path)
            self.total -= file.size
        for path in {Path(file.path).parent for file in files} - {self._room}:
            with suppress(OSError):  # not empty, or gone
                path.rmdir()

    def _look(self) -> list[_File]:
        """All blocks in the directory, of any identity; abandoned parts are removed."""
        found = []
        for room in self._directory.iterdir():
            if not _ROOM.fullmatch(room.name) or not room.is_dir():
                continue
            with suppress(FileNotFoundError), os.scandir(room) as entries:
                for entry in entries:
                    is_part = _PART.fullmatch(entry.name)
                    if not is_part and not _BLOCK.fullmatch(entry.name):
                        continue
                    with suppress(FileNotFoundError):
                        about = entry.stat(follow_symlinks=False)
                        if is_part and self._now() - about.st_mtime_ns > _ABANDONED:
                            os.unlink(entry.path)
                        else:
                            found.append(_File(about.st_mtime_ns, entry.path, about.st_size))
        return found

    def _open(self) -> None:
        """Create the room of this identity, or check that no one else may use it."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._room.mkdir(mode=0o700, exist_ok=True)
        about = self._room.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise PermissionError(f"{self._room} must be a directory of this user's, with mode 0700")

    def _create(self, part: Path) -> BinaryIO:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            return open(os.open(part, flags, 0o600), "wb")
        except FileNotFoundError:  # another process found the room empty
            self._open()
            return open(os.open(part, flags, 0o600), "wb")

    def _path(self, key: bytes) -> Path:
        return self._room / f"{key.hex()}.kv"

    def _header(self, key: bytes) -> bytes:
        return _HEADER.pack(_MAGIC, self._identity, key, self.size)


def _checksum(header: bytes, content: memoryview) -> bytes:
    digest = sha256(header)
    digest.update(content)
    return digest.digest()
