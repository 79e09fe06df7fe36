"""Starting, stopping and dying: what a person at a terminal sees, and that no process is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO, TextIOWrapper
from pathlib import Path
from threading import Barrier

import httpx2
import psutil
import pytest
import structlog
from ports import reserved_port
from serving import LOOK, START_TIMEOUT, Serve, Served, Start, until
from setting_up import set_up

from penstock.api.serve import processes
from penstock.api.serve.listening import listen, say
from penstock.api.serve.processes import Ending, Part, ProcessKeeper, child_environment, keep_broker
from penstock.api.serve.watching import ready
from penstock.config.settings import Settings
from penstock.schemas.errors import BrokerUnavailable, StartupError
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.outages import through_outages
from penstock.streams.port import StreamSpec

BODY = {"model": "echo", "prompt": "x" * 200, "max_tokens": 200, "stream": True}


def children(pid: int) -> list[psutil.Process]:
    return list(psutil.Process(pid).children(recursive=True))


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=30)
    return not alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_lets_running_requests_finish(serve: Serve, number: signal.Signals) -> None:
    served = serve("--backend", "echo", "--echo-rate", "200")
    family = children(served.process.pid)
    assert len(family) == 3  # broker, front, worker
    text = ""
    with httpx2.stream("POST", f"{served.url}/v1/completions", json=BODY, timeout=60) as response:
        for line in response.iter_lines():
            if not text:
                os.killpg(served.process.pid, number)  # as a terminal does: the whole group
                if number is signal.SIGHUP:  # which the shell repeats
                    os.killpg(served.process.pid, number)
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == "x" * 200
    assert served.process.wait() == 0
    assert gone(family)
    assert not (served.state_dir / "nats-url").exists()


def test_a_file_of_the_state_directory_that_cannot_be_replaced_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "state" / "nats-url").mkdir(parents=True)
    server = start("serve", "--backend", "echo", "--port", "0", "--state-dir", str(tmp_path / "state"))
    server.wait_for("error: cannot replace .*/state/nats-url: Is a directory; choose another --state-dir")
    assert server.wait() == 2


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_the_fault_that_is_named(host: str) -> None:
    with pytest.raises(StartupError, match=f"cannot listen on {host} port 0: .*; choose another --host"):
        listen(host, 0)


async def test_all_addresses_are_asked_without_ipv6_too(echo_server: Served) -> None:
    async with asyncio.timeout(START_TIMEOUT):
        await ready(echo_server.url.replace("127.0.0.1", "[::]"))


def test_it_serves_and_ends_though_nobody_hears_it_any_more(tmp_path: Path) -> None:
    """The terminal is gone, or `head` has read enough."""
    command = echoing(port := reserved_port())
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as serving:
        assert serving.stdout and serving.stderr
        serving.stdout.close()
        serving.stderr.close()
        serves_and_ends(serving, port)


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_it_serves_where_its_standard_files_are_closed(tmp_path: Path, closed: str) -> None:
    """As some of those do that start services."""
    command = ["sh", "-c", f"exec {shlex.join(echoing(port := reserved_port()))} {closed}"]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as serving:
        serves_and_ends(serving, port)


def test_it_takes_no_modules_from_the_working_directory(tmp_path: Path) -> None:
    """The console script does not look there for itself."""
    for name in ("random", "token", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    command = echoing(port := reserved_port())
    with subprocess.Popen([command[0], "-P", *command[1:]], cwd=tmp_path, start_new_session=True) as serving:
        serves_and_ends(serving, port)


def echoing(port: int) -> list[str]:
    """A command that is not to be read to learn its port."""
    return [
        *(sys.executable, "-m", "penstock", "serve", "--backend", "echo"),
        *("--port", str(port), "--state-dir", "state"),
    ]


def serves_and_ends(serving: subprocess.Popen[bytes], port: int) -> None:
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/health/ready"))
        assert httpx2.post(f"http://127.0.0.1:{port}/tokenize", json={"prompt": "x"}, timeout=30).status_code == 200
        family = children(serving.pid)
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(START_TIMEOUT) == 0
        assert gone(family)
    finally:
        serving.kill()


def test_a_line_that_nobody_reads_stops_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        say("penstock ready", stream)
        say("stopping", stream)


@pytest.mark.skipif(sys.platform != "linux", reason="pipes that keep what was written apart are Linux's")
def test_a_line_is_written_at_once() -> None:
    """Others write to the same file, and Python keeps nothing back in containers with PYTHONUNBUFFERED=1."""
    reader, writer = os.pipe2(os.O_DIRECT)
    with open(reader, "rb", buffering=0) as reading, TextIOWrapper(FileIO(writer, "w"), write_through=True) as file:
        say("penstock ready", file)
        assert reading.read(100) == b"penstock ready\n"


def answers(url: str) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(url, timeout=5).status_code == 200
    return False


def test_children_read_no_file_that_the_parent_did_not(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "given.toml").write_text("echo_rate = 0")
    (tmp_path / "penstock.toml").write_text("max_sequence_length = 20")  # in the working directory
    served = serve("--backend", "echo", "--config", str(tmp_path / "given.toml"))
    answer = httpx2.post(f"{served.url}/v1/completions", json=BODY | {"stream": False}, timeout=60)
    assert answer.json()["choices"][0]["text"] == "x" * 200


def test_what_outlasts_the_drain_limit_is_told_so(serve: Serve) -> None:
    served = serve("--backend", "echo", "--echo-rate", "1", "--drain-timeout", "1")
    with httpx2.stream("POST", f"{served.url}/v1/completions", json=BODY, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        served.process.send(signal.SIGINT)
        rest = "".join(lines) if response.status_code == 200 else ""
    assert '"error"' in rest
    assert served.process.wait() == 0


def test_a_killed_parent_leaves_no_process(serve: Serve) -> None:
    served = serve("--backend", "echo")
    family = children(served.process.pid)
    served.process.send(signal.SIGKILL)
    served.process.wait()
    assert gone(family)


def test_a_start_under_another_name_offers_the_former_model_no_longer(serve: Serve) -> None:
    serve("--backend", "echo").process.end()
    url = serve("--backend", "echo", "--served-model-name", "other").url
    assert [each["id"] for each in httpx2.get(f"{url}/v1/models").json()["data"]] == ["other"]
    assert httpx2.post(f"{url}/v1/completions", json=BODY).json()["error"]["code"] == "model_not_found"


def test_a_killed_front_or_broker_is_started_again(serve: Serve) -> None:
    served = serve("--backend", "echo")
    for name in ("front", "nats-server"):
        victim = next(child for child in children(served.process.pid) if name in " ".join(child.cmdline()))
        os.kill(victim.pid, signal.SIGKILL)
        psutil.wait_procs([victim], timeout=30)
        with httpx2.Client(base_url=served.url, timeout=60, transport=httpx2.HTTPTransport(retries=20)) as client:
            until(lambda: client.get("/health/ready").status_code == 200)
            answer = client.post("/v1/completions", json=BODY | {"stream": False})
        assert answer.json()["choices"][0]["text"] == "x" * 200


def test_a_worker_retires_and_another_takes_its_place(serve: Serve) -> None:
    served = serve("--backend", "echo", "--restart-after-requests", "1", "--heartbeat-interval", "0.2")
    for _ in range(2):
        (first,) = [child for child in children(served.process.pid) if "worker" in child.cmdline()]
        answer = httpx2.post(f"{served.url}/v1/completions", json=BODY | {"stream": False}, timeout=60)
        assert answer.json()["choices"][0]["text"] == "x" * 200
        assert gone([first])
        served.process.wait_for("process ended itself, restarting")
        until(lambda: any("worker" in child.cmdline() for child in children(served.process.pid)))


def test_readiness_and_the_log_name_the_fast_paths_that_are_not_taken(serve: Serve, tiny_model: Path) -> None:
    served = serve(str(tiny_model), "--dtype", "float32", "--compile-kernels", "false")
    reason = "decoding is not compiled: compile_kernels is false"
    assert httpx2.get(f"{served.url}/health/ready").json()["slow_paths"] == {"w0": [reason]}
    served.process.wait_for(f"worker ready.*{reason}")


def test_who_comes_while_the_model_loads_waits_for_it(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{reserved_port()}"
    process = start(
        *("serve", str(tiny_model), "--served-model-name", "tiny", "--dtype", "float32"),
        *("--port", url.rpartition(":")[2], "--state-dir", str(tmp_path / "state")),
    )
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    answer = None
    while answer is None:
        try:
            answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=START_TIMEOUT)
        except httpx2.ConnectError:  # it does not listen yet; from then on nothing is refused
            assert not any("worker ready" in line for line in process.lines)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)


def test_p20_ready_means_that_every_worker_is(serve: Serve) -> None:
    """P20: N configured workers means N ready workers."""
    served = serve("--backend", "echo", "--workers", "2", "--heartbeat-interval", "0.2")
    answer = httpx2.get(f"{served.url}/health/ready")
    assert (answer.status_code, answer.json()["workers"]) == (200, 2)
    (victim, _) = [child for child in children(served.process.pid) if "worker" in child.cmdline()]
    victim.kill()
    psutil.wait_procs([victim], timeout=30)
    counts: list[int] = []
    while counts[-2:] != [1, 2]:  # it is missed, then replaced
        if (count := httpx2.get(f"{served.url}/health/ready").json()["workers"]) not in counts[-1:]:
            counts.append(count)
    assert counts in ([1, 2], [2, 1, 2])


async def test_a_part_that_finds_no_broker_while_it_restarts_waits_for_it(tmp_path: Path) -> None:
    async def until(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    server = await EmbeddedServer.start(tmp_path / "state")
    await set_up({"PENSTOCK_NATS_URL": server.url})
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    with (tmp_path / "output").open("w+b") as output:
        keeper, over = ProcessKeeper(5.0, most_delay=0.1, output=output), asyncio.Event()
        settings = Settings(state_dir=tmp_path / "state")
        part = Part("stage", ("stage", "validate"))
        keeping = asyncio.create_task(keeper.keep(part, child_environment(settings, server.url), over))
        await until(lambda: b"waiting for the broker" in (tmp_path / "output").read_bytes())
        broker = asyncio.create_task(keep_broker(server))  # finds it dead
        await until(lambda: b'"running"' in (tmp_path / "output").read_bytes())
        assert keeper.fatal is None
        over.set()
        await keeping
    broker.cancel()
    await server.stop()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """One of 24 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", path], capture_output=True)
    if mounting.returncode:
        pytest.skip("needs a machine where it may mount")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


