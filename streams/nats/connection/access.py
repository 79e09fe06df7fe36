"""How a connection to NATS proves who it is, and what it trusts: the files that the settings name.

They are read again at each connection, so that they may be renewed while Penstock runs. What few of them need, which
takes a tenth of a second to import, is imported where it is used.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nats.errors import Error

from ....config.broker import BrokerSettings, check_broker
from ....config.files import read_text
from ....config.sources import flag

if TYPE_CHECKING:
    from nkeys import KeyPair

_in_credentials = re.compile(r"-----BEGIN ([A-Z ]+)-----\s+(\S+)\s+-{3,}END").findall
_JWT, _SEED = "NATS USER JWT", "USER NKEY SEED"


class AccessError(Error):
    """A file is missing, is not what it should be, or has expired. nats-py takes it for a failed connection."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a connection needs besides the URL of the servers; check_broker says what goes together."""

    credentials: Path | None = None
    nkey: Path | None = None
    user_file: Path | None = None
    password_file: Path | None = None
    token_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None
    tls_first: bool = False
    inbox_prefix: str = "_INBOX"
    domain: str | None = None

    @classmethod
    def of(cls, settings: BrokerSettings) -> Self:
        """Raises `ConfigurationError` if settings contradict each other."""
        check_broker(settings)
        return cls(
            settings.nats_credentials,
            settings.nats_nkey,
            settings.nats_user_file,
            settings.nats_password_file,
            settings.nats_token_file,
            settings.nats_ca,
            settings.nats_certificate,
            settings.nats_certificate_key,
            settings.nats_tls_first,
            settings.nats_inbox_prefix or "_INBOX",
            settings.nats_domain,
        )

    @property
    def proof(self) -> str:
        """What a server refuses that refuses us, for messages."""
        for kind, path, setting in (
            ("the credentials", self.credentials, "nats_credentials"),
            ("the nkey", self.nkey, "nats_nkey"),
            ("the user and password", self.password_file, "nats_password_file"),
            ("the token", self.token_file, "nats_token_file"),
        ):
            if path is not None:
                return f"{kind} of {path} ({flag(setting)})"
        return "the user or token of --nats-url"

    @property
    def proof_of_tls(self) -> str:
        """What a server refuses that ends the TLS handshake."""
        if self.certificate is None:
            return "us without a certificate (--nats-certificate)"
        return f"the certificate {self.certificate} (--nats-certificate)"

    @property
    def proves(self) -> bool:
        return any((self.credentials, self.nkey, self.password_file, self.token_file))

    @property
    def wants_tls(self) -> bool:
        return self.tls_first or self.ca is not None or self.certificate is not None

    @property
    def api(self) -> str:
        """What the subjects of JetStream's management begin with."""
        return "$JS.API." if self.domain is None else f"$JS.{self.domain}.API."

    @property
    def key_values(self) -> str:
        """What the subjects begin with on which keys are written."""
        return "" if self.domain is None else self.api  # a leaf node has a `$KV` of its own

    def mapped(self, subject: str) -> str:
        """What a server of the domain calls a subject of ours, also when it denies it."""
        if self.domain is None or not subject.startswith(self.api):
            return subject
        call = subject.removeprefix(self.api)
        return call if call.startswith("$KV.") else f"$JS.API.{call}"

    def options(self) -> dict[str, Any]:
        """For nats-py's `connect`. Raises `AccessError` if a file is not what it should be."""
        options: dict[str, Any] = {"inbox_prefix": self.inbox_prefix, "tls_handshake_first": self.tls_first}
        if self.credentials is not None:
            self._user_jwt()
            options |= {"user_jwt_cb": self._user_jwt, "signature_cb": self._signature}
        elif self.nkey is not None:
            options |= {"signature_cb": self._signature}
        elif self.user_file is not None:
            options |= {"user": lambda: _line(self.user_file, "nats_user_file")}
            options |= {"password": lambda: _line(self.password_file, "nats_password_file")}
        elif self.token_file is not None:
            options |= {"token": lambda: _line(self.token_file, "nats_token_file")}
        for each in ("user", "password", "token"):
            if each in options:
                options[each]()
        if self.wants_tls:
            self.tls()
        return options

    def public_key(self) -> str | None:
        """By which the server knows the nkey."""
        return None if self.nkey is None else str(self._key_pair().public_key.decode())

    def tls(self) -> ssl.SSLContext:
        """Raises `AccessError`."""
        if self.ca is None:
            context = ssl.create_default_context()
        else:
            _text(self.ca, "nats_ca")
            try:
                context = ssl.create_default_context(cafile=self.ca)
            except (OSError, ssl.SSLError) as error:
                raise AccessError(f"{self.ca} (--nats-ca) holds no certificates in PEM: {error}") from error
        if self.certificate is not None:
            self._check_certificate()
            assert self.certificate_key is not None  # check_broker
            _text(self.certificate_key, "nats_certificate_key")
            try:
                context.load_cert_chain(self.certificate, self.certificate_key, password=_no_password)
            except (OSError, ssl.SSLError, ValueError) as error:
                raise AccessError(
                    f"{self.certificate_key} (--nats-certificate-key) is not the private key, in PEM and without a "
                    f"password, of {self.certificate}: {error}"
                ) from error
        return context

    def _check_certificate(self) -> None:
        from cryptography import x509

        path = self.certificate
        try:
            certificate = x509.load_pem_x509_certificate(_text(path, "nats_certificate").encode())
        except ValueError as error:
            raise AccessError(f"{path} (--nats-certificate) holds no certificate in PEM: {error}") from error
        if certificate.not_valid_after_utc <= datetime.now(UTC):
            end = certificate.not_valid_after_utc
            raise AccessError(f"{path} (--nats-certificate) expired at {end:%Y-%m-%d %H:%M} UTC: renew it")

    def _parts(self) -> dict[str, str]:
        """The sections of the credentials file by their names."""
        found = dict(_in_credentials(_text(self.credentials, "nats_credentials")))
        if _JWT not in found or _SEED not in found:
            raise AccessError(
                f"{self.credentials} (--nats-credentials) is no credentials file: it needs a section {_JWT!r} and one "
                f"{_SEED!r}, as `nsc generate creds` writes them"
            )
        return found

    def _user_jwt(self) -> bytes:
        jwt = self._parts()[_JWT]
        try:
            payload = jwt.split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
            expires = float(claims.get("exp", 0))
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            raise AccessError(f"{self.credentials} (--nats-credentials) holds no JWT that can be read") from error
        if expires and expires <= time.time():
            end = datetime.fromtimestamp(expires, UTC)
            raise AccessError(f"{self.credentials} (--nats-credentials) expired at {end:%Y-%m-%d %H:%M} UTC: renew it")
        return jwt.encode()

    def _key_pair(self) -> KeyPair:
        import nkeys

        path, setting = (self.nkey, "nats_nkey") if self.nkey else (self.credentials, "nats_credentials")
        seed = (_line(path, setting) if self.nkey else self._parts()[_SEED]).encode()
        try:
            prefix, raw = nkeys.decode_seed(bytearray(seed))
            if prefix != nkeys.PREFIX_BYTE_USER or nkeys.encode_seed(bytes(raw), prefix) != seed:
                raise ValueError
            return nkeys.from_seed(bytearray(seed))
        except (nkeys.NkeysError, ValueError, IndexError) as error:
            raise AccessError(
                f"{path} ({flag(setting)}) holds no seed of a user's nkey, which begins with SU"
            ) from error

    def _signature(self, nonce: str) -> bytes:
        return base64.b64encode(self._key_pair().sign(nonce.encode()))


def _no_password() -> str:
    raise ValueError("it is encrypted")


def _line(path: Path | None, setting: str) -> str:
    """The only line of a file."""
    text = _text(path, setting).strip()
    if not text or "\n" in text:
        raise AccessError(f"{path} ({flag(setting)}) must hold one line")
    return text


def _text(path: Path | None, setting: str) -> str:
    assert path is not None
    try:
        return read_text(path)
    except FileNotFoundError:
        raise AccessError(f"{path} ({flag(setting)}): no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise AccessError(f"{path} ({flag(setting)}) cannot be read: {reason}") from error
