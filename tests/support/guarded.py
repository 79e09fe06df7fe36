"""A nats-server with TLS and the users of `penstock nats config`: each part connects as the user of its role."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import sys
from pathlib import Path

import nats
import trustme
from ports import reserved_port

from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.connection.access import Access
from penstock.streams.nats.servers.server import EmbeddedServer

DENIED = re.compile("does not allow|[Pp]ermissions [Vv]iolation")


class GuardedServer:
    """`url` is where parts find the server; `domain` is its JetStream domain, if it has one."""

    def __init__(self, server: EmbeddedServer, directory: Path, domain: str | None, leafs: int | None = None) -> None:
        self._server = server
        self._directory = directory
        self.domain = domain
        self._leafs = leafs
        self.leaf: EmbeddedServer | None = None  # set by start_leaf
        self.url = server.url.replace("nats://", "tls://")

    @classmethod
    async def start(cls, directory: Path, domain: str | None = None) -> GuardedServer:
        lines = _write(directory, domain)
        leafs = reserved_port() if domain else None
        if leafs:
            lines.append(f"leafnodes {{ listen: 127.0.0.1:{leafs}\n {lines[-1]} }}")
        jetstream = "" if domain is None else f"domain: {domain}"
        server = await EmbeddedServer.start(directory / "nats", more=lines, jetstream=jetstream, authorization="")
        return cls(server, directory, domain, leafs)

    async def start_leaf(self, configuration: str) -> dict[str, str]:
        """Start a leaf node as `docs/nats.md` configures it; returns the settings of a worker there."""
        text = configuration.replace("hub.example.org:7422", f"127.0.0.1:{self._leafs}")
        text = re.sub(r"(?m)^listen: .*$", "", text).replace("$WORKER_SEED }", "$WORKER_SEED, tls { ca_file: $CA } }")
        seed = (self._directory / "users" / "worker.nk").read_text().strip()
        variables = f'WORKER_SEED: "{seed}"\nCA: "{self._directory / "ca.pem"}"'
        leaf = await EmbeddedServer.start(
            self._directory / "leaf", more=[variables, text], jetstream="off", authorization=""
        )
        self.leaf = leaf
        own = {"URL": leaf.url, "DOMAIN": str(self.domain), "INBOX_PREFIX": "_in_worker"}
        return {f"PENSTOCK_NATS_{name}": value for name, value in own.items()}

    async def stop(self) -> None:
        if self.leaf is not None:
            await self.leaf.stop()
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

    async def broker(self) -> JetStreamBroker:
        """Connected as the user `admin`."""
        users = self._directory / "users"
        access = Access(ca=self._directory / "ca.pem", nkey=users / "admin.nk", inbox_prefix="_in_admin")
        return await JetStreamBroker.connect(self.url, namespace="penstock", access=access)

    async def chat_of_tenant(self, tenant: str, model: str, prompt: str) -> str:
        """The answer that a tenant hears over NATS, from an account of its own."""
        user = self.environment(f"tenant-{tenant}")
        trusted = ssl.create_default_context(cafile=user["PENSTOCK_NATS_CA"])
        options = {"nkeys_seed": user["PENSTOCK_NATS_NKEY"], "inbox_prefix": user["PENSTOCK_NATS_INBOX_PREFIX"]}
        client = await nats.connect(self.url, tls=trusted, **options)
        try:
            events = await client.subscribe(f"penstock.events.{tenant}.me.r1")
            job = {
                "id": "r1",
                "bridge": "me",
                "endpoint": "/v1/completions",
                "body": {"model": model, "prompt": prompt},
            }
            answer = await client.request(f"penstock.jobs.normal.{tenant}", json.dumps(job).encode(), timeout=30)
            assert b'"stream"' in answer.data, answer.data
            first = json.loads((await events.next_msg(timeout=60)).data)
            assert first["type"] in ("accepted", "queued"), first
            text, after = "", 0
            while True:
                asked = json.dumps({"after": after, "wait": 10}).encode()
                answer = await client.request(f"penstock.control.replay.{tenant}.me.r1", asked, timeout=30)
                for stored in json.loads(answer.data)["events"]:
                    event, after = stored["event"], stored["sequence"]
                    if event["type"] == "done":
                        return text
                    assert event["type"] in ("accepted", "queued", "token"), event
                    text += event.get("text", "")
        finally:
            await client.close()

    def of_command(self, *arguments: str) -> dict[str, str]:
        """The settings of the user whose role a `penstock` command has; what no role is made for runs as `admin`."""
        match arguments:
            case ("worker" | "bridge" | "agent" as role, *_):
                return self.environment(role)
            case ("stage", "tools", *more) if all(word.startswith("-") for word in more[:1]):
                return self.environment("tools")
            case ("stage", name, *more) if all(word.startswith("-") for word in more[:1]):
                user = f"stage-{name}"
                if (self._directory / "users" / f"{user}.nk").exists():
                    return self.environment(user)
        return self.environment("admin")


def _write(directory: Path, domain: str | None) -> list[str]:
    """Write users and certificates, unless they are there; returns the lines for the server."""
    users = directory / "users"
    tls = f'tls {{ cert_file: "{directory / "server.pem"}", key_file: "{directory / "server.key"}" }}'
    if directory.exists():
        return [(users / "penstock.conf").read_text(), tls]
    directory.mkdir(parents=True)
    flags = ["--tenant", "anna", *([] if domain is None else ["--nats-domain", domain])]
    command = [sys.executable, "-m", "penstock", "nats", "config", str(users), *flags]
    subprocess.run(command, check=True, capture_output=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    (directory / "server.pem").write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(directory / "server.key"))
    return [(users / "penstock.conf").read_text(), tls]
