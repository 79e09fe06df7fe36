"""API keys, which identify tenants: as settings and key files store them, a line each, and how they are looked up.

Penstock stores and looks up their SHA-256 hashes, never the keys themselves. Keys are long and random, so a plain hash
protects them. A look-up compares hashes, which a client cannot choose, so its duration reveals nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Self, cast, get_args

import structlog

from ..schemas.errors import ConfigurationError, Unauthorized
from ..schemas.jobs import TOKEN_PATTERN, Priority
from .files import read_text

log = structlog.get_logger(__name__)


class ApiKey(NamedTuple):
    """`tenant=sha256:<hex>`, optionally with ` max_priority=normal`, the highest of its requests, and ` admin`, which
    lets it load and unload models."""

    tenant: str
    digest: str
    max_priority: Priority | None = None
    admin: bool = False

    @classmethod
    def parse(cls, entry: str) -> Self:
        """Parse `key`, `tenant=key`, `sha256:<hex>` or the full form. Raises `ValueError`, which hides the key."""
        given, *options = entry.split() or [""]
        tenant, named, key = given.partition("=")
        if not named:
            tenant, key = "default", given
        if not re.fullmatch(TOKEN_PATTERN, tenant):
            raise ValueError(
                "a tenant's name, before the first '=', has at most 64 characters: letters, digits, '_' and '-'"
            )
        if key.startswith("sha256:"):
            digest = key.removeprefix("sha256:").lower()
            if not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError("sha256: must be followed by 64 hexadecimal digits")
        elif re.fullmatch("[!-~]{8,}", key):
            digest = hashlib.sha256(key.encode()).hexdigest()
        else:
            raise ValueError("a key must have at least 8 characters, all visible ASCII")
        is_admin = "admin" in options
        return cls(tenant, digest, _ceiling([option for option in options if option != "admin"]), is_admin)

    def __str__(self) -> str:
        ceiling = f" max_priority={self.max_priority}" if self.max_priority else ""
        return f"{self.tenant}=sha256:{self.digest}{ceiling}{' admin' if self.admin else ''}"


def _ceiling(options: list[str]) -> Priority | None:
    if not options:
        return None
    name, _, value = options[0].partition("=")
    if len(options) > 1 or name != "max_priority" or value not in get_args(Priority):
        raise ValueError(
            f"only admin and max_priority= may follow a key, the latter with one of {', '.join(get_args(Priority))}"
        )
    return cast(Priority, value)


class Keys:
    """The keys of the settings and those of a file, which is read again when it changes.

    If the file becomes unreadable, the known keys stay valid and the log has an error.
    """

    def __init__(self, given: Iterable[str], file: Path | None = None) -> None:
        """`given` holds entries for `ApiKey.parse`. Raises `ConfigurationError`, which names the faulty lines."""
        self._file = file
        self._given = _owners({f"key {number}": entry for number, entry in enumerate(given, 1)})
        self._read: Mapping[str, ApiKey] = {}  # by hash; set by _load
        self._version: object = None  # of the file when it was last read
        if file is not None:
            self._version = _version(file)
            self._load(file)

    def find(self, key: str) -> ApiKey | None:
        """The entry of this key: its tenant and rights. None for an unknown key."""
        if self._file is not None and (version := _version(self._file)) != self._version:
            self._version = version
            try:
                self._load(self._file)
                log.info("API keys reloaded", file=str(self._file), keys=len(self._read))
            except ConfigurationError as error:
                log.error("cannot reload API keys, keeping the old ones", reason=str(error))
        digest = hashlib.sha256(key.encode()).hexdigest()
        return self._read.get(digest) or self._given.get(digest)

    def owner(self, headers: Mapping[str, str]) -> ApiKey:
        """Whose request has these headers, by lower-case names: `authorization: Bearer KEY`, the `x-api-key` of
        Anthropic's clients, or the `api-key` of Azure's. Raises `Unauthorized`."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [
            bearer.strip() if scheme.lower() == "bearer" else "",
            headers.get("x-api-key", ""),
            headers.get("api-key", ""),
        ]
        for key in filter(None, given):
            if (owner := self.find(key)) is not None:
                return owner
        raise Unauthorized(
            "Incorrect API key." if any(given) else "No API key: send one as `Authorization: Bearer KEY`."
        )

    def _load(self, file: Path) -> None:
        try:
            lines = read_text(file, "utf-8-sig").splitlines()
            readable = file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError([f"api_keys_file {file} cannot be read: {error}"]) from None
        entries = {
            f"api_keys_file {file}, line {number}": text
            for number, line in enumerate(lines, 1)
            if (text := line.strip()) and not text.startswith("#")
        }
        self._read = _owners(entries)
        if readable and any("sha256:" not in text for text in entries.values()):
            log.warning("plain-text API keys in a file that other users can read", file=str(file))


def _owners(entries: Mapping[str, str]) -> dict[str, ApiKey]:
    """The keys by their hash; `entries` are by their source, for error messages. Raises `ConfigurationError`."""
    found: dict[str, ApiKey] = {}
    faults = []
    for origin, entry in entries.items():
        try:
            key = ApiKey.parse(entry)
        except ValueError as error:
            faults.append(f"{origin}: {error}")
        else:
            if found.setdefault(key.digest, key) != key:
                faults.append(f"{origin}: this key is listed before with another tenant or other rights; remove one")
    if faults:
        raise ConfigurationError(faults)
    return found


def _version(file: Path) -> object:
    try:
        found = os.stat(file)
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino
