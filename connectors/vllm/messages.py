"""What travels between the scheduler half and the worker halves, inside vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

from kvpool.plan import LoadPlan, MovePlan, StoredHeaders, StorePlan, merge_reports
from kvpool.types import DeviceReport, Geometry, WorkerReport


@dataclass
class LoadSpec(LoadStoreSpec):
    """The pool's side of a load job."""

    plan: LoadPlan
    request_id: str


@dataclass
class StoreSpec(LoadStoreSpec):
    """The pool's side of a store job."""

    plan: StorePlan


@dataclass
class KVPoolHandshake(KVConnectorHandshakeMetadata):
    """What one rank found at start."""

    rank: int
    geometry: Geometry
    devices: list[DeviceReport]
    survivors: list[StoredHeaders]  # by device
    namespace: bytes


@dataclass
class KVPoolConnectorMetadata(OffloadingConnectorMetadata):
    """One step's jobs: vLLM's own, and the pool's."""

    moves: list[MovePlan] = field(default_factory=list)
    epoch: int = 0
    trials: list[int] = field(default_factory=list)  # devices that failed, to be tried


@dataclass
class KVPoolWorkerMetadata(OffloadingWorkerMetadata):
    """One step's completions. Every rank sends this class: a plain one would drop the others'."""

    report: WorkerReport = field(default_factory=WorkerReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's completions."""
        merged = super().aggregate(other)
        assert isinstance(merged, OffloadingWorkerMetadata)
        report = self.report
        if isinstance(other, KVPoolWorkerMetadata):
            report = merge_reports(report, other.report)
        return KVPoolWorkerMetadata(merged.completed_jobs, merged.transfer_stats, report)