async def test_a_broker_whose_disk_was_full_stores_again_when_there_is_room(disk: Path) -> None:
    server = await EmbeddedServer.start(disk / "state")
    broker = await JetStreamBroker.connect(server.url, namespace="p", timeout=0.5)
    await broker.ensure([StreamSpec("LEDGER", ("p.ledger",), "limits", "file")], [])
    await broker.publish("p.ledger", b"first", message_id="first")
    with (disk / "other").open("wb", buffering=0) as other, pytest.raises(OSError, match="No space left"):
        while True:
            other.write(bytes(1 << 10))
    keeping = asyncio.create_task(keep_broker(server))
    with pytest.raises(BrokerUnavailable):
        for number in range(20):
            await broker.publish("p.ledger", bytes(1 << 10), message_id=f"{number}")
    (disk / "other").unlink()
    async with asyncio.timeout(START_TIMEOUT):
        await through_outages(lambda: broker.publish("p.ledger", b"last", message_id="last"), "p.ledger")
    stored = await broker.replay("LEDGER", "p.ledger")
    assert (stored[0].data, stored[-1].data) == (b"first", b"last")
    keeping.cancel()
    await broker.close()
    await server.stop()


async def test_a_broker_that_could_not_write_is_restarted_once(tmp_path: Path) -> None:
    server = await EmbeddedServer.start(tmp_path / "state")
    with (tmp_path / "state" / "nats-server.log").open("ab") as log:
        log.write(b"[1] [ERR] Filestore [X] Critical write error: write /x/msgs/1.blk: no space left on device\n")
    assert server.is_stuck()
    await server.restart()
    assert not server.is_stuck()
    await server.stop()


