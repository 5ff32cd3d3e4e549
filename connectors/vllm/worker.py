"""The worker half of one rank: turns vLLM's transfer jobs into plans for the data plane."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvpool import native, probe
from kvpool.config import PoolConfig
from kvpool.connectors.vllm.accelerator import (
    AcceleratorPlane,
    CudaCopier,
    DevicePages,
    add_host_groups,
)
from kvpool.connectors.vllm.geometry import build_geometry
from kvpool.connectors.vllm.idle import IdlePoller
from kvpool.connectors.vllm.messages import KVPoolHandshake, LoadSpec, StoreSpec
from kvpool.connectors.vllm.namespace import namespace_digest
from kvpool.connectors.vllm.plugin import PROCESS_CPUS
from kvpool.dataplane import DataPlane
from kvpool.devices import open_device
from kvpool.devices.base import Device
from kvpool.plan import Int32, MovePlan, UInt8
from kvpool.types import Geometry, WorkerReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

# A name below vLLM's: its logging configuration covers nothing else.
logger = init_logger(f"vllm.{__name__}")

STORE_STAGING_BYTES = 256 << 20
PINNED_BYTES = 256 << 20
WAIT_S = 0.1
SHUTDOWN_S = 3.0  # vLLM kills workers that need more than 5 s


class KVPoolWorker(OffloadingWorker):
    """Runs one rank's transfers. Jobs always end with success for vLLM's base class, which would
    stop the engine otherwise; requests whose chunks could not be read are named apart.
    """

    def __init__(
        self,
        config: PoolConfig,
        offloading_config: OffloadingConfig,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: CanonicalKVCaches,
    ) -> None:
        parallel = offloading_config.parallel
        self._geometry = build_geometry(offloading_config, kv_cache_config, kv_caches)
        slot_bytes = self._geometry.slot_bytes
        namespace = namespace_digest(vllm_config, self._geometry)
        engine = native.Engine(slot_bytes, store_buffers=max(4, STORE_STAGING_BYTES // slot_bytes))
        devices: list[Device] = []
        try:
            with process_cpus():
                for device_config in config.devices:
                    devices.append(
                        open_device(
                            device_config,
                            engine,
                            namespace=namespace,
                            rank=parallel.rank,
                            ranks=parallel.world_size,
                            replicas=vllm_config.parallel_config.data_parallel_size_local,
                            owner=parallel.data_parallel_index,
                            slot_bytes=slot_bytes,
                        )
                    )
                profiles = probe.measure(engine, devices)
        except BaseException:
            engine.close()
            for device in devices:
                device.close()
            raise
        for device in devices:
            if device.damaged_headers:
                logger.warning(
                    "kvpool: %s: %d damaged headers ignored", device.name, device.damaged_headers
                )
        reports = [d.report(p) for d, p in zip(devices, profiles, strict=True)]
        survivors = [device.survivors for device in devices]
        self.handshake = KVPoolHandshake(
            parallel.rank, self._geometry, reports, survivors, namespace
        )
        self._data_plane = build_plane(engine, devices, self._geometry, parallel.rank, kv_caches)
        self._lock = threading.Lock()  # the data plane's
        with process_cpus():
            self._idle_poller = IdlePoller(self._data_plane, self._lock)
        self._loads: dict[int, tuple[str, Int32]] = {}  # job -> request, blocks by chunk
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()

    # ---- vLLM's interface -------------------------------------------------------------------

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start writing chunks; the job ends when their pages are staged."""
        assert isinstance(dst_spec, StoreSpec)
        plan = dst_spec.plan
        blocks = chunk_blocks(src_spec, plan.group, self._geometry, whole=True)
        with self._lock:
            self._data_plane.submit_store(job_id, plan, blocks)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Start reading chunks into pages."""
        assert isinstance(src_spec, LoadSpec)
        plan = src_spec.plan
        blocks = chunk_blocks(dst_spec, plan.group, self._geometry, whole=False)
        self._loads[job_id] = src_spec.request_id, blocks
        with self._lock:
            self._data_plane.submit_load(job_id, plan, blocks)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended, all as success; see `take_failed_requests`."""
        with self._lock:
            self._data_plane.poll()
            finished = self._data_plane.take_finished()
        results = []
        for job in finished:
            if job.is_load:
                request_id, blocks = self._loads.pop(job.job_id)
                if job.failed:
                    self._note_failure(request_id, blocks, job.failed)
            size = None if job.failed else job.payload_bytes
            results.append(TransferResult(job.job_id, True, size, job.seconds))
        return results

    def _note_failure(self, request_id: str, blocks: Int32, failed: list[int]) -> None:
        """Name the blocks that were not filled; with several KV groups, where vLLM takes no block
        for an answer, the request.
        """
        if len(self._geometry.groups) > 1:
            self._failed_requests.add(request_id)
            return
        named = blocks.reshape(-1, self._geometry.blocks_per_chunk)[failed]
        self._failed_blocks.update(named[named >= 0].tolist())

    def wait(self, job_ids: set[int]) -> None:
        """Block until the named jobs no longer use pages: stores not staged by now are dropped."""
        with self._lock:
            self._data_plane.release_stores(job_ids)
        while self._still_used(job_ids):
            self._data_plane.wait(WAIT_S)

    def _still_used(self, job_ids: set[int]) -> set[int]:
        with self._lock:
            self._data_plane.poll()
            return self._data_plane.unfinished(job_ids)

    def shutdown(self) -> None:
        """Bring to its end what is being written, so that a restart finds it; close the devices."""
        self._idle_poller.stop()
        if not self._data_plane.drain(SHUTDOWN_S):
            logger.warning("kvpool: stopped before all writes ended: those chunks are lost")
        self._data_plane.close()

    # ---- for the connector ------------------------------------------------------------------

    def submit_moves(self, moves: MovePlan) -> None:
        """Start the spills that the scheduler half decided."""
        with self._lock:
            self._data_plane.submit_moves(moves)

    def try_devices(self, devices: list[int]) -> None:
        """Try whether devices that failed work again."""
        if devices:
            with self._lock:
                self._data_plane.try_devices(devices)

    def set_epoch(self, epoch: int) -> None:
        """Invalidate, durably, what was stored before a reset of the cache."""
        with self._lock:
            self._data_plane.set_epoch(epoch)

    def take_failed_requests(self) -> set[str]:
        """Return the requests whose load ended with chunks that could not be read."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that ended loads could not fill, of a model with one KV group."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """Return what happened since the last call, None where nothing did."""
        with self._lock:
            report = self._data_plane.take_report()
        return None if report == WorkerReport() else report


@contextmanager
def process_cpus() -> Iterator[None]:
    """Let threads that are started inside run on all CPUs of the process.

    vLLM's CPU worker binds the calling thread to the cores that compute. Threads inherit that, and
    would share those cores with the forward pass while others idle.
    """
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, PROCESS_CPUS)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def build_plane(
    engine: native.Engine,
    devices: list[Device],
    geometry: Geometry,
    rank: int,
    kv_caches: CanonicalKVCaches,
) -> DataPlane | AcceleratorPlane:
    """Return the data plane for the memory that the KV tensors lie in."""
    plane = DataPlane(engine, devices, geometry, rank)
    pages = [group_pages(kv_caches, references) for references in kv_caches.group_data_refs]
    if kv_caches.tensors[0].tensor.device.type == "cpu":
        for group in pages:
            engine.add_group(
                group.bases.tolist(),
                group.strides.tolist(),
                group.lengths.tolist(),
                geometry.blocks_per_chunk,
            )
        return plane
    arena = native.Arena(PINNED_BYTES)
    add_host_groups(engine, pages, arena, geometry.blocks_per_chunk)
    return AcceleratorPlane(plane, CudaCopier(arena), pages, geometry, arena)


def group_pages(kv_caches: CanonicalKVCaches, references: list[CanonicalKVCacheRef]) -> DevicePages:
    """Return where the pages of one KV group lie."""
    tensors = [kv_caches.tensors[reference.tensor_idx].tensor for reference in references]
    return DevicePages(
        np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64),
        np.array([tensor.stride(0) * tensor.element_size() for tensor in tensors], dtype=np.int64),
        np.array([reference.page_size_bytes for reference in references], dtype=np.int64),
    )


def chunk_blocks(
    spec: GPULoadStoreSpec, groups: UInt8, geometry: Geometry, *, whole: bool
) -> Int32:
    """Return the block ids of each chunk of a plan, shape (n * blocks_per_chunk,), -1: none.

    vLLM names blocks group by group, from some block inside the first chunk on. With `whole` (a
    store) each chunk must have all its blocks; a group in which some are missing has lost the
    mapping of blocks to chunks, so none of its blocks are given.
    """
    per_chunk = geometry.blocks_per_chunk
    blocks = np.full(groups.size * per_chunk, -1, dtype=np.int32)
    taken = 0
    for group, (size, index) in enumerate(zip(spec.group_sizes, spec.block_indices, strict=True)):
        chunks = np.flatnonzero(groups == group)
        ids, taken = spec.block_ids[taken : taken + size], taken + size
        if not chunks.size:
            continue
        start = index % per_chunk
        end = start + size
        complete = start == 0 and end == chunks.size * per_chunk
        fits = (chunks.size - 1) * per_chunk < end <= chunks.size * per_chunk
        if complete or (fits and not whole):
            first = int(chunks[0]) * per_chunk
            blocks[first + start : first + end] = ids
    return blocks
