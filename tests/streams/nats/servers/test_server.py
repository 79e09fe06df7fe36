"""The embedded server: one a directory, gone with its parent, its secrets the owner's."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import structlog

from penstock.schemas.errors import StartupError
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.servers import server as server_module
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import BucketSpec, StreamSpec

PATIENCE = 20.0  # seconds until a wait counts as endless
POLL = 0.02

LEDGER = StreamSpec("LEDGER", ("p.ledger",), "limits", "file")


async def listens(url: str) -> bool:
    address = urlsplit(url)
    try:
        _, writer = await asyncio.open_connection(address.hostname, address.port)
    except (ConnectionRefusedError, ConnectionResetError):  # the latter where it is dying
        return False
    writer.close()
    return True


async def gone(url: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while await listens(url):  # noqa: ASYNC110  (another process tells nobody when it ends)
            await asyncio.sleep(POLL)


def command_line(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline())


async def test_a_held_directory_is_refused(own_server: EmbeddedServer, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"state is in use by another Penstock; stop that one"):
        await EmbeddedServer.start(tmp_path / "state")


async def test_a_limit_on_the_size_of_files_is_lifted_where_it_may_be(tmp_path: Path) -> None:
    """Under it the server could not write, and took nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        server = await EmbeddedServer.start(tmp_path / "state")
        broker = await JetStreamBroker.connect(server.url, namespace="p", timeout=10.0)
        await broker.ensure([LEDGER], [])
        await broker.publish("p.ledger", bytes(1 << 20), message_id="large")
        await broker.close()
        await server.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_broker_starts_where_its_files_would_be_too_large(tmp_path: Path) -> None:
    code = (
        "import asyncio, pathlib, resource; from penstock.streams.nats.servers.server import EmbeddedServer as Server;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        f"asyncio.run(Server.start(pathlib.Path({str(tmp_path)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "files may have no more than 1 MiB here (ulimit -f), and the broker's need 64 MiB; raise" in done.stderr


async def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    """nats-server's configuration has its own escapes: a home directory called Jürgen was none to it."""
    state = tmp_path / 'Jürgen\'s 東京 "x" \\u00fc\\ $HOME #1; {y}\t\n🙂' / os.fsdecode(b"latin-\xfc")
    server = await EmbeddedServer.start(state)
    broker = await JetStreamBroker.connect(server.url, namespace="p", timeout=10.0)
    await broker.ensure([], [BucketSpec("state", storage="file")])
    await broker.close()
    await server.stop()
    assert [path.name for path in state.parent.parent.iterdir()] == [state.parent.name]
    assert any((state / "jetstream").rglob("*.blk")) or any((state / "jetstream").rglob("meta.inf"))


async def test_a_directory_is_free_after_stop(tmp_path: Path) -> None:
    first = await EmbeddedServer.start(tmp_path)
    await first.stop()
    await gone(first.url)
    second = await EmbeddedServer.start(tmp_path)
    assert await listens(second.url)
    await second.stop()


async def test_what_was_stored_is_there_after_a_stop(tmp_path: Path) -> None:
    for expected in (1, 2):
        server = await EmbeddedServer.start(tmp_path, sync_interval="always")
        broker = await JetStreamBroker.connect(server.url, namespace="p")
        await broker.ensure([LEDGER], [])
        published = await broker.publish("p.ledger", b"", message_id=f"m{expected}")
        assert published.sequence == expected
        await broker.close()
        await server.stop()


async def test_restart_keeps_the_address(own_server: EmbeddedServer) -> None:
    before = own_server.url, own_server.pid
    os.kill(own_server.pid, signal.SIGKILL)
    assert await own_server.wait() == -signal.SIGKILL
    await own_server.restart()
    assert own_server.url == before[0]
    assert own_server.pid != before[1]
    assert await listens(own_server.url)


async def test_secrets_are_the_owners(own_server: EmbeddedServer, tmp_path: Path) -> None:
    config = tmp_path / "state" / "nats-server.conf"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    token = urlsplit(own_server.url).username
    assert token is not None
    assert token in config.read_text()
    assert token not in (tmp_path / "state" / "nats-server.log").read_text()
    assert token not in command_line(own_server.pid)


async def test_the_log_begins_anew_once_it_is_long(
    own_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_MOST_LOG", 100)
    log = tmp_path / "state" / "nats-server.log"
    before = log.read_text()
    assert len(before) > 100
    assert not own_server.is_stuck()
    assert log.with_name("nats-server.log.1").read_text() == before
    os.kill(own_server.pid, signal.SIGKILL)
    await own_server.wait()
    await own_server.restart()
    assert "Server is ready" in log.read_text()
    assert not own_server.is_stuck()
    with log.open("ab") as file:
        file.write(b"[1] [ERR] write /x/msgs/1.blk: no space left on device\n")
    assert own_server.is_stuck(), "what is written after that is read"


async def test_only_this_machine_reaches_it(own_server: EmbeddedServer) -> None:
    assert urlsplit(own_server.url).hostname == "127.0.0.1"
    with pytest.raises(StartupError):
        await JetStreamBroker.connect(f"nats://127.0.0.1:{urlsplit(own_server.url).port}", namespace="p")


@pytest.mark.parametrize("given", [None, "1GiB"])
async def test_it_is_asked_for_little_memory_unless_the_operator_says_more(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMEMLIMIT", raising=False)
    if given is not None:
        monkeypatch.setenv("GOMEMLIMIT", given)
    server = await EmbeddedServer.start(tmp_path)
    environment = psutil.Process(server.pid).environ()
    await server.stop()
    assert environment["GOMEMLIMIT"] == (given or "512MiB")
    assert environment.get("GOMAXPROCS") == os.environ.get("GOMAXPROCS", "1" if os.cpu_count() in (1, 2) else None)


async def test_buckets_may_reserve_more_memory_than_the_server_is_asked_to_use(own_server: EmbeddedServer) -> None:
    broker = await JetStreamBroker.connect(own_server.url, namespace="p")
    reserved = StreamSpec("RESERVED", ("p.reserved",), "limits", "memory", max_bytes=1 << 30)
    await broker.ensure([reserved], [])
    await broker.close()


async def test_a_missing_binary(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="correct --nats-server"):
        await EmbeddedServer.start(tmp_path / "state", tmp_path / "none")


async def test_a_server_that_crashes_is_asked_why(tmp_path: Path) -> None:
    """The end of its log is Go's stacks."""
    state, binary = tmp_path / "state", tmp_path / "nats-server"
    state.mkdir()
    (state / "nats-server.log").write_text("panic: long ago\n")
    told = "runtime: failed to create new OS thread\nfatal error: newosproc"
    binary.write_text(f"#!/bin/sh\necho '{told}\n\nruntime stack:\n\tgo:1\n\tgo:2\n\tgo:3' >&2\nexit 2\n")
    binary.chmod(0o755)
    with pytest.raises(StartupError, match=r"ended with status 2") as caught:
        await EmbeddedServer.start(state, binary)
    assert str(caught.value).endswith(f"{state}/nats-server.log:\n{told}")


async def test_a_binary_that_ends_at_once(tmp_path: Path) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text("#!/bin/sh\necho no licence today >&2\nexit 3\n")
    binary.chmod(0o755)
    with pytest.raises(StartupError, match=r"(?s)ended with status 3.*no licence today"):
        await EmbeddedServer.start(tmp_path / "state", binary)
    after = await EmbeddedServer.start(tmp_path / "state")  # the failed start has let go of the directory
    await after.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has computed is known on Linux alone")
async def test_a_large_store_may_take_its_time_but_not_a_server_that_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text(f"""#!/bin/sh
number=0
while [ $number -lt 400000 ]; do number=$((number + 1)); done
exec {server_module._find(None)} "$@"
""")
    binary.chmod(0o755)
    monkeypatch.setattr(server_module, "_START_TIMEOUT", 0.1)
    with structlog.testing.capture_logs() as logs:
        server = await EmbeddedServer.start(tmp_path / "state", binary)
    await server.stop()
    assert {each["event"] for each in logs} == {"the broker still reads its store"}
    binary.write_text("#!/bin/sh\necho it waits for a disk >&2\nexec sleep 1000\n")
    with pytest.raises(StartupError, match=r"(?s)does not accept connections after 0 s.*it waits for a disk"):
        await EmbeddedServer.start(tmp_path / "state", binary)


async def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text("nothing to run")
    binary.chmod(0o755)
    with pytest.raises(StartupError, match="cannot be run"):
        await EmbeddedServer.start(tmp_path / "state", binary)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux's")
async def test_a_killed_parent_leaves_no_server(tmp_path: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from penstock.streams.nats.servers.server import EmbeddedServer
async def main():
    server = await EmbeddedServer.start(Path({str(tmp_path)!r}))
    print(server.url, flush=True)
    await server.wait()
asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(PATIENCE):
        url = (await parent.stdout.readline()).decode().strip()
        assert await listens(url)
        parent.kill()
        await parent.wait()
    await gone(url)
    successor = await EmbeddedServer.start(tmp_path)
    await successor.stop()


async def test_a_working_directory_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.rmdir(tmp_path)
    with pytest.raises(StartupError, match=r"cannot use the state directory state: .*No such file"):
        await EmbeddedServer.start(Path("state"))
