"""How a part proves to NATS who it is, and the clear ends of what cannot work. Every server is real."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nkeys
import pytest
import trustme
from ports import reserved_port

from penstock.api.serve.connecting import connected
from penstock.config.settings import Settings
from penstock.schemas.errors import BrokerDenied, ConfigurationError, StartupError
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.connection.access import Access
from penstock.streams.nats.servers.cluster import LocalCluster
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import BucketSpec, ConsumerSpec, StreamSpec

Start = Callable[..., Coroutine[Any, Any, EmbeddedServer]]


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a server with these lines in its configuration, instead of a token and JetStream if they name others."""
    servers: list[EmbeddedServer] = []

    async def start(*lines: str, jetstream: str = "", authorization: str | None = None) -> EmbeddedServer:
        state = tmp_path / f"nats{len(servers)}"
        servers.append(await EmbeddedServer.start(state, more=lines, jetstream=jetstream, authorization=authorization))
        return servers[-1]

    yield start
    for server in servers:
        await server.stop()


def _seed(prefix: int = nkeys.PREFIX_BYTE_USER) -> bytes:
    return bytes(nkeys.encode_seed(os.urandom(32), prefix))


def _public(seed: bytes) -> str:
    return str(nkeys.from_seed(bytearray(seed)).public_key.decode())


def _jwt(issuer: bytes, subject: str, name: str, nats: dict[str, Any], **claims: int) -> str:
    """A JWT as `nsc` makes it (nats-io/jwt, version 2)."""

    def encoded(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    body = {"iat": int(time.time()), "iss": _public(issuer), "name": name, "sub": subject, "nats": nats, **claims}
    body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
    signed = f"{encoded({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{encoded(body)}"
    signature = nkeys.from_seed(bytearray(issuer)).sign(signed.encode())
    return f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


class Operator:
    """Signs an account with JetStream and its users, as `nsc` would."""

    def __init__(self) -> None:
        self._operator = _seed(nkeys.PREFIX_BYTE_OPERATOR)
        self._account, self._system = (_seed(nkeys.PREFIX_BYTE_ACCOUNT) for _ in range(2))
        none = {"subs": -1, "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "data": -1, "payload": -1}
        limits = none | {"wildcards": True, "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
        account = {"limits": limits, "type": "account", "version": 2}
        self._account_jwt = _jwt(self._operator, _public(self._account), "A", account)
        self._system_jwt = _jwt(self._operator, _public(self._system), "SYS", account | {"limits": none})
        self._operator_jwt = _jwt(self._operator, _public(self._operator), "O", {"type": "operator", "version": 2})

    @property
    def lines(self) -> list[str]:
        return [
            f"operator: {self._operator_jwt}",
            "resolver: MEMORY",
            f"system_account: {_public(self._system)}",
            f"resolver_preload: {{ {_public(self._account)}: {self._account_jwt}",
            f"{_public(self._system)}: {self._system_jwt} }}",
        ]

    def credentials(self, path: Path, **claims: int) -> Path:
        seed = _seed()
        user = {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}}
        jwt = _jwt(self._account, _public(seed), "U", user, **claims)
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\nSecret:\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed.decode()}\n------END USER NKEY SEED------\n"
        )
        return path


async def _connect(server: EmbeddedServer, **access: Any) -> JetStreamBroker:
    return await JetStreamBroker.connect(server.url, namespace="p", timeout=5.0, access=Access(**access))


async def _works(broker: JetStreamBroker) -> None:
    """A message goes the whole way, and a key."""
    try:
        await broker.ensure([StreamSpec("JOBS", ("p.jobs.>",), "work_queue", "file")], [BucketSpec("state")])
        await broker.publish("p.jobs.a", b"one", message_id="1")
        consumer = await broker.consume(ConsumerSpec("JOBS", "c", "p.jobs.>"), prefetch=4)
        (delivery,) = await consumer.take(1)
        assert delivery.message.data == b"one"
        await delivery.ack()
        bucket = await broker.bucket("state")
        await bucket.put("k", b"v")
        (entry,) = await bucket.entries()
        assert (entry.key, entry.value) == ("k", b"v")
        assert await broker.replay("JOBS", "p.jobs.>") in ([], [delivery.message])
    finally:
        await broker.close()


