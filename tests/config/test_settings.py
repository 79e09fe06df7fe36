"""Settings through the command line as a user gives them: who wins, who is named, and what is said of every fault."""

from __future__ import annotations

import json
import os
import re
import types
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo
from typer.testing import CliRunner, Result

from penstock.__main__ import app
from penstock.api.terminal.options import with_settings
from penstock.config.settings import BUILT_IN_STAGES, Settings
from penstock.config.sources import Loaded, flag, load, variable, with_projector
from penstock.schemas.errors import ConfigurationError

Source = Literal["flag", "variable", "file"]
SOURCES: tuple[Source, ...] = ("file", "variable", "flag")  # the later wins

ALLOWED_URLS = ("image_allowed_urls", "document_allowed_urls", "mcp_allowed_urls")
FIELDS = Settings.model_fields
WORDS = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="@:\\"), min_size=1, max_size=12
)
TOKENS = st.from_regex(r"[a-z][a-z0-9_-]{0,11}", fullmatch=True)


def _kind(field: FieldInfo) -> Any:
    """The field's type without `None`."""
    if get_origin(field.annotation) in (Union, types.UnionType):
        return next(kind for kind in get_args(field.annotation) if kind is not type(None))
    return field.annotation


def _constraint(field: FieldInfo, *kinds: type) -> Any:
    """The bound that one of these constraints sets, be it of the field or of its type; None without one."""
    kind = _kind(field)
    inner = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    metadata = [*field.metadata, *(part for extra in inner for part in getattr(extra, "metadata", [extra]))]
    for part in metadata:
        if isinstance(part, kinds):
            return next(getattr(part, name) for name in ("ge", "gt", "le", "lt", "min_length") if hasattr(part, name))
        if str in kinds and getattr(part, "pattern", None):
            return part.pattern
    return None


def _values(name: str) -> st.SearchStrategy[Any]:
    """What a field may hold."""
    field = FIELDS[name]
    kind = _kind(field)
    if name == "pipeline":
        first, *last = BUILT_IN_STAGES
        custom = st.lists(TOKENS.map("x-".__add__), max_size=3, unique=True)
        return custom.map(lambda names: (first, *names, *last))
    if name == "cors_origins":
        return st.lists(TOKENS.map("https://{}".format), min_size=1, max_size=3).map(tuple)
    if name == "nats_url":
        servers = st.tuples(st.sampled_from(["", "nats://", "tls://"]), TOKENS, st.sampled_from(["", ":1"]))
        return st.lists(servers.map("".join), min_size=1, max_size=3).map(",".join)
    if name in ALLOWED_URLS:
        return st.lists(TOKENS.map("https://example.org/{}".format), max_size=3).map(tuple)
    if name in (
        "tool_functions",
        "tool_grants",
        "tools_without_approval",
        "allowed_backends",
        "backend_options",
        "allowed_plug_ins",
    ):
        return st.lists(TOKENS, max_size=3).map(tuple)
    if name == "lora_modules":
        return st.dictionaries(TOKENS, TOKENS, max_size=3).map(lambda pairs: tuple(map("=".join, pairs.items())))
    if name == "tenant_weights":
        weights = st.dictionaries(TOKENS, st.integers(1, 9).map(str), max_size=3)
        return weights.map(lambda pairs: tuple(map("=".join, pairs.items())))
    if name in ("tenant_requests_per_minute", "tenant_tokens_per_minute"):
        limits = st.dictionaries(TOKENS, st.integers(1, 9).map(str) | st.just("none"), max_size=3)
        return limits.map(lambda pairs: tuple(map("=".join, pairs.items())))
    if name == "secret_key":
        return st.from_regex(r"[a-z]{16,20}", fullmatch=True)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    if (pattern := _constraint(field, str)) is not None:
        return st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True).filter(lambda text: "\n" not in text)
    lowest, highest = _range(field)
    if kind in (int, ByteSize):
        return st.integers(int(lowest), int(highest))
    if kind is float:
        below = _constraint(field, annotated_types.Lt) is not None
        above = _constraint(field, annotated_types.Gt) is not None
        return st.floats(lowest, highest, exclude_min=above, exclude_max=below)
    return WORDS.map(Path) if kind is Path else WORDS


