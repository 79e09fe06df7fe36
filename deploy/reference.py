"""python deploy/reference.py: write the tables of docs/reference.md from the code, between their markers

`tests/docs/test_reference.py` compares them, so that what a user looks up is what the code does.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import typer
from prometheus_client.metrics_core import Metric
from pydantic import ByteSize

from penstock.__main__ import app
from penstock.api.bridge.bridge import Bridge
from penstock.api.http.app import create_app
from penstock.api.http.metrics import Deployment
from penstock.api.http.openapi import REFUSALS
from penstock.api.http.preparers import Preparers
from penstock.api.http.requests import Gateway
from penstock.api.terminal.options import PANELS
from penstock.config import metrics
from penstock.config.settings import Settings
from penstock.config.sources import flag
from penstock.engine import CacheStats, EngineStats, ModelInfo
from penstock.schemas import errors
from penstock.schemas.deployment import SHARED
from penstock.schemas.openai.completions import ChatRequest
from penstock.schemas.params import GenerationParams
from penstock.schemas.wire.asyncapi import CHANNELS
from penstock.stages.infer.request_metrics import EngineMetrics
from penstock.stages.loading import model_card
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.nats.administration.deployment import layout
from penstock.streams.port import Backlog
from penstock.streams.stores.named_files import NamedFileStore
from penstock.streams.stores.quotas import Quotas
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import Subjects, model_lanes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
COMMAND = "python deploy/reference.py"
_ROOMS = ("api", "composition", "config", "engine", "schemas", "stages", "streams")
Node = TypeVar("Node", bound=ast.AST)
_LEVELS = ("debug", "info", "warning", "error", "exception")


def settings() -> str:
    """Every setting, in the panels of `--help`."""
    panels: dict[str, list[tuple[str, ...]]] = {}
    panel = ""
    for name, field in Settings.model_fields.items():
        panel = PANELS.get(name, panel) or "Serving"
        value = "~/.local/state/penstock" if name == "state_dir" else field.get_default(call_default_factory=True)
        meaning = str(field.description)
        choices = [str(choice) for choice in _choices(field.annotation)]
        if not all(choice in meaning for choice in choices):
            meaning += f" One of {', '.join(choices)}."
        text = f"`{flag(name)}`" if name != "model" else "`MODEL` (an argument)"
        default = _shown(value) + (f" ({_duration(value)})" if isinstance(value, float) and value >= 3600 else "")
        panels.setdefault(panel, []).append((text, default, meaning + (" ◆" if name in SHARED else "")))
    tables = [f"### {name}\n\n{_table('setting', 'default', 'meaning', rows=rows)}" for name, rows in panels.items()]
    return "\n\n".join(tables)


def commands() -> str:
    """Every command, with the options that are its own."""
    return "\n\n".join(_described(typer.main.get_command(app), "penstock"))


def http() -> str:
    """Every path, with what it does."""
    page = asyncio.run(_openapi())
    rows = [
        (f"`{method.upper()} {path}`", str(operation.get("description", "")).split("\n\n")[0])
        for path, methods in page["paths"].items()
        for method, operation in methods.items()
    ]
    return _table("path", "purpose", rows=rows)


def parameters() -> str:
    """Every sampling parameter of chats and of the library, with its range."""
    rows = []
    for name, field in GenerationParams.model_json_schema()["properties"].items():
        kind = field.get("anyOf", [field])[0]
        if name in ChatRequest.model_fields:
            value = field.get("default")
            default = "" if value == [] else _shown(value)
            rows.append((f"`{name}`", kind["type"], _range(kind), default))
    return _table("parameter", "type", "range", "default", rows=rows)


def subjects() -> str:
    """Every subject, with what travels on it."""
    rows = [
        (f"`penstock.{address}`", messages.replace(" ", ", "), text) for address, messages, text in CHANNELS.values()
    ]
    known = {address for address, _, _ in CHANNELS.values()}
    whole = Subjects("penstock")
    for name, method in inspect.getmembers(Subjects, inspect.isfunction):
        if name.startswith("_") or name.endswith(("_all", "_of", "_at")):
            continue
        names = list(inspect.signature(method).parameters)[1:]
        address = str(method(whole, *names)).removeprefix("penstock.")
        address = ".".join(f"{{{part}}}" if part in names else part for part in address.split("."))
        if not any(_same(address, other) for other in known):
            rows.append((f"`penstock.{address}`", "", (inspect.getdoc(method) or "").split("\n\n")[0]))
    return _table("subject", "message", "use", rows=rows)


def streams() -> str:
    """Every stream and bucket that a deployment with the default settings has."""
    found = layout(Settings())
    rows: dict[str, tuple[str, ...]] = {}
    of_a_model = [  # for their name stands a hash
        replace(
            spec,
            name=spec.name.replace("_LANES_", "_{LANES}_"),
            subjects=(spec.subjects[0].replace(".lanes.", ".{lanes}."),),
        )
        for spec in model_lanes("penstock", "lanes", store_limit=int(Settings().store_limit))
    ]
    for stream in (*found.streams, *of_a_model):
        name, shape = f"PENSTOCK_{stream.name}", "until acknowledged" if stream.retention == "work_queue" else "kept"
        most = [f"{stream.max_messages:,} messages"] if stream.max_messages else []
        most += [_duration(stream.max_age)] if stream.max_age else []
        lane = re.sub(r"_(HIGH|NORMAL|LOW)$", "_{HIGH,NORMAL,LOW}", name)
        subject = re.sub(r"\.(high|normal|low)\.", ".{priority}.", stream.subjects[0])
        rows[lane] = (f"`{lane}`", f"`{subject}`", shape, ", ".join([*most, _size(stream.max_bytes)]))
    buckets = [
        (
            f"`penstock_{bucket.name}`",
            bucket.storage,
            _duration(bucket.ttl) if bucket.ttl else "for ever",
            _size(bucket.max_bytes),
        )
        for bucket in found.buckets
    ]
    return (
        _table("stream", "subjects", "messages stay", "limits", rows=list(rows.values()))
        + "\n\n"
        + _table("bucket", "storage", "entries live", "limit", rows=buckets)
    )


def refusals() -> str:
    """Every status that a request can end with, and its codes."""
    kinds = {kind.__name__: kind for kind in _refusals(errors.Refusal)}
    codes: dict[str, set[str]] = {name: {str(kind.default_code)} for name, kind in kinds.items()}
    by_status: dict[int, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    constants = _constants()
    for node in _nodes(ast.Call):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in kinds:
                for keyword in node.keywords:
                    if keyword.arg == "code":
                        codes[name] |= _texts(keyword.value, constants)
            case ast.Call(
                func=ast.Attribute(attr="_refuse"),  # a connection's, before there is a request
                args=[ast.Constant(value=int(status)), ast.Constant(value=str(code)), *_],
            ):
                by_status[status][0].add("overloaded_error" if status == 503 else "invalid_request_error")
                by_status[status][1].add(code)
    for name, kind in kinds.items():
        types, found = by_status[kind.status]
        types.add(kind.type)
        found |= codes[name]
    rows = [
        (str(status), _coded(types), _coded(found), REFUSALS[status])
        for status, (types, found) in sorted(by_status.items())
    ]
    return _table("status", "`type`", "`code`", "meaning", rows=rows)


def log_events() -> str:
    """Every event that a process logs, with its fields."""
    rows: set[tuple[str, str, str]] = set()
    for node in _nodes(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "outage_logged":
            fields = _coded({"reason", *(str(keyword.arg) for keyword in node.keywords)})
            rows.update(("warning", text, fields) for text in _texts(node.args[0], {}))
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        if not (isinstance(node.func, ast.Attribute) and isinstance(of, ast.Name) and of.id in ("log", "_log")):
            continue
        if node.func.attr in _LEVELS and node.args and isinstance(node.args[0], ast.Constant):
            fields = _coded({keyword.arg for keyword in node.keywords if keyword.arg and keyword.arg != "exc_info"})
            level = "error" if node.func.attr == "exception" else node.func.attr
            rows.add((level, str(node.args[0].value), fields))
    order = {level: place for place, level in enumerate(reversed(_LEVELS))}
    return _table("level", "event", "fields", rows=sorted(rows, key=lambda row: (order[row[0]], row)))


def measured() -> str:
    """Every metric, with its labels."""
    rows = []
    for metric in metrics.REGISTRY.collect():
        own = metrics.REGISTRY._names_to_collectors[metric.name]
        labels = getattr(own, "_labelnames", ())
        rows.append(_metric(metric, labels))
    cache = CacheStats(0, 0, 0.0, 0, 0, 0, 0, 0, 0)
    engine = EngineMetrics(lambda: EngineStats(0, 0, 0, 0, 0, 0, cache), "model", "worker")
    for metric in (*engine.collect(), *asyncio.run(_deployment())):
        rows.append(_metric(metric, tuple(metric.samples[0].labels)))
    return _table("metric", "type", "labels", "meaning", rows=sorted(rows))


def _metric(metric: Metric, labels: Sequence[str]) -> tuple[str, str, str, str]:
    name = metric.name + ("_total" if metric.type == "counter" else "")
    return f"`{name}`", metric.type, ", ".join(f"`{label}`" for label in labels), metric.documentation


async def _deployment() -> list[Metric]:
    broker = MemoryBroker()
    await broker.ensure(layout(Settings()).streams, layout(Settings()).buckets)
    bridge, registry = Bridge(broker, Subjects("penstock"), "reference"), Registry(broker, interval=1.0)
    registry.models = {
        "model": model_card(Settings(backend="echo", served_model_name="model"), ModelInfo("", "", 1, 1, ()))
    }
    preparers = Preparers(registry, NamedFileStore(broker, 0))
    gateway = Gateway(bridge, broker, registry, Settings(), Quotas(broker, 0), preparers)

    async def states() -> dict[str, Any]:
        return {"models": [{"id": "model", "state": "ready", "loads": 1}]}

    shown = Deployment(gateway, states)
    await shown.look()
    shown.used = [used._replace(leader="n1") for used in shown.used]
    shown.backlogs = [Backlog("INFER", 0, 0, 0)]
    return list(shown.collect())


SECTIONS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "commands": commands,
    "http": http,
    "parameters": parameters,
    "subjects": subjects,
    "streams": streams,
    "errors": refusals,
    "metrics": measured,
    "log events": log_events,
}


def filled(text: str) -> str:
    """The page with each section written anew. Raises `ValueError` where a section has no markers."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->\n"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{PAGE.name} has no markers for {name!r}: {begin.strip()} and {end.strip()}")
        text = f"{before}{begin}\n{make()}\n\n{end}{after}"
    return text