async def _refused(server: EmbeddedServer, **access: Any) -> str:
    async with asyncio.timeout(20):
        with pytest.raises(StartupError) as caught:
            await _connect(server, **access)
    return str(caught.value)


async def test_an_nkey_opens_and_another_is_refused_by_its_file(started: Start, tmp_path: Path) -> None:
    good, other = tmp_path / "good.nk", tmp_path / "other.nk"
    for path in (good, other):
        path.write_bytes(_seed() + b"\n")
    server = await started(authorization=f"users: [{{ nkey: {_public(good.read_bytes().strip())} }}]")
    await _works(await _connect(server, nkey=good))
    reason = await _refused(server, nkey=other)
    assert f"the nkey of {other} (--nats-nkey)" in reason
    assert "authorization violation" in reason.lower()
    assert "without credentials" in await _refused(server)
    for content in (b"", b"SUNONSENSE", good.read_bytes()[:-6] + b"AAAAA", _seed(nkeys.PREFIX_BYTE_ACCOUNT)):
        other.write_bytes(content)
        assert f"{other} (--nats-nkey)" in await _refused(server, nkey=other)
    assert "no such file" in await _refused(server, nkey=tmp_path / "missing.nk")


async def test_credentials_of_a_jwt(started: Start, tmp_path: Path) -> None:
    ours, others = Operator(), Operator()
    server = await started(*ours.lines, authorization="")
    await _works(await _connect(server, credentials=ours.credentials(tmp_path / "ours.creds")))
    wrong = others.credentials(tmp_path / "wrong.creds")
    reason = await _refused(server, credentials=wrong)
    assert f"the credentials of {wrong} (--nats-credentials)" in reason and "authorization violation" in reason.lower()
    old = ours.credentials(tmp_path / "old.creds", exp=int(time.time()) - 60)
    assert f"{old} (--nats-credentials) expired at 2" in await _refused(server, credentials=old)
    none = tmp_path / "none.creds"
    none.write_text("no credentials")
    assert f"{none} (--nats-credentials) is no credentials file" in await _refused(server, credentials=none)


async def test_user_and_password_and_token_from_files(started: Start, tmp_path: Path) -> None:
    for name, text in {"user": "anna", "password": "p:@/ss", "token": "t0k@n", "wrong": "wrong"}.items():
        (tmp_path / name).write_text(text + "\n")
    server = await started(authorization='user: anna, password: "p:@/ss"')
    await _works(await _connect(server, user_file=tmp_path / "user", password_file=tmp_path / "password"))
    wrong = {"user_file": tmp_path / "user", "password_file": tmp_path / "wrong"}
    assert f"user and password of {tmp_path / 'wrong'}" in await _refused(server, **wrong)
    server = await started(authorization='token: "t0k@n"')
    await _works(await _connect(server, token_file=tmp_path / "token"))
    assert f"token of {tmp_path / 'wrong'} (--nats-token-file)" in await _refused(server, token_file=tmp_path / "wrong")


def _issue(ca: trustme.CA, path: Path, *names: str, **given: Any) -> tuple[Path, Path]:
    issued = ca.issue_cert(*names, **given)
    certificate, key = path.with_suffix(".pem"), path.with_suffix(".key")
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return certificate, key


