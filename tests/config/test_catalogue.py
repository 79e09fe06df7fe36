"""Files and directories of models: what they mean, and that every fault is named at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.config.catalogue import KEYS, read_models
from penstock.schemas.errors import ConfigurationError
from penstock.schemas.models.catalogue import CatalogueEntry


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A directory with two models, and what else lies in such directories."""
    root = tmp_path / "models"
    for name in ("llama", "qwen"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text("{}")
    (root / ".cache").mkdir()
    (root / "notes.txt").write_text("")
    return root


def faults_of(text: str, directory: Path, *, also: Path | None = None) -> list[str]:
    """The faults of a file with this text, without the beginning that they share."""
    file = directory / "models.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        read_models(file, also)
    assert str(refused.value).splitlines() == list(refused.value.faults), "one line each"
    return [fault.removeprefix(f"{file}").strip() for fault in refused.value.faults]


def test_a_table_says_how_its_model_is_served(models: Path) -> None:
    file = models.parent / "models.toml"
    file.write_text(
        f"""
        [models.qwen]
        source = "models/qwen"
        aliases = ["fast", "default"]
        backend = "hf"
        dtype = "float32"
        quantization = "int8"
        device = "cpu"
        max_batch_size = 4
        max_sequence_length = 512
        kv_cache_memory = "1GiB"
        tool_format = "hermes"
        reasoning_format = "none"
        preload = true
        keep_alive = "5m"
        queue_limit = 3
        wait_limit = 60
        defaults = {{ temperature = 0, stop = ["."] }}

        [models."org/llama:8b"]
        source = "{models / "llama"}"
        pin = true
        keep_alive = -1

        [models.remote]
        source = "org/remote"
        """
    )
    qwen, llama, remote = read_models(file)
    assert qwen == CatalogueEntry(
        name="qwen",
        source=str(models / "qwen"),
        aliases=("fast", "default"),
        backend="hf",
        dtype="float32",
        quantization="int8",
        device="cpu",
        max_batch_size=4,
        max_sequence_length=512,
        kv_cache_memory=1 << 30,
        tool_format="hermes",
        reasoning_format="none",
        preload=True,
        keep_alive=300.0,
        queue_limit=3,
        wait_limit=60.0,
        defaults={"temperature": 0, "stop": ["."]},
    )
    assert llama == CatalogueEntry(name="org/llama:8b", source=str(models / "llama"), pin=True)
    assert remote == CatalogueEntry(name="remote", source="org/remote")


def test_a_directory_holds_a_model_in_each_folder(models: Path) -> None:
    assert read_models(directory=models) == (
        CatalogueEntry(name="llama", source=str(models / "llama")),
        CatalogueEntry(name="qwen", source=str(models / "qwen")),
    )
    assert read_models() == ()


def test_both_make_one_catalogue(models: Path) -> None:
    text = f'[models.other]\nsource = "{models / "qwen"}"\naliases = ["llama"]\n[models.qwen]\nsource = "org/qwen"'
    assert faults_of(text, models.parent, also=models) == [
        f"{models / 'qwen'}: {models.parent / 'models.toml'} [models.qwen] has the same name; rename one of the two",
        f"[models.other] aliases: 'llama' is the name of {models / 'llama'}; choose another alias",
    ]


def test_five_faults_are_five_lines(models: Path) -> None:
    text = """
    [models.a]
    source = "models/qwen"
    alias = ["x"]
    max_batch_size = "four"
    pin = true
    keep_alive = "5m"

    [models.b]
    source = "models/none"
    queue_limit = -1
    """
    directory = models.parent
    assert faults_of(text, directory) == [
        "[models.a] alias: no such key; did you mean aliases?",
        "[models.a] max_batch_size: Input should be a valid integer, got 'four'",
        "[models.a] keep_alive: a pinned model is never unloaded: set keep_alive to -1, or leave pin or keep_alive "
        "out, got 300.0",
        f"[models.b] source: no such directory or file: {directory / 'models/none'}; check the path (a relative one "
        "begins at the file's directory)",
        "[models.b] queue_limit: Input should be greater than or equal to 0, got -1",
    ]


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ("", "source: missing; give a directory, a GGUF file or a Hugging Face id"),
        ('source = ""', "source: String should have at least 1 character, got ''"),
        ("source = 5", "source: Input should be a valid string, got 5"),
        ('source = "x.gguf"', "source: no such directory or file: "),
        ('source = "models"', "has no config.json: name a model's directory in Hugging Face's format"),
        ('source = "models/notes.txt"', "is no GGUF file: name one, or a model's directory in Hugging Face's format"),
        ('source = "./none"', "source: no such directory or file: "),
        ('source = "a/b/c"', "source: no such directory or file: "),
        ('source = "o/m"\nrevision = 2', "revision: no such key; the keys are source, aliases, backend"),
        ('source = "o/m"\nkeep_alive = "soon"', 'keep_alive: must be a duration such as "5m" or "1h30m", a number '),
        ('source = "o/m"\nkeep_alive = true', "keep_alive: must be a duration"),
        ('source = "o/m"\nkeep_alive = 0\npreload = true', "keep_alive: 0 would unload at once what preload has"),
        ('source = "o/m"\nkv_cache_memory = "much"', "kv_cache_memory: must be a number of bytes, or a size such as 4"),
        ('source = "o/m"\nkv_cache_memory = true', "kv_cache_memory: must be a number of bytes"),
        ('source = "o/m"\nkv_cache_memory = 0', "kv_cache_memory: Input should be greater than 0, got 0"),
        ('source = "o/m"\naliases = "x"', "aliases: Input should be a valid tuple, got 'x'"),
        ('source = "o/m"\naliases = ["x", 5]', "aliases.1: Input should be a valid string, got 5"),
        ('source = "o/m"\naliases = ["x", "x"]', "aliases: 'x' is already an alias of"),
        ('source = "o/m"\ndefaults = { temperature = 9 }', "defaults: temperature: Input should be less than"),
        ('source = "o/m"\nwait_limit = nan', "wait_limit: Input should be a finite number, got nan"),
        ('source = "o/m"\npreload = 1', "preload: Input should be a valid boolean, got 1"),
    ],
)
def test_each_fault_names_its_table_and_key(models: Path, table: str, fault: str) -> None:
    (found,) = faults_of(f"[models.a]\n{table}", models.parent)
    assert found.startswith("[models.a] ")
    assert fault in found


