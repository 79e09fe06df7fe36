"""API keys, which identify tenants. Penstock stores and looks up their SHA-256 hashes, never the keys themselves.

Keys are long and random, so a plain hash protects them. A look-up compares hashes, which a client cannot choose, so its
duration reveals nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import structlog
import typer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ....config import metrics
from ....config.api_keys import ApiKey
from ....schemas.errors import ConfigurationError, Unauthorized
from ....schemas.events import ErrorBody
from ....schemas.jobs import TOKEN_PATTERN
from ..answers import error_response
from .access import note

log = structlog.get_logger(__name__)

_OPEN = "/health/"
_PAGE = "/console/"  # the files of the page, which asks for a key itself


def is_open(path: str) -> bool:
    """Whether a path needs no key and is open to every web page."""
    return f"{path}/".startswith(_OPEN)


def is_page(path: str) -> bool:
    """Whether a path is that of the page or one of its files, which need no key."""
    return path == "/" or path.startswith(_PAGE)


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

    def _load(self, file: Path) -> None:
        try:
            lines = file.read_text("utf-8").splitlines()
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


class Authentication:
    """ASGI middleware: refuses a request without a known key; puts the tenant of any other into its scope's state."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (is_open(scope["path"]) or is_page(scope["path"])):
            headers = Headers(scope=scope)
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            bearer = bearer.strip() if scheme.lower() == "bearer" else ""
            given = [key for key in (bearer, headers.get("x-api-key")) if key]  # Anthropic's clients send `x-api-key`
            owner = next((found for key in given if (found := self.keys.find(key))), None)
            if owner is None:
                refusal = Unauthorized(
                    "Incorrect API key." if given else "No API key: send one as `Authorization: Bearer KEY`."
                )
                note(scope, error=refusal.code)
                address = (scope.get("client") or ("",))[0]
                log.warning("API key refused", address=address, reason="unknown" if given else "none was sent")
                metrics.REFUSALS.labels(refusal.code or "unknown").inc()
                response = error_response(ErrorBody.of(refusal))
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope.setdefault("state", {}).update(
                tenant=owner.tenant, max_priority=owner.max_priority, admin=owner.admin
            )
        await self.app(scope, receive, send)


def make_key(
    tenant: Annotated[
        str, typer.Argument(help="The tenant that gets the key. Tenants share no quota, prefix or answer.")
    ],
    max_priority: Annotated[
        str | None, typer.Option(help="The highest priority that its requests may have: high, normal or low.")
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="It may also change models: load, unload, add, remove and swap them.")
    ] = False,
) -> None:
    """Make an API key and print its line for the file of --api-keys-file."""
    if re.fullmatch(TOKEN_PATTERN, tenant) is None:
        raise typer.BadParameter("a tenant's name may hold only letters, digits, '_' and '-', at most 64")
    key = f"sk-penstock-{secrets.token_urlsafe(32)}"
    try:
        entry = ApiKey.parse(
            f"{tenant}={key}" + (f" max_priority={max_priority}" if max_priority else "") + (" admin" if admin else "")
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    print(f"The key, shown only now:\n{key}\n\nIts line for the file:\n{entry}")