@pytest.mark.parametrize("first", [False, True], ids=["upgraded", "tls-first"])
async def test_tls_with_client_certificates(
    started: Start, tmp_path: Path, first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ours, others = trustme.CA(), trustme.CA()
    ca, other_ca = tmp_path / "ca.pem", tmp_path / "other-ca.pem"
    ours.cert_pem.write_to_path(str(ca))
    others.cert_pem.write_to_path(str(other_ca))
    certificate, key = _issue(ours, tmp_path / "server", "127.0.0.1")
    server = await started(
        f'tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{ca}", verify: true, '
        f"handshake_first: {str(first).lower()} }}"
    )

    def access(of: trustme.CA, trusted: Path = ca, **given: Any) -> dict[str, Any]:
        mine, its_key = _issue(of, tmp_path / "client", "client", **given)
        return {"ca": trusted, "certificate": mine, "certificate_key": its_key, "tls_first": first}

    await _works(await _connect(server, **access(ours)))
    assert "is not accepted" in (reason := await _refused(server, **access(ours, other_ca))) and "--nats-ca" in reason
    client = tmp_path / "client.pem"
    assert f"refuses the certificate {client}" in await _refused(server, **access(others))
    reason = await _refused(server, ca=ca, tls_first=first)
    assert "without a certificate (--nats-certificate)" in reason
    expired = access(ours, not_after=datetime.now(UTC) - timedelta(days=1))
    assert f"{client} (--nats-certificate) expired at 2" in await _refused(server, **expired)
    assert "is not the private key" in await _refused(server, **access(ours) | {"certificate_key": key})
    client.write_text("no certificate")
    assert f"{client} (--nats-certificate) holds no certificate" in await _refused(
        server, ca=ca, certificate=client, certificate_key=key
    )
    assert "eof_received" not in caplog.text, "commands would show asyncio's warning at their end"


async def test_no_password_is_sent_without_the_tls_that_is_wanted(started: Start, tmp_path: Path) -> None:
    server = await started()
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(ca))
    assert "offers no TLS" in await _refused(server, ca=ca)
    assert "does not begin with TLS" in await _refused(server, ca=ca, tls_first=True)
    with pytest.raises(StartupError, match="offers no TLS"):
        await JetStreamBroker.connect(server.url.replace("nats://", "tls://"), namespace="p")


async def test_an_inbox_prefix_is_kept_to(started: Start) -> None:
    permissions = '{ publish: ">", subscribe: ["_mine.>", "p.>"] }'
    server = await started(authorization=f"users: [{{ user: u, password: p, permissions: {permissions} }}]")
    url = server.url.replace("//", "//u:p@")
    with pytest.raises(BrokerDenied, match=r"subscribe to _INBOX\.\S+\*: give this user the permissions of its role"):
        await JetStreamBroker.connect(url, namespace="p", access=Access())
    await _works(await JetStreamBroker.connect(url, namespace="p", access=Access(inbox_prefix="_mine")))


async def test_a_denial_names_the_subject_at_once(started: Start) -> None:
    permissions = '{ publish: ["$JS.API.INFO", "_INBOX.>"], subscribe: ["_INBOX.>"] }'
    server = await started(authorization=f"users: [{{ user: u, password: p, permissions: {permissions} }}]")
    url = server.url.replace("//", "//u:p@")
    broker = await JetStreamBroker.connect(url, namespace="p", timeout=600.0)
    try:
        async with asyncio.timeout(20):
            with pytest.raises(BrokerDenied, match=r"publish to p\.Jobs\.a:"):
                await broker.publish("p.Jobs.a", b"", message_id="1")
            with pytest.raises(BrokerDenied, match=r"publish to \$JS\.API\.STREAM\.CREATE\.P_JOBS:"):
                await broker.ensure([StreamSpec("JOBS", ("p.jobs.>",), "work_queue", "file")], [])
            with pytest.raises(BrokerDenied, match=r"subscribe to p\.events\.>:"):
                await broker.listen("p.events.>", lambda _: None)
    finally:
        await broker.close()


async def test_a_domain_reached_through_a_leaf_node(started: Start) -> None:
    at = f"127.0.0.1:{reserved_port()}"
    hub = await started(f"leafnodes {{ listen: {at} }}", jetstream="domain: hub", authorization="")
    remote = f'leafnodes {{ remotes: [{{ url: "nats-leaf://{at}" }}] }}'
    leaf = await started(remote, jetstream="domain: edge", authorization="")
    await _works(await _connect(leaf, domain="hub"))
    at_hub, at_leaf = await _connect(hub), await _connect(leaf)
    assert await at_hub.present("P_JOBS") is not None
    assert await at_leaf.present("P_JOBS") is None
    assert (await (await at_hub.bucket("state")).entries())[0].value == b"v"
    await at_hub.close()
    await at_leaf.close()
    reason = ""
    with pytest.raises(StartupError) as caught:
        await JetStreamBroker.connect(leaf.url, namespace="p", timeout=1.0, access=Access(domain="nowhere"))
    reason = str(caught.value)
    assert "no JetStream domain 'nowhere'" in reason and "--nats-domain" in reason


