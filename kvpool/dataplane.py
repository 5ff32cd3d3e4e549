"""The data plane of one rank: executes plans on devices through the native engine.

It moves bytes and decides nothing. One native call hands over a plan's operations as arrays;
completions come back in batches. The caller owns one thread for all methods.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool import native
from kvpool.devices.base import Device
from kvpool.errors import QueueFullError
from kvpool.plan import Int32, Int64, LoadPlan, MovePlan, StorePlan, UInt8
from kvpool.types import NO_DEVICE, DeviceCounters, Geometry, Key, WorkerReport

Bools = npt.NDArray[np.bool_]
UInt64 = npt.NDArray[np.uint64]

_NO_BLOCKS = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class FinishedJob:
    """A load that ended, or a store whose source pages are free again.

    `failed` holds the positions in the plan that were not read (load) or not accepted (store).
    """

    job_id: int
    is_load: bool
    failed: list[int]
    payload_bytes: int
    seconds: float


@dataclass(slots=True)
class _Headers:
    """What the headers of a batch of written chunks say."""

    group: UInt8
    device: UInt8
    slot: Int32
    keys: list[Key]
    parents: list[Key]
    positions: Int32


@dataclass(slots=True, kw_only=True)
class _Job:
    """Operations with consecutive tags from `first_tag` on; one operation a chunk."""

    job_id: int = -1
    first_tag: int
    count: int
    started_s: float = field(default_factory=time.monotonic)
    payload_bytes: int = 0
    failed: list[int] = field(default_factory=list)
    done: int = 0


@dataclass(slots=True, kw_only=True)
class _Load(_Job):
    plan: LoadPlan
    position: Int64  # operation -> position in the plan
    first_position: int
    last_part: bool


@dataclass(slots=True, kw_only=True)
class _Write(_Job):
    """A store or a batch of spills."""

    is_store: bool
    position: Int64  # operation -> position in the plan
    write_id: Int64
    headers: _Headers
    epoch: int  # in which it was submitted
    staged: Bools
    released: bool = False  # told to the caller


@dataclass(slots=True, kw_only=True)
class _HeaderWrite(_Job):
    device: int
    offsets: list[int]


class DataPlane:
    """Executes plans on `devices`, in the order in which plans number them.

    Guaranteed by the caller: slots in a plan are valid and not under another write; a slot being
    read is not written. Owed: each job is reported exactly once; each write id is acknowledged
    exactly once, as finished or failed. Never: bytes that do not verify in a page that counts as
    read.
    """

    def __init__(
        self,
        engine: native.Engine,
        devices: Sequence[Device],
        geometry: Geometry,
        rank: int = 0,
    ) -> None:
        self._engine, self._devices, self._rank = engine, list(devices), rank
        self._engine_index = np.array([device.index for device in devices], dtype=np.uint32)
        self._lengths = np.array([g.chunk_bytes for g in geometry.groups], dtype=np.uint32)
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._jobs: dict[int, _Job] = {}  # by first tag, which only grows
        self._next_tag = 0
        self._epoch = 0
        self._finished: list[FinishedJob] = []
        self._report = WorkerReport()
        self._reported = [engine.statistics(device.index) for device in devices]
        # Header blocks (by offset) that changed, and those on their way: two writes of one block
        # must not be in flight together, since the older could land last.
        self._dirty_headers: list[dict[int, tuple[int, int]]] = [{} for _ in devices]
        self._written_headers: list[set[int]] = [set() for _ in devices]

    # ---- submitting -------------------------------------------------------------------------

    def submit_load(
        self,
        job_id: int,
        plan: LoadPlan,
        blocks: Int32,
        *,
        first_position: int = 0,
        last_part: bool = True,
    ) -> None:
        """Start reading a plan's chunks into pages.

        `blocks` has shape (n * blocks_per_chunk,): block ids, -1 where a block is not wanted. A
        plan may come in parts: positions are then counted from `first_position`, and the load
        counts as finished with its `last_part`.
        """
        readable = np.flatnonzero(plan.device != NO_DEVICE)
        ops = self._operations(readable.size)
        self._locate(ops, plan.device[readable], plan.slot[readable])
        kept = plan.keep_device[readable]
        self._locate_keep(ops, kept, plan.keep_slot[readable])
        ops["kind"], ops["flags"] = native.KIND_LOAD, native.FLAG_VERIFY
        ops["group"] = plan.group[readable]
        ops["length"] = self._lengths[ops["group"]]
        ops["crc"] = self._checksums(plan.device[readable], plan.slot[readable])
        ops["first_block"] = readable * self._blocks_per_chunk
        job = _Load(
            job_id=job_id,
            first_tag=self._next_tag,
            count=int(readable.size),
            payload_bytes=int(ops["length"].sum()),
            plan=plan,
            position=readable,
            first_position=first_position,
            last_part=last_part,
        )
        job.failed = [first_position + int(i) for i in np.flatnonzero(plan.device == NO_DEVICE)]
        if not self._submit(job, ops, blocks):
            job.failed = [first_position + i for i in range(plan.device.size)]
            self._fail_keeps(plan, np.arange(plan.device.size))
        if job.done == job.count:
            self._end_load(job)

    def submit_store(self, job_id: int, plan: StorePlan, blocks: Int32) -> None:
        """Start writing a plan's chunks from pages. A chunk with a missing block (-1) fails."""
        shaped = blocks.reshape(-1, self._blocks_per_chunk)
        complete = np.flatnonzero((shaped >= 0).all(axis=1))
        ops = self._operations(complete.size)
        self._locate(ops, plan.device[complete], plan.slot[complete])
        ops["kind"], ops["keep"] = native.KIND_STORE, native.NO_DEVICE
        ops["group"] = plan.group[complete]
        ops["first_block"] = complete * self._blocks_per_chunk
        headers = _Headers(
            plan.group, plan.device, plan.slot, plan.keys, plan.parents, plan.positions
        )
        missing = np.setdiff1d(np.arange(shaped.shape[0]), complete)
        self.refuse_writes(plan.write_id[missing])
        job = self._submit_writes(job_id, True, ops, plan.write_id, headers, complete, blocks)
        job.failed = [int(i) for i in missing] + job.failed
        self._release_pages(job)

    def submit_moves(self, plan: MovePlan) -> None:
        """Start copying chunks from DRAM slots to slower devices."""
        ops = self._operations(plan.device.size)
        self._locate(ops, plan.device, plan.slot)
        self._locate_keep(ops, plan.source_device, plan.source_slot)
        ops["kind"], ops["flags"] = native.KIND_MOVE, native.FLAG_VERIFY
        ops["group"] = plan.group
        ops["crc"] = self._checksums(plan.source_device, plan.source_slot)
        headers = _Headers(
            plan.group, plan.device, plan.slot, plan.keys, plan.parents, plan.positions
        )
        everything = np.arange(plan.device.size)
        self._submit_writes(-1, False, ops, plan.write_id, headers, everything, _NO_BLOCKS)

    def _operations(self, count: int) -> npt.NDArray[np.void]:
        ops = np.zeros(count, dtype=native.OP_DTYPE)
        ops["tag"] = np.arange(self._next_tag, self._next_tag + count, dtype=np.uint64)
        return ops

    def _locate(self, ops: npt.NDArray[np.void], device: UInt8, slot: Int32) -> None:
        ops["device"] = self._engine_index[device]
        ops["offset"] = self._offsets(device, slot)

    def _locate_keep(self, ops: npt.NDArray[np.void], device: UInt8, slot: Int32) -> None:
        ops["keep"] = native.NO_DEVICE
        kept = device != NO_DEVICE
        ops["keep"][kept] = self._engine_index[device[kept]]
        ops["keep_offset"][kept] = self._offsets(device[kept], slot[kept])

    def _offsets(self, device: UInt8, slot: Int32) -> UInt64:
        offsets = np.zeros(device.size, dtype=np.uint64)
        for index in np.unique(device):
            chosen = device == index
            offsets[chosen] = self._devices[index].offsets(slot[chosen])
        return offsets

    def _checksums(self, device: UInt8, slot: Int32) -> npt.NDArray[np.uint32]:
        checksums = np.zeros(device.size, dtype=np.uint32)
        for index in np.unique(device):
            chosen = device == index
            checksums[chosen] = self._devices[index].checksums[slot[chosen]]
        return checksums

    def _submit(self, job: _Job, ops: npt.NDArray[np.void], blocks: Int32) -> bool:
        """Queue `ops` as `job`. A full queue refuses the whole job: False, nothing is queued."""
        if ops.size:
            try:
                self._engine.submit(ops, blocks)
            except QueueFullError:
                job.count = 0
                return False
            self._next_tag += ops.size
            self._jobs[job.first_tag] = job
        return True

    def _submit_writes(
        self,
        job_id: int,
        is_store: bool,
        ops: npt.NDArray[np.void],
        write_id: Int64,
        headers: _Headers,
        chosen: Int64,
        blocks: Int32,
    ) -> _Write:
        ops["length"] = self._lengths[ops["group"]]
        job = _Write(
            job_id=job_id,
            first_tag=self._next_tag,
            count=int(ops.size),
            payload_bytes=int(ops["length"].sum()),
            position=chosen,
            is_store=is_store,
            write_id=write_id[chosen],
            headers=_select(headers, chosen),
            epoch=self._epoch,
            staged=np.zeros(ops.size, dtype=np.bool_),
        )
        if not self._submit(job, ops, blocks):
            self.refuse_writes(job.write_id)
            job.failed = [int(position) for position in chosen]
            job.staged = np.empty(0, np.bool_)
        return job

    # ---- completions ------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what the engine completed since the last call. Does not block."""
        while (events := self._engine.poll()).size:
            first_tags = np.fromiter(self._jobs, dtype=np.int64, count=len(self._jobs))
            owner = np.searchsorted(first_tags, events["tag"].astype(np.int64), side="right") - 1
            for index in np.unique(owner):
                job = self._jobs[int(first_tags[index])]
                self._complete(job, events[owner == index])
        self._write_headers()

    def _complete(self, job: _Job, events: npt.NDArray[np.void]) -> None:
        operation = (events["tag"] - np.uint64(job.first_tag)).astype(np.int64)
        done = events["kind"] == native.EVENT_DONE
        job.done += int(done.sum())
        if isinstance(job, _Load):
            self._complete_load(job, operation, events)
        elif isinstance(job, _Write):
            job.staged[operation] = True
            self._complete_writes(job, operation[done], events[done])
            self._release_pages(job)
        elif isinstance(job, _HeaderWrite):
            self._written_headers[job.device].difference_update(job.offsets)
        if job.done == job.count:
            del self._jobs[job.first_tag]
            if isinstance(job, _Load):
                self._end_load(job)

    def _complete_load(self, job: _Load, operation: Int64, events: npt.NDArray[np.void]) -> None:
        position = job.position[operation]
        bad = position[events["result"] != 0]
        job.failed += [job.first_position + int(i) for i in bad]
        kept = events["kept"] != 0
        for device, slot, crc, write_id in zip(
            job.plan.keep_device[position[kept]],
            job.plan.keep_slot[position[kept]],
            events["crc"][kept],
            job.plan.keep_write_id[position[kept]],
            strict=True,
        ):
            self._devices[device].checksums[slot] = crc
            _count(self._report.finished_writes, int(write_id))
        self._fail_keeps(job.plan, position[~kept])

    def _fail_keeps(self, plan: LoadPlan, position: Int64) -> None:
        asked = plan.keep_device[position] != NO_DEVICE
        self.refuse_writes(plan.keep_write_id[position[asked]])

    def _end_load(self, job: _Load) -> None:
        if job.failed:
            self._report.failed_loads.setdefault(job.plan.load_id, set()).update(job.failed)
        if job.last_part:
            _count(self._report.finished_loads, job.plan.load_id)
        seconds = time.monotonic() - job.started_s
        self._report.load_seconds.append(seconds)
        self._finished.append(
            FinishedJob(job.job_id, True, sorted(job.failed), job.payload_bytes, seconds)
        )

    def _complete_writes(self, job: _Write, operation: Int64, events: npt.NDArray[np.void]) -> None:
        good = events["result"] == 0
        written = operation[good]
        if written.size:
            # A chunk of an epoch that is over must not be found after a restart.
            if job.epoch == self._epoch:
                self._record(_select(job.headers, written), events["crc"][good])
            for write_id in job.write_id[written]:
                _count(self._report.finished_writes, int(write_id))
        self.refuse_writes(job.write_id[operation[~good]])
        job.failed += [int(i) for i in job.position[operation[~good]]]

    def _record(self, headers: _Headers, crc: npt.NDArray[np.uint32]) -> None:
        """Remember the checksums of written chunks and mark their headers for writing."""
        for index in np.unique(headers.device):
            chosen = np.flatnonzero(headers.device == index)
            part = _select(headers, chosen)
            rows = self._devices[index].record(
                part.slot,
                part.keys,
                part.parents,
                part.positions,
                part.group,
                self._lengths[part.group],
                crc[chosen],
            )
            dirty = self._dirty_headers[index]
            dirty.update((int(row[0]), (int(row[1]), int(row[2]))) for row in rows)

    def _release_pages(self, job: _Write) -> None:
        """Tell the caller, once, that a store's source pages may be reused."""
        if job.is_store and not job.released and bool(job.staged.all()):
            job.released = True
            seconds = time.monotonic() - job.started_s
            self._report.store_seconds.append(seconds)
            self._finished.append(
                FinishedJob(job.job_id, False, list(job.failed), job.payload_bytes, seconds)
            )

    def _write_headers(self) -> None:
        for index, dirty in enumerate(self._dirty_headers):
            busy = self._written_headers[index]
            ready = [offset for offset in dirty if offset not in busy]
            if not ready:
                continue
            ops = self._operations(len(ready))
            ops["kind"], ops["keep"] = native.KIND_WRITE, native.NO_DEVICE
            ops["device"] = self._engine_index[index]
            ops["offset"] = ready
            ops["buffer"] = [dirty[offset][0] for offset in ready]
            ops["length"] = [dirty[offset][1] for offset in ready]
            job = _HeaderWrite(
                first_tag=self._next_tag, count=len(ready), device=index, offsets=ready
            )
            if self._submit(job, ops, _NO_BLOCKS):
                busy.update(ready)
                for offset in ready:
                    del dirty[offset]

    # ---- for the caller ---------------------------------------------------------------------

    def take_finished(self) -> list[FinishedJob]:
        """Return the jobs that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_report(self) -> WorkerReport:
        """Return what happened since the last call, for the orchestrator."""
        report, self._report = self._report, WorkerReport()
        for index, device in enumerate(self._devices):
            now, before = self._engine.statistics(device.index), self._reported[index]
            if now != before:
                report.counters[(index, self._rank)] = _difference(now, before)
                self._reported[index] = now
        return report

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something completed, at most `timeout_s`; False on time-out."""
        return self._engine.wait(timeout_s)

    def release_stores(self, job_ids: set[int]) -> None:
        """End the named stores now: what is not being staged yet is dropped."""
        for job in list(self._jobs.values()):
            if isinstance(job, _Write) and job.is_store and job.job_id in job_ids:
                self._engine.cancel_stores(job.first_tag, job.first_tag + job.count - 1)

    def refuse_writes(self, write_ids: Iterable[np.int64]) -> None:
        """Acknowledge writes as failed that will not be made, or did not succeed."""
        for write_id in write_ids:
            _count(self._report.failed_writes, int(write_id))

    def unfinished(self, job_ids: set[int]) -> set[int]:
        """Return those of the named jobs whose pages are still in use."""
        return {
            job.job_id
            for job in self._jobs.values()
            if job.job_id in job_ids
            and (isinstance(job, _Load) or (isinstance(job, _Write) and not job.released))
        }

    def busy(self) -> bool:
        """Whether operations are queued or in flight."""
        return bool(self._jobs) or any(self._dirty_headers)

    def set_epoch(self, epoch: int) -> None:
        """Make all that was stored before `epoch` invalid, durably where the device can."""
        if epoch != self._epoch:
            self._epoch = epoch
            for device in self._devices:
                device.set_epoch(epoch)

    def close(self) -> None:
        """Close engine and devices. What is queued is dropped, what is in flight ends first."""
        self._engine.close()
        for device in self._devices:
            device.close()


def _select(headers: _Headers, chosen: Int64) -> _Headers:
    return _Headers(
        headers.group[chosen],
        headers.device[chosen],
        headers.slot[chosen],
        [headers.keys[i] for i in chosen],
        [headers.parents[i] for i in chosen],
        headers.positions[chosen],
    )


def _count(counts: dict[int, int], key: int) -> None:
    counts[key] = counts.get(key, 0) + 1


def _difference(now: native.Statistics, before: native.Statistics) -> DeviceCounters:
    return DeviceCounters(
        bytes_read=now.bytes_read - before.bytes_read,
        bytes_written=now.bytes_written - before.bytes_written,
        read_busy_s=(now.read_busy_ns - before.read_busy_ns) / 1e9,
        write_busy_s=(now.write_busy_ns - before.write_busy_ns) / 1e9,
        saturated_read_bytes=now.saturated_read_bytes - before.saturated_read_bytes,
        saturated_read_s=(now.saturated_read_ns - before.saturated_read_ns) / 1e9,
        read_failures=now.read_failures - before.read_failures,
        write_failures=now.write_failures - before.write_failures,
        checksum_failures=now.checksum_failures - before.checksum_failures,
        queue_depth=now.queue_depth,
    )
