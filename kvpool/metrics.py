"""The pool's metrics: names, help, units, and how a snapshot becomes samples.

Names and units follow Prometheus' conventions. Metrics are pulled: the hot path counts in plain
numbers, and `Collector.collect` turns what changed into samples when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kvpool.cost import Take
from kvpool.types import DeviceCounters, DeviceState, PoolSnapshot, WorkerReport


class MetricKind(Enum):
    """Prometheus' metric types that are in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric's definition; counters' names end in `_total`."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A counter's increase, a gauge's value, or one observation of a histogram."""

    name: str
    kind: MetricKind
    value: float
    labels: tuple[str, ...] = ()


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_DEVICE, _RANK = ("device",), ("device", "rank")
_TRANSFER_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_LOOKUP_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)

# Metric -> field of DeviceCounters.
_RANK_COUNTERS = {
    Metric("kvpool_read_bytes_total", _COUNTER, "Payload bytes read.", _RANK): "bytes_read",
    Metric("kvpool_written_bytes_total", _COUNTER, "Bytes written, headers included.", _RANK): (
        "bytes_written"
    ),
    Metric(
        "kvpool_read_busy_seconds_total", _COUNTER, "Time with a read in flight.", _RANK
    ): "read_busy_s",
    Metric(
        "kvpool_write_busy_seconds_total", _COUNTER, "Time with a write in flight.", _RANK
    ): "write_busy_s",
    Metric("kvpool_read_failures_total", _COUNTER, "Reads that failed.", _RANK): "read_failures",
    Metric("kvpool_write_failures_total", _COUNTER, "Writes that failed.", _RANK): (
        "write_failures"
    ),
    Metric(
        "kvpool_checksum_failures_total", _COUNTER, "Reads that did not verify.", _RANK
    ): "checksum_failures",
    Metric("kvpool_stalls_total", _COUNTER, "Times that a device stopped answering.", _RANK): (
        "stalls"
    ),
}
_QUEUE_DEPTH = Metric(
    "kvpool_queue_depth", _GAUGE, "Transfers queued or in flight at the last report.", _RANK
)

# Metric -> field of a snapshot's device row.
_DEVICE_COUNTERS = {
    Metric("kvpool_hit_chunks_total", _COUNTER, "Chunks loaded, by device.", _DEVICE): (
        "hit_chunks"
    ),
    Metric(
        "kvpool_hit_tokens_total",
        _COUNTER,
        "Tokens whose KV was loaded, by device; counted once for each KV group.",
        _DEVICE,
    ): "hit_tokens",
}
_DEVICE_GAUGES = {
    Metric("kvpool_chunks", _GAUGE, "Chunks held, by device.", _DEVICE): "chunks",
    Metric("kvpool_capacity_chunks", _GAUGE, "Chunks that fit on the device.", _DEVICE): "slots",
    Metric("kvpool_retired_chunks", _GAUGE, "Slots taken out of use.", _DEVICE): "retired_slots",
    Metric(
        "kvpool_read_bandwidth_bytes_per_second",
        _GAUGE,
        "Read bandwidth of one rank: the profile, corrected by saturated transfers.",
        _DEVICE,
    ): "read_bandwidth_bytes_s",
    Metric(
        "kvpool_share_weight_ratio", _GAUGE, "Share of new chunks that goes there.", _DEVICE
    ): "share_weight",
}
_CAPACITY_BYTES = Metric(
    "kvpool_capacity_bytes", _GAUGE, "Bytes of all slots of one rank.", _DEVICE
)
_DEVICE_UP = Metric(
    "kvpool_device_up", _GAUGE, "1 while the device takes and serves chunks.", _DEVICE
)
_DEVICE_READABLE = Metric(
    "kvpool_device_readable", _GAUGE, "1 while the device serves chunks.", _DEVICE
)