def _faults(name: str) -> list[str]:
    """Texts that a field may not hold; none where any text will do."""
    field = FIELDS[name]
    kind = _kind(field)
    if name == "pipeline":
        return ["validate", "batch,validate,queue,infer,stream", ",".join([*BUILT_IN_STAGES, "late"]), "validate,a b"]
    if name == "api_keys":
        return ["short"]
    if name == "cors_origins":
        return ["short", "https://a/b"]
    if name in ALLOWED_URLS:
        return ["example.org", "https://a.example/?x=1", "ftp://a.example", "https://"]
    if name == "lora_modules":
        return ["a", "a=", "=a", "a=b,a=c", "a=b,c", "a\nb=c", f"{'a' * 257}=b"]
    if name == "served_model_name":  # what no request could ask for
        return ["", "a\nb", "a" * 257]
    if name == "tenant_weights":
        return ["a", "a=", "=1", "a=0", "a=-1", "a=1,a=2", "a=x", "a b=1", "a=inf"]
    if name in ("tenant_requests_per_minute", "tenant_tokens_per_minute"):
        return ["a", "a=", "=1", "a=0", "a=-1", "a=1,a=2", "a=x", "a b=1", "a=1.5"]
    if name == "nats_url":
        return ["", "http://a:1", "ws://a", "nats://", "nats://a:b", "a,,b", "nats://[::1", "a b"]
    if get_origin(kind) is Literal:
        return ["nonsense", ""]
    if kind is bool:
        return ["maybe", ""]
    if _constraint(field, str) is not None:
        return ["§", "a.b", ""]
    lowest, highest = _range(field)
    if kind in (int, ByteSize):
        return ["many", "", "1.5x", str(int(lowest) - 1)] + ([str(int(highest) + 1)] if highest < 10**9 else [])
    if kind is float:
        return ["long", "", "nan", "inf", str(lowest - 1)] + ([str(highest + 1)] if highest < 10**9 else [])
    return [""] if kind is Path or _constraint(field, annotated_types.MinLen) else []


def _range(field: FieldInfo) -> tuple[float, float]:
    over = _constraint(field, annotated_types.Gt)
    least = _constraint(field, annotated_types.Ge)
    most = _constraint(field, annotated_types.Le, annotated_types.Lt)
    whole = _kind(field) in (int, ByteSize)
    return (over + 1 if whole else over) if over is not None else least or 0, most or 10**9


def _has_flag(name: str) -> bool:
    return name != "model"  # an argument of those commands that need it


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _toml(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items())


def _toml_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # what a file holds here is written alike in both


Given = dict[Source, dict[str, Any]]


@st.composite
def given_values(draw: st.DrawFn) -> Given:
    """Some settings, each with a value of its own from each of some sources."""
    given: Given = {source: {} for source in SOURCES}
    # API keys are not kept as they are given: tests/api/test_keys.py.
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS.keys() - {"api_keys"})), unique=True, max_size=6)):
        sources = [source for source in SOURCES if source != "flag" or _has_flag(name)]
        for source in draw(st.sets(st.sampled_from(sources), min_size=1)):
            given[source][name] = draw(_values(name))
    return given


@st.composite
def given_faults(draw: st.DrawFn) -> Given:
    """Some settings, each with a fault from one source; the file may have keys that are no settings."""
    given: Given = {source: {} for source in SOURCES}
    faulty = sorted(name for name in FIELDS if _faults(name))
    for name in draw(st.lists(st.sampled_from(faulty), unique=True, min_size=1, max_size=6)):
        source = draw(st.sampled_from([source for source in SOURCES if source != "flag" or _has_flag(name)]))
        given[source][name] = draw(st.sampled_from(_faults(name)))
    for name in draw(st.lists(TOKENS.filter(lambda name: name not in FIELDS), unique=True, max_size=3)):
        given["file"][name] = draw(st.integers() | st.booleans())
    return given


# A command that only keeps what it was given.
_loaded: list[Loaded] = []
_probe = typer.Typer()


@_probe.command()
@with_settings
def probe(loaded: Loaded) -> None:
    _loaded.append(loaded)


def _invoke(application: typer.Typer, file: Path, given: Given, *arguments: str) -> Result:
    """Run a command with values from a file, the environment and the command line."""
    file.write_text(_toml(given["file"]), "utf-8")
    flags = [f"{flag(name)}={_text(value)}" for name, value in given["flag"].items()]
    environment: dict[str, str | None] = {name: None for name in os.environ if name.startswith("PENSTOCK_")}
    environment["COLUMNS"] = "500"  # of the terminal
    environment |= {variable(name): _text(value) for name, value in given["variable"].items()}
    return CliRunner().invoke(application, [*arguments, f"--config={file}", *flags], env=environment)


def _origin(source: Source, name: str, file: Path) -> str:
    return {"file": str(file), "variable": variable(name), "flag": flag(name)}[source]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "some.toml"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, and an environment without settings."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    with chdir(tmp_path):
        yield tmp_path


