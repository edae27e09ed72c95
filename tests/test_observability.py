"""What the board, the alerts and the manual say of metrics is what a router and its workers tell."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from cluster.worker_port import MetricsPort
from tests.router.whole import GOOD, whole_router

DOCS = Path(__file__).parents[1] / "docs"
BOARD, ALERTS, MANUAL = DOCS / "grafana/kvferry.json", DOCS / "grafana/alerts.yaml", DOCS / "observability.md"
PROMTOOL = shutil.which("promtool")
_SERIES = re.compile(r"\bkvferry_[a-z0-9_]+")
_SELECTOR = re.compile(r"(kvferry_[a-z0-9_]+)\{([^}]*)\}")
_GROUPED = re.compile(r"\bby \(([^)]*)\)")
_UNITS = {
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_watts": "watts",
    "_tokens": "tokens",
    "_ratio": "0 to 1",
    "_rate": "0 to 1",
    "_perc": "0 to 1",
    "_blocks": "blocks",
    "_frames": "frames",
    "_info": "1.",
}


async def scraped() -> dict[str, str]:
    """What a router and each of its workers tell, after an answer."""
    async with whole_router() as whole, whole.client() as client:
        ports = {worker.config.name: MetricsPort(worker, 0) for worker in whole.workers}
        try:
            (await client.post("/v1/completions", json=GOOD)).raise_for_status()
            whole.serving.server.text.metrics.planned("scale")
            # Until the next heartbeat.
            await asyncio.sleep(0.6)
            targets = (await client.get("/metrics/targets")).json()
            urls = {one["labels"]["__meta_kvferry_worker"]: f"http://{one['targets'][0]}/metrics" for one in targets}
            assert urls.keys() == ports.keys()
            return {name: (await client.get(url)).text for name, url in {"router": "/metrics", **urls}.items()}
        finally:
            for port in ports.values():
                await port.close()


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    return asyncio.run(scraped())


@pytest.fixture(scope="module")
def families(told: dict[str, str]) -> dict[str, Metric]:
    """By the name of each."""
    found = {family.name: family for family in text_string_to_metric_families(told["router"])}
    # When prometheus_client made each counter.
    return {name: family for name, family in found.items() if not name.endswith("_created")}


def series(families: dict[str, Metric]) -> dict[str, Metric]:
    """Families by the names that their samples have, or would have."""
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    return {name + ending: family for name, family in families.items() for ending in endings[family.type]}


def expressions() -> Iterator[str]:
    """Of panels and of alerts."""
    board = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for rule in rules():
        yield rule["expr"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


EXPRESSIONS = sorted(set(expressions()))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_each_metric_that_is_asked_for_is_told(expression, families):
    known = series(families)
    asked = set(_SERIES.findall(expression))
    assert asked
    assert asked <= known.keys()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_each_label_that_is_asked_for_is_there(expression, families):
    known = series(families)
    labels_of = {name: labels(known[name]) for name in _SERIES.findall(expression)}
    for name, selector in _SELECTOR.findall(expression):
        assert set(re.findall(r"(\w+)\s*(?:=|!)", selector)) <= labels_of[name]
    grouped = {label.strip() for group in _GROUPED.findall(expression) for label in group.split(",")}
    assert grouped <= set().union(*labels_of.values(), {"le"})


def labels(family: Metric) -> set[str]:
    """Those that it has, or, of one without samples, that the manual says it has."""
    found = {label for sample in family.samples for label in sample.labels}
    return found or documented()[family.name][1]


def documented() -> dict[str, tuple[str, set[str], str]]:
    """By name, what the manual's tables say: type, labels and meaning."""
    rows = re.findall(r"^\| `(kvferry_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|", MANUAL.read_text(), re.MULTILINE)
    assert len({row[0] for row in rows}) == len(rows)
    return {name: (kind, set(re.findall(r"\w+", found)), text.strip()) for name, kind, found, text in rows}


def test_the_manual_has_every_metric_with_its_type_labels_and_meaning(families):
    ours = {name: family for name, family in families.items() if name.startswith("kvferry_")}
    table = documented()
    assert table.keys() == ours.keys()
    for name, family in ours.items():
        kind, labels_told, text = table[name]
        assert (kind, text) == (family.type, family.documentation), name
        seen = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert seen in (set(), labels_told), name


def test_every_metric_says_what_it_is_with_the_unit_of_its_name(families):
    for name, family in families.items():
        assert re.fullmatch(r"\S.{4,}\.", family.documentation), name
        unit = next((words for ending, words in _UNITS.items() if name.endswith(ending)), "")
        assert unit in family.documentation.lower(), name


def test_a_worker_tells_of_itself_what_its_router_tells_of_it(told, families):
    for worker in ("prefill", "decode"):
        own = {family.name: family for family in text_string_to_metric_families(told[worker])}
        assert own.keys() <= families.keys()
        assert {"kvferry_handoff_started", "kvferry_kv_transfer_seconds", "kvferry_worker_up"} <= own.keys()
        for name, family in own.items():
            theirs = {frozenset(s.labels.items()) for s in families[name].samples if s.labels.get("worker") == worker}
            mine = {frozenset(sample.labels.items()) for sample in family.samples}
            if name != "kvferry_worker_peer_transport":  # By incarnation: it knows no names.
                assert mine == theirs, name


def test_a_hand_off_is_in_the_figures_of_both_sides(families):
    def value(name: str, **labels: str) -> float:
        samples = series(families)[name].samples
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    assert value("kvferry_handoff_committed_total", worker="decode") == 1
    sent = value("kvferry_kv_transfer_bytes_total", worker="prefill", direction="sent")
    assert sent == value("kvferry_kv_transfer_bytes_total", worker="decode", direction="received") > 0
    assert value("kvferry_kv_transfer_seconds_count", worker="prefill") == 1
    assert value("kvferry_planner_decisions_total", kind="scale") == 1


def test_the_board_is_one_that_grafana_takes():
    board = json.loads(BOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or len({t["refId"] for t in panel["targets"]}) == len(panel["targets"]) > 0


def test_the_manual_says_what_to_do_on_each_alert():
    headings = re.findall(r"^\| `(KVFerry\w+)` \| [^|]{40,} \|$", MANUAL.read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules()]


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
def test_prometheus_takes_the_rules_and_what_is_told(told):
    assert PROMTOOL is not None
    subprocess.run([PROMTOOL, "check", "rules", str(ALERTS)], check=True, capture_output=True)
    for text in told.values():
        checked = subprocess.run([PROMTOOL, "check", "metrics"], input=text, text=True, capture_output=True)
        # Suffixes that are vLLM's names are not for us to change.
        complaints = [line for line in checked.stderr.splitlines() if "cache_config_info" not in line]
        assert complaints == [], complaints
