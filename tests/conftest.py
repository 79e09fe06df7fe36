"""What all tests share: a tiny model, Penstock's real processes, and the order in which files are run."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby, zip_longest
from pathlib import Path

import pytest
import torch
import trustme
from serving import GUARDED, Process, Serve, Served, Start, serving
from templates import HERMES
from tiny_model import make_tiny_model

ROOT = Path(__file__).parents[1]

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # or else each of many processes compiles whatever it imports
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(ROOT / ".cache" / "bytecode")
    sys.dont_write_bytecode = False

if not torch.cuda.is_available():  # Triton, which others import too, reads it once
    os.environ["TRITON_INTERPRET"] = "1"

if "SSL_CERT_FILE" not in os.environ:  # each HTTP client would read all that the system trusts, to use none of it
    _authority = ROOT / ".cache" / "authority.pem"
    _authority.parent.mkdir(exist_ok=True)
    trustme.CA().cert_pem.write_to_path(_authority)
    os.environ["SSL_CERT_FILE"] = str(_authority)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or else no child would end at Ctrl-C

gc.disable()  # until all is collected: what test modules import stays

_num_modules = 0  # when the last were found to be no garbage

SLOW = tuple(  # with many processes
    f"tests/{folder}/" for folder in ("serve", "deploy", "api/bench", "docs", "examples", "stages")
)
SERVERS = ("echo_server", "model_server", "tool_server")  # that tests share; each also takes time when it is idle
_running: dict[str, ExitStack] = {}
_last_users: dict[str, int] = {}  # the place of the last file that uses it, among all in the order in which they run
_places: dict[Path, int] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nats-permissions",
        action="store_true",
        help="tests/serve: parts in processes of their own connect over TLS, with the users of penstock nats config",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nats-permissions"):
        os.environ[GUARDED] = "1"
    config.option.loadscopereorder = False  # or else --dist loadfile undoes the order in which shared servers end


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the files, slow ones begin, or else a process would run the last one alone.

    Each is followed by a quick one, so that not all processes wait at the same time. Of both those come first that
    share a server, which ends after the last of them.
    """
    if hasattr(config, "workerinput"):
        files = [[*group] for _, group in groupby(items, lambda item: item.path)]
        files.sort(key=lambda file: not any(map(_servers_of, file)))
        slow = [file for folder in SLOW for file in files if file[0].nodeid.startswith(folder)]
        quick = [file for file in files if not file[0].nodeid.startswith(SLOW)]
        pairs = zip_longest(slow, quick, fillvalue=list[pytest.Item]())
        items[:] = [item for pair in pairs for file in pair for item in file]


def pytest_collection_finish(session: pytest.Session) -> None:
    for place, item in enumerate(session.items):
        _places.setdefault(item.path, place)
        _last_users.update(dict.fromkeys(_servers_of(item), _places[item.path]))
    gc.freeze()
    gc.enable()


def _servers_of(item: pytest.Item) -> set[str]:
    return {*SERVERS} & {*getattr(item, "fixturenames", ())}


@pytest.fixture(scope="module", autouse=True)
def ended_servers(request: pytest.FixtureRequest) -> None:
    """Those that neither this file nor a later one uses."""
    for name in [name for name in _running if _last_users[name] < _places[request.path]]:
        _running.pop(name).close()


@pytest.fixture(scope="module", autouse=True)
def loaded_modules() -> None:
    """What a module begins with is no garbage: an engine that closes would search a million objects for some."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names proxies: one is dead, and one of a kind that HTTP clients lack a package for."""
    for name, proxy in {"http_proxy": "http://127.0.0.1:9", "all_proxy": "socks5://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, proxy)


@pytest.fixture(autouse=True)
def modules_of_earlier_tests(loaded_modules: None) -> None:
    """Nor is what the tests before this one have imported, and loaded for all that follow."""
    global _num_modules
    if len(sys.modules) != _num_modules:
        gc.collect()
        gc.freeze()
        _num_modules = len(sys.modules)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a `penstock` command; it is ended after the test."""
    processes: list[Process] = []

    def run(*arguments: str, environment: dict[str, str] | None = None) -> Process:
        processes.append(Process(*arguments, environment=environment, cwd=tmp_path))
        return processes[-1]

    yield run
    for process in reversed(processes):
        process.end()


@pytest.fixture
def serve(start: Start, tmp_path: Path) -> Serve:
    """Start `penstock serve` on a free port with a state directory of its own, and wait until it is ready."""

    def run(*arguments: str, environment: dict[str, str] | None = None) -> Served:
        state_dir = tmp_path / "state"
        process = start("serve", *arguments, "--port", "0", "--state-dir", str(state_dir), environment=environment)
        return Served(process, state_dir)

    return run


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One `penstock serve --backend echo` for all tests that only talk to it."""
    yield from _shared_server("echo_server", tmp_path_factory, "--backend", "echo")


@pytest.fixture(scope="session")
def model_server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    """One server of the tiny model in float32, for all tests that only talk to it."""
    named = ("--served-model-name", "tiny")
    yield from _shared_server("model_server", tmp_path_factory, str(tiny_model), "--dtype", "float32", *named)


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny model with a chat template that takes tools."""
    directory = tmp_path_factory.mktemp("models") / "tools"
    shutil.copytree(tiny_model, directory)
    (directory / "chat_template.jinja").write_text(HERMES)
    return directory


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory, tool_model: Path) -> Iterator[Served]:
    yield from _shared_server("tool_server", tmp_path_factory, str(tool_model), "--dtype", "float32")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of a few megabytes, with a real tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(directory)
    return directory


def _shared_server(name: str, factory: pytest.TempPathFactory, *arguments: str) -> Iterator[Served]:
    with ExitStack() as stack:
        _running[name] = stack
        yield stack.enter_context(serving(factory.mktemp("serve") / "state", *arguments))
