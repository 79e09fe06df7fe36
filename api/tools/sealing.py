"""Encrypts a client's headers for its MCP servers, which are stored with a response.

By AES-SIV, for equal secrets must give equal texts: a repeated request must be the same request.
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
    """Encrypt headers for this tenant's requests to this URL, as URL-safe text. `key` may have any length."""
    plain = json.dumps(secret, sort_keys=True).encode()
    return base64.urlsafe_b64encode(_cipher(key).encrypt(plain, _bound(tenant, url))).decode()


def unseal(text: str, tenant: str, url: str, key: bytes) -> dict[str, str]:
    """Decrypt what `seal` made. Raises `ToolFailed` for another key, tenant or URL, and for any other text."""
    try:
        plain = _cipher(key).decrypt(base64.urlsafe_b64decode(text), _bound(tenant, url))
    except (InvalidTag, ValueError):
        raise ToolFailed("the authorisation was not sealed here for this tenant and server; send it again") from None
    secret: dict[str, str] = json.loads(plain)
    return secret


def _bound(tenant: str, url: str) -> list[bytes]:
    """The associated data that must be the same to decrypt; each part is authenticated separately."""
    return [_PURPOSE, tenant.encode(), url.encode()]


def _cipher(key: bytes) -> AESSIV:
    return AESSIV(hashlib.sha512(key).digest())
