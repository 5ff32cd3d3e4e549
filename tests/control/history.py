"""A random engine: requests come, hit, load, store and end; workers answer when they like."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from kvpool.orchestrator import RequestState
from kvpool.pool import WriteKind
from kvpool.table import READABLE
from kvpool.types import DeviceState, GroupGeometry, GroupKind, Key, Outcome, WorkerReport
from tests.control.rig import (
    FULL,
    STATE,
    TOKENS,
    WIDE_FULL,
    WINDOW,
    FakeDataPlane,
    check_contiguous,
    check_table,
    counters,
    device,
    ends,
    key,
    make,
    offer,
    pool_of,
)

DOCUMENTS = ("a", "ab", "aab", "aaac", "b", "bbc", "c", "d", "de", "e", "eef", "g", "h")
CHUNKS = 12

GROUPS = {
    "full": (FULL,),
    "window, full": (WINDOW, FULL),
    "full, state": (FULL, STATE),
    "two full, window": (WIDE_FULL, WINDOW, FULL),
    "windows alone": (WINDOW, STATE),
}
POOLS = {
    "dram and two ssds": [("dram", 16, 10.0), ("file0", 14, 5.0), ("file1", 13, 5.0)],
    "dram alone": [("dram", 20, 10.0)],
    "no dram": [("file0", 16, 5.0), ("file1", 11, 2.0)],
    "two drams": [("dram0", 9, 10.0), ("dram1", 8, 10.0), ("file", 25, 6.0)],
    "small dram": [("dram", 3, 10.0), ("file", 40, 5.0)],
    "room for all": [("dram", 60, 10.0), ("file", 200, 5.0)],
}
PLACEMENTS = ("proportional", "link_aware", "serial")


@dataclass
class Running:
    document: str
    state: RequestState
    tokens: int = 0
    loading: bool = False


class History:
    """Steps to take in any order; `check` compares all that must hold."""

    def __init__(
        self,
        groups: tuple[GroupGeometry, ...],
        pool: str,
        ranks: int,
        placement: str,
        seed: int,
        backup: bool,
    ) -> None:
        devices = [device(name, slots, speed, speed / 2) for name, slots, speed in POOLS[pool]]
        self.groups = groups
        self.orchestrator = make(devices, groups, ranks, placement, backup)
        self.plane = FakeDataPlane(self.orchestrator, ranks, random.Random(seed))
        self.running: list[Running] = []
        self.started = 0
        self.checked = 0
        self.looker = self.orchestrator.begin("looker")

    def _ready(self, which: int) -> Running | None:
        ready = [request for request in self.running if not request.loading]
        return ready[which % len(ready)] if ready else None

    def begin(self, document: str) -> None:
        self.started += 1
        if len(self.running) < 6:
            state = self.orchestrator.begin(str(self.started))
            self.running.append(Running(document, state))

    def compute(self, which: int, chunks: int) -> None:
        """A step computes some chunks and offers them, from position 0 on at first."""
        request = self._ready(which)
        if request is None:
            return
        end = min(request.tokens + chunks * TOKENS, CHUNKS * TOKENS)
        plan = offer(self.orchestrator, request.state, request.document, request.tokens, end)
        request.tokens = end
        self.plane.take_store(plan)

    def load(self, which: int, local: int, stale: bool) -> None:
        """Load what vLLM would, after `local` chunks that the accelerator still has."""
        request = self._ready(which)
        if request is None:
            return
        keys = self._keys_to_load(request, local * TOKENS)
        if stale:  # a chunk that is gone by the time of the plan
            keys.append(key("zz", 0, TOKENS))
        if keys:
            plan = self.orchestrator.plan_load(keys, request.state)
            self.plane.take_load(keys, plan, request.state)
            request.loading = True

    def _keys_to_load(self, request: Running, first_token: int) -> list[Key]:
        full = [i for i, group in enumerate(self.groups) if group.kind is GroupKind.FULL]
        end = min(
            (self._hit_end(request, i, first_token) for i in full),
            default=self._last_hit(request, first_token),
        )
        keys = []
        for i, group in enumerate(self.groups):
            wanted = ends(group, first_token, end)
            if group.kind is not GroupKind.FULL:
                wanted = wanted[-(group.window_chunks or 1) :]
            keys += [key(request.document, i, e) for e in wanted]
        lookup = self.orchestrator.lookup
        return [k for k in keys if lookup(k, request.state) is Outcome.HIT]

    def _is_hit(self, request: Running, i: int, end: int) -> bool:
        k = key(request.document, i, end)
        return self.orchestrator.lookup(k, request.state) is Outcome.HIT

    def _hit_end(self, request: Running, i: int, first_token: int) -> int:
        last = first_token
        for end in ends(self.groups[i], first_token, CHUNKS * TOKENS):
            if not self._is_hit(request, i, end):
                break
            last = end
        return last

    def _last_hit(self, request: Running, first_token: int) -> int:
        possible = ends(self.groups[0], first_token, CHUNKS * TOKENS)
        return max((end for end in possible if self._is_hit(request, 0, end)), default=first_token)

    def spill(self) -> None:
        moves = self.orchestrator.take_moves()
        if moves is not None:
            self.plane.take_moves(moves)

    def work(self, amount: int, failure_rate: float) -> None:
        self.plane.work(amount, failure_rate)
        self._notice_loads()

    def drain(self) -> None:
        self.plane.drain()
        self._notice_loads()

    def _notice_loads(self) -> None:
        under_way = {id(load.request) for load in self.plane.loads}
        for request in self.running:
            request.loading = id(request.state) in under_way

    def finish(self, which: int) -> None:
        """A request ends, perhaps with its load and writes under way (an abort)."""
        if self.running:
            self.orchestrator.finish(self.running.pop(which % len(self.running)).state)

    def reset(self) -> None:
        self.orchestrator.reset()
        for request in self.running:
            request.tokens, request.loading = 0, False
        assert not pool_of(self.orchestrator).table.index

    def break_device(self, which: int) -> None:
        pool = pool_of(self.orchestrator)
        which %= len(pool.devices)
        failures = {(which, 0): counters(read_failures=3)}
        self.orchestrator.acknowledge(WorkerReport(counters=failures))
        assert pool.devices[which].state is DeviceState.FAILED
        for entry in pool.table.index.values():
            assert pool.table.device0[entry] != which

    def fill_device(self, which: int) -> None:
        """A device takes no more writes, until a trial says that it does."""
        pool = pool_of(self.orchestrator)
        which %= len(pool.devices)
        was_ok = pool.devices[which].state is DeviceState.OK
        report = WorkerReport(counters={(which, 0): counters(write_failures=3)})
        if not was_ok:
            report = WorkerReport(trials={(which, rank): True for rank in range(self.plane.ranks)})
        self.orchestrator.acknowledge(report)
        state = DeviceState.READ_ONLY if was_ok else DeviceState.OK
        assert pool.devices[which].state is state

    def check(self) -> None:
        check_table(self.orchestrator)
        check_contiguous(self.orchestrator, DOCUMENTS, CHUNKS * TOKENS)
        self._check_lookups()
        pool, now = pool_of(self.orchestrator), self.orchestrator.snapshot()
        storing = sum(write.kind is WriteKind.STORE for write in pool.writes.values())
        assert now.miss_chunks == now.stored_chunks + now.dropped_store_chunks + storing

    def _check_lookups(self) -> None:
        """One request that looks up all documents in turn is told what the index knows."""
        self.checked += 1
        document = DOCUMENTS[self.checked % len(DOCUMENTS)]
        table = pool_of(self.orchestrator).table
        for i, group in enumerate(self.groups):
            for end in ends(group, 0, CHUNKS * TOKENS):
                k = key(document, i, end)
                expected = Outcome.MISS
                if k in table.index:
                    readable = table.state[table.index[k]] == READABLE
                    expected = Outcome.HIT if readable else Outcome.PENDING
                assert self.orchestrator.lookup(k, self.looker) is expected

    def end(self) -> None:
        """All requests end, all work is done: every slot that still works is free again."""
        while self.running:
            self.finish(0)
        self.drain()
        assert not self.orchestrator.pending_work()
        self.check()
        self.orchestrator.reset()
        check_table(self.orchestrator)
        for slots in pool_of(self.orchestrator).table.slots:
            assert len(slots.free) == slots.capacity - slots.retired

    def run(self, steps: int, rng: random.Random, failure_rate: float) -> Counter[str]:
        """Take `steps` random steps with the frequencies of a busy engine; return what happened."""
        for _ in range(steps):
            dice = rng.random()
            if dice < 0.12:
                self.begin(rng.choice(DOCUMENTS))
            elif dice < 0.40:
                self.compute(rng.randrange(6), rng.randint(1, 5))
            elif dice < 0.55:
                self.load(rng.randrange(6), rng.choice((0, 0, 0, 1, 3)), rng.random() < 0.05)
            elif dice < 0.65:
                self.spill()
            elif dice < 0.91:
                self.work(rng.randint(1, 30), failure_rate)
            elif dice < 0.99:
                self.finish(rng.randrange(6))
            elif dice < 0.995:
                self.reset()
            elif failure_rate:
                rng.choice((self.break_device, self.fill_device))(rng.randrange(3))
            self.check()
        now = self.orchestrator.snapshot()
        seen = Counter(
            stored=now.stored_chunks,
            dropped=now.dropped_store_chunks,
            evicted=now.evicted_chunks,
            spilled=now.spilled_chunks,
            returned=now.returned_chunks,
            backed_up=now.backed_up_chunks,
            hit=sum(row.hit_chunks for row in now.devices),
            retired=sum(row.retired_slots for row in now.devices),
        )
        self.end()
        return seen
