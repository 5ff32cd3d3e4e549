"""`KVPoolConnector`: vLLM's OffloadingConnector over the pool, with failures that it survives."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvpool import config
from kvpool.connectors.vllm.geometry import default_blocks_per_chunk
from kvpool.connectors.vllm.hits import HitCosts
from kvpool.connectors.vllm.manager import KVPoolManager
from kvpool.connectors.vllm.messages import (
    KVPoolConnectorMetadata,
    KVPoolHandshake,
    KVPoolWorkerMetadata,
)
from kvpool.connectors.vllm.pages import huge_page_allocation
from kvpool.connectors.vllm.spec import KVPoolSpec
from kvpool.connectors.vllm.worker import KVPoolWorker

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput, KVConnectorTransferResults
    from vllm.v1.request import Request

# A name below vLLM's: its logging configuration covers nothing else.
logger = init_logger(f"vllm.{__name__}")


def complete_extra_config(vllm_config: VllmConfig) -> dict[str, Any]:
    """Fill in what users need not say, in place: our spec, and stores of generated tokens."""
    transfer_config = vllm_config.kv_transfer_config
    assert transfer_config is not None
    extra_config: dict[str, Any] = transfer_config.kv_connector_extra_config
    pool_config = config.from_mapping(extra_config)
    extra_config.setdefault("spec_name", "KVPoolSpec")
    extra_config.setdefault("offload_prompt_only", pool_config.offload_prompt_only)
    if pool_config.blocks_per_chunk is not None:
        extra_config.setdefault("blocks_per_chunk", pool_config.blocks_per_chunk)
    return extra_config


def _unregister_metrics() -> None:
    """Make way for a second engine in one process: vLLM takes back only metrics of its own name."""
    for collector in {*REGISTRY._collector_to_names}:
        if getattr(collector, "_name", "").startswith("kvpool_"):
            REGISTRY.unregister(collector)


class KVPoolConnector(OffloadingConnector):
    """Routes KV chunks between vLLM and the pool.

    vLLM's base class plans, fences and counts transfers; this one adds the pool's own messages
    (spills, acknowledgements, profiles) and reports chunks that could not be read, so that vLLM
    recomputes them.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        extra_config = complete_extra_config(vllm_config)
        if "block_size" not in extra_config:
            extra_config.setdefault("blocks_per_chunk", default_blocks_per_chunk(kv_cache_config))
        super().__init__(vllm_config, role, kv_cache_config)
        self._hit_costs: HitCosts | None = None
        if self.connector_worker is not None:
            assert isinstance(self.connector_worker.spec, KVPoolSpec)
            self.connector_worker.spec.bind(vllm_config, kv_cache_config)
        else:
            self._announce(vllm_config)
            if config.from_mapping(extra_config).cost_model:
                one_by_one = vllm_config.parallel_config.pipeline_parallel_size == 1
                self._hit_costs = HitCosts(self.scheduler, self._manager, one_by_one)
        self._scheduled: set[str] = set()  # in the previous step

    def _announce(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        if vllm_config.kv_transfer_config.kv_load_failure_policy == "fail":
            logger.info(
                "kvpool: kv_load_failure_policy is 'fail': a request whose chunks cannot be read"
                " ends with an error; 'recompute' has vLLM compute them instead"
            )
        if vllm_config.model_config.use_mla and self.scheduler.config.num_workers > 1:
            logger.info("kvpool: the MLA cache is replicated over ranks and stored once a rank")

    @property
    def _manager(self) -> KVPoolManager:
        assert isinstance(self.scheduler.manager, KVPoolManager)
        return self.scheduler.manager

    @property
    def _worker(self) -> KVPoolWorker:
        assert self.connector_worker is not None
        assert isinstance(self.connector_worker.worker, KVPoolWorker)
        return self.connector_worker.worker

    # ---- worker side ------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Have KV tensors in host memory allocated on huge pages, aligned."""
        return huge_page_allocation()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Report this rank's devices to the scheduler half."""
        return self._worker.handshake

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submit this step's loads, stores and spills."""
        metadata = self._connector_metadata
        assert isinstance(metadata, KVPoolConnectorMetadata)
        self._worker.set_epoch(metadata.epoch)
        super().start_load_kv(forward_context, **kwargs)
        for moves in metadata.moves:
            self._worker.submit_moves(moves)
        self._worker.try_devices(metadata.trials)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report ended loads, and those requests whose chunks could not all be read."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving.update(self._worker.take_failed_requests())
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the blocks that could not be loaded: vLLM keeps what lies before them."""
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Add the pool's report to vLLM's completions."""
        metadata = super().build_connector_worker_meta() or OffloadingWorkerMetadata()
        report = self._worker.take_report()
        if not metadata.completed_jobs and report is None:
            return None
        mine = KVPoolWorkerMetadata(metadata.completed_jobs, metadata.transfer_stats)
        if report is not None:
            mine.report = report
        return mine

    # ---- scheduler side ---------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the workers' devices in: from now on the pool answers."""
        handshakes = [item for item in metadata.values() if isinstance(item, KVPoolHandshake)]
        self._manager.attach(sorted(handshakes, key=lambda handshake: handshake.rank))

    def on_new_request(self, request: Request) -> None:
        """Keep a request with a LoRA out of the pool: hashes name an adapter, not its content."""
        if request.lora_request is not None:
            self._manager.keep_out(request.request_id)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens the pool holds beyond what vLLM has, and time the answer."""
        # A reset of the cache preempts running requests and has them scheduled again at once. In
        # that step vLLM still flushes their stores, and takes a load among them for a fault.
        if request.status == RequestStatus.PREEMPTED and request.request_id in self._scheduled:
            return None, False
        started_s = time.perf_counter()
        result: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if self._hit_costs is not None:
            result = self._hit_costs.choose(request, num_computed_tokens, result[0])
        self._manager.observe_lookup(time.perf_counter() - started_s)
        return result

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of a request that is admitted now; count what became of its hit."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._hit_costs is not None:
            self._hit_costs.admitted(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Add the pool's messages to vLLM's jobs of this step."""
        self._scheduled = set(scheduler_output.num_scheduled_tokens)
        metadata = super().build_connector_meta(scheduler_output)
        if self._hit_costs is not None:
            self._hit_costs.step_scheduled(scheduler_output)
        assert isinstance(metadata, OffloadingConnectorMetadata)
        return KVPoolConnectorMetadata(
            load_jobs=metadata.load_jobs,
            store_jobs=metadata.store_jobs,
            jobs_to_flush=metadata.jobs_to_flush,
            moves=self._manager.take_moves(),
            epoch=self._manager.epoch,
            trials=self._manager.take_trials(time.monotonic()),
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in the workers' reports: failures first, so that the retry's look-up misses."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, KVPoolWorkerMetadata):
            self._manager.acknowledge(metadata.report)
        super().update_connector_output(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return vLLM's events. Its scheduler asks once for every step's output, in order."""
        if self._hit_costs is not None:
            self._hit_costs.step_ended()
        events: Iterable[KVCacheEvent] = super().take_events()
        return events

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Define the pool's metrics in the API process too, which makes no connector."""
        complete_extra_config(vllm_config)
        _unregister_metrics()
        return super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )
