"""What the control plane's tests share: small pools, documents, and a data plane made of dicts."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.orchestrator import Orchestrator, RequestState
from kvpool.plan import LoadPlan, MovePlan, StorePlan
from kvpool.pool import Pool, WriteKind
from kvpool.table import BACKING, BUSY, DOOMED, FREE, HELD, READABLE, WRITING, Table
from kvpool.types import (
    NO_DEVICE,
    DeviceCounters,
    DeviceReport,
    Geometry,
    GroupGeometry,
    GroupKind,
    Key,
    Outcome,
    Profile,
    WorkerReport,
)

TOKENS = 16
SIZE = 1 << 20

FULL = GroupGeometry(GroupKind.FULL, TOKENS, SIZE)
WIDE_FULL = GroupGeometry(GroupKind.FULL, 2 * TOKENS, SIZE // 2)
WINDOW = GroupGeometry(GroupKind.WINDOW, TOKENS, SIZE // 2, 3)
STATE = GroupGeometry(GroupKind.STATE, TOKENS, SIZE // 4, 1)


def geometry(*groups: GroupGeometry) -> Geometry:
    return Geometry(groups or (FULL,), 1, SIZE)


def device(name: str, slots: int, bandwidth: float, together: float | None = None) -> DeviceReport:
    """A device whose kind is its name without digits; bandwidths in GB/s."""
    together = bandwidth if together is None else together
    profile = Profile(bandwidth * 1e9, bandwidth * 1e9, 1e-4, together * 1e9)
    return DeviceReport(name, name.rstrip("0123456789"), slots, SIZE, profile)


def pool_of(orchestrator: Orchestrator) -> Pool:
    assert orchestrator._pool is not None
    return orchestrator._pool


def make(
    devices: Sequence[DeviceReport],
    groups: Sequence[GroupGeometry] = (FULL,),
    ranks: int = 1,
    placement: str = "proportional",
    backup: bool = False,
) -> Orchestrator:
    orchestrator = Orchestrator(geometry(*groups), ranks, placement, backup)
    orchestrator.attach(devices)
    return orchestrator


def key(document: str, group: int, end: int) -> Key:
    """The key of the chunk of `document` (a string of tokens) that ends at `end`.

    The n-th letter stands for the n-th `TOKENS` tokens, the last one for all that follow, so two
    documents share their keys as far as their letters agree.
    """
    letters = "".join(document[min(i, len(document) - 1)] for i in range(-(-end // TOKENS)))
    return hashlib.sha256(f"{letters}/{end}".encode()).digest() + group.to_bytes(4, "big")


def ends(group: GroupGeometry, first_token: int, end_token: int) -> list[int]:
    """End positions of the group's chunks that end after `first_token` and by `end_token`."""
    size = group.chunk_tokens
    return list(range((first_token // size + 1) * size, end_token + 1, size))


def offer(
    orchestrator: Orchestrator,
    request: RequestState,
    document: str,
    first_token: int,
    end_token: int,
) -> StorePlan:
    """Offer what a step computed, group by group, as vLLM does."""
    keys, positions = [], []
    for i, group in enumerate(orchestrator._geometry.groups):
        for end in ends(group, first_token, end_token):
            keys.append(key(document, i, end))
            positions.append(end)
    return orchestrator.reserve(keys, positions, request)


def write_report(plan_ids: Iterable[int], ok: bool = True, ranks: int = 1) -> WorkerReport:
    ids = {int(write_id): ranks for write_id in plan_ids}
    return WorkerReport(finished_writes=ids) if ok else WorkerReport(failed_writes=ids)


def store(orchestrator: Orchestrator, document: str, chunks: int, first: int = 0) -> StorePlan:
    """Store the document's first chunks in one step and have all ranks acknowledge them."""
    request = orchestrator.begin(f"store {document}")
    plan = offer(orchestrator, request, document, first * TOKENS, chunks * TOKENS)
    orchestrator.acknowledge(write_report(plan.write_id, ranks=pool_of(orchestrator).ranks))
    orchestrator.finish(request)
    return plan


def held(orchestrator: Orchestrator, document: str, chunks: int, group: int = 0) -> list[Outcome]:
    request = orchestrator.begin("look")
    size = orchestrator._geometry.groups[group].chunk_tokens
    return [
        orchestrator.lookup(key(document, group, (i + 1) * size), request) for i in range(chunks)
    ]


def hits(orchestrator: Orchestrator, document: str, chunks: int, group: int = 0) -> int:
    """Leading hits of one group."""
    outcomes = held(orchestrator, document, chunks, group)
    return next((i for i, o in enumerate(outcomes) if o is not Outcome.HIT), chunks)


def load(
    orchestrator: Orchestrator, document: str, chunks: int, first: int = 0
) -> tuple[LoadPlan, RequestState]:
    request = orchestrator.begin(f"load {document}")
    keys = [key(document, 0, (i + 1) * TOKENS) for i in range(first, chunks)]
    return orchestrator.plan_load(keys, request), request


def devices_of(plan: StorePlan | LoadPlan | MovePlan) -> list[int]:
    return [int(d) for d in plan.device]


def counters(**values: int | float) -> DeviceCounters:
    return DeviceCounters(**values)  # type: ignore[arg-type]


# ---- a data plane ---------------------------------------------------------------------------

Place = tuple[int, int]
Content = tuple[Key, int]  # key, and the write that brought it


@dataclass
class _Write:
    write_id: int
    target: Place
    content: Content | None  # None: copy what is at `source` when it is executed
    source: Place | None
    ranks: set[int]
    key: Key
    backup: _Write | None = None  # may begin on a rank that has ended this one
    waiting: set[int] = field(default_factory=set)  # ranks that may not begin yet


@dataclass
class _Load:
    load_id: int
    keys: list[Key]
    plan: LoadPlan
    ranks: set[int]
    request: RequestState
    failed: set[int] = field(default_factory=set)
    epoch: int = 0


class FakeDataPlane:
    """Executes plans rank by rank, whenever it likes, and watches for slots that are misused."""

    def __init__(self, orchestrator: Orchestrator, ranks: int, rng: random.Random) -> None:
        self.orchestrator, self.ranks, self.rng = orchestrator, ranks, rng
        self.slots: list[dict[Place, Content]] = [{} for _ in range(ranks)]
        self.writes: list[_Write] = []
        self.loads: list[_Load] = []
        self.stored: dict[Key, int] = {}  # key -> write that all ranks reported, the last one
        self.failed_ids: set[int] = set()
        self.bad: set[tuple[int, Place]] = set()  # (rank, place): cannot be read any more

    # -- taking plans

    def _begin_write(self, write: _Write) -> None:
        for other in self.writes:
            assert other.target != write.target, f"{write.target} is under two writes"
            copied = other.source == write.target and other.waiting == set()
            assert not copied, f"{write.target} is written while it is copied"
        assert write.target not in self._being_read(), f"{write.target} is written while read"
        assert all(place != write.target for _, place in self.bad), "a bad slot is used again"
        self.writes.append(write)

    def _being_read(self) -> set[Place]:
        return {
            (int(d), int(s))
            for load in self.loads
            for d, s in zip(load.plan.device, load.plan.slot, strict=True)
        }

    def take_store(self, plan: StorePlan) -> None:
        for i, k in enumerate(plan.keys):
            write_id, place = int(plan.write_id[i]), (int(plan.device[i]), int(plan.slot[i]))
            write = _Write(write_id, place, (k, write_id), None, set(range(self.ranks)), k)
            self._begin_write(write)
            if plan.backup_device[i] != NO_DEVICE:
                target = (int(plan.backup_device[i]), int(plan.backup_slot[i]))
                backup_id = int(plan.backup_write_id[i])
                write.backup = _Write(backup_id, target, None, place, set(range(self.ranks)), k)
                write.backup.waiting = set(range(self.ranks))
                self._begin_write(write.backup)

    def take_moves(self, plan: MovePlan) -> None:
        for i in range(len(plan.write_id)):
            source = (int(plan.source_device[i]), int(plan.source_slot[i]))
            target = (int(plan.device[i]), int(plan.slot[i]))
            assert all(write.target != source for write in self.writes), "moved while written"
            everyone = set(range(self.ranks))
            self._begin_write(
                _Write(int(plan.write_id[i]), target, None, source, everyone, plan.keys[i])
            )

    def take_load(self, keys: list[Key], plan: LoadPlan, request: RequestState) -> None:
        for d, slot in zip(plan.device, plan.slot, strict=True):
            place = (int(d), int(slot))
            assert all(write.target != place for write in self.writes), f"{place} read and written"
        for i in np.flatnonzero(plan.keep_device != NO_DEVICE):
            target = (int(plan.keep_device[i]), int(plan.keep_slot[i]))
            source = (int(plan.device[i]), int(plan.slot[i]))
            everyone = set(range(self.ranks))
            write_id = int(plan.keep_write_id[i])
            self._begin_write(_Write(write_id, target, None, source, everyone, keys[i]))
        load = _Load(plan.load_id, keys, plan, set(range(self.ranks)), request)
        load.epoch = self.orchestrator.epoch
        self.loads.append(load)

    # -- doing something

    def work(self, amount: int, failure_rate: float = 0.0) -> None:
        """Execute some operations of some ranks and acknowledge them in one report."""
        report = WorkerReport()
        ended: list[_Load] = []
        for _ in range(amount):
            if self.loads and (not self.writes or self.rng.random() < 0.3):
                load = self.rng.choice(self.loads)
                if self._work_load(load, report, failure_rate):
                    ended.append(load)
            elif self.writes:
                self._work_write(self.rng.choice(self.writes), report, failure_rate)
        self.orchestrator.acknowledge(report)
        for load in ended:  # vLLM's own way, where no reset came in between
            if load.epoch == self.orchestrator.epoch:
                self.orchestrator.complete_load(load.request)

    def _work_write(self, write: _Write, report: WorkerReport, failure_rate: float) -> None:
        ready = sorted(write.ranks - write.waiting)
        if not ready:
            return
        rank = self.rng.choice(ready)
        write.ranks.discard(rank)
        content = write.content
        if write.source is not None:
            content = self.slots[rank].get(write.source)
            assert content is not None and content[0] == write.key, "copied the wrong chunk"
            if (rank, write.source) in self.bad:
                content = None
        ok = content is not None and self.rng.random() >= failure_rate
        if ok:
            assert content is not None
            self.slots[rank][write.target] = content
        else:
            self.failed_ids.add(write.write_id)
        target = report.finished_writes if ok else report.failed_writes
        target[write.write_id] = target.get(write.write_id, 0) + 1
        if write.backup is not None:
            self._start_backup(write.backup, rank, ok, report)
        if not write.ranks:
            self.writes.remove(write)
            if write.content is not None and write.write_id not in self.failed_ids:
                # A write from before a reset may end after a newer one of the same chunk.
                self.stored[write.key] = max(self.stored.get(write.key, 0), write.write_id)

    def _start_backup(self, backup: _Write, rank: int, ok: bool, report: WorkerReport) -> None:
        """A rank has ended a store: it copies the chunk, or says that it will not."""
        backup.waiting.discard(rank)
        if not ok:
            backup.ranks.discard(rank)
            failed = report.failed_writes
            failed[backup.write_id] = failed.get(backup.write_id, 0) + 1
            if not backup.ranks:
                self.writes.remove(backup)

    def _work_load(self, load: _Load, report: WorkerReport, failure_rate: float) -> bool:
        """Read all chunks of a load on one rank; True where that was the last rank."""
        rank = self.rng.choice(sorted(load.ranks))
        load.ranks.discard(rank)
        failed = set()
        for i, k in enumerate(load.keys):
            place = (int(load.plan.device[i]), int(load.plan.slot[i]))
            if place[0] == NO_DEVICE:
                failed.add(i)
            elif (rank, place) in self.bad or self.rng.random() < failure_rate:
                self.bad.add((rank, place))
                failed.add(i)
            else:
                self._check_read(rank, place, k, load)
        if failed:
            report.failed_loads.setdefault(load.load_id, set()).update(failed)
        report.finished_loads[load.load_id] = report.finished_loads.get(load.load_id, 0) + 1
        if not load.ranks:
            self.loads.remove(load)
        return not load.ranks

    def _check_read(self, rank: int, place: Place, k: Key, load: _Load) -> None:
        content = self.slots[rank].get(place)
        assert content is not None, f"{place} was never written on rank {rank}"
        assert content[0] == k, f"{place} holds another chunk on rank {rank}"
        if load.epoch == self.orchestrator.epoch:
            assert content[1] == self.stored[k], f"{place} holds an older store of the chunk"

    def drain(self) -> None:
        while self.writes or self.loads:
            self.work(64)


# ---- what must hold at any time -------------------------------------------------------------


def check_table(orchestrator: Orchestrator) -> None:
    """Compare every redundant fact of the table with the others."""
    pool = pool_of(orchestrator)
    table = pool.table
    _check_entries(table)
    _check_slots(table)
    _check_tree(table)
    _check_heaps(table)
    _check_work(orchestrator, table)


def _check_entries(table: Table) -> None:
    free = list(table.free)
    assert len(set(free)) == len(free), "an entry is free twice"
    assert {e for e in range(table.capacity) if table.state[e] == FREE} == set(free)
    resident = {e for e in range(table.capacity) if table.resident(e)}
    assert set(table.index.values()) == resident
    for k, entry in table.index.items():
        assert table.keys[entry] == k
    for entry in range(table.capacity):
        if table.state[entry] == DOOMED:
            assert table.pins[entry] or table.flags[entry] & HELD, "doomed for nothing"
        if table.state[entry] == WRITING:
            assert table.flags[entry] & BUSY and not table.pins[entry]
        if table.state[entry] == FREE:
            assert not table.pins[entry] and not table.flags[entry] & HELD


def _check_slots(table: Table) -> None:
    owned: Counter[Place] = Counter()
    doomed: Counter[int] = Counter()
    for entry in range(table.capacity):
        for d, s in (
            (table.device0[entry], table.slot0[entry]),
            (table.device1[entry], table.slot1[entry]),
        ):
            if d != NO_DEVICE:
                assert table.state[entry] != FREE
                owned[d, s] += 1
                doomed[d] += table.state[entry] == DOOMED
        if table.state[entry] != FREE:
            assert table.device0[entry] != NO_DEVICE
    for d, slots in enumerate(table.slots):
        for s in slots.free:
            owned[d, s] += 1
        assert slots.doomed == doomed[d]
        here = [place for place in owned if place[0] == d]
        assert all(0 <= s < slots.capacity for _, s in here)
        assert len(here) + slots.retired == slots.capacity, "a slot was lost or invented"
    assert set(owned.values()) <= {1}, "a slot is used twice"


def _check_tree(table: Table) -> None:
    children: dict[int, list[int]] = {}
    for entry in range(table.capacity):
        parent = table.parent[entry]
        if parent >= 0:
            assert table.resident(entry) and table.resident(parent)
            children.setdefault(parent, []).append(entry)
    for entry in range(table.capacity):
        linked = []
        child = table.first_child[entry]
        while child >= 0:
            linked.append(child)
            after = table.next_sibling[child]
            assert after < 0 or table.previous_sibling[after] == child
            child = after
        assert sorted(linked) == sorted(children.get(entry, []))
        assert table.children[entry] == len(linked)


def _check_heaps(table: Table) -> None:
    for heap in (table.leaves, table.spillable):
        records = Counter(record & ((1 << 28) - 1) for record in heap._records)
        flagged = {e for e in range(table.capacity) if table.flags[e] & heap._bit}
        assert set(records) == flagged and set(records.values()) <= {1}
        for record in heap._records:
            entry = record & ((1 << 28) - 1)
            assert record <= heap._record(entry), "a record is newer than its entry"
    for entry in range(table.capacity):
        idle = (
            table.state[entry] == READABLE
            and not table.pins[entry]
            and not table.flags[entry] & HELD
        )
        if idle and not table.children[entry]:
            assert table.flags[entry] & table.leaves._bit, "a leaf that can never be evicted"
        if idle and table.in_memory(entry) and table._spills:
            assert table.flags[entry] & table.spillable._bit, "a chunk that can never be spilled"


def _check_work(orchestrator: Orchestrator, table: Table) -> None:
    pool = pool_of(orchestrator)
    assert orchestrator._loads is not None
    pins: Counter[int] = Counter()
    for load in orchestrator._loads._open.values():
        pins.update(int(e) for e in load.entries if e >= 0)
    assert all(table.pins[e] == pins[e] for e in range(table.capacity)), "pins do not balance"
    for flag, backups in ((BUSY, False), (BACKING, True)):
        writes = [w.entry for w in pool.writes.values() if (w.kind is WriteKind.BACKUP) == backups]
        assert len(set(writes)) == len(writes), "an entry is under two writes of a kind"
        assert {e for e in range(table.capacity) if table.flags[e] & flag} == set(writes)
    assert all(count >= 0 for count in pool.spills_from + pool.backups_from)
    assert sum(pool.spills_from) <= 16


def check_contiguous(orchestrator: Orchestrator, documents: Iterable[str], tokens: int) -> None:
    """What is resident of each document is contiguous from its start, in every FULL group."""
    index = pool_of(orchestrator).table.index
    groups = orchestrator._geometry.groups
    for document in documents:
        for i, group in enumerate(groups):
            there = [key(document, i, end) in index for end in ends(group, 0, tokens)]
            if group.kind is GroupKind.FULL:
                assert there == sorted(there, reverse=True), f"{document}/{i}: a hole, {there}"
