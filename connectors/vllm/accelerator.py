"""The data plane for KV pages in an accelerator's memory.

The native engine reads and writes pinned host blocks that stand in for pages; batched copies on
a stream of their own move them to and from the device while the next chunks are being read. Only
`CudaCopier` knows CUDA: everything else is the same for any memory that a copier can reach.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvpool import native
from kvpool.dataplane import DataPlane
from kvpool.jobs import FinishedJob
from kvpool.plan import Int32, Int64, LoadPlan, MovePlan, StorePlan
from kvpool.types import Geometry, WorkerReport

Plan = TypeVar("Plan", LoadPlan, StorePlan)

# Chunks that travel together: few enough that copies overlap with the reads of the next ones.
PART_CHUNKS = 8


class Copier(Protocol):
    """Copies between pinned host memory and the device, in the order of submission."""

    def copy(self, source: Int64, destination: Int64, sizes: Int64) -> Any:
        """Start copying `sizes[i]` bytes from `source[i]` to `destination[i]`; return a ticket.

        What the device computed before this call is visible to the copy.
        """

    def done(self, ticket: Any) -> bool:
        """Return whether the copies of a ticket have ended."""

    def wait(self, ticket: Any) -> None:
        """Block until they have."""


class CudaCopier:
    """Copies by `cudaMemcpyBatchAsync` (through vLLM's operator) on a stream of its own."""

    def __init__(self, arena: native.Arena) -> None:
        self._stream = torch.cuda.Stream()
        result = torch.cuda.cudart().cudaHostRegister(arena.address, arena.length, 0)
        if int(result) != 0:
            raise RuntimeError(f"cudaHostRegister of {arena.length} bytes: error {int(result)}")

    def copy(self, source: Int64, destination: Int64, sizes: Int64) -> torch.cuda.Event:
        """Start copies; see `Copier`."""
        from vllm import _custom_ops

        self._stream.wait_stream(torch.cuda.current_stream())
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            _custom_ops.swap_blocks_batch(
                torch.from_numpy(source), torch.from_numpy(destination), torch.from_numpy(sizes)
            )
            event.record(self._stream)
        return event

    def done(self, ticket: torch.cuda.Event) -> bool:
        """Return whether the copies of a ticket have ended."""
        return bool(ticket.query())

    def wait(self, ticket: torch.cuda.Event) -> None:
        """Block until they have."""
        ticket.synchronize()


@dataclass(frozen=True, slots=True)
class DevicePages:
    """Where a KV group's pages lie on the device: per tensor base, stride of a block, bytes."""

    bases: Int64
    strides: Int64
    lengths: Int64


@dataclass(slots=True)
class _Job:
    job_id: int
    plan: LoadPlan | StorePlan
    blocks: Int32
    started_s: float
    submitted: int = 0  # chunks
    ended: int = 0
    failed: list[int] = field(default_factory=list)
    payload_bytes: int = 0


@dataclass(slots=True)
class _Part:
    """Some consecutive chunks of a job, and the host chunks that they travel through."""

    job: _Job
    first: int
    host_chunks: list[int]
    ticket: Any = None

    @property
    def last(self) -> int:
        return self.first + len(self.host_chunks)


class AcceleratorPlane:
    """`DataPlane` for device memory, with the same calls; see there for what is owed.

    `host_chunks` bounds the pinned memory (host_chunks * slot_bytes).
    """

    def __init__(
        self,
        data_plane: DataPlane,
        copier: Copier,
        pages: Sequence[DevicePages],
        geometry: Geometry,
        arena: native.Arena,
    ) -> None:
        self._plane, self._copier, self._pages = data_plane, copier, list(pages)
        self._per_chunk, self._arena = geometry.blocks_per_chunk, arena
        self._block_stride = host_block_stride(pages)
        self._free = list(range(arena.length // (self._block_stride * self._per_chunk)))
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._parts: dict[int, _Part] = {}  # under way in the data plane, by inner job id
        self._copies: deque[tuple[_Part, bool]] = deque()  # in order; True: of a load
        self._next_inner = 0
        self._finished: list[FinishedJob] = []

    # ---- DataPlane's calls ------------------------------------------------------------------

    def submit_load(self, job_id: int, plan: LoadPlan, blocks: Int32) -> None:
        """Start reading a plan's chunks into device pages."""
        self._loads.append(_Job(job_id, plan, blocks, time.monotonic()))
        self._advance()

    def submit_store(self, job_id: int, plan: StorePlan, blocks: Int32) -> None:
        """Start writing a plan's chunks from device pages."""
        self._stores.append(_Job(job_id, plan, blocks, time.monotonic()))
        self._advance()

    def submit_moves(self, plan: MovePlan) -> None:
        """Spills do not touch the device."""
        self._plane.submit_moves(plan)

    def poll(self) -> None:
        """Take in what ended, and start what can start."""
        self._plane.poll()
        for finished in self._plane.take_finished():
            part = self._parts.pop(finished.job_id)
            if finished.is_load:
                self._copy_in(part, finished)
            else:
                self._free += part.host_chunks
        while self._copies and self._copier.done(self._copies[0][0].ticket):
            self._end_copy(*self._copies.popleft())
        self._advance()

    def poll_devices(self) -> None:
        """Take in what devices completed; from any thread, the accelerator is left alone."""
        self._plane.poll()

    @property
    def eventfd(self) -> int:
        """A file descriptor that is readable while `poll_devices` has something to take in."""
        return self._plane.eventfd

    def take_finished(self) -> list[FinishedJob]:
        """Return the jobs that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_report(self) -> WorkerReport:
        """Return what happened since the last call."""
        return self._plane.take_report()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something completed, at most `timeout_s`."""
        if self._copies:
            self._copier.wait(self._copies[0][0].ticket)
            return True
        return self._plane.wait(timeout_s)

    def release_stores(self, job_ids: set[int]) -> None:
        """Drop what the named stores have not begun to copy out."""
        for job in [job for job in self._stores if job.job_id in job_ids]:
            assert isinstance(job.plan, StorePlan)
            left = np.arange(job.submitted, job.plan.device.size)
            self._plane.refuse_stores(job.plan, left)
            job.ended += job.plan.device.size - job.submitted
            job.submitted = job.plan.device.size
            self._stores.remove(job)
            self._end_job(job, is_load=False)

    def unfinished(self, job_ids: set[int]) -> set[int]:
        """Return those of the named jobs whose pages are still in use."""
        waiting = {job.job_id for job in (*self._loads, *self._stores)}
        reading = {p.job.job_id for p in self._parts.values() if isinstance(p.job.plan, LoadPlan)}
        copying = {part.job.job_id for part, _ in self._copies}
        return (waiting | reading | copying) & job_ids

    def try_devices(self, indices: list[int]) -> None:
        """Try whether devices that failed work again."""
        self._plane.try_devices(indices)

    def set_epoch(self, epoch: int) -> None:
        """Invalidate what was stored before `epoch`."""
        self._plane.set_epoch(epoch)

    def drain(self, timeout_s: float) -> bool:
        """Bring to its end what was submitted; False on time-out."""
        deadline_s = time.monotonic() + timeout_s
        self.poll()
        while (self._loads or self._stores or self._parts or self._copies) and (
            left_s := deadline_s - time.monotonic()
        ) > 0:
            self.wait(left_s)
            self.poll()
        return self._plane.drain(max(deadline_s - time.monotonic(), 0.0))

    def close(self) -> None:
        """End the copies under way, then close the data plane."""
        for part, _ in self._copies:
            self._copier.wait(part.ticket)
        self._plane.close()

    # ---- parts ------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start parts while host chunks are free: loads first."""
        while self._loads and self._free and self._start_load(self._loads[0]):
            if self._loads[0].submitted == self._loads[0].plan.device.size:
                self._loads.popleft()
        while self._stores and self._free and not self._loads:
            self._copy_out(self._stores[0])
            if self._stores[0].submitted == self._stores[0].plan.device.size:
                self._stores.popleft()

    def _take_part(self, job: _Job) -> _Part:
        count = min(PART_CHUNKS, len(self._free), job.plan.device.size - job.submitted)
        chunks, self._free = self._free[:count], self._free[count:]
        part = _Part(job, job.submitted, chunks)
        job.submitted = part.last
        return part

    def _start_load(self, job: _Job) -> bool:
        """Start the next part; False where the last one has to wait for the others to end.

        The pool counts a load as over with its last part, and may then reuse its slots.
        """
        total = job.plan.device.size
        remaining = total - job.submitted
        if remaining <= min(PART_CHUNKS, len(self._free)) and job.ended < job.submitted:
            return False
        part = self._take_part(job)
        assert isinstance(job.plan, LoadPlan)
        plan = _slice(job.plan, part.first, part.last)
        inner = self._begin(part)
        self._plane.submit_load(
            inner,
            plan,
            self._host_blocks(part),
            first_position=part.first,
            last_part=part.last == total,
        )
        return True

    def _begin(self, part: _Part) -> int:
        inner, self._next_inner = self._next_inner, self._next_inner + 1
        self._parts[inner] = part
        return inner

    def _copy_in(self, part: _Part, finished: FinishedJob) -> None:
        part.job.failed += finished.failed
        part.job.payload_bytes += finished.payload_bytes
        host, device, sizes = self._addresses(part, set(finished.failed))
        part.ticket = self._copier.copy(host, device, sizes)
        self._copies.append((part, True))

    def _copy_out(self, job: _Job) -> None:
        part = self._take_part(job)
        host, device, sizes = self._addresses(part, set())
        part.ticket = self._copier.copy(device, host, sizes)
        self._copies.append((part, False))

    def _end_copy(self, part: _Part, is_load: bool) -> None:
        job = part.job
        if is_load:
            self._free += part.host_chunks
        else:
            assert isinstance(job.plan, StorePlan)
            plan = _slice(job.plan, part.first, part.last)
            self._plane.submit_store(self._begin(part), plan, self._host_blocks(part))
        job.ended += len(part.host_chunks)
        self._end_job(job, is_load)

    def _end_job(self, job: _Job, is_load: bool) -> None:
        if job.ended == job.plan.device.size:
            seconds = time.monotonic() - job.started_s
            self._finished.append(
                FinishedJob(job.job_id, is_load, sorted(job.failed), job.payload_bytes, seconds)
            )

    def _host_blocks(self, part: _Part) -> Int32:
        """Return the host blocks of a part; -1 where the job has no page."""
        wanted = self._job_blocks(part) >= 0
        chunks = np.array(part.host_chunks, dtype=np.int32)[:, None]
        blocks = chunks * self._per_chunk + np.arange(self._per_chunk, dtype=np.int32)
        return np.where(wanted, blocks, -1).astype(np.int32).ravel()

    def _job_blocks(self, part: _Part) -> Int32:
        return part.job.blocks.reshape(-1, self._per_chunk)[part.first : part.last]

    def _addresses(self, part: _Part, skipped: set[int]) -> tuple[Int64, Int64, Int64]:
        """Return host address, device address and bytes of each copy of a part."""
        rows: list[npt.NDArray[np.int64]] = []
        for offset, (chunk, blocks) in enumerate(
            zip(part.host_chunks, self._job_blocks(part), strict=True)
        ):
            if part.first + offset in skipped:
                continue
            pages = self._pages[int(part.job.plan.group[part.first + offset])]
            wanted = np.flatnonzero(blocks >= 0)
            host_block = self._arena.address + (chunk * self._per_chunk + wanted) * (
                self._block_stride
            )
            within = np.cumsum(pages.lengths) - pages.lengths
            host = host_block[:, None] + within
            device = pages.bases + blocks[wanted].astype(np.int64)[:, None] * pages.strides
            sizes = np.broadcast_to(pages.lengths, host.shape)
            rows.append(np.stack([host.ravel(), device.ravel(), sizes.ravel()]))
        if not rows:
            empty = np.empty(0, np.int64)
            return empty, empty, empty
        table = np.concatenate(rows, axis=1).astype(np.int64)
        return table[0].copy(), table[1].copy(), table[2].copy()


def host_block_stride(pages: Sequence[DevicePages]) -> int:
    """Return the bytes of a host block that any group's block fits in."""
    return max(int(group.lengths.sum()) for group in pages)


def add_host_groups(
    engine: native.Engine, pages: Sequence[DevicePages], arena: native.Arena, per_chunk: int
) -> None:
    """Register the host blocks as the engine's pages, one group a KV group."""
    stride = host_block_stride(pages)
    for group in pages:
        within = np.cumsum(group.lengths) - group.lengths
        engine.add_group(
            [arena.address + int(offset) for offset in within],
            [stride] * within.size,
            [int(length) for length in group.lengths],
            per_chunk,
        )


def _slice(plan: Plan, first: int, last: int) -> Plan:
    names = [name for name in plan.__slots__ if name != "load_id"]
    return replace(plan, **{name: getattr(plan, name)[first:last] for name in names})
