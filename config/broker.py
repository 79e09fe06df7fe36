"""The settings of the broker: where it is, and how a part proves who it is."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from pydantic import ByteSize, Field, field_validator

from ..schemas.errors import ConfigurationError
from ..schemas.jobs import SubjectToken
from .models import ModelsSettings

_is_server = re.compile(r"((nats|tls)://)?(.*@)?([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?/?").fullmatch
_PROOFS = ("nats_credentials", "nats_nkey", "nats_token_file", "nats_password_file")  # of which one is enough
_PAIRS = (("nats_user_file", "nats_password_file"), ("nats_certificate", "nats_certificate_key"))
_FILES = (*_PROOFS, "nats_user_file", "nats_ca", "nats_certificate", "nats_certificate_key")  # read again and again
OF_OWN_SERVER = (
    *_PROOFS,
    *("nats_user_file", "nats_ca", "nats_certificate", "nats_certificate_key", "nats_tls_first"),
    *("nats_inbox_prefix", "nats_domain"),
)


LEAST_STORE = 64 << 20  # bytes


class BrokerSettings(ModelsSettings):
    """A part of `Settings`."""

    nats_url: str | None = Field(
        None, description="Your own NATS server, or several with commas; without it `serve` starts one."
    )
    nats_credentials: Path | None = Field(
        None, description="Credentials file (.creds) of a NATS user: a JWT and its seed; read at each connection."
    )
    nats_nkey: Path | None = Field(
        None, description="File with the nkey seed of a NATS user, as `penstock nats config` writes them."
    )
    nats_user_file: Path | None = Field(None, description="File with the name of a NATS user.")
    nats_password_file: Path | None = Field(None, description="File with the password of that user.")
    nats_token_file: Path | None = Field(None, description="File with the token of a NATS server.")
    nats_ca: Path | None = Field(
        None, description="Certificates (PEM) that sign the NATS server's; the system's by default."
    )
    nats_certificate: Path | None = Field(None, description="Certificate (PEM) that the NATS server asks for.")
    nats_certificate_key: Path | None = Field(None, description="Private key (PEM) of that certificate.")
    nats_tls_first: bool = Field(
        False, description="Begin with TLS, before the server says anything; its handshake_first must be set, too."
    )
    nats_inbox_prefix: SubjectToken | None = Field(
        None, description="First token of the subjects on which this part receives answers; _INBOX by default."
    )
    nats_domain: SubjectToken | None = Field(
        None, description="JetStream domain of the streams, where it is not that of the server, such as a leaf node."
    )
    nats_server: Path | None = Field(None, description="Binary for the embedded server; the bundled one by default.")
    nats_timeout: float = Field(5.0, gt=0, description="How long one broker operation may take.")
    nats_replicas: int = Field(1, ge=1, le=5, description="Copies that a NATS cluster keeps of each stream.")
    store_limit: ByteSize = Field(
        ByteSize(16 << 30),
        ge=LEAST_STORE,
        description="Disk space of all streams together; the embedded broker starts with three quarters of the free "
        "disk if that is less.",
    )
    nats_sync_interval: str | None = Field(
        None,
        pattern=r"^(always|[0-9]+(ms|s|m))$",
        description="How often the embedded server syncs to disk: 'always' survives power cuts, at a cost.",
    )
    namespace: SubjectToken = Field("penstock", description="First token of every subject.")

    @field_validator(*_FILES, "api_keys_file", "mcp_config", check_fields=False)
    @classmethod
    def _readable_again(cls, value: Path | None) -> Path | None:
        if value is not None and _is_pipe(value):
            raise ValueError("is a pipe, such as that of <(command), which can be read once: name a file instead")
        return value

    @field_validator("nats_url")
    @classmethod
    def _servers(cls, value: str | None) -> str | None:
        if value is not None and not all(map(_is_server, value.split(","))):
            raise ValueError("must be nats://HOST:PORT or tls://HOST:PORT, or several with commas between")
        return value


def _is_pipe(path: Path) -> bool:
    """False also for what may not be looked at: its reader names the reason."""
    try:
        return stat.S_ISFIFO(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def check_broker(settings: BrokerSettings) -> None:
    """Raises `ConfigurationError` if the settings of the connection contradict each other."""
    faults = []
    given = [name for name in OF_OWN_SERVER if getattr(settings, name)]
    if given and settings.nats_url is None:
        faults.append(f"{', '.join(given)}: only for a NATS server of your own; name it with --nats-url")
    proofs = [name for name in _PROOFS if name in given]
    if settings.nats_url is not None and "@" in settings.nats_url:
        proofs.append("a user or token in nats_url")
    if len(proofs) > 1:
        faults.append(f"{' and '.join(proofs)}: one of them is enough; leave the others out")
    for pair in _PAIRS:
        if len(present := [name for name in pair if name in given]) == 1:
            (other,) = {*pair} - {*present}
            faults.append(f"{present[0]} needs {other}, too; give both")
    if faults:
        raise ConfigurationError(faults)
