"""The offloading spec that vLLM makes in the scheduler and in each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
)

from kvpool import config, metrics
from kvpool.connectors.vllm.manager import KVPoolManager
from kvpool.connectors.vllm.worker import KVPoolWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig


class KVPoolSpec(OffloadingSpec):
    """Builds the two halves: `KVPoolManager` (scheduler) and `KVPoolWorker` (one a rank)."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Return the metrics of `kvpool.metrics` in vLLM's terms."""
        return {metric.name: _metadata(metric) for metric in metrics.METRICS}

    def __init__(self, offloading_config: OffloadingConfig) -> None:
        super().__init__(offloading_config)
        self.pool_config = config.from_mapping(self.extra_config)
        self._engine_config: tuple[VllmConfig, KVCacheConfig] | None = None

    def bind(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Hand over what vLLM does not pass to a spec, before `get_worker`."""
        self._engine_config = (vllm_config, kv_cache_config)

    def get_manager(self) -> KVPoolManager:
        """Return the scheduler half."""
        return KVPoolManager(self.pool_config, self.config.parallel.world_size)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> KVPoolWorker:
        """Return this rank's half: opens and measures its devices."""
        assert self._engine_config is not None
        return KVPoolWorker(self.pool_config, self.config, *self._engine_config, kv_caches)


def _metadata(metric: metrics.Metric) -> OffloadingMetricMetadata:
    if metric.kind is metrics.MetricKind.COUNTER:
        return OffloadingCounterMetadata(metric.help, metric.labels)
    if metric.kind is metrics.MetricKind.GAUGE:
        return OffloadingGaugeMetadata(metric.help, metric.labels)
    return OffloadingHistogramMetadata(metric.help, metric.labels, metric.buckets)