async def _openapi() -> dict[str, Any]:
    broker = MemoryBroker()  # it belongs to a running loop
    bridge, registry = Bridge(broker, Subjects("penstock"), "reference"), Registry(broker, interval=1.0)
    return create_app(bridge, broker, registry, Settings(backend="echo"), "0").openapi()


def _described(command: Any, name: str) -> Iterator[str]:
    if command.hidden:
        return
    children = getattr(command, "commands", {})
    own = [each for each in command.params if "(also" not in str(getattr(each, "rich_help_panel", ""))]
    has_settings = len(own) < len(command.params)
    arguments = "".join(
        f" {each.name.upper()}" if each.required else f" [{each.name.upper()}]"
        for each in own
        if not each.opts[0].startswith("-")
    )
    if not children:
        text = re.sub(
            r"\s*\n\s*(?=\S)", lambda gap: "\n\n" if "\n\n" in gap[0] else " ", inspect.cleandoc(command.help)
        )
        rows = [_option(each) for each in own]
        table = _table("option", "default", "meaning", rows=rows) if rows else ""
        more = "It also takes every [setting](#settings) as a flag." if has_settings else ""
        yield "\n\n".join(part for part in (f"### `{name}{arguments}`", text, table, more) if part)
    for child in children.values():
        yield from _described(child, f"{name} {child.name}")


def _option(one: Any) -> tuple[str, str, str]:
    names = [*one.opts, *one.secondary_opts] if one.opts[0].startswith("-") else [one.name.upper()]
    shown = one.show_default if isinstance(one.show_default, str) else _shown(one.default)
    meaning = str(one.help or "").replace("\\[", "[") + (f" Also `{one.envvar}`." if one.envvar else "")
    return ", ".join(f"`{name}`" for name in names), shown, meaning


def _range(kind: dict[str, Any]) -> str:
    """The bounds of a number, or of a list and its members, as JSON Schema has them."""
    one = kind.get("items") or kind.get("additionalProperties") or kind
    least, above, most = one.get("minimum"), one.get("exclusiveMinimum"), one.get("maximum")
    text = "64 bits" if "exclusiveMaximum" in one else f"from {least:g}" if least is not None else ""
    text = f"above {above:g}" if above is not None else text
    text += f" to {most:g}" if most is not None else ""
    return ", ".join(part for part in (f"at most {kind['maxItems']}" if "maxItems" in kind else "", text) if part)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, also within an optional one."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((found for each in get_args(annotation) if (found := _choices(each))), ())


def _shown(value: object) -> str:
    match value:
        case None | "" | ():
            return ""
        case bool():
            return f"`{str(value).lower()}`"
        case ByteSize():
            return f"`{_size(value)}`"
        case tuple():
            return f"`{','.join(value)}`"
        case float() if value.is_integer():
            return f"`{value:.0f}`"
        case _:
            return f"`{value}`"


