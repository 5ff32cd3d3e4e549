"""Each metric against a workload whose numbers can be told beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpool import metrics
from tests.vllm.process import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNK_TOKENS = 256
CHUNKS = 1000 // CHUNK_TOKENS  # of the scenario's prompt
CHUNK_BYTES = 4 * 6 * 49152  # blocks x layers x page of the llama model
BLOCK = 4096


class Samples:
    """What `/metrics` shows of the pool."""

    def __init__(self, rows: list[list[Any]]) -> None:
        self.rows = rows

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with this name and these labels; there must be one."""
        values = [
            value for n, have, value in self.rows if n == name and labels.items() <= have.items()
        ]
        assert values, f"{name} {labels} is not among the samples"
        return sum(values)


@pytest.fixture(scope="module")
def samples(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    folder = tmp_path_factory.mktemp("pool")
    found = run_scenario(
        "metrics",
        **{
            "models": models_folder,
            "blocks-per-chunk": 4,
            "devices": f"dram:64MiB,file:{folder}/kvpool?size=128MiB",
        },
    )
    return Samples(found["samples"])


def test_every_metric_is_shown(samples: Samples) -> None:
    shown = {name for name, _, _ in samples.rows}
    quiet = {
        "kvpool_read_failures_total",
        "kvpool_write_failures_total",
        "kvpool_checksum_failures_total",
        "kvpool_stalls_total",
    }
    for metric in metrics.METRICS:
        suffix = "_count" if metric.kind is metrics.MetricKind.HISTOGRAM else ""
        assert metric.name + suffix in shown or metric.name in quiet, metric.name


def test_gate_14_chunks_and_tokens(samples: Samples) -> None:
    assert samples.total("kvpool_miss_chunks_total") == CHUNKS
    assert samples.total("kvpool_miss_tokens_total") == CHUNKS * CHUNK_TOKENS
    assert samples.total("kvpool_stored_chunks_total") == CHUNKS
    backed_up = samples.total("kvpool_backed_up_chunks_total")
    assert samples.total("kvpool_chunks") == CHUNKS + backed_up, "a chunk with two copies twice"
    assert samples.total("kvpool_hit_chunks_total") == CHUNKS
    assert samples.total("kvpool_hit_tokens_total") == CHUNKS * CHUNK_TOKENS
    for name in ("dropped_store", "evicted", "spilled", "returned"):
        assert samples.total(f"kvpool_{name}_chunks_total") == 0
    assert samples.total("kvpool_pending_writes") == 0


def test_gate_14_bytes(samples: Samples) -> None:
    assert samples.total("kvpool_read_bytes_total") == CHUNKS * CHUNK_BYTES
    backed_up = samples.total("kvpool_backed_up_chunks_total")
    assert samples.total("kvpool_written_bytes_total", device="dram") == backed_up * CHUNK_BYTES
    in_file = samples.total("kvpool_written_bytes_total")
    in_file -= samples.total("kvpool_written_bytes_total", device="dram")
    assert 0 < in_file - CHUNKS * CHUNK_BYTES <= CHUNKS * BLOCK, "all chunks, and headers"
    assert samples.total("kvpool_capacity_bytes", device="dram") == (64 << 20) // CHUNK_BYTES * (
        CHUNK_BYTES
    )
    assert samples.total("kvpool_capacity_chunks", device="dram") == (64 << 20) // CHUNK_BYTES


def test_times_and_rates(samples: Samples) -> None:
    assert samples.total("kvpool_load_seconds_count") == 1
    assert samples.total("kvpool_store_seconds_count") >= 1
    assert samples.total("kvpool_lookup_seconds_count") == 2
    assert samples.total("kvpool_read_busy_seconds_total") > 0
    assert samples.total("kvpool_write_busy_seconds_total") > 0
    assert samples.total("kvpool_share_weight_ratio") == pytest.approx(1)
    rates = samples.total("kvpool_read_bandwidth_bytes_per_second")
    dram = samples.total("kvpool_read_bandwidth_bytes_per_second", device="dram")
    assert samples.total("kvpool_share_weight_ratio", device="dram") == pytest.approx(dram / rates)
    assert samples.total("kvpool_device_up") == 2
