"""The units of `deploy/systemd`: systemd takes them, and they run Penstock's own commands with settings that it has."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from deployed import command_fault, environment_file, role_files, settings_fault
from pages import ROOT

FOLDER = ROOT / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
STAGES = ("validate", "queue", "batch", "stream")


def instances(unit: Path) -> list[str]:
    return list(STAGES) if "stage@" in unit.name else ["0"]


def values(unit: Path, key: str, instance: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit.read_text("utf-8").replace("%i", instance), re.MULTILINE)


def test_there_is_one_for_each_kind_of_part() -> None:
    assert len(UNITS) == 6
    commands = [values(unit, "ExecStart", name)[0].split()[1:3] for unit in UNITS for name in instances(unit)]
    assert [words[0] for words in commands] == ["bridge", "nats", *["stage"] * 5, "worker", "serve"]
    assert ["nats", "setup"] in commands
    assert {words[1] for words in commands if words[0] == "stage"} == {*STAGES, "tools"}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_it_runs_a_command_of_ours_as_the_user_of_its_role(unit: Path, tmp_path: Path) -> None:
    for instance in instances(unit):
        (line,) = values(unit, "ExecStart", instance)
        program, *arguments = shlex.split(line.replace("${CREDENTIALS_DIRECTORY}", "/run/credentials"))
        assert program == "/opt/penstock/bin/penstock" and command_fault(arguments) == ""
        given = environment_file("\n".join(" ".join(values(unit, "Environment", instance)).split()))
        shared = environment_file((FOLDER / "penstock.env").read_text("utf-8"))
        assert settings_fault(shared | given) == ""
        loaded = dict(one.split(":") for one in values(unit, "LoadCredential", instance))
        named = re.findall(r"\$\{CREDENTIALS_DIRECTORY\}/(\S+)", line)
        assert set(named) == loaded.keys()
        if arguments[0] == "serve":  # with a broker of its own
            continue
        user = given["PENSTOCK_NATS_INBOX_PREFIX"].removeprefix("_in_")
        assert loaded["nkey"] == f"/etc/penstock/users/{user}.nk" and Path(loaded["nkey"]).name in role_files()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_what_it_starts_tells_that_it_is_ready_and_lives(unit: Path) -> None:
    """Those that stay; `tests/serve/test_service_manager.py` has them do it."""
    (kind,) = values(unit, "Type", "0")
    stays = kind != "oneshot"
    assert kind == ("notify" if stays else "oneshot")
    assert values(unit, "TimeoutStartSec", "0") == ["infinity"]
    assert len(values(unit, "WatchdogSec", "0")) == stays


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_it(unit: Path, tmp_path: Path) -> None:
    """As it stands, but for the program, which is not installed there."""
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text("utf-8").replace("/opt/penstock/bin/penstock", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    told = [line for line in checked.stderr.splitlines() if unit.name.partition("@")[0].partition(".")[0] in line]
    assert checked.returncode == 0 and told == [], checked.stderr