def _size(number: int) -> str:
    return ByteSize(number).human_readable(separator=" ").replace(".0 ", " ")


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length or seconds == length:
            number = f"{seconds / length:g}"
            return f"{number} {unit if number != '1' else unit[:-1]}"
    return f"{seconds:g} seconds"


def _coded(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _same(address: str, other: str) -> bool:
    """Whether two addresses differ in the names of their parameters alone."""
    one, two = (re.sub(r"\{\w+\}", "{}", each) for each in (address, other))
    return one == two


def _refusals(kind: type[errors.Refusal]) -> Iterator[type[errors.Refusal]]:
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from _refusals(child)


def _nodes(kind: type[Node]) -> Iterator[Node]:
    """Every node of a kind in product code that a server runs."""
    files = [*ROOT.glob("*.py"), *(file for room in _ROOMS for file in sorted((ROOT / room).rglob("*.py")))]
    for file in files:
        if "bench" not in str(file.relative_to(ROOT)):
            yield from (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, kind))


def _constants() -> dict[str, str]:
    """The names that stand for a text."""
    return {
        node.targets[0].id: node.value.value
        for node in _nodes(ast.Assign)
        if isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    }


def _texts(node: ast.expr, constants: dict[str, str]) -> set[str]:
    """What an expression may be, of the texts that stand in it."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.Name(id=name) if name in constants:
            return {constants[name]}
        case ast.IfExp(body=first, orelse=second):
            return _texts(first, constants) | _texts(second, constants)
        case _:
            return set()


def _table(*head: str, rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        f"| {' | '.join(' '.join(cell.replace('|', '&#124;').split()) for cell in row)} |" for row in lines
    )


if __name__ == "__main__":
    written = filled(PAGE.read_text("utf-8"))
    changed = written != PAGE.read_text("utf-8")
    PAGE.write_text(written, "utf-8")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}: {'written' if changed else 'as it was'}\n")
