"""API keys as settings and key files store them: one line each, with the key as a hash."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple, Self, cast, get_args

from ..schemas.jobs import TOKEN_PATTERN, Priority


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
