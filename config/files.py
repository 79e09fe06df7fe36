"""Reads the files that users name, and never waits for one that nobody writes."""

from __future__ import annotations

import errno
import io
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from ..schemas.errors import ConfigurationError

MOST_PIPED = 64 << 20  # bytes of what is no regular file, which may have no end


def read_bytes(path: Path) -> bytes:
    """The content of a file, or of a pipe or device that holds or is given some, such as that of `<(command)`.

    Raises `OSError`, also for a pipe that nobody writes to, which would keep its reader waiting.
    """
    with open(path, "rb", buffering=0, opener=_open_at_once) as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(mode):
            return file.readall()
        data = file.read(1)
        if data == b"" and stat.S_ISFIFO(mode):
            raise OSError(
                errno.EAGAIN, "is a pipe that nobody writes to, or that was read before; name a file", str(path)
            )
        os.set_blocking(file.fileno(), True)  # somebody holds the other end
        whole = bytearray(data or b"")
        while data != b"":
            data = file.read(1 << 16)
            whole += data or b""
            if len(whole) > MOST_PIPED:
                raise OSError(errno.EFBIG, f"is no file, and has more than {MOST_PIPED >> 20} MiB", str(path))
        return bytes(whole)


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """As `read_bytes`, as a text. Raises `UnicodeDecodeError`, too."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding).read()


def read_toml(path: Path) -> dict[str, Any]:
    """Raises `FileNotFoundError`, and `ConfigurationError` for what cannot be read or is no TOML."""
    try:
        return tomllib.loads(read_text(path, "utf-8-sig"))
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        fault = f"{path}: cannot be read: {error}; check its permissions and encoding (UTF-8)"
    except tomllib.TOMLDecodeError as error:
        fault = f"{path}: not valid TOML: {error}"
    raise ConfigurationError([fault])


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
