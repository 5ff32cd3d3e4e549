"""A random engine over faulty files: what is loaded is right, or a miss, whatever the files do."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpool.faults import FaultKind
from kvpool.jobs import FinishedJob
from kvpool.orchestrator import Orchestrator, RequestState
from kvpool.placement import POLICIES
from kvpool.plan import Int32, LoadPlan, StorePlan, merge_reports
from kvpool.types import (
    NO_DEVICE,
    DeviceState,
    Geometry,
    GroupKind,
    Key,
    Outcome,
    Profile,
    WorkerReport,
)
from tests.control.rig import check_contiguous, check_table, ends, key, pool_of
from tests.dataplane.fault_ranks import (
    BLOCKS_PER_CHUNK,
    FILLER,
    FRAMES,
    GROUPS,
    HANG_S,
    SLOT_BYTES,
    TOKENS,
    FaultRates,
    Rank,
)

# Each letter stands for a chunk, the last one for all that follow: some share their beginnings.
DOCUMENTS = tuple(
    root * shared + branch
    for root in "abcdefghij"
    for shared, branch in ((1, ""), (5, "x"), (2, "y"))
)
CHUNKS = 20
CHECK_EVERY = 25
WRITES_ONLY = (FaultKind.TORN, FaultKind.STALE, FaultKind.FULL)
# What the device itself refuses makes it leave the pool soon; what it does in silence does not.
LOUD = (FaultKind.ERROR, FaultKind.SHORT, FaultKind.FULL)


@dataclass
class Running:
    document: str
    state: RequestState
    tokens: int = 0
    load: Job | None = None


@dataclass
class Job:
    """A store or load that some ranks have not ended."""

    request: Running
    plan: StorePlan | LoadPlan
    keys: list[Key]
    frames: list[int]
    blocks: Int32
    versions: list[int]
    ranks_left: set[int]

    @property
    def is_load(self) -> bool:
        return isinstance(self.plan, LoadPlan)


def random_rates(rng: random.Random) -> FaultRates:
    """Return rates for some kinds of faults."""
    loudest = rng.choice((1000, 1000, 1000, 12000))

    def chosen(reads: bool) -> dict[FaultKind, int]:
        rates = {}
        for kind in FaultKind:
            most = loudest if kind in LOUD else 500 if kind is FaultKind.STUCK else 5000
            wanted = rng.random() < 0.4 and kind is not FaultKind.LOST
            if wanted and not (reads and kind in WRITES_ONLY):
                rates[kind] = rng.randint(1, most)
        return rates

    return FaultRates(chosen(True), chosen(False))


class FaultHistory:
    """One pool from its start to its end; `run` takes random steps. Raises AssertionError."""

    def __init__(self, folder: Path, ranks: int, seed: str) -> None:
        self.rng = rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.paths = [folder / name for name in "ab"]
        self.sizes = [rng.choice((8, 10, 14)) << 20 for _ in self.paths]
        files = [f"file:{p}?size={s}" for p, s in zip(self.paths, self.sizes, strict=True)]
        devices = [f"dram:{2 * ranks * rng.choice((1, 1, 2))}MiB", *files]
        groups = rng.choice(GROUPS)
        self.geometry = Geometry(groups, BLOCKS_PER_CHUNK, SLOT_BYTES)
        buffers, entries = rng.choice((2, 4, 16)), rng.choice((24, 64, 1024))
        volatile_bytes = rng.choice((0, 0, 8 << 20))  # a crash at the end
        limits = (ranks, buffers, entries, volatile_bytes)
        self._open = partial(Rank, devices, self.geometry, *limits)
        self.policy, self.backup = rng.choice(POLICIES), rng.random() < 0.6
        self.speeds = [rng.choice((1e9, 4e9, 8e9)), 1e9, rng.choice((1e9, 2e9))]
        self.crashes, self.restarted = volatile_bytes > 0, False
        self.all_versions: dict[Key, list[int]] = {}
        self._start(ranks)
        self.running: list[Running] = []
        self.jobs: dict[int, Job] = {}
        self.versions: dict[Key, int] = {}
        self.frames = list(range(FRAMES))
        self.last_job = self.last_version = self.step = 0
        self.healthy = rng.random() < 0.2  # files that never fail
        self.break_files()

    def _start(self, ranks: int) -> None:
        """Open the devices and take in what is on them."""
        self.ranks = [self._open(rank=rank) for rank in range(ranks)]
        self.orchestrator = Orchestrator(self.geometry, ranks, self.policy, self.backup)
        profiles = [Profile(speed, speed, 1e-4, speed) for speed in self.speeds]
        reports = [d.report(p) for d, p in zip(self.ranks[0].devices, profiles, strict=True)]
        survivors = [[device.survivors for device in rank.devices] for rank in self.ranks]
        self.seen["restored"] += sum(self.orchestrator.attach(reports, survivors))

    # ---- what an engine does ----

    def begin(self) -> None:
        if len(self.running) < 6:
            document = self.rng.choice(DOCUMENTS)
            self.running.append(Running(document, self.orchestrator.begin(str(self.step))))

    def _ready(self) -> Running | None:
        ready = [request for request in self.running if request.load is None]
        return self.rng.choice(ready) if ready else None

    def compute(self) -> None:
        """Some chunks of a request are computed and offered."""
        request, count = self._ready(), self.rng.randint(1, 8)
        if request is None or len(self.frames) < count * len(self.geometry.groups):
            return
        end = min(request.tokens + count * TOKENS, CHUNKS * TOKENS)
        keys, positions = [], []
        for i, group in enumerate(self.geometry.groups):
            for position in ends(group, request.tokens, end):
                keys.append(key(request.document, i, position))
                positions.append(position)
        request.tokens = end
        plan = self.orchestrator.reserve(keys, positions, request.state)
        if plan.keys:
            self._submit_store(request, plan)

    def _submit_store(self, request: Running, plan: StorePlan) -> None:
        job = self._job(request, plan, plan.keys)
        for i, chunk_key in enumerate(plan.keys):
            self.last_version += 1
            self.versions[chunk_key] = job.versions[i] = self.last_version
            self.all_versions.setdefault(chunk_key, []).append(self.last_version)
        if self.rng.random() < 0.03:  # vLLM left a block out
            job.blocks[self.rng.randrange(job.blocks.size)] = -1
        for rank in self.ranks:
            rank.inbox.append(partial(self._store_on, rank, self.last_job, job, plan))

    def _store_on(self, rank: Rank, number: int, job: Job, plan: StorePlan) -> None:
        for frame, chunk_key, version in zip(job.frames, job.keys, job.versions, strict=True):
            rank.chunk(frame, chunk_key[-1])[:] = rank.expected(chunk_key, version)
        rank.plane.submit_store(number, plan, job.blocks)

    def _job(self, request: Running, plan: StorePlan | LoadPlan, keys: list[Key]) -> Job:
        frames = [self.frames.pop() for _ in keys]
        first = np.array(frames, np.int32).reshape(-1, 1) * BLOCKS_PER_CHUNK
        blocks = (first + np.arange(BLOCKS_PER_CHUNK, dtype=np.int32)).reshape(-1)
        versions = [self.versions.get(chunk_key, 0) for chunk_key in keys]
        everyone = set(range(len(self.ranks)))
        self.last_job += 1
        self.jobs[self.last_job] = Job(request, plan, keys, frames, blocks, versions, everyone)
        return self.jobs[self.last_job]

    def load(self) -> None:
        """A request loads what is there of it, behind chunks that the accelerator may have."""
        request = self._ready()
        if request is None:
            return
        first = self.rng.choice((0, 0, 0, 1, 4)) * TOKENS
        keys = self._keys_to_load(request, first)
        if self.rng.random() < 0.05:  # a chunk that is gone by the time of the plan
            keys.append(key("zz", 0, TOKENS))
        if not keys or len(self.frames) < len(keys):
            return
        plan = self.orchestrator.plan_load(keys, request.state)
        request.load = job = self._job(request, plan, keys)
        skipped = [i for i in range(job.blocks.size) if self.rng.random() < 0.02]
        job.blocks[skipped] = -1
        for rank in self.ranks:
            rank.inbox.append(partial(self._load_on, rank, self.last_job, job, plan))

    def _load_on(self, rank: Rank, number: int, job: Job, plan: LoadPlan) -> None:
        rank.frames[job.frames] = FILLER
        rank.plane.submit_load(number, plan, job.blocks)

    def _keys_to_load(self, request: Running, first: int) -> list[Key]:
        groups, keys = self.geometry.groups, []
        end = min(
            self._hit_end(request, i, first)
            for i, group in enumerate(groups)
            if group.kind is GroupKind.FULL
        )
        for i, group in enumerate(groups):
            wanted = ends(group, first, end)
            if group.kind is not GroupKind.FULL:
                wanted = wanted[-(group.window_chunks or 1) :]
            keys += [key(request.document, i, position) for position in wanted]
        return [k for k in keys if self.orchestrator.lookup(k, request.state) is Outcome.HIT]

    def _hit_end(self, request: Running, i: int, first: int) -> int:
        last = first
        for end in ends(self.geometry.groups[i], first, CHUNKS * TOKENS):
            found = self.orchestrator.lookup(key(request.document, i, end), request.state)
            if found is not Outcome.HIT:
                break
            last = end
        return last

    def spill(self) -> None:
        moves = self.orchestrator.take_moves()
        if moves is not None:
            for rank in self.ranks:
                rank.inbox.append(partial(rank.plane.submit_moves, moves))

    def finish(self) -> None:
        """A request ends, perhaps with its load and stores under way."""
        if self.running:
            request = self.running.pop(self.rng.randrange(len(self.running)))
            self.orchestrator.finish(request.state)

    def preempt(self) -> None:
        """Pages of stores are needed at once: that takes no longer, even if a file is stuck."""
        stores = [number for number, job in self.jobs.items() if not job.is_load]
        if not stores:
            return
        chosen = set(self.rng.sample(stores, min(2, len(stores))))
        for rank in self.ranks:
            rank.catch_up()
            rank.plane.release_stores(chosen)
            deadline_s = time.monotonic() + HANG_S
            while rank.plane.unfinished(chosen):
                assert time.monotonic() < deadline_s, "a released store keeps its pages"
                rank.plane.wait(0.1)
                rank.plane.poll()
            self.pump(rank)

    def reset(self) -> None:
        """Other weights: nothing from before may be read."""
        moves = self.orchestrator.take_moves()
        self.orchestrator.reset()
        for rank in self.ranks:
            begin = partial(rank.begin_epoch, self.orchestrator.epoch, self.last_version + 1)
            rank.inbox.append(begin)
            if moves is not None:
                rank.inbox.append(partial(rank.plane.submit_moves, moves))
        for request in self.running:
            request.tokens, request.load = 0, None
        self.seen["reset"] += 1
        self.check()

    # ---- what files do ----

    def break_files(self) -> None:
        if self.healthy:
            return
        rates = random_rates(self.rng)
        for rank in self.ranks:
            rank.break_files(self.rng.getrandbits(32), rates)

    def release(self) -> None:
        for rank in self.ranks:
            for device in rank.files:
                rank.engine.release_stuck(device.index)

    # ---- what workers say ----

    def pump(self, rank: Rank) -> None:
        if self.rng.random() < 0.7:
            rank.catch_up()
        rank.plane.poll()
        self._take_finished(rank)
        rank.collect()

    def _take_finished(self, rank: Rank) -> None:
        for finished in rank.plane.take_finished():
            job = self.jobs[finished.job_id]
            assert finished.is_load == job.is_load and rank.rank in job.ranks_left
            job.ranks_left.discard(rank.rank)
            if job.is_load:
                self._check_load(rank, job, finished)
            rank.frames[job.frames] = FILLER  # whoever gets the pages next writes to them
            if not job.ranks_left and not job.is_load:
                self._end_job(finished.job_id)

    def _end_job(self, number: int) -> None:
        self.frames += self.jobs.pop(number).frames

    def _check_load(self, rank: Rank, job: Job, finished: FinishedJob) -> None:
        failed = set(finished.failed)
        self._check_reasons(job, failed)
        for i, (frame, chunk_key) in enumerate(zip(job.frames, job.keys, strict=True)):
            pages = rank.chunk(frame, chunk_key[-1])
            possible = self._possible(rank, chunk_key, job.versions[i])
            wanted = job.blocks.reshape(-1, BLOCKS_PER_CHUNK)[i] >= 0
            where = f"rank {rank.rank}, chunk {i} of {len(job.keys)}, {chunk_key.hex()}"
            if i in failed:
                assert all(not page.any() or (page == FILLER).all() for page in pages), where
            else:
                right = any((pages[wanted] == each[wanted]).all() for each in possible)
                assert right, f"{where}: wrong bytes"
                self.seen["loaded"] += 1
            assert (pages[~wanted] == FILLER).all(), f"{where}: a page that was not asked for"

    def _possible(
        self, rank: Rank, chunk_key: Key, version: int
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield what may be loaded; after a restart, what was stored since the last reset."""
        if not self.restarted:
            yield rank.expected(chunk_key, version)
            return
        for each in self.all_versions[chunk_key]:
            if each >= rank.oldest_version:
                yield rank.expected(chunk_key, each)

    def _check_reasons(self, job: Job, failed: set[int]) -> None:
        """Chunks fail where a file did, or were gone; or the whole load where a queue was full."""
        if len(failed) == len(job.keys):
            return
        for i in failed:
            device = job.plan.device[i]
            can_fail = device == NO_DEVICE or (device > 0 and not self.healthy)
            assert can_fail, f"chunk {i} of {len(job.keys)} failed on device {device}"

    def deliver(self) -> None:
        """The scheduler reads some ranks' mail, then ends the loads that are over."""
        chosen = self.rng.sample(self.ranks, self.rng.randint(1, len(self.ranks)))
        report = WorkerReport()
        for rank in chosen:
            report = merge_reports(report, rank.take_mail())
        self.orchestrator.acknowledge(report)
        self.seen["lost devices"] += len(self.orchestrator.take_announcements())
        by_load = {
            job.plan.load_id: job for job in self.jobs.values() if isinstance(job.plan, LoadPlan)
        }
        for load_id, positions in report.failed_loads.items():
            self._check_misses(by_load[load_id], positions)
        for number, job in list(self.jobs.items()):
            if job.is_load and not job.ranks_left and not any(rank.mail for rank in self.ranks):
                self._end_load(number, job)

    def _check_misses(self, job: Job, positions: set[int]) -> None:
        looker = self.orchestrator.begin("looker")
        for i in positions:
            self.seen["failed loads"] += 1
            planned = job.plan.device[i] != NO_DEVICE
            if planned and self.versions.get(job.keys[i], 0) == job.versions[i]:
                found = self.orchestrator.lookup(job.keys[i], looker)
                assert found is Outcome.MISS, f"{job.keys[i].hex()} failed and is a {found}"

    def _end_load(self, number: int, job: Job) -> None:
        if job.request.load is job:
            job.request.load = None
            self.orchestrator.complete_load(job.request.state)
        self._end_job(number)

    # ---- the whole ----

    def run(self, steps: int) -> Counter[str]:
        """Take `steps` steps and come to an end; return what happened."""
        weights = {
            self.begin: 14,
            self.compute: 30,
            self.load: 18,
            self.spill: 14,
            lambda: self.pump(self.rng.choice(self.ranks)): 30,
            self.deliver: 24,
            self.finish: 8,
            self.release: 4,
            self.preempt: 2,
            self.break_files: 1,
            self.reset: 0.3,
        }
        actions, shares = list(weights), list(weights.values())
        for self.step in range(steps):
            self.rng.choices(actions, shares)[0]()
            if self.step % CHECK_EVERY == 0:
                self.check()
        if self.crashes:
            self.crash()
        self.end()
        return self.seen

    def crash(self) -> None:
        """In the middle of its work the machine dies, and starts again with files that work."""
        oldest = [rank.oldest_version for rank in self.ranks]
        for rank in self.ranks:
            rank.crash()
        self._count()
        self.close()
        self._start(len(self.ranks))
        for rank, version in zip(self.ranks, oldest, strict=True):
            rank.oldest_version = version
        self.restarted, self.healthy = True, False
        self.running, self.jobs, self.frames = [], {}, list(range(FRAMES))

    def check(self) -> None:
        check_table(self.orchestrator)
        check_contiguous(self.orchestrator, DOCUMENTS, CHUNKS * TOKENS)
        for path, size in zip(self.paths, self.sizes, strict=True):
            assert os.stat(path / "container.kvpool").st_size <= size
        for row in self.orchestrator.snapshot().devices:
            assert 0 <= row.chunks <= row.slots_used <= row.slots - row.retired_slots

    def drain(self) -> None:
        """Mend the files and wait until nothing is under way; a hang fails."""
        deadline_s = time.monotonic() + HANG_S
        for rank in self.ranks:
            rank.engine.mend_files()
        while self._under_way():
            assert time.monotonic() < deadline_s, f"hangs: {self._under_way()}"
            self.spill()
            for rank in self.ranks:
                rank.catch_up()
                rank.plane.wait(0.01)
                self.pump(rank)
            self.deliver()

    def _under_way(self) -> str:
        """Say what is not over; "": all is."""
        busy = [r.rank for r in self.ranks if r.plane.busy() or r.mail or r.inbox]
        pending = self.orchestrator.pending_work()
        return f"{busy=} {pending=} {len(self.jobs)=}" if busy or pending or self.jobs else ""

    def end(self) -> None:
        """All work ends; every slot is free, retired, or held by a chunk that can be read."""
        self.drain()
        self.check()
        for rank in self.ranks:
            rank.check_idle()
        table = pool_of(self.orchestrator).table
        assert not table.pins_view.any() and len(self.frames) == FRAMES
        for slots in table.slots:
            assert slots.doomed == 0
        self._count()
        self._load_everything()
        self.orchestrator.reset()
        for slots in table.slots:
            assert len(slots.free) == slots.capacity - slots.retired

    def _load_everything(self) -> None:
        """Each chunk that counts as readable is, or turns out not to be; never another's bytes."""
        for document in DOCUMENTS:
            request = Running(document, self.orchestrator.begin("last"))
            self.running = [request]
            for _ in range(2):
                self.load()
                self.drain()

    def _count(self) -> None:
        now = self.orchestrator.snapshot()
        self.seen.update(
            stored=now.stored_chunks,
            dropped=now.dropped_store_chunks,
            evicted=now.evicted_chunks,
            spilled=now.spilled_chunks,
            returned=now.returned_chunks,
            backed_up=now.backed_up_chunks,
            retired=sum(row.retired_slots for row in now.devices),
        )
        for rank in self.ranks:
            for kind, count in rank.engine.faults().items():
                self.seen[kind.name] += count
        failed = [row.state is DeviceState.FAILED for row in now.devices]
        assert not failed[0], "memory does not fail"

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
