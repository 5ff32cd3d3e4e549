"""The data plane of one rank: executes plans on devices through the native engine.

It moves bytes and decides nothing. One native call hands over a plan's operations as arrays;
completions come back in batches. The caller owns one thread for all methods.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvpool import native
from kvpool.devices.base import Device
from kvpool.errors import DeviceError, QueueFullError
from kvpool.jobs import FinishedJob, Headers, HeaderWrite, Job, Load, Write, header_blocks
from kvpool.plan import Int32, Int64, LoadPlan, MovePlan, StorePlan, UInt8
from kvpool.reporter import Reporter
from kvpool.stalls import STALLED_S, StallWatch
from kvpool.trials import Trial, TrialJob
from kvpool.types import NO_DEVICE, Geometry, WorkerReport

UInt64 = npt.NDArray[np.uint64]

_NO_BLOCKS = np.empty(0, dtype=np.int32)
# Kept from being freed, since a device might still read or write it.
_left_behind: list[tuple[native.Engine, list[Device], dict[int, Job]]] = []


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
        stalled_s: float = STALLED_S,
    ) -> None:
        self._engine, self._devices, self._rank = engine, list(devices), rank
        self._engine_index = np.array([device.index for device in devices], dtype=np.uint32)
        self._lengths = np.array([g.chunk_bytes for g in geometry.groups], dtype=np.uint32)
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._jobs: dict[int, Job] = {}  # by first tag, which only grows
        self._next_tag = 0
        self._epoch = 0
        self._finished: list[FinishedJob] = []
        self._reporter = Reporter(engine, self._devices, rank)
        self._watch = StallWatch(len(devices), stalled_s)
        self._watch_pause_s, self._watch_next_s = min(stalled_s / 4, 0.5), 0.0
        self._on_trial: set[int] = set()
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
        job = Load(
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
        if not job.count:
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
        headers = Headers(
            plan.group, plan.device, plan.slot, plan.keys, plan.parents, plan.positions
        )
        missing = np.setdiff1d(np.arange(shaped.shape[0]), complete)
        self.refuse_stores(plan, missing)
        job = self._submit_writes(job_id, True, ops, plan.write_id, headers, complete, blocks)
        job.plan = plan
        if job.failed:  # a full queue
            self._refuse_backups(plan, complete)
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
        headers = Headers(
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

    def _submit(self, job: Job, ops: npt.NDArray[np.void], blocks: Int32) -> bool:
        """Queue `ops` as `job`. A full queue refuses the whole job: False, nothing is queued."""
        if ops.size:
            try:
                self._engine.submit(ops, blocks)
            except QueueFullError:
                job.count = 0
                return False
            self._next_tag += ops.size
            job.ended = np.zeros(ops.size, np.bool_)
            self._jobs[job.first_tag] = job
        return True

    def _submit_writes(
        self,
        job_id: int,
        is_store: bool,
        ops: npt.NDArray[np.void],
        write_id: Int64,
        headers: Headers,
        chosen: Int64,
        blocks: Int32,
    ) -> Write:
        ops["length"] = self._lengths[ops["group"]]
        job = Write(
            job_id=job_id,
            first_tag=self._next_tag,
            count=int(ops.size),
            payload_bytes=int(ops["length"].sum()),
            position=chosen,
            is_store=is_store,
            write_id=write_id[chosen],
            headers=headers.select(chosen),
            staged=np.zeros(ops.size, dtype=np.bool_),
        )
        if not self._submit(job, ops, blocks):
            self._reporter.fail_writes(job.write_id)
            job.failed = [int(position) for position in chosen]
            job.staged = np.empty(0, np.bool_)
        return job

    # ---- completions ------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what the engine completed since the last call. Does not block."""
        while (events := self._engine.poll()).size:
            first_tags = np.fromiter(self._jobs, dtype=np.int64, count=len(self._jobs))
            owner = np.searchsorted(first_tags, events["tag"].astype(np.int64), side="right") - 1
            for index in np.unique(owner[owner >= 0]):
                job = self._jobs[int(first_tags[index])]
                self._complete(job, events[owner == index])
        self._write_headers()
        self._look_for_stalls()

    def poll_devices(self) -> None:
        """As `poll`."""
        self.poll()

    @property
    def eventfd(self) -> int:
        """A file descriptor that is readable while `poll` has something to take in."""
        return self._engine.eventfd

    def _complete(self, job: Job, events: npt.NDArray[np.void]) -> None:
        operation = (events["tag"] - np.uint64(job.first_tag)).astype(np.int64)
        # An answer may come late: when its operation was given up, or the whole job is over.
        operation, events = operation[operation < job.count], events[operation < job.count]
        timely = ~job.ended[operation]
        operation, events = operation[timely], events[timely]
        if not operation.size:
            return
        done = events["kind"] != native.EVENT_STAGED
        job.ended[operation[done]] = True
        if isinstance(job, Load):
            self._complete_load(job, operation, events)
        elif isinstance(job, Write):
            job.staged[operation] = True
            self._complete_writes(job, operation[done], events[done])
            self._release_pages(job)
        elif isinstance(job, HeaderWrite):
            self._written_headers[job.device].difference_update(job.offsets[i] for i in operation)
            self._reporter.note_errors(np.full(operation.size, job.device), events)
        elif isinstance(job, TrialJob):
            self._go_on_with_trial(job, int(events["result"][0]))
        if job.ended.all():
            del self._jobs[job.first_tag]
            if isinstance(job, Load):
                self._end_load(job)

    def _complete_load(self, job: Load, operation: Int64, events: npt.NDArray[np.void]) -> None:
        position = job.position[operation]
        bad = position[events["result"] != 0]
        self._reporter.note_errors(job.plan.device[position], events)
        job.failed += [job.first_position + int(i) for i in bad]
        wrong = position[(events["result"] != 0) & (events["result"] != -errno.ETIMEDOUT)]
        self._forget(job.plan.device[wrong], job.plan.slot[wrong])
        kept = events["kept"] != 0
        for device, slot, crc, write_id in zip(
            job.plan.keep_device[position[kept]],
            job.plan.keep_slot[position[kept]],
            events["crc"][kept],
            job.plan.keep_write_id[position[kept]],
            strict=True,
        ):
            self._devices[device].checksums[slot] = crc
            self._reporter.finish_writes([write_id])
        self._fail_keeps(job.plan, position[~kept])

    def _forget(self, device: UInt8, slot: Int32) -> None:
        # A restart would find these chunks again, in place of the copies that are stored now.
        for index in np.unique(device):
            rows = self._devices[index].forget(slot[device == index])
            self._dirty_headers[index].update(header_blocks(rows))

    def _fail_keeps(self, plan: LoadPlan, position: Int64) -> None:
        asked = plan.keep_device[position] != NO_DEVICE
        self._reporter.fail_writes(plan.keep_write_id[position[asked]])

    def _end_load(self, job: Load) -> None:
        seconds = time.monotonic() - job.started_s
        self._reporter.end_load(job.plan.load_id, job.failed, job.last_part, seconds)
        self._finished.append(
            FinishedJob(job.job_id, True, sorted(job.failed), job.payload_bytes, seconds)
        )

    def _complete_writes(self, job: Write, operation: Int64, events: npt.NDArray[np.void]) -> None:
        good = events["result"] == 0
        self._reporter.note_errors(job.headers.device[operation], events)
        written = operation[good]
        if written.size:
            self._record(job.headers.select(written), events["crc"][good])
            self._reporter.finish_writes(job.write_id[written])
        self._reporter.fail_writes(job.write_id[operation[~good]])
        job.failed += [int(i) for i in job.position[operation[~good]]]
        if job.plan is not None:
            self._refuse_backups(job.plan, job.position[operation[~good]])
            if (moves := job.plan.backups(job.position[written])).device.size:
                self.submit_moves(moves)

    def _refuse_backups(self, plan: StorePlan, positions: Int64) -> None:
        self._reporter.fail_writes(plan.backups(positions).write_id)

    def _record(self, headers: Headers, crc: npt.NDArray[np.uint32]) -> None:
        """Remember the checksums of written chunks and mark their headers for writing."""
        for index in np.unique(headers.device):
            chosen = np.flatnonzero(headers.device == index)
            part = headers.select(chosen)
            if self._epoch:
                # After a reset the weights may be others than those on disk, which name the
                # namespace: what is stored from then on is for this process alone.
                self._devices[index].checksums[part.slot] = crc[chosen]
                continue
            rows = self._devices[index].record(
                part.slot,
                part.keys,
                part.parents,
                part.positions,
                part.group,
                self._lengths[part.group],
                crc[chosen],
            )
            self._dirty_headers[index].update(header_blocks(rows))

    def _release_pages(self, job: Write) -> None:
        """Tell the caller, once, that a store's source pages may be reused."""
        if job.is_store and not job.released and bool(job.staged.all()):
            job.released = True
            seconds = time.monotonic() - job.started_s
            self._reporter.release_store(seconds)
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
            job = HeaderWrite(
                first_tag=self._next_tag, count=len(ready), device=index, offsets=ready
            )
            if self._submit(job, ops, _NO_BLOCKS):
                busy.update(ready)
                for offset in ready:
                    del dirty[offset]

    # ---- devices that fail ------------------------------------------------------------------

    def _look_for_stalls(self, *, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if now_s < self._watch_next_s and not at_once:
            return
        self._watch_next_s = now_s + self._watch_pause_s
        for index, device in enumerate(self._devices):
            statistics = self._engine.statistics(device.index)
            if self._watch.observe(index, statistics.done, statistics.queue_depth, now_s):
                self._give_up(index)

    def _give_up(self, index: int) -> None:
        """End all that a device owes: it does not answer. What it does later changes no page."""
        self._reporter.stalled(index)
        self._engine.abandon_loads(self._devices[index].index)
        for job in list(self._jobs.values()):
            if not isinstance(job, Write | HeaderWrite):
                continue
            on_it = (job.headers.device if isinstance(job, Write) else job.devices()) == index
            tags = job.first_tag + np.flatnonzero(on_it & ~job.ended)
            for tag in tags:
                self._engine.cancel_stores(int(tag), int(tag))
            events = np.zeros(tags.size, native.EVENT_DTYPE)
            events["tag"], events["kind"] = tags, native.EVENT_ABANDONED
            events["result"] = -errno.ETIMEDOUT
            self._complete(job, events)

    def try_devices(self, indices: Iterable[int]) -> None:
        """Try whether devices that failed work again; the report says it once that is known."""
        for index in indices:
            if index not in self._on_trial:
                self._on_trial.add(index)
                self._continue(Trial(index, self._devices[index].probe_target, self._rank))

    def _continue(self, trial: Trial) -> None:
        job = TrialJob(first_tag=self._next_tag, count=1, trial=trial)
        if not self._submit(job, trial.operation(self._next_tag), _NO_BLOCKS):
            self._end_trial(trial, ok=False)

    def _go_on_with_trial(self, job: TrialJob, result: int) -> None:
        trial = job.trial
        if result == 0 and not trial.reading:
            trial.reading = True
            self._continue(trial)
        else:
            self._end_trial(trial, ok=result == 0 and trial.passed())

    def _end_trial(self, trial: Trial, ok: bool) -> None:
        self._on_trial.discard(trial.device)
        self._reporter.end_trial(trial.device, ok)

    # ---- for the caller ---------------------------------------------------------------------

    def take_finished(self) -> list[FinishedJob]:
        """Return the jobs that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_report(self) -> WorkerReport:
        """Return what happened since the last call, for the orchestrator."""
        return self._reporter.take()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something completed, at most `timeout_s`; False on time-out."""
        return self._engine.wait(timeout_s)

    def release_stores(self, job_ids: set[int]) -> None:
        """End the named stores now: what is not being staged yet is dropped."""
        for job in list(self._jobs.values()):
            if isinstance(job, Write) and job.is_store and job.job_id in job_ids:
                self._engine.cancel_stores(job.first_tag, job.first_tag + job.count - 1)

    def refuse_stores(self, plan: StorePlan, positions: Int64) -> None:
        """Acknowledge as failed the stores at `positions` of a plan, and their backups."""
        self._reporter.fail_writes(plan.write_id[positions])
        self._refuse_backups(plan, positions)

    def unfinished(self, job_ids: set[int]) -> set[int]:
        """Return those of the named jobs whose pages are still in use."""
        return {
            job.job_id
            for job in self._jobs.values()
            if job.job_id in job_ids
            and (isinstance(job, Load) or (isinstance(job, Write) and not job.released))
        }

    def busy(self) -> bool:
        """Whether operations are queued or in flight."""
        return bool(self._jobs) or any(self._dirty_headers)

    def set_epoch(self, epoch: int) -> None:
        """Make all that was stored before `epoch` invalid, durably where the device can.

        One that cannot is reported; what it holds is of the weights that its namespace tells.
        """
        if epoch == self._epoch:
            return
        self._epoch = epoch
        for index, device in enumerate(self._devices):
            try:
                device.set_epoch(epoch)
            except DeviceError as error:
                self._reporter.refused(index, error.errno or errno.EIO)

    def drain(self, timeout_s: float) -> bool:
        """Bring to its end what was submitted, backups and headers too; False on time-out."""
        deadline_s = time.monotonic() + timeout_s
        self.poll()
        while self.busy() and (left_s := deadline_s - time.monotonic()) > 0:
            self.wait(left_s)
            self.poll()
        return not self.busy()

    def close(self) -> None:
        """Close engine and devices. What is queued is dropped, what is in flight ends first.

        What a device owes that does not answer might come any time, so all is left as it is.
        """
        self._look_for_stalls(at_once=True)
        if self._watch.any_stalled:
            _left_behind.append((self._engine, self._devices, self._jobs))
            return
        self._engine.close()
        for device in self._devices:
            with contextlib.suppress(DeviceError):
                device.close()
