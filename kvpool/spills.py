"""Spills: memory is kept from filling up by moving its coldest chunks to slower devices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvpool import placement
from kvpool.plan import MovePlan
from kvpool.pool import Pool, WriteKind
from kvpool.prefix import placed_on
from kvpool.types import NO_DEVICE, Key

SPILLS_IN_FLIGHT = 16
ATTEMPTS = 64
"""Chunks that are looked at in one step; most of them can be moved."""


@dataclass(slots=True)
class _Moves:
    """The moves decided in one step, a column each."""

    write_id: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    source_device: list[int] = field(default_factory=list)
    source_slot: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    parents: list[Key] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, pool: Pool, entry: int, device: int, slot: int, write_id: int) -> None:
        table = pool.table
        parent = table.parent[entry]
        self.write_id.append(write_id)
        self.group.append(table.group[entry])
        self.source_device.append(table.device0[entry])
        self.source_slot.append(table.slot0[entry])
        self.device.append(device)
        self.slot.append(slot)
        self.keys.append(table.keys[entry])
        self.parents.append(table.keys[parent] if parent >= 0 else b"")
        self.positions.append(table.position[entry])

    def plan(self) -> MovePlan:
        return MovePlan(
            write_id=np.array(self.write_id, np.int64),
            group=np.array(self.group, np.uint8),
            source_device=np.array(self.source_device, np.uint8),
            source_slot=np.array(self.source_slot, np.int32),
            device=np.array(self.device, np.uint8),
            slot=np.array(self.slot, np.int32),
            keys=self.keys,
            parents=self.parents,
            positions=np.array(self.positions, np.int32),
        )


class _PrefixLoads:
    """What the prefixes that chunks belong to read from each device, in bytes.

    Victims of one step mostly belong to one prefix, so the last one is remembered.
    """

    def __init__(self, pool: Pool) -> None:
        self._table, self._rules = pool.table, pool.rules
        self._sizes = np.array(pool.rules.sizes, np.float64)
        self._path: set[int] = set()
        self._load: list[float] = []

    def without(self, entry: int) -> list[float]:
        """Return the loads of the prefix of `entry`, but for that chunk itself."""
        if entry not in self._path:
            self._remember(entry)
        load = list(self._load)
        load[self._table.device0[entry]] -= self._rules.sizes[self._table.group[entry]]
        return load

    def move(self, entry: int, device: int) -> None:
        """Note that the chunk last asked for goes to `device`."""
        self._load = self.without(entry)
        self._load[device] += self._rules.sizes[self._table.group[entry]]

    def _remember(self, entry: int) -> None:
        table = self._table
        path, above, below = [entry], table.parent[entry], self._spine_child(entry)
        while above >= 0:
            path.append(above)
            above = table.parent[above]
        while below >= 0:
            path.append(below)
            below = self._spine_child(below)
        entries = np.array(path, np.int64)
        self._path = set(path)
        sizes = self._sizes[table.group_view[entries]]
        devices = len(table.slots)
        self._load = np.bincount(placed_on(table, entries), sizes, minlength=devices).tolist()

    def _spine_child(self, entry: int) -> int:
        """Return a child that continues the prefix: one of a FULL group, else any; -1: none."""
        first = child = self._table.first_child[entry]
        while child >= 0 and self._table.group[child] not in self._rules.full:
            child = self._table.next_sibling[child]
        return child if child >= 0 else first


def take_moves(pool: Pool) -> MovePlan | None:
    """Decide this step's spills and late backups; None where there is nothing to move."""
    moves = _Moves()
    if pool.slower:
        _spill(pool, moves)
        _back_up(pool, moves)
    return moves.plan() if moves.write_id else None


def _spill(pool: Pool, moves: _Moves) -> None:
    """Have memory emptied, the coldest chunks first.

    That is while free slots are below the low-water mark plus what placement wanted. A chunk that
    lies on a slower device as well only loses its copy in memory.
    """
    needs = {device: need for device in pool.usable_memory if (need := _need(pool, device)) > 0}
    loads, left_alone = _PrefixLoads(pool), []
    for _ in range(ATTEMPTS):
        if not needs or sum(pool.spills_from) >= SPILLS_IN_FLIGHT:
            break
        entry = pool.table.pop_spillable()
        if entry < 0:
            break
        memory = _memory_device(pool, entry)
        if memory not in needs:
            left_alone.append(entry)
            continue
        if not _relieve(pool, entry, loads, moves):
            # Colder than all that could make room for it. It is the first to be evicted for a
            # store; spilling warmer ones instead would turn the order round.
            left_alone.append(entry)
            break
        needs[memory] -= 1
        if not needs[memory]:
            del needs[memory]
    pool.table.spillable.push_all(left_alone)


def _back_up(pool: Pool, moves: _Moves) -> None:
    """Copy what found no room, or no time, for its backup when it was stored."""
    table = pool.table
    for _ in range(min(len(pool.unbacked), ATTEMPTS)):
        entry, generation = pool.unbacked.popleft()
        if table.generation[entry] != generation or not table.resident(entry):
            continue
        if not pool.memory[table.device0[entry]] or table.device1[entry] != NO_DEVICE:
            continue
        device = -1
        if table.is_idle(entry):
            size = pool.rules.sizes[table.group[entry]]
            device = pool.claim_backup(table.device0[entry], size, table.stamp[entry])
        if device < 0:
            pool.unbacked.append((entry, generation))
            continue
        slot = table.begin_backup(entry, device)
        moves.add(pool, entry, device, slot, pool.open_write(entry, WriteKind.BACKUP))


def _need(pool: Pool, device: int) -> int:
    """Return how many slots of a memory device should come free, those on the way counted."""
    slots = pool.table.slots[device]
    low_water = max(1, slots.capacity // 16) if slots.capacity else 0
    coming = pool.spills_from[device]
    return low_water + pool.memory_demand[device] - len(slots.free) - coming


def _memory_device(pool: Pool, entry: int) -> int:
    first = pool.table.device0[entry]
    return first if pool.memory[first] else pool.table.device1[entry]


def _relieve(pool: Pool, entry: int, loads: _PrefixLoads, moves: _Moves) -> bool:
    """Take one chunk out of memory, or start to; False where it has to stay."""
    table = pool.table
    if table.has_copy(entry):
        table.drop_memory_copy(entry)
        pool.counters.spilled_chunks += 1
        return True
    room = [device for device in pool.slower if pool.has_room(device)]
    if not room and not table.leaves.any_below(table.stamp[entry]):
        return False
    size, load = pool.rules.sizes[table.group[entry]], loads.without(entry)
    targets = placement.rank_proportional(load, size, pool.bandwidth, room or pool.slower)
    device = targets[0] if room else -1
    if device < 0:
        device = pool.evict_for(targets, table.stamp[entry])
    if device < 0:
        return False
    loads.move(entry, device)
    slot = table.begin_copy(entry, device)
    moves.add(pool, entry, device, slot, pool.open_write(entry, WriteKind.SPILL))
    return True