def test_an_alias_means_one_model(models: Path) -> None:
    text = """
    [models.a]
    source = "o/a"
    aliases = ["b", "x"]
    [models.b]
    source = "o/b"
    aliases = ["c", "x"]
    [models.c]
    source = "o/c"
    aliases = ["a"]
    [models.d]
    source = "o/d"
    aliases = ["d"]
    [models.e]
    source = "o/e"
    aliases = ["a"]
    """
    file = models.parent / "models.toml"
    assert faults_of(text, models.parent) == [
        "[models.a] aliases: a → b → c → a is a circle; remove one of these aliases",
        f"[models.b] aliases: 'x' is already an alias of {file} [models.a]; keep one",
        f"[models.d] aliases: 'd' is the name of {file} [models.d]; choose another alias",
        f"[models.e] aliases: 'a' is the name of {file} [models.a]; choose another alias",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", ": names no model; add a table such as [models.qwen] with its source"),
        ("models = 5", ": names no model"),
        ("[models]\na = 5", "[models.a]: must be a table, got 5; write [models.a] above its source"),
        ("[models.a\n", ": not valid TOML: "),
        ('[models.a]\nsource="a"\n[models.a]\nsource="b"', ": not valid TOML: Cannot declare"),
        ('[models."a b"]\nsource="o/a"', "[models.a b] name: String should match pattern"),
    ],
)
def test_a_file_that_is_no_catalogue_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    (found,) = faults_of(text, tmp_path)
    assert found.startswith(fault)