@settings(max_examples=40, deadline=None)
@given(given_values())
@example({"file": {"port": 1, "host": "file"}, "variable": {"port": 2, "host": "variable"}, "flag": {"port": 3}})
def test_command_line_beats_environment_beats_file(file: Path, given: Given) -> None:
    """P26: every setting comes from the strongest source that names it, and `penstock config` says which."""
    expected = {name: (value, "default") for name, value in Settings.model_validate({}).model_dump().items()}
    for source in SOURCES:
        expected |= {name: (value, _origin(source, name, file)) for name, value in given[source].items()}

    _loaded.clear()
    result = _invoke(_probe, file, given)
    assert result.exit_code == 0, result.output
    (loaded,) = _loaded
    assert {name: (getattr(loaded.settings, name), loaded.origins[name]) for name in FIELDS} == expected

    shown = _invoke(app, file, given, "config")
    assert shown.exit_code == 0, shown.output
    lines = {words[0]: line.rstrip() for line in shown.stdout.splitlines() if (words := line.split())}
    for name, (value, origin) in expected.items():
        empty = "auto" if name in ("max_batch_size", "kv_cache_memory") else ""
        text = empty if value is None else _text(value)
        assert re.fullmatch(rf"{name} +{re.escape(text)} +{re.escape(origin)}", lines[name]), lines[name]


def test_a_flag_of_several_values_may_be_repeated_and_adapters_may_be_a_table(file: Path) -> None:
    given: Given = {"file": {}, "variable": {}, "flag": {"lora_modules": "a=b,c=d"}}
    for arguments in (["--lora-modules=a=b", "--lora-modules", "c=d"], []):
        _loaded.clear()
        result = _invoke(_probe, file, given | {"flag": {}} if arguments else given, *arguments)
        assert result.exit_code == 0, result.output
        assert _loaded[0].settings.lora_modules == ("a=b", "c=d")
    file.write_text('[lora_modules]\na = "b"\n')
    assert load(config=file).settings.lora_modules == ("a=b",)


@settings(max_examples=50, deadline=None)
@given(given_faults())
def test_invalid_configuration_names_every_fault(file: Path, given: Given) -> None:
    """P27: invalid configuration exits with code 2 and says of every fault what it is and where it was set."""
    result = _invoke(app, file, given, "config")
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    for source in SOURCES:
        for name in given[source]:
            origin = _origin(source, name, file)
            assert any(re.match(rf"error: {name} ", line) and origin in line for line in lines), (name, lines)
    assert len(lines) == sum(map(len, given.values()))
    assert "Value error" not in result.stderr  # a library's words before our own


def test_an_order_of_stages_that_cannot_be_is_told_in_our_words(file: Path) -> None:
    result = _invoke(app, file, {"file": {}, "variable": {}, "flag": {"pipeline": "foo"}}, "config")
    told = "error: pipeline (--pipeline): must hold validate, queue, batch, infer, stream in this order, got 'foo'\n"
    assert (result.exit_code, result.stderr) == (2, told)


def test_no_image_has_more_pixels_at_least_than_at_most(file: Path) -> None:
    given: Given = {"file": {"min_pixels": "2000"}, "variable": {"max_pixels": "1000"}, "flag": {}}
    result = _invoke(app, file, given, "config")
    assert result.exit_code == 2
    assert "2000 is above max_pixels=1000" in result.stderr


@pytest.mark.parametrize(
    "value",
    [
        "[red]",
        "a:100:b",
        "C:\\[x]",
    ],
)
def test_config_prints_values_as_they_are(file: Path, value: str) -> None:
    given: Given = {"file": {}, "variable": {"served_model_name": value}, "flag": {}}
    assert value in _invoke(app, file, given, "config").stdout


def test_config_is_printed_whole_into_a_pipe(alone: Path) -> None:
    long = "/".join(["directory"] * 30)
    result = CliRunner().invoke(app, ["config", f"--state-dir={long}"])
    assert re.search(rf"^state_dir +{long} +--state-dir *$", result.stdout, re.MULTILINE)


def test_defaults_are_valid_and_named_so(alone: Path) -> None:
    loaded = load()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.settings.pipeline == BUILT_IN_STAGES
    assert loaded.settings.host == "127.0.0.1"


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_file_in_the_working_directory_is_read(alone: Path, mark: str) -> None:
    (alone / "penstock.toml").write_text(f"{mark}port = 1")
    loaded = load()
    assert (loaded.settings.port, loaded.origins["port"]) == (1, "penstock.toml")


def test_file_named_by_the_environment_is_read(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone / "other.toml").write_text("port = 2")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(alone / "other.toml"))
    assert load().settings.port == 2
    (alone / "third.toml").write_text("port = 3")
    assert load(config=alone / "third.toml").settings.port == 3


def test_size_is_understood_with_its_unit(alone: Path) -> None:
    assert load({"kv_cache_memory": "2GiB"}).settings.kv_cache_memory == 2 << 30


