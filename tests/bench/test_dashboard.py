"""The dashboard and Prometheus' configuration name no metric that nobody exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpool.metrics import METRICS, MetricKind

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana-dashboard.json"
PROMETHEUS = DEPLOY / "prometheus.yml"

# vLLM's own, as /metrics shows them.
VLLM_SAMPLES = {
    "vllm:external_prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:kv_cache_usage_perc",
    "vllm:time_to_first_token_seconds_bucket",
}
_NAME = re.compile(r"\b(?:kvpool_|vllm:)[a-z0-9_:]+")


def exported_samples() -> dict[str, MetricKind]:
    """Return the names of the samples that the pool exports."""
    samples = {}
    for metric in METRICS:
        histogram = metric.kind is MetricKind.HISTOGRAM
        for suffix in ("_bucket", "_sum", "_count") if histogram else ("",):
            samples[metric.name + suffix] = metric.kind
    return samples


def expressions(node: Any) -> Iterator[str]:
    """Yield the PromQL expressions of panels, and the queries of variables."""
    for value in node.values() if isinstance(node, dict) else node:
        if isinstance(value, (dict, list)):
            yield from expressions(value)
    if isinstance(node, dict):
        yield from (str(node[key]) for key in ("expr", "query") if key in node)


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def prometheus_text() -> str:
    """Return Prometheus' configuration without comments."""
    return re.sub(r"(?m)(^|\s)#.*$", "", PROMETHEUS.read_text())


def unknown_names(text: str) -> set[str]:
    return set(_NAME.findall(text)) - exported_samples().keys() - VLLM_SAMPLES


def test_dashboard_names_only_exported_metrics() -> None:
    found = list(expressions(dashboard()))
    assert found
    assert {name for text in found for name in unknown_names(text)} == set()


def test_prometheus_configuration_names_only_exported_metrics() -> None:
    assert unknown_names(prometheus_text()) == set()


def test_unknown_names_are_found() -> None:
    expression = "rate(kvpool_read_bytes_total[1m]) + kvpool_read_bytes + vllm:no_such_total"
    assert unknown_names(expression) == {"kvpool_read_bytes", "vllm:no_such_total"}


def test_every_metric_is_on_the_dashboard() -> None:
    shown = " ".join(expressions(dashboard()))
    missing = [metric.name for metric in METRICS if metric.name not in shown]
    assert missing == []


def test_counters_are_shown_as_rates() -> None:
    counters = [name for name, kind in exported_samples().items() if kind is MetricKind.COUNTER]
    for text in expressions(dashboard()):
        for name in counters:
            for match in re.finditer(rf"\b{name}\b", text):
                assert re.search(r"(rate|increase)\($", text[: match.start()]), text


def test_every_panel_has_its_place() -> None:
    cells: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert cells.setdefault((x, y), panel["title"]) == panel["title"]
    identities = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(identities)) == len(identities)