def test_a_table_elsewhere_is_refused(tmp_path: Path) -> None:
    text = '[models.a]\nsource = "o/a"\n[model.b]\nsource = "o/b"'
    assert faults_of(text, tmp_path) == [
        ": [model] is unknown; each model needs a table of its own, such as [models.model]"
    ]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_models(tmp_path / "none.toml", tmp_path / "none")
    assert refused.value.faults == (
        f"{tmp_path / 'none.toml'}: no such file; name an existing one",
        f"{tmp_path / 'none'}: no such directory; name one that holds a folder or a GGUF file for each model",
    )
    with pytest.raises(ConfigurationError, match="holds no model; put a GGUF file or a folder"):
        read_models(directory=tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"[models.\xe9]")
    with pytest.raises(ConfigurationError, match=r"cannot be read: .* check its permissions and encoding"):
        read_models(tmp_path / "latin.toml")


def endless(path: Path) -> Path:
    """A link to itself, at which the system refuses to look, as at what others own: root may look at all of that."""
    path.symlink_to(path.name)
    return path


REASON = "cannot be read: Too many levels of symbolic links; check the path and its permissions"


def test_what_may_not_be_looked_at_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    loop, config = endless(tmp_path / "loop"), endless(tmp_path / "model" / "config.json")
    assert faults_of('[models.a]\nsource = "loop"\n[models.b]\nsource = "model"', tmp_path) == [
        f"[models.a] source: {loop} {REASON}",
        f"[models.b] source: {config} {REASON}",
    ]
    with pytest.raises(ConfigurationError) as refused:
        read_models(directory=loop)
    assert refused.value.faults == (f"{loop} {REASON}",)


def test_what_may_not_be_looked_at_in_a_directory_is_passed_over(models: Path) -> None:
    """As is `lost+found` of a disk that holds models and nothing else."""
    before = read_models(directory=models)
    loop = endless(models / "lost+found")
    (models / "locked").mkdir()
    endless(models / "locked" / "config.json")
    with capture_logs() as lines:
        assert read_models(directory=models) == before
    passed_over = [(line["path"], line["log_level"]) for line in lines]
    assert passed_over == [(str(models / "locked"), "warning"), (str(loop), "warning")]


def test_what_a_directory_cannot_serve_is_named(models: Path) -> None:
    (models / "two words.gguf").write_bytes(b"GGUF")
    (models / "two words").mkdir()
    (models / "two words" / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError) as refused:
        read_models(directory=models)
    for name, fault in zip(("two words", "two words.gguf"), refused.value.faults, strict=True):
        assert fault.startswith(f"{models / name}: String should match pattern") and fault.endswith("rename it")


def test_gguf_files_of_a_directory_are_models(models: Path) -> None:
    """Under their own names; shards together are one, and the vision part of a model is none."""
    for name in ("small.Q4_K_M.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-small.gguf"):
        (models / name).write_bytes(b"GGUF")
    (models / "downloaded").mkdir()
    (models / "downloaded" / "only.gguf").write_bytes(b"GGUF")
    found = {entry.name: entry.source for entry in read_models(directory=models)}
    assert {name: found.get(name) for name in ("small.Q4_K_M", "big", "downloaded")} == {
        "small.Q4_K_M": str(models / "small.Q4_K_M.gguf"),
        "big": str(models / "big-00001-of-00002.gguf"),
        "downloaded": str(models / "downloaded"),
    }
    assert not {"big-00002-of-00002", "mmproj-small"} & found.keys()


def test_a_file_is_a_source_seen_from_the_catalogues_directory(models: Path) -> None:
    """A link keeps its name: its target may have another, as in the hub's cache."""
    (models / "blob").write_bytes(b"GGUF")
    (models / "small.gguf").symlink_to(models / "blob")
    file = models.parent / "models.toml"
    file.write_text('[models.small]\nsource = "models/small.gguf"\n')
    (small,) = read_models(file)
    assert small.source == str(models / "small.gguf")


