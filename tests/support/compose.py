"""The compose file of `deploy/compose` as processes of this machine: its commands, with paths and addresses mapped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import yaml
from pages import ROOT
from ports import reserved_port
from serving import Process, until

FOLDER = ROOT / "deploy" / "compose"
BROKER, OURS = "docker.io/library/nats:", "penstock"  # images
_variable = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """`text` with its `${…}` as compose replaces them. Raises `KeyError` where one must be set and is not."""

    def value(found: re.Match[str]) -> str:
        name, kind, default = found.groups()
        return variables.get(name, default) if kind == "-" else variables[name]

    return _variable.sub(value, text)


def services(variables: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The services by name."""
    found: dict[str, dict[str, Any]] = compose(variables)["services"]
    return found


def compose(variables: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(interpolate((FOLDER / "compose.yaml").read_text("utf-8"), variables))
    return found


class Composed:
    """The NATS servers and our parts; end it with `end`. `parts` has the processes of each service."""

    def __init__(self, folder: Path, variables: Mapping[str, str], extra: Mapping[str, str]) -> None:
        self._folder = folder
        self._extra = dict(extra)
        self._file = compose(variables)
        self.services: dict[str, dict[str, Any]] = self._file["services"]
        nodes = [name for name, service in self.services.items() if service["image"].startswith(BROKER)]
        self._ports = {(name, port): reserved_port() for name in nodes for port in (4222, 6222, 8222)}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[Process] = []
        self.parts: dict[str, list[Process]] = {}
        self.urls: dict[str, str] = {}

    def start(self) -> None:
        """Everything in the order of `depends_on`; returns when the bridges answer."""
        for name, service in self.services.items():
            if service["image"].startswith(BROKER):
                self._start_node(name, service)
        for name in self._nodes:
            until(lambda name=name: self._healthy(name))  # type: ignore[misc]
        ours = {name: service for name, service in self.services.items() if service["image"] == OURS}
        setup = self._start_part("setup", ours.pop("setup"))
        assert setup.wait() == 0, setup.output
        for name, service in ours.items():
            copies = service.get("deploy", {}).get("replicas", 1)
            self.parts[name] = [self._start_part(name, service) for _ in range(copies)]
        for name, service in ours.items():
            for part in self.parts[name]:
                if "ports" in service:
                    self.urls[name] = part.wait_for(r"penstock ready (http://\S+)")[1]
                else:
                    part.wait_for("worker ready" if service["command"][0] == "worker" else "running")

    def end(self) -> None:
        for part in self._started:
            part.end()
        for node in self._nodes.values():
            node.kill()
            node.wait()

    def _start_node(self, name: str, service: dict[str, Any]) -> None:
        home = self._folder / name
        home.mkdir()
        mounted = {}
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            if source.startswith("./"):
                text = self._source(source).read_text("utf-8")
                mounted[target] = home / Path(target).name
                mounted[target].write_text(self._rewritten(name, text))
            else:
                assert source in self._file["volumes"] and target == "/data"
        program, *arguments = (str(mounted.get(word, word)) for word in service["command"])
        routes = re.sub(
            r"@(n\d):6222",
            lambda found: f"@127.0.0.1:{self._ports[found[1], 6222]}",
            service["environment"]["NATS_ROUTES"],
        )
        with (home / "log").open("wb") as log:
            self._nodes[name] = subprocess.Popen(
                [Path(sys.executable).with_name(program), *arguments],
                env=os.environ | service["environment"] | {"NATS_ROUTES": routes},
                stdout=log,
                stderr=log,
            )

    def _rewritten(self, name: str, text: str) -> str:
        for key, port in (("port", 4222), ("http", 8222), ("port", 6222)):
            to = f"{'listen' if key == 'port' else key}: 127.0.0.1:{self._ports[name, port]}"
            text = re.sub(rf"\b{key}: {port}\b", to, text)
        return text.replace("store_dir: /data", f'store_dir: "{self._folder / name / "data"}"')

    def _healthy(self, name: str) -> bool:
        assert self._nodes[name].poll() is None, (self._folder / name / "log").read_text()
        *_, url = self.services[name]["healthcheck"]["test"]
        try:
            return httpx2.get(url.replace(":8222", f":{self._ports[name, 8222]}")).status_code == 200
        except httpx2.HTTPError:
            return False

    def _start_part(self, name: str, service: dict[str, Any]) -> Process:
        environment = dict(service["environment"])
        for secret in service["secrets"]:
            path = str(self._source(self._file["secrets"][secret]["file"]))
            environment = {
                key: path if value == f"/run/secrets/{secret}" else value for key, value in environment.items()
            }
        assert not [value for value in environment.values() if value.startswith("/run/")], f"{name} lacks a secret"
        environment["PENSTOCK_NATS_URL"] = re.sub(
            r"(n\d):4222", lambda found: f"127.0.0.1:{self._ports[found[1], 4222]}", environment["PENSTOCK_NATS_URL"]
        )
        environment |= {
            "PENSTOCK_HOST": "127.0.0.1",
            "PENSTOCK_METRICS_PORT": str(reserved_port()),
            "PENSTOCK_PORT": "0",
        }
        self._started.append(Process(*service["command"], environment=environment | self._extra, cwd=self._folder))
        return self._started[-1]

    def _source(self, path: str) -> Path:
        """A file that compose mounts: one of the folder, or one that the README's commands write."""
        return FOLDER / path if (FOLDER / path).exists() else self._folder / path
