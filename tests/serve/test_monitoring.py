"""The dashboard and the alerts of `deploy/monitoring`: what they ask Prometheus for exists, with these labels."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from typing import NamedTuple

import pytest
import requests
from pages import ROOT
from prometheus_client.parser import text_string_to_metric_families
from serving import Served, answers

FOLDER = ROOT / "deploy" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text("utf-8"))
ALERTS = (FOLDER / "alerts.yml").read_text("utf-8")
_metric = re.compile(r"\b((?:penstock|http)_[a-z0-9_]+|vllm:[a-z0-9_]+)(?:\{([^}]*)\})?")
_grouped = re.compile(r"\b(?:by|on|without) \(([^)]*)\)")
_known = re.compile(
    r"^\| `((?:penstock_|vllm:|http_)[^`]+)` \| (?:counter|gauge|histogram) \| ([^|]*) \|", re.MULTILINE
)


class Query(NamedTuple):
    name: str
    text: str
    legend: str = ""


def queries() -> list[Query]:
    panels = [
        Query(panel["title"], target["expr"], target["legendFormat"])
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]
    rules = re.findall(
        r"- (?:alert|record): (\S+)\n(?:\s+#.*\n)?\s+expr: (?:>-\n)?((?:.*\n)+?)\s+(?=for:|labels:|- )",
        ALERTS + "      - ",
    )
    variables = [Query("model", DASHBOARD["templating"]["list"][1]["query"])]
    annotations = [Query(each["name"], each["expr"]) for each in DASHBOARD["annotations"]["list"]]
    return [*panels, *variables, *annotations, *(Query(name, text) for name, text in rules)]


@pytest.fixture(scope="module")
def scraped(model_server: Served) -> dict[str, set[str]]:
    """The names of all samples of a real scrape, with their labels; those without a sample yet with the documented."""
    if not model_server.supervised:
        pytest.skip("a bridge alone does not have the counts of workers")
    answers(model_server.url, "tiny", ["one", "two"], 8)
    documented = dict(_known.findall((ROOT / "docs" / "reference.md").read_text("utf-8")))
    until = time.monotonic() + 30
    while True:
        text = requests.get(f"{model_server.url}/metrics", timeout=30).text
        found: defaultdict[str, set[str]] = defaultdict(set)
        for family in text_string_to_metric_families(text):
            name = family.name + ("_total" if family.type == "counter" else "")
            if not family.samples and name in documented:
                found[name] = set(re.findall("`([^`]+)`", documented[name]))
            for sample in family.samples:
                found[sample.name] |= sample.labels.keys()
        if "engine" in found["vllm:time_to_first_token_seconds_count"]:  # the worker's counts have come
            return found
        assert time.monotonic() < until


def test_there_are_twelve_panels_each_with_its_own_place() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == 12
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == 12
    assert len(queries()) >= 12 + 22


def test_each_query_asks_for_what_a_scrape_has(scraped: dict[str, set[str]]) -> None:
    for query in queries():
        found = _metric.findall(query.text)
        assert found or "penstock:" in query.text, query
        labels = {"le"} if "_bucket" in query.text else set()
        for name, matchers in found:
            assert name in scraped, f"{query.name} asks for {name}"
            wanted = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert wanted <= scraped[name], f"{query.name} asks {name} for {wanted - scraped[name]}"
            labels |= scraped[name]
        groups = {label for each in _grouped.findall(query.text) for label in re.findall(r"\w+", each)}
        assert groups <= labels, f"{query.name} groups by {groups - labels}"
        legend = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        assert legend <= (groups or labels), f"{query.name} names {legend} in its legend"


def test_recorded_names_are_those_that_alerts_use() -> None:
    recorded = set(re.findall(r"- record: (\S+)", ALERTS))
    assert set(re.findall(r"penstock:[a-z0-9_:]+", ALERTS)) == recorded
