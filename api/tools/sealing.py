"""A client's headers for its MCP servers, encrypted while a response holds on to them.

AES-SIV, because equal secrets must seal to equal texts: a request that is sent again is the same request.
"""

from __future__ import annotations

import base64
import hashlib
import json

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from ...schemas.errors import ToolFailed

_PURPOSE = b"penstock: headers of an MCP server"


def seal(secret: dict[str, str], key: bytes, tenant: str, url: str) -> str:
    """URL-safe text that only who has `key`, of any length, can read, for this tenant's requests to this URL."""
    plain = json.dumps(secret, sort_keys=True).encode()
    return base64.urlsafe_b64encode(_cipher(key).encrypt(plain, _bound(tenant, url))).decode()


def unseal(text: str, tenant: str, url: str, key: bytes) -> dict[str, str]:
    """Raises `ToolFailed` for what was sealed with another key, for another tenant or URL, or by nobody."""
    try:
        plain = _cipher(key).decrypt(base64.urlsafe_b64decode(text), _bound(tenant, url))
    except (InvalidTag, ValueError):
        raise ToolFailed("the authorisation was not sealed here for this tenant and server; send it again") from None
    secret: dict[str, str] = json.loads(plain)
    return secret


def _bound(tenant: str, url: str) -> list[bytes]:
    """What a text must be opened with again; each part is authenticated for itself."""
    return [_PURPOSE, tenant.encode(), url.encode()]


def _cipher(key: bytes) -> AESSIV:
    return AESSIV(hashlib.sha512(key).digest())
