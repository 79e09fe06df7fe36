"""The shape of the code: which room may import which, what the package holds, and how large a file may grow."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 350

# What each folder may import.
ARROWS: dict[str, set[str]] = {
    "schemas": set(),
    "config": {"schemas"},
    "streams": {"schemas", "config"},
    "engine": {"schemas", "config"},
    "stages": {"streams", "schemas", "config"},
    "api": {"engine", "streams", "schemas", "config"},
    "simulation": {"engine", "stages", "streams", "schemas", "config"},
    "testing": {"engine", "schemas"},
    "composition": {"api", "engine", "stages", "streams", "schemas", "config"},
}
# The rooms inside a folder, and what each may import of its own folder: rooms, or single modules of the folder itself,
# whose other modules stand above its rooms. A room may import what its folder may.
ROOMS: dict[str, set[str]] = {
    "schemas": {"schemas.models", "schemas.openai"},
    "schemas.anthropic": {"schemas", "schemas.openai"},
    "schemas.ollama": {"schemas", "schemas.openai"},
    "schemas.models": {"schemas.base", "schemas.errors", "schemas.jobs", "schemas.params"},
    "schemas.openai": {"schemas", "schemas.models"},
    "schemas.openai.responses": {"schemas", "schemas.openai"},
    "schemas.wire": {"schemas"},
    "streams": {"streams.memory", "streams.nats", "streams.nats.servers"},
    "streams.memory": {"streams"},
    "streams.nats": {"streams", "streams.nats.connection"},
    "streams.nats.administration": {"streams", "streams.nats", "streams.nats.connection"},
    "streams.nats.connection": set(),
    "streams.nats.servers": {"streams", "streams.nats", "streams.nats.connection"},
    "streams.stores": {"streams"},
    "engine": {
        "engine.adapters",
        "engine.backends",
        "engine.checkpoints",
        "engine.checkpoints.gguf",
        "engine.cpu",
        "engine.cuda",
        "engine.grammar",
        "engine.plain",
        "engine.planning",
        "engine.plug_ins",
        "engine.preparing",
        "engine.text",
        "engine.vision",
        "engine.vision.families",
        "engine.vision.towers",
    },
    "engine.adapters": {"engine.checkpoints", "engine.cpu", "engine.models", "engine.planning", "engine.transfer"},
    "engine.backends": {"engine", "engine.adapters", "engine.cpu", "engine.planning", "engine.text"},
    "engine.checkpoints": {"engine.checkpoints.gguf"},
    "engine.checkpoints.gguf": {
        "engine.checkpoints.experts",
        "engine.checkpoints.gguf.families",
        "engine.checkpoints.gguf.projectors",
        "engine.checkpoints.lazy",
        "engine.checkpoints.mxfp4",
        "engine.checkpoints.rounded",
    },
    "engine.checkpoints.gguf.families": {"engine.checkpoints.gguf.file", "engine.checkpoints.gguf.keys"},
    "engine.checkpoints.gguf.projectors": {"engine.checkpoints.gguf.file"},
    "engine.cpu": {"engine.models"},
    "engine.cuda": {"engine.checkpoints", "engine.models"},
    "engine.grammar": {"engine.grammar.expressions", "engine.text"},
    "engine.grammar.expressions": set(),
    "engine.llama_cpp": {"engine", "engine.planning", "engine.text"},
    "engine.paged": {
        "engine",
        "engine.adapters",
        "engine.checkpoints",
        "engine.cpu",
        "engine.cuda",
        "engine.paged.compiled",
        "engine.paged.cuda",
        "engine.paged.decoding",
        "engine.paged.kv",
        "engine.paged.quantization",
        "engine.paged.scheduling",
        "engine.paged.speculation",
        "engine.paged.spill",
        "engine.paged.state",
        "engine.plain",
        "engine.planning",
        "engine.text",
        "engine.vision",
    },
    "engine.paged.compiled": {
        "engine.adapters",
        "engine.cpu",
        "engine.paged",
        "engine.paged.decoding",
        "engine.paged.kv",
        "engine.paged.state",
        "engine.vision",
    },
    "engine.paged.cuda": {"engine", "engine.paged", "engine.paged.kv", "engine.paged.state"},
    "engine.paged.decoding": {
        "engine.adapters",
        "engine.checkpoints",
        "engine.cpu",
        "engine.paged",
        "engine.paged.cuda",
        "engine.paged.kv",
        "engine.paged.state",
        "engine.plain",
        "engine.planning",
        "engine.vision",
    },
    "engine.paged.kv": {"engine.cpu", "engine.planning"},
    "engine.paged.quantization": {
        "engine.checkpoints",
        "engine.checkpoints.gguf",
        "engine.cpu",
        "engine.cuda",
        "engine.paged.decoding",
        "engine.plain",
        "engine.vision.families",
    },
    "engine.paged.scheduling": {
        "engine.choice",
        "engine.paged.kv",
        "engine.paged.state.slots",
        "engine.request",
        "engine.vision",
    },
    "engine.paged.speculation": {"engine", "engine.cpu", "engine.paged", "engine.paged.scheduling", "engine.text"},
    "engine.paged.spill": {
        "engine",
        "engine.checkpoints",
        "engine.checkpoints.gguf",
        "engine.cpu",
        "engine.paged",
        "engine.paged.kv",
        "engine.paged.scheduling",
        "engine.planning",
    },
    "engine.paged.state": {"engine", "engine.paged", "engine.paged.kv", "engine.planning"},
    "engine.plain": {
        "engine.backend",
        "engine.checkpoints",
        "engine.checkpoints.gguf",
        "engine.config",
        "engine.cpu",
        "engine.models",
    },
    "engine.planning": {
        "engine.checkpoints",
        "engine.checkpoints.gguf",
        "engine.config",
        "engine.cpu",
        "engine.cuda",
        "engine.models",
        "engine.plain",
        "engine.vision.families",
    },
    "engine.plug_ins": {"engine.planning", "engine.text"},
    "engine.preparing": {
        "engine.backend",
        "engine.config",
        "engine.grammar",
        "engine.request",
        "engine.text",
        "engine.vision",
    },
    "engine.text": {"engine.checkpoints", "engine.checkpoints.gguf", "engine.cpu.process", "engine.models"},
    "engine.vision": {
        "engine.vision.families",
        "engine.background",
        "engine.checkpoints",
        "engine.checkpoints.gguf",
        "engine.models",
        "engine.request",
        "engine.text",
    },
    "engine.vision.families": {"engine.checkpoints"},
    "engine.vision.towers": set(),
    "engine.vllm": {"engine", "engine.grammar", "engine.planning", "engine.text"},
    "config.logs": {"config"},
    "stages": {"stages.custom"},
    "stages.batch": {"stages"},
    "stages.custom": {"stages"},
    "stages.infer": {"stages"},
    "stages.tools": {"stages"},
    "stages.validate": {"stages"},
    "api": set(),
    "api.batches": {"api.bridge", "api.render"},
    "api.bench": {"api.bench.chaos", "api.serve", "api.terminal"},
    "api.bench.chaos": {"api.bench", "api.serve", "api.terminal", "api.tools"},
    "api.bridge": set(),
    "api.grpc": {"api.bridge", "api.http.middleware"},
    "api.http": {
        "api.batches",
        "api.bridge",
        "api.http.anthropic",
        "api.http.console",
        "api.http.middleware",
        "api.http.models",
        "api.http.ollama",
        "api.render",
        "api.tools",
    },
    "api.http.anthropic": {"api.batches", "api.http", "api.http.middleware", "api.render"},
    "api.http.console": {"api.http", "api.http.models"},
    "api.http.middleware": {"api.bridge", "api.http.answers"},
    "api.http.models": {"api.http", "api.http.anthropic"},
    "api.http.ollama": {"api.http", "api.http.middleware", "api.http.models", "api.render"},
    "api.library": {"api.render", "api.tools"},
    "api.render": set(),
    "api.serve": set(),
    "api.terminal": set(),
    "api.terminal.over_http": {"api.terminal"},
    "api.terminal.over_nats": {"api.bridge", "api.serve", "api.terminal"},
    "api.tools": set(),
}
# What single files may import besides.
EXCEPTIONS: dict[str, set[str]] = {
    "api/terminal/simulate.py": {"simulation"},
    "stages/infer/adapters.py": {"engine"},
    "stages/images.py": {"engine.preparing.documents", "engine.vision.chat", "engine.vision.images"},
    "stages/infer/relay.py": {"engine"},
    "stages/infer/request_metrics.py": {"engine"},
    "stages/infer/requests.py": {"engine"},
    "stages/infer/room.py": {"engine"},
    "stages/infer/stage.py": {"engine"},
    "stages/loading.py": {"engine.adapters", "engine.models", "engine.planning"},
    "stages/tools/images.py": {"engine.vision.reading"},
    "stages/validate/slow_parts.py": {
        "engine.grammar.checker",
        "engine.preparing.documents",
        "engine.preparing.prepare",
        "engine.preparing.remote_files",
    },
    "stages/validate/stage.py": {
        "engine.grammar.checker",
        "engine.plug_ins.found",
        "engine.preparing.documents",
        "engine.preparing.preparers",
        "engine.text.tokenizer",
        "engine.vision.chat",
        "engine.vision.reading",
    },
    "stages/stream.py": {"engine.text.answer_reader"},
    "__main__.py": {
        "api.serve.ahead",
        "api.terminal.lazy",
        "schemas.threads",
        "schemas.version",
    },  # all else when a command is invoked
    "__init__.py": {
        "api.library",
        "api.tools",
        "engine",
        "schemas.lazy_names",
        "schemas.version",
        "stages",
    },  # its names, when they are first used
}
NO_CODE = {"tests", "deploy", "build", "dist", "node_modules"}  # folders that may hold Python and are no rooms of ours


class Arrow(NamedTuple):
    """An import: of what, dotted below the package, and in which line."""

    target: str
    line: int


def _folders() -> list[str]:
    """The folders of the package, as they lie on disk."""
    return sorted(
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and path.name not in NO_CODE and path.name.isidentifier() and any(path.rglob("*.py"))
        if not path.name.startswith("__")
    )


def _rooms() -> list[str]:
    """The folders and the rooms inside them, dotted."""
    return sorted({file.rpartition("/")[0].replace("/", ".") for file in _files() if "/" in file})


@cache
def _files() -> list[str]:
    """All product code, relative to the root."""
    files = [*ROOT.glob("*.py"), *(file for folder in _folders() for file in (ROOT / folder).rglob("*.py"))]
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def _arrows(name: str, source: str) -> Iterator[Arrow]:
    """Every import of Penstock's own modules, wherever in the file it stands."""
    package = ["penstock", *name.split("/")[:-1]]
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "penstock":
                    yield Arrow(alias.name.partition(".")[2], node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            if module.split(".")[0] != "penstock":
                continue
            below = module.partition(".")[2]
            for alias in node.names:
                yield Arrow(f"{below}.{alias.name}".strip(".") if _room(below) == below else below, node.lineno)


@cache
def _room(target: str) -> str:
    """The room that an imported name lies in."""
    while target and not (ROOT / target.replace(".", "/")).is_dir():
        target = target.rpartition(".")[0]
    return target


def _faults(name: str, source: str) -> list[str]:
    """The imports of one file that the tables do not allow."""
    room = name.rpartition("/")[0].replace("/", ".")
    folder = room.partition(".")[0]
    inside, outside = ROOMS.get(room, set()), ARROWS.get(folder, set()) | EXCEPTIONS.get(name, set())
    faults = []
    for arrow in _arrows(name, source):
        target = arrow.target
        fits = any(f"{target}.".startswith(f"{one}.") for one in outside)
        if target.partition(".")[0] == folder:
            one_module = any(f"{target}.".startswith(f"{one}.") for one in inside if _room(one) != one)
            fits = _room(target) in {room, *inside} or one_module
        if not fits:
            faults.append(f"{name}:{arrow.line} imports {target}")
    return faults


@cache
def _source(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


def test_every_room_has_its_arrows() -> None:
    assert _folders() == sorted(ARROWS)
    assert _rooms() == sorted(ROOMS.keys() | ARROWS.keys())


def test_engine_and_streams_never_meet() -> None:
    for room, other in (("engine", "streams"), ("streams", "engine")):
        assert other not in ARROWS[room]


def test_imports_follow_the_table() -> None:
    assert [fault for name in _files() for fault in _faults(name, _source(name))] == []


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("schemas/a.py", "from ..config import settings", "config.settings"),
        ("schemas/a.py", "from ..config.settings import Settings", "config.settings"),
        ("schemas/openai/a.py", "from ...config.settings import Settings", "config.settings"),
        ("config/a.py", "def f():\n    from .. import streams", "streams"),
        ("streams/a.py", "from ..engine import Engine", "engine.Engine"),
        ("streams/memory/a.py", "from ..nats.connection.link import Link", "streams.nats.connection.link"),
        ("engine/a.py", "import penstock.streams.port", "streams.port"),
        ("engine/a.py", "from penstock.stages import Stage", "stages.Stage"),
        ("engine/a.py", "from .paged.runner import Runner", "engine.paged.runner"),
        ("engine/text/a.py", "from ..sampler import Sampler", "engine.sampler"),
        ("engine/text/a.py", "from .. import sampler", "engine.sampler"),
        ("engine/cpu/a.py", "from ..paged import runner", "engine.paged.runner"),
        ("stages/a.py", "from ..engine.text.tokenizer import load_tokenizer", "engine.text.tokenizer"),
        (
            "stages/validate/stage.py",
            "from ...engine.text import tokenizer, chat_messages",
            "engine.text.chat_messages",
        ),
        ("stages/validate/stage.py", "from ...engine.engine import InferenceEngine", "engine.engine"),
        ("stages/batch/a.py", "from ..tools.calls import Calls", "stages.tools.calls"),
        ("api/a.py", "from ..stages.endings import refuse", "stages.endings"),
        ("api/a.py", "from .. import __main__", "__main__"),
        ("api/batches/a.py", "from ..http.files import page", "api.http.files"),
        ("api/render/a.py", "from ..http.requests import Gateway", "api.http.requests"),
        ("__init__.py", "from .streams import Broker", "streams.Broker"),
    ],
)
def test_arrow_against_the_tables_is_found(name: str, source: str, fault: str) -> None:
    (found,) = _faults(name, source)
    assert found.endswith(f" imports {fault}")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("stages/infer/stage.py", "from ...engine import InferenceEngine"),
        ("stages/validate/stage.py", "from ...engine.text.tokenizer import load_tokenizer"),
        (
            "stages/batch/stage.py",
            "from ..contract import Stage\nfrom .lanes import Lanes\nfrom ...streams import port",
        ),
        ("api/a.py", "from ..schemas.version import __version__\nfrom ..streams.port import Broker\nfrom .b import c"),
        ("api/http/a.py", "from ..render import openai\nfrom ...streams.stores.objects import Objects"),
        ("engine/a.py", "from .text import tokenizer\nfrom .request import b\nimport torch.nn\nfrom .. import schemas"),
        ("engine/text/a.py", "from ..models import ModelInfo\nfrom ... import schemas"),
        ("composition/a.py", "from ..api.http.app import create_app\nfrom ..stages import Stage\nfrom .b import c"),
    ],
)
def test_arrow_along_the_tables_is_let_pass(name: str, source: str) -> None:
    assert _faults(name, source) == []


def test_product_code_imports_itself_relatively() -> None:
    found = []
    for name in _files():
        for node in ast.walk(_tree(_source(name))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found += [f"{name}: {each}" for each in names if each.split(".")[0] == "penstock"]
    assert found == []


def test_package_list_is_the_rooms() -> None:
    project = tomllib.loads(_source("pyproject.toml"))
    assert sorted(project["tool"]["setuptools"]["packages"]) == [
        "penstock",
        *(f"penstock.{name}" for name in _rooms()),
    ]


def test_root_holds_no_other_code() -> None:
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["__init__.py", "__main__.py"]


def test_no_file_grows_too_large() -> None:
    lines = {name: len(_source(name).splitlines()) for name in _files()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_only_commands_print() -> None:
    found = []
    for name in _files():
        if not name.startswith(("api/", "__main__")):
            for node in ast.walk(_tree(_source(name))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                    found.append(f"{name}:{node.lineno} prints; log it")
    assert found == []
