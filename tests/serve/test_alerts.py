"""The alerts of `deploy/monitoring`, by Prometheus's own tool: which fault raises which, and which raises none."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from pages import ROOT

FOLDER = ROOT / "deploy" / "monitoring"
PARTS = {  # of rules, each with what breaks it and the alert that is then missed
    "PenstockLostSeats": ("min_over_time(penstock_seats_in_flight[2m])", "0 * penstock_seats_in_flight"),
    "PenstockStoreAlmostFull": (") > 0.9", ") > 0.99"),
    "PenstockErrorsBurnFast": ("penstock:error_ratio:1h > 14.4", "penstock:error_ratio:1h > 144"),
}


def promtool(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_rules_are_well_formed() -> None:
    checked = promtool("check", "rules", "alerts.yml")
    assert checked.returncode == 0 and "24 rules found" in checked.stdout, checked.stdout + checked.stderr


def test_the_queries_of_the_dashboard_can_be_parsed(tmp_path: Path) -> None:
    dashboard = json.loads((FOLDER / "grafana.json").read_text("utf-8"))
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "5m").replace("$model", ".*")}
        for number, text in enumerate(texts)
    ]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", "rules.json", folder=tmp_path)
    assert checked.returncode == 0 and f"{len(texts)} rules found" in checked.stdout, checked.stdout + checked.stderr


def test_each_fault_raises_its_alert() -> None:
    tested = promtool("test", "rules", "alerts_test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("alert", PARTS)
def test_a_broken_rule_is_found(alert: str, tmp_path: Path) -> None:
    rules, tests = ((FOLDER / name).read_text("utf-8") for name in ("alerts.yml", "alerts_test.yml"))
    assert rules.count(PARTS[alert][0]) == 1
    (tmp_path / "alerts.yml").write_text(rules.replace(*PARTS[alert]))
    (tmp_path / "alerts_test.yml").write_text(tests)
    tested = promtool("test", "rules", "alerts_test.yml", folder=tmp_path)
    assert tested.returncode != 0 and re.search(rf"alertname: {alert}\b", tested.stdout + tested.stderr)