async def test_a_broker_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its disk is full, or its log is another user's."""
    monkeypatch.setattr(processes, "MOST_DELAY", 0.01)
    state = tmp_path / "state"
    server = await EmbeddedServer.start(state)
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    (state / "nats-server.log").rename(tmp_path / "log")
    (state / "nats-server.log").mkdir()
    with pytest.raises(StartupError, match=r"^cannot use the state directory .*nats-server.log"):
        await server.restart()
    with structlog.testing.capture_logs() as logs:
        keeping = asyncio.create_task(keep_broker(server))
        while not any(entry["event"] == "broker cannot be started" for entry in logs):  # noqa: ASYNC110
            await asyncio.sleep(0)
    (state / "nats-server.log").rmdir()
    async with asyncio.timeout(START_TIMEOUT):
        while not server.alive:  # noqa: ASYNC110
            await asyncio.sleep(LOOK)
    keeping.cancel()
    await server.stop()


async def test_a_broker_whose_store_was_deleted_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began with an empty one, in which no part found its streams, so all ended with a traceback."""
    monkeypatch.setattr(processes, "MOST_DELAY", 0.01)
    server = await EmbeddedServer.start(tmp_path / "state")
    broker = await JetStreamBroker.connect(server.url, namespace="p", timeout=0.5)
    await broker.ensure([StreamSpec("LEDGER", ("p.ledger",), "limits", "file")], [])
    await broker.publish("p.ledger", b"first", message_id="first")
    (tmp_path / "state" / "jetstream").rename(tmp_path / "away")
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    with structlog.testing.capture_logs() as logs:
        keeping = asyncio.create_task(keep_broker(server))
        while not (told := [entry for entry in logs if entry["event"] == "broker cannot be started"]):  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert "state/jetstream was deleted" in told[0]["reason"]
    (tmp_path / "away").rename(tmp_path / "state" / "jetstream")
    async with asyncio.timeout(START_TIMEOUT):
        stored = await through_outages(lambda: broker.replay("LEDGER", "p.ledger"), "p.ledger")
    assert [message.data for message in stored] == [b"first"]
    keeping.cancel()
    await broker.close()
    await server.stop()


@pytest.mark.parametrize(("steady", "delays"), [(1000.0, [0.0, 0.01, 0.01]), (-1.0, [0.0, 0.0, 0.0])])
async def test_a_process_that_dies_is_restarted_at_once_and_less_often_if_it_dies_again(
    steady: float, delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STEADY", steady)
    over, lives = asyncio.Event(), iter(range(len(delays)))

    class Dying(ProcessKeeper):
        async def run(self, part: Part, environment: dict[str, str], until: asyncio.Event) -> Ending:
            if next(lives, None) is None:
                over.set()
            return Ending(1)

    with structlog.testing.capture_logs() as logs:
        await Dying(5.0, most_delay=0.01).keep(Part("stage", ()), {}, over)
    assert [entry["delay"] for entry in logs if entry["event"] == "process died, restarting"] == delays


@pytest.mark.parametrize(
    ("kills", "told"),
    [
        ([4, 5], "was killed by SIGKILL: the memory of the machine or its container ran out"),
        ([4, 4], "was killed by SIGKILL, as the system does when its memory runs out"),
    ],
)
async def test_a_kill_for_want_of_memory_is_told(kills: list[int], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, part = iter(kills), Part("stage", ("--version",))
    monkeypatch.setattr(processes, "_memory_kills", lambda: next(counts))
    keeper = ProcessKeeper(5.0)
    running = asyncio.create_task(keeper.run(part, dict(os.environ), asyncio.Event()))
    while part.name not in keeper.running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    os.kill(keeper.running[part.name].pid, signal.SIGKILL)
    assert (await running).text == told


@pytest.mark.parametrize("name", ["worker", "nats-server"])
def test_streams_go_on_after_a_kill(serve: Serve, name: str) -> None:
    served = serve("--backend", "echo", "--echo-rate", "50", "--lease", "2")
    started = Barrier(9)

    def ask(place: int) -> str:
        text = ""
        body = BODY | {"prompt": f"{place}" * 150}
        with httpx2.stream("POST", f"{served.url}/v1/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    if not text:
                        started.wait()
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(ask, range(8))
        started.wait()
        for child in children(served.process.pid):
            if name in " ".join(child.cmdline()):
                child.kill()
        assert list(answers) == [f"{place}" * 150 for place in range(8)]


def test_a_port_in_use_is_told_at_once(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start("serve", "--backend", "echo", "--port", port, "--state-dir", str(tmp_path / "state"))
        assert process.wait() == 2
    assert f"port {port}" in process.output
    assert "--port" in process.output
    assert len(process.lines) == 1


def test_a_state_directory_in_use_is_told_at_once(echo_server: Served, start: Start) -> None:
    second = start("serve", "--backend", "echo", "--port", "0", "--state-dir", str(echo_server.state_dir))
    assert second.wait() == 2
    assert str(echo_server.state_dir) in second.output
    assert "--state-dir" in second.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "/no/such/directory"], "no such directory or file: /no/such/directory"),
        (["serve", "EMPTY"], "has no config.json"),
        (["serve", "BROKEN"], "model.safetensors"),
        (["serve", "--prot", "1"], "No such option"),
        (["serve", "--config", "BAD_TOML"], "not valid TOML"),
        (["serve", "--config", "/no/such/file.toml"], "no such file"),
        (["serve", "--backend", "nonsense"], "unknown backend 'nonsense'"),
        (["serve", "--backend", "echo", "--api-keys-file", "nowhere.txt"], "nowhere.txt"),
        (["serve", "--backend", "echo", "--tool-format", "nonsense"], "nonsense"),
        (["serve", "--backend", "echo", "--nats-url", "http://127.0.0.1:4222"], "must be nats://HOST:PORT"),
        (["submit", "hello", "--nats-url", "127.0.0.1:1"], "no NATS server answers at nats://127.0.0.1:1"),
        (["serve", "--backend", "echo", "--nats-server", "/no/such/binary"], "--nats-server"),
        (["worker", "--backend", "echo"], "no broker"),
        (["stage", "nonsense"], "no stage is called nonsense"),
        (["stage", "infer"], "penstock worker MODEL"),
        (["submit", "hello"], "no broker"),
        (["submit", "hello", "--state-dir", "KILLED"], "it was killed: start it again"),
        (["serve", "--backend", "echo", "--dtype", "int3"], "dtype (--dtype)"),
        (["worker", "--backend", "echo", "--id", "a b"], "--id 'a b'"),
    ],
)
def test_bad_input_is_told_with_exit_code_2(
    start: Start, tmp_path: Path, tiny_model: Path, arguments: list[str], told: str
) -> None:
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"these are no weights")
    (tmp_path / "bad.toml").write_text("port = = 1")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "nats-url").write_text("nats://127.0.0.1:1")
    places = {"EMPTY": tmp_path / "empty", "BROKEN": broken, "BAD_TOML": tmp_path / "bad.toml"}
    places["KILLED"] = tmp_path / "killed"
    process = start(
        *(str(places.get(argument, argument)) for argument in arguments),
        environment={"PENSTOCK_STATE_DIR": str(tmp_path / "state"), "PENSTOCK_PORT": "0"},
    )
    assert process.wait() == 2
    assert told in process.output
    assert "Traceback" not in process.output


def test_submit_prints_the_answer(echo_server: Served, start: Start) -> None:
    process = start("submit", "hello there", "--state-dir", str(echo_server.state_dir))
    assert process.wait() == 0
    assert "hello there" in process.output


def test_jobs_of_many_threads_over_one_server(echo_server: Served) -> None:
    with httpx2.Client(base_url=echo_server.url, timeout=60) as client, ThreadPoolExecutor(32) as pool:
        bodies = [BODY | {"stream": False, "prompt": f"request {place}"} for place in range(200)]
        texts = pool.map(lambda body: client.post("/v1/completions", json=body).json()["choices"][0]["text"], bodies)
        assert list(texts) == [body["prompt"] for body in bodies]