def test_the_word_auto_leaves_a_choice_to_the_engine(alone: Path) -> None:
    (alone / "penstock.toml").write_text('max_batch_size = 3\nkv_cache_memory = "2GiB"')
    settings = load({"max_batch_size": "auto", "kv_cache_memory": "auto"}).settings
    assert settings.max_batch_size is settings.kv_cache_memory is None
    shown = CliRunner().invoke(app, ["config", "--max-batch-size=auto"]).stdout
    assert re.search(r"^max_batch_size +auto +--max-batch-size$", shown, re.MULTILINE), shown
    assert re.search(r"^kv_cache_memory +2147483648 +penstock.toml$", shown, re.MULTILINE), shown


def test_a_projector_goes_with_its_model(alone: Path) -> None:
    (alone / "m.gguf").write_bytes(b"GGUF")
    found = with_projector(load({"model": "m.gguf", "mmproj": "mmproj.gguf"}).settings)
    assert (found.model, found.mmproj) == ("m.gguf,mmproj.gguf", None)
    assert with_projector(found) == found
    for model, fault in (({}, "name MODEL, too"), ({"model": "owner/model"}, "owner/model is no GGUF file")):
        with pytest.raises(ConfigurationError, match=f"mmproj='none': {fault}"):
            with_projector(load({"mmproj": "none", **model}).settings)


def test_variables_that_are_no_settings_are_left_alone(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SERVICE_HOST", "10.0.0.1")  # as Kubernetes sets it
    load()


@pytest.mark.parametrize("text", ["port = ", "= 3", "[", "port = 1\nport = 2", "\x00"])
def test_broken_toml_is_named_with_its_place(alone: Path, text: str) -> None:
    file = alone / "broken.toml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["config", f"--config={file}", "--port=none"])
    assert result.exit_code == 2
    toml, port = result.stderr.splitlines()
    assert toml.startswith(f"error: {file}: not valid TOML: ")
    assert re.search(r"\(at (line \d+, column \d+|end of document)\)$", toml)
    assert "port (--port)" in port


def test_file_that_is_not_there_is_named(alone: Path) -> None:
    result = CliRunner().invoke(app, ["config", "--config=nowhere.toml"])
    assert result.exit_code == 2
    assert "nowhere.toml: no such file" in result.stderr


def test_file_that_is_no_text_is_named(alone: Path) -> None:
    (alone / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"binary\.toml: cannot be read"):
        load(config=alone / "binary.toml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(config=alone)


@pytest.mark.parametrize(("key", "meant"), [("wrokers", "workers"), ("max-batch-size", "max_batch_size")])
def test_unknown_key_comes_with_a_suggestion(alone: Path, key: str, meant: str) -> None:
    (alone / "penstock.toml").write_text(f"{key} = 2")
    with pytest.raises(ConfigurationError) as raised:
        load()
    assert raised.value.faults == (f"{key} in penstock.toml: no such setting; did you mean {meant}?",)


def test_unknown_flag_ends_with_code_2() -> None:
    result = CliRunner().invoke(app, ["config", "--wrokers=2"])
    assert result.exit_code == 2
    assert "--wrokers" in result.stderr


@pytest.mark.parametrize("name", FIELDS)
def test_settings_are_frozen(name: str) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(Settings.model_validate({}), name, None)


SECRETS = st.from_regex(r"S3cret[A-Za-z0-9@:/_-]{0,40}", fullmatch=True)


@settings(max_examples=40, deadline=None)
@given(SECRETS, st.sampled_from(["nats://{}@host:4222", "tls://user:{}@host", "nats://a:{}@b,nats://c:{}@d"]))
def test_secrets_of_the_broker_url_are_never_printed(file: Path, secret: str, url: str) -> None:
    given: Given = {"file": {}, "flag": {}, "variable": {"nats_url": url.replace("{}", secret)}}
    result = _invoke(app, file, given, "config")
    assert result.exit_code == 0
    assert "S3cret" not in result.output
    assert url.rpartition("@")[2] in result.stdout


@pytest.mark.parametrize("values", [{"nats_url": "user:S3cret@host:4222"}, {"nats_url": ["nats://S3cret@host"]}])
def test_secrets_of_an_unusual_broker_url_are_not_printed_either(file: Path, values: dict[str, Any]) -> None:
    assert "S3cret" not in _invoke(app, file, {"file": values, "variable": {}, "flag": {}}, "config").output


@pytest.mark.parametrize("name", ["a\nb", "a" * 257])
def test_a_name_that_no_request_could_hold_is_refused(name: str) -> None:
    """The model was served, and each request for it got 400 or 404."""
    for values in ({"served_model_name": name}, {"lora_modules": f"{name}=adapter"}):
        with pytest.raises(ConfigurationError, match="must have 1 to 256 characters, and no control characters"):
            load(values)
