"""A nats-server with TLS and the users of `penstock nats config`: each part connects as the user of its role."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import trustme

from penstock.streams.nats.server import EmbeddedServer

DENIED = re.compile("does not allow|[Pp]ermissions [Vv]iolation")


class GuardedServer:
    """`url` is where parts find the server; `domain` is its JetStream domain, if it has one."""

    def __init__(self, server: EmbeddedServer, directory: Path, domain: str | None) -> None:
        self._server = server
        self._directory = directory
        self.domain = domain
        self.url = server.url.replace("nats://", "tls://")

    @classmethod
    async def start(cls, directory: Path, domain: str | None = None) -> GuardedServer:
        lines = _write(directory, domain)
        jetstream = "" if domain is None else f"domain: {domain}"
        server = await EmbeddedServer.start(directory / "nats", more=lines, jetstream=jetstream, authorization="")
        return cls(server, directory, domain)

    async def stop(self) -> None:
        await self._server.stop()

    def environment(self, user: str) -> dict[str, str]:
        """The settings with which a part connects as this user."""
        values = {
            "URL": self.url,
            "CA": str(self._directory / "ca.pem"),
            "NKEY": str(self._directory / "users" / f"{user}.nk"),
            "INBOX_PREFIX": f"_in_{user}",
        }
        if self.domain is not None:
            values["DOMAIN"] = self.domain
        return {f"PENSTOCK_NATS_{name}": value for name, value in values.items()}

    def of_command(self, *arguments: str) -> dict[str, str]:
        """The settings of the user whose role a `penstock` command has; what no role is made for runs as `admin`."""
        match arguments:
            case ("worker" | "bridge" as role, *_):
                return self.environment(role)
            case ("stage", "tools", *more) if all(word.startswith("-") for word in more[:1]):
                return self.environment("tools")
            case ("stage", name, *more) if all(word.startswith("-") for word in more[:1]):
                user = f"stage-{name}"
                if (self._directory / "users" / f"{user}.nk").exists():
                    return self.environment(user)
        return self.environment("admin")


def _write(directory: Path, domain: str | None) -> list[str]:
    """Write users and certificates; returns the lines for the server."""
    directory.mkdir()
    users = directory / "users"
    flags = [] if domain is None else ["--nats-domain", domain]
    command = [sys.executable, "-m", "penstock", "nats", "config", str(users), *flags]
    subprocess.run(command, check=True, capture_output=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    (directory / "server.pem").write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(directory / "server.key"))
    tls = f'tls {{ cert_file: "{directory / "server.pem"}", key_file: "{directory / "server.key"}" }}'
    return [(users / "penstock.conf").read_text(), tls]
