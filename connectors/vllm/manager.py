"""The scheduler half: answers vLLM's scheduler from the orchestrator. Never blocks, does no I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import fmean

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpool import cost, metrics
from kvpool.config import PoolConfig
from kvpool.connectors.vllm.messages import KVPoolHandshake, LoadSpec, StoreSpec
from kvpool.errors import ConfigurationError
from kvpool.orchestrator import Orchestrator, RequestState
from kvpool.plan import MovePlan
from kvpool.types import DeviceReport, Outcome, Profile, WorkerReport

# A name below vLLM's: its logging configuration covers nothing else.
logger = init_logger(f"vllm.{__name__}")

FIRST_TRIAL_S, LONGEST_PAUSE_S = 10.0, 600.0

# A chunk that is still being written counts as a miss: its request is computed, not held up.
_LOOKUP_RESULTS = {
    Outcome.HIT: LookupResult.HIT,
    Outcome.MISS: LookupResult.MISS,
    Outcome.PENDING: LookupResult.MISS,
    Outcome.RETRY: LookupResult.RETRY,
}


class Trials:
    """When a device that failed is tried: pauses double from 10 seconds to 10 minutes."""

    def __init__(self, now_s: float) -> None:
        self._pause_s = FIRST_TRIAL_S
        self._next_s = now_s + self._pause_s

    def is_due(self, now_s: float) -> bool:
        """Whether it is time; if so, the next time is later."""
        if now_s < self._next_s:
            return False
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        self._next_s = now_s + self._pause_s
        return True


class KVPoolManager(OffloadingManager):
    """vLLM's `OffloadingManager` over the pool's `Orchestrator`.

    Until the workers have reported their devices (`attach`) all look-ups miss and nothing is
    stored.
    """

    def __init__(self, config: PoolConfig, ranks: int) -> None:
        self._config, self._ranks = config, ranks
        self._orchestrator: Orchestrator | None = None
        self._device_names: list[str] = []
        self._moves: list[MovePlan] = []
        self._trials: dict[int, Trials] = {}
        self._kept_out: set[str] = set()  # requests
        self._collector = metrics.Collector()

    def attach(self, handshakes: Sequence[KVPoolHandshake]) -> None:
        """Build the table over what all ranks have: a chunk counts only where every rank has it."""
        first = handshakes[0]
        require_agreement(handshakes)
        devices = [
            merge_devices([handshake.devices[i] for handshake in handshakes])
            for i in range(len(first.devices))
        ]
        orchestrator = Orchestrator(
            first.geometry, self._ranks, self._config.placement, self._config.backup
        )
        restored = orchestrator.attach(devices, [handshake.survivors for handshake in handshakes])
        self._orchestrator = orchestrator
        self._device_names = [device.name for device in devices]
        rows = orchestrator.snapshot().devices
        for device, row, chunks in zip(devices, rows, restored, strict=True):
            line = describe(device, row.share_weight, self._ranks)
            logger.info("kvpool: %s%s", line, f", {chunks} chunks from before" if chunks else "")

    @property
    def epoch(self) -> int:
        """The epoch of what is stored now; a reset of the cache advances it."""
        return self._orchestrator.epoch if self._orchestrator else 0

    def acknowledge(self, report: WorkerReport) -> None:
        """Take in what the workers did. Call before vLLM handles the completions of that step."""
        if self._orchestrator is None:
            return
        self._orchestrator.acknowledge(report)
        self._collector.add_report(report, self._device_names)
        for line in self._orchestrator.take_announcements():
            logger.warning("kvpool: %s", line)

    def observe_lookup(self, seconds: float) -> None:
        """Note how long a request's look-up took."""
        self._collector.add_lookup(seconds)

    def observe_decision(self, take: cost.Take, declined_tokens: int) -> None:
        """Note what became of a request's hit."""
        self._collector.add_decision(take, declined_tokens)

    def load_bounds(self) -> cost.Bounds:
        """Return what a load of hits costs now, wherever its chunks lie."""
        assert self._orchestrator is not None, "before attach nothing is a hit"
        return self._orchestrator.load_bounds()

    def load_seconds(self, reads: cost.Reads, ends: cost.Int64) -> cost.Float64:
        """Return the expected seconds of a load of hits that ends at each of `ends`, in tokens."""
        assert self._orchestrator is not None, "before attach nothing is a hit"
        return self._orchestrator.load_seconds(reads, ends)

    def keep_out(self, request_id: str) -> None:
        """Have the pool neither serve nor store a request."""
        self._kept_out.add(request_id)

    def take_trials(self, now_s: float) -> list[int]:
        """Return the devices that are to be tried now, seldomer the longer they do not work."""
        broken = self._orchestrator.broken_devices() if self._orchestrator else []
        self._trials = {device: self._trials.get(device, Trials(now_s)) for device in broken}
        return [device for device in broken if self._trials[device].is_due(now_s)]

    def take_moves(self) -> list[MovePlan]:
        """Return the spills that were decided since the last call."""
        moves, self._moves = self._moves, []
        return moves

    # ---- vLLM's interface -------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Start tracking a request; all its chunks are to be offered, those it hit included."""
        if self._orchestrator is not None and req_context.req_id not in self._kept_out:
            req_context.set_state(self._orchestrator.begin(req_context.req_id))
        # With the chunk-level policy vLLM never offers again what it loaded or failed to load.
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer at once from the table in memory."""
        request = req_context.get_state(RequestState)
        if request is None or self._orchestrator is None:
            return LookupResult.MISS
        return _LOOKUP_RESULTS[self._orchestrator.lookup(key, request)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Name the kind of device that a hit comes from, for vLLM's own metrics."""
        kind = self._orchestrator.location_kind(key) if self._orchestrator else None
        if kind is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return CacheHitSource.HOST if kind == "dram" else CacheHitSource.DISK

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin the chunks and say where they are."""
        request = req_context.get_state(RequestState)
        assert request is not None and self._orchestrator is not None
        return LoadSpec(self._orchestrator.plan_load(list(keys), request), req_context.req_id)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin the chunks of the request's load."""
        request = req_context.get_state(RequestState)
        if request is not None and self._orchestrator is not None:
            self._orchestrator.complete_load(request)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve slots for what is not there yet. A full pool stores nothing: never None."""
        request = req_context.get_state(RequestState)
        if request is None or self._orchestrator is None:
            return PrepareStoreOutput([], LoadStoreSpec(), [])
        offered = list(keys)
        positions = [req_context.get_offload_key_position(key) or 0 for key in offered]
        plan = self._orchestrator.reserve(offered, positions, request)
        return PrepareStoreOutput(
            [OffloadKey(key) for key in plan.keys], StoreSpec(plan), evicted_keys=[]
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request; its transfers may still be under way."""
        self._kept_out.discard(req_context.req_id)
        request = req_context.get_state(RequestState)
        if request is not None and self._orchestrator is not None:
            self._orchestrator.finish(request)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Decide this step's spills."""
        if self._orchestrator is not None and (moves := self._orchestrator.take_moves()):
            self._moves.append(moves)

    def has_pending_work(self) -> bool:
        """Keep the engine stepping until all writes are acknowledged."""
        return self._orchestrator is not None and self._orchestrator.pending_work()

    def reset_cache(self) -> None:
        """Forget everything: the weights may have been swapped."""
        if self._orchestrator is not None:
            # Spills that were decided still go out: their slots wait for an acknowledgement.
            self._orchestrator.reset()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what changed since the last call, for `/metrics`."""
        if self._orchestrator is None:
            return None
        stats = OffloadingConnectorStats()
        for sample in self._collector.collect(self._orchestrator.snapshot()):
            if sample.kind is metrics.MetricKind.COUNTER:
                stats.increase_counter(sample.name, sample.value, sample.labels)
            elif sample.kind is metrics.MetricKind.GAUGE:
                stats.set_gauge(sample.name, sample.value, sample.labels)
            else:
                stats.observe_histogram(sample.name, sample.value, sample.labels)
        return None if stats.is_empty() else stats


def require_agreement(handshakes: Sequence[KVPoolHandshake]) -> None:
    """Raise ConfigurationError where ranks mean other bytes by the same key, or have other devices:
    their chunks would never be hits, or be others'.
    """
    for rank in handshakes[1:]:
        for what in ("namespace", "geometry"):
            mine, others = getattr(handshakes[0], what), getattr(rank, what)
            if mine != others:
                allowed = f"the same on all ranks; rank {handshakes[0].rank} has {show(mine)}"
                raise ConfigurationError(f"{what} of rank {rank.rank}", show(others), allowed)


def show(value: object) -> str:
    """Return a value as it stands in a message."""
    return value.hex()[:16] if isinstance(value, bytes) else repr(value)


def merge_devices(reports: Sequence[DeviceReport]) -> DeviceReport:
    """Return one device as all ranks have it: the fewest slots, the mean of the measured rates."""

    def mean(name: str) -> float:
        return fmean(getattr(report.profile, name) for report in reports)

    profile = Profile(
        read_bandwidth_bytes_s=mean("read_bandwidth_bytes_s"),
        write_bandwidth_bytes_s=mean("write_bandwidth_bytes_s"),
        read_latency_s=mean("read_latency_s"),
        together_read_bandwidth_bytes_s=mean("together_read_bandwidth_bytes_s"),
    )
    return replace(reports[0], slots=min(report.slots for report in reports), profile=profile)


def describe(device: DeviceReport, share_weight: float, ranks: int) -> str:
    """Return the line that announces a device at start."""
    details = [device.page_type.value + " pages"] if device.page_type else []
    details += [device.io_path] if device.io_path else []
    return (
        f"{device.name}: {device.slots} slots of {device.slot_bytes / 2**20:.2f} MiB"
        f" x {ranks} ranks, reads {device.profile.read_bandwidth_bytes_s / 1e9:.2f} GB/s"
        f" ({device.profile.together_read_bandwidth_bytes_s / 1e9:.2f} with all together),"
        f" share {share_weight:.3f}" + "".join(f", {detail}" for detail in details)
    )
