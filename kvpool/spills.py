"""Spills: memory is kept from filling up by moving its coldest chunks to slower devices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvpool import placement
from kvpool.plan import MovePlan
from kvpool.pool import Pool, WriteKind
from kvpool.prefix import placed_on
from kvpool.types import Key

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
    """Decide this step's spills; None where there is nothing to move.

    The coldest chunks in memory go while free slots are below the low-water mark plus what
    placement wanted. A chunk that lies on a slower device as well only loses its copy in memory.
    """
    needs = {device: need for device in pool.usable_memory if (need := _need(pool, device)) > 0}
    if not needs or not pool.slower:
        return None
    moves, loads, left_alone = _Moves(), _PrefixLoads(pool), []
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
    return moves.plan() if moves.write_id else None


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
        table.drop_copy(entry)
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
    moves.source_device.append(table.device0[entry])
    moves.source_slot.append(table.slot0[entry])
    moves.device.append(device)
    moves.slot.append(table.begin_copy(entry, device))
    moves.write_id.append(pool.open_write(entry, WriteKind.SPILL))
    moves.group.append(table.group[entry])
    moves.keys.append(table.keys[entry])
    moves.parents.append(table.keys[table.parent[entry]] if table.parent[entry] >= 0 else b"")
    moves.positions.append(table.position[entry])
    return True