async def test_of_several_servers_one_that_answers_is_taken(started: Start) -> None:
    server = await started()
    url = f"nats://127.0.0.1:1,{server.url},nats://127.0.0.1:2"
    await _works(await JetStreamBroker.connect(url, namespace="p"))


async def test_a_server_without_jetstream(started: Start) -> None:
    server = await started(jetstream="off")
    with pytest.raises(StartupError, match="offers no JetStream; start it with -js"):
        await JetStreamBroker.connect(server.url, namespace="p", timeout=1.0)
    accounts = "accounts { A: { users: [{ user: u, password: p }] }, S: { jetstream: enabled, users: [{user: s}] } }"
    server = await started(accounts, authorization="")
    with pytest.raises(StartupError, match=r"to this account: .*enable it for the account"):
        await JetStreamBroker.connect(server.url.replace("//", "//u:p@"), namespace="p", timeout=1.0)


async def test_an_old_server(started: Start) -> None:
    """A real one whose greeting is changed on its way to us."""
    server = await started()
    host, _, port = server.url.rpartition("@")[2].partition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(host, int(port))
        greeting = await from_server.readline()
        info = json.loads(greeting.partition(b" ")[2]) | {"version": "2.9.25"}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                target.write(data)
            target.close()

        await asyncio.gather(copy(from_server, writer), copy(reader, to_server))

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as proxy:
        url = server.url.replace(f":{port}", f":{proxy.sockets[0].getsockname()[1]}")
        with pytest.raises(StartupError, match=r"has version 2\.9\.25: Penstock needs 2\.10 or later"):
            await JetStreamBroker.connect(url, namespace="p")


async def test_three_copies_on_two_servers(tmp_path: Path) -> None:
    cluster = await LocalCluster.start(tmp_path / "two", size=2)
    try:
        broker = await JetStreamBroker.connect(cluster.urls, namespace="p", timeout=10.0, replicas=3)
        with pytest.raises(StartupError, match="3 copies need 3 servers with JetStream: start them, or lower"):
            await broker.ensure([StreamSpec("JOBS", ("p.jobs.>",), "work_queue", "file")], [])
        await broker.close()
    finally:
        await cluster.close()


async def test_a_part_ends_when_its_server_goes_on_refusing_it(started: Start, tmp_path: Path) -> None:
    (tmp_path / "ours.nk").write_bytes(seed := _seed())
    server = await started(authorization=f"users: [{{ nkey: {_public(seed)} }}]")
    given = {"nats_url": server.url, "nats_nkey": str(tmp_path / "ours.nk"), "nats_timeout": 0.2}
    with pytest.raises(StartupError, match=r"(?i)the nkey of .*ours\.nk \(--nats-nkey\): authorization violation"):
        async with asyncio.timeout(60), connected(Settings.model_validate(given), "test", patient=True) as broker:
            server._authorization = f"users: [{{ nkey: {_public(_seed())} }}]"
            await server.restart()
            await asyncio.Event().wait()
    assert broker.outages


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"nats_nkey": "a"}, "only for a NATS server of your own"),
        ({"nats_url": "nats://a", "nats_nkey": "a", "nats_credentials": "b"}, "nats_credentials and nats_nkey: one"),
        ({"nats_url": "nats://token@a", "nats_nkey": "a"}, "nats_nkey and a user or token in nats_url: one"),
        ({"nats_url": "nats://a", "nats_password_file": "a"}, "nats_password_file needs nats_user_file"),
        ({"nats_url": "nats://a", "nats_certificate": "a"}, "nats_certificate needs nats_certificate_key"),
    ],
)
def test_settings_that_contradict_each_other(given: dict[str, str], fault: str) -> None:
    with pytest.raises(ConfigurationError, match=fault):
        Access.of(Settings.model_validate(given))


async def test_a_server_of_another_user_is_named_so(tmp_path: Path) -> None:
    (tmp_path / "nats-url").touch(mode=0)
    before = os.geteuid()
    if before == 0:  # who may read all files
        os.seteuid(1)
    try:
        with pytest.raises(StartupError, match="run as that user"):
            await connected(Settings(state_dir=tmp_path), "test").__aenter__()
    finally:
        os.seteuid(before)