def test_a_pair_of_files_is_seen_from_the_catalogues_directory(models: Path) -> None:
    """Both files of a model that sees, or one that is to see nothing."""
    for name in ("small.gguf", "mmproj.gguf"):
        (models / name).write_bytes(b"GGUF")
    file = models.parent / "models.toml"
    file.write_text(
        '[models.seer]\nsource = "models/small.gguf,models/mmproj.gguf"\n'
        '[models.blind]\nsource = "models/small.gguf,none"\n'
        '[models.wrong]\nsource = "models/none.gguf,models/mmproj.gguf"\n'
    )
    with pytest.raises(ConfigurationError, match=r"no such directory or file: .*none\.gguf,models/mmproj\.gguf"):
        read_models(file)
    file.write_text(file.read_text().partition("[models.wrong]")[0])
    seer, blind = read_models(file)
    assert seer.source == f"{models / 'small.gguf'},{models / 'mmproj.gguf'}"
    assert blind.source == f"{models / 'small.gguf'},none"


def test_every_key_of_an_entry_can_be_set() -> None:
    assert set(KEYS) | {"version", "name", "revision", "others", "failed_swap"} == set(CatalogueEntry.model_fields)


def test_adapters_are_directories_relative_to_the_file(models: Path) -> None:
    file = models.parent / "models.toml"
    file.write_text(
        '[models.llama]\nsource = "models/llama"\nadapters = { support = "adapters/support", other = "/elsewhere" }\n'
    )
    (llama,) = read_models(file)
    assert llama.adapters == {"support": str(models.parent / "adapters" / "support"), "other": "/elsewhere"}
    assert llama.names == ("llama", "support", "other")


def test_a_model_may_be_offered_in_several_quantizations(models: Path) -> None:
    """Each is a model of its own, like the first but for what is the first one's alone."""
    file = models.parent / "models.toml"
    file.write_text(
        '[models.llama]\nsource = "models/llama"\naliases = ["fast"]\npreload = true\nkeep_alive = 60\n'
        'adapters = { support = "x" }\nquantizations = ["int8", "int4"]\n'
    )
    llama, *variants = read_models(file)
    assert (llama.name, llama.quantization) == ("llama", None)
    assert variants == [
        CatalogueEntry(name=f"llama:{each}", source=llama.source, keep_alive=60.0, quantization=each)
        for each in ("int8", "int4")
    ]


def test_faults_of_quantizations(models: Path) -> None:
    table = '[models.{}]\nsource = "models/{}"\nquantizations = {}\n'
    first = table.format("llama", "llama", '["int8", "int8"]') + '[models."llama:int8"]\nsource = "o/m"\n'
    where = f"{models.parent / 'models.toml'} [models.llama] quantizations"
    assert faults_of(first + table.format("qwen", "qwen", '["int 8"]'), models.parent) == [
        '[models.qwen] quantizations: must be a list such as ["int8", "int4"], got [\'int 8\']',
        f"[models.llama] quantizations: {where} has the same name; rename one of the two",
        f"[models.llama:int8]: {where} has the same name; rename one of the two",
    ]


def test_names_of_adapters_must_be_free(models: Path) -> None:
    table = '[models.{name}]\nsource = "models/{name}"\naliases = ["{alias}"]\nadapters = {adapters}\n'
    first = table.format(name="llama", alias="fast", adapters='{ mine = "x", qwen = "x" }')
    second = table.format(name="qwen", alias="small", adapters='{ mine = "x", fast = "x", small = "x", "a=b" = 3 }')
    assert faults_of(first + second, models.parent) == [
        "[models.qwen] adapters.a=b.[key]: String should match pattern '^[^\\s\\x00-\\x1f\\x7f,=]+$', got 'a=b'",
        "[models.qwen] adapters.a=b: Input should be a valid string, got 3",
        *(
            f"[models.{model}] adapters: {name!r} is a name of {models.parent / 'models.toml'} [models.{other}]; "
            "choose another name for the adapter"
            for model, name, other in (
                ("llama", "qwen", "qwen"),
                ("qwen", "mine", "llama"),
                ("qwen", "fast", "llama"),
                ("qwen", "small", "qwen"),
            )
        ),
    ]
