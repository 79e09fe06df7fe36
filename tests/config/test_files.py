"""Files that users name and that are none: pipes, devices, directories."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from penstock.api.tools.mcp_config import load_servers
from penstock.config.api_keys import Keys
from penstock.config.catalogue import read_models
from penstock.config.files import read_text
from penstock.config.sources import load
from penstock.schemas.errors import ConfigurationError
from penstock.simulation.scenario import load_scenario
from penstock.streams.nats.connection.access import Access, AccessError


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """One that nobody writes to."""
    os.mkfifo(path := tmp_path / "penstock.toml")
    return path


def test_no_command_waits_for_a_pipe_that_nobody_writes_to(pipe: Path) -> None:
    for read in (
        lambda: load(config=pipe),
        lambda: read_models(pipe),
        lambda: Keys((), pipe),
        lambda: load_servers(pipe),
        lambda: load_scenario(pipe),
    ):
        with pytest.raises(
            ConfigurationError, match=r"penstock\.toml.* is a pipe that nobody writes to, or that was read"
        ):
            read()
    with pytest.raises(AccessError, match="is a pipe that nobody writes to, or that was read"):
        Access(ca=pipe).tls()


def test_a_pipe_in_place_of_the_default_file_is_told(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pipe.parent)
    with pytest.raises(ConfigurationError, match=r"^penstock\.toml: cannot be read.*is a pipe that nobody writes to"):
        load()


@pytest.mark.parametrize(
    ("path", "fault"), [("/", "Is a directory"), ("/dev/zero", "is no file, and has more than 64 MiB")]
)
def test_what_is_no_file_is_refused(path: str, fault: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{path}: cannot be read: .*{fault}"):
        load(config=Path(path))


def test_what_a_command_writes_into_a_pipe_is_read_to_its_end() -> None:
    """As with `--config <(command)`, which may take its time."""
    reading, writing = os.pipe()
    text = "# é\n" * 50_000 + "port = 5\n"  # more than a pipe holds
    with open(reading, "rb"), open(writing, "w", encoding="utf-8") as end:

        def write() -> None:
            end.write(text)
            end.close()

        writer = threading.Thread(target=write)
        writer.start()
        assert read_text(Path(f"/dev/fd/{reading}")) == text
        writer.join()
    assert load(config=Path(os.devnull)).settings.port == 8000


@pytest.mark.parametrize("setting", ["api_keys_file", "mcp_config", "nats_ca", "nats_token_file", "nats_credentials"])
def test_a_pipe_in_place_of_a_file_that_is_read_again_is_refused_at_once(setting: str) -> None:
    """The first process had its content, and the next found nothing: `is a pipe that nobody writes to`."""
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "w") as end:
        print("secret", file=end, flush=True)
        with pytest.raises(ConfigurationError, match=rf"^{setting} .* can be read once: name a file instead"):
            load({setting: f"/dev/fd/{reading}"})


def test_a_file_that_may_not_be_looked_at_is_named_by_its_reader() -> None:
    with pytest.raises(ConfigurationError, match=r"api_keys_file .* cannot be read: .* File name too long"):
        Keys((), load({"api_keys_file": "x" * 300}).settings.api_keys_file)