# Metric -> field of a snapshot.
_POOL_COUNTERS = {
    Metric("kvpool_miss_chunks_total", _COUNTER, "Chunks computed that were not there."): (
        "miss_chunks"
    ),
    Metric("kvpool_miss_tokens_total", _COUNTER, "Tokens of these chunks."): "miss_tokens",
    Metric("kvpool_stored_chunks_total", _COUNTER, "Chunks stored."): "stored_chunks",
    Metric("kvpool_dropped_store_chunks_total", _COUNTER, "Chunks offered and not stored."): (
        "dropped_store_chunks"
    ),
    Metric("kvpool_evicted_chunks_total", _COUNTER, "Chunks evicted for room."): "evicted_chunks",
    Metric("kvpool_spilled_chunks_total", _COUNTER, "Chunks that left DRAM for a slower device."): (
        "spilled_chunks"
    ),
    Metric("kvpool_returned_chunks_total", _COUNTER, "Chunks copied back to DRAM on a load."): (
        "returned_chunks"
    ),
    Metric(
        "kvpool_backed_up_chunks_total", _COUNTER, "Chunks in DRAM copied to a slower device."
    ): ("backed_up_chunks"),
}
_PENDING_WRITES = Metric(
    "kvpool_pending_writes", _GAUGE, "Chunks being written, not yet acknowledged."
)
_LOAD_SECONDS = Metric(
    "kvpool_load_seconds", _HISTOGRAM, "Time of a load job.", (), _TRANSFER_BUCKETS_S
)
_STORE_SECONDS = Metric(
    "kvpool_store_seconds",
    _HISTOGRAM,
    "Time until a store job's pages are staged.",
    (),
    _TRANSFER_BUCKETS_S,
)
_HIT_DECISIONS = Metric(
    "kvpool_hit_decisions_total",
    _COUNTER,
    "Requests that hit, by what was taken of the hit: whole, part or declined.",
    ("decision",),
)
_DECLINED_TOKENS = Metric(
    "kvpool_declined_tokens_total",
    _COUNTER,
    "Tokens of hits that were computed, since to load them would have taken longer.",
)
_LOOKUP_SECONDS = Metric(
    "kvpool_lookup_seconds", _HISTOGRAM, "Time of a request's look-up.", (), _LOOKUP_BUCKETS_S
)

METRICS: tuple[Metric, ...] = (
    *_RANK_COUNTERS,
    _QUEUE_DEPTH,
    *_DEVICE_COUNTERS,
    *_DEVICE_GAUGES,
    _CAPACITY_BYTES,
    _DEVICE_UP,
    _DEVICE_READABLE,
    *_POOL_COUNTERS,
    _PENDING_WRITES,
    _LOAD_SECONDS,
    _STORE_SECONDS,
    _HIT_DECISIONS,
    _DECLINED_TOKENS,
    _LOOKUP_SECONDS,
)


class Collector:
    """Gathers reports between two collections. A failing rank's numbers arrive with the others'."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    def add_report(self, report: WorkerReport, device_names: Sequence[str]) -> None:
        """Take in what workers did since their previous report."""
        for (device, rank), counters in report.counters.items():
            self._samples += _rank_samples(counters, (device_names[device], str(rank)))
        for metric, observations in (
            (_LOAD_SECONDS, report.load_seconds),
            (_STORE_SECONDS, report.store_seconds),
        ):
            self._samples += [_sample(metric, value) for value in observations]

    def add_decision(self, take: Take, declined_tokens: int) -> None:
        """Take in what became of one request's hit."""
        self._samples.append(_sample(_HIT_DECISIONS, 1, (take.value,)))
        self._samples.append(_sample(_DECLINED_TOKENS, declined_tokens))

    def add_lookup(self, seconds: float) -> None:
        """Take in how long one request's look-up took."""
        self._samples.append(_sample(_LOOKUP_SECONDS, seconds))

    def collect(self, snapshot: PoolSnapshot) -> list[Sample]:
        """Return what changed since the last call: increases of counters, new values of gauges."""
        samples, self._samples = self._samples, []
        for sample in _snapshot_samples(snapshot):
            told = self._told.get((sample.name, sample.labels))
            if sample.value == told:
                continue
            self._told[sample.name, sample.labels] = sample.value
            if sample.kind is _COUNTER:
                sample = Sample(sample.name, _COUNTER, sample.value - (told or 0), sample.labels)
            samples.append(sample)
        return samples


def _sample(metric: Metric, value: float, labels: tuple[str, ...] = ()) -> Sample:
    return Sample(metric.name, metric.kind, float(value), labels)


def _rank_samples(counters: DeviceCounters, labels: tuple[str, ...]) -> Iterator[Sample]:
    for metric, attribute in _RANK_COUNTERS.items():
        if value := getattr(counters, attribute):
            yield _sample(metric, value, labels)
    yield _sample(_QUEUE_DEPTH, counters.queue_depth, labels)


def _snapshot_samples(snapshot: PoolSnapshot) -> Iterator[Sample]:
    for row in snapshot.devices:
        for metric, attribute in (_DEVICE_COUNTERS | _DEVICE_GAUGES).items():
            yield _sample(metric, getattr(row, attribute), (row.name,))
        yield _sample(_CAPACITY_BYTES, row.slots * row.slot_bytes, (row.name,))
        yield _sample(_DEVICE_UP, row.state is DeviceState.OK, (row.name,))
        yield _sample(_DEVICE_READABLE, row.state is not DeviceState.FAILED, (row.name,))
    for metric, attribute in _POOL_COUNTERS.items():
        yield _sample(metric, getattr(snapshot, attribute))
    yield _sample(_PENDING_WRITES, snapshot.pending_writes)
