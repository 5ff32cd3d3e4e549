"""Stores: which of the offered chunks are written, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.plan import StorePlan
from kvpool.pool import Pool, WriteKind
from kvpool.prefix import MISSING, RequestState, WindowLoads
from kvpool.types import NO_DEVICE, Key

NOTHING = StorePlan(
    write_id=np.empty(0, np.int64),
    group=np.empty(0, np.uint8),
    device=np.empty(0, np.uint8),
    slot=np.empty(0, np.int32),
    keys=[],
    parents=[],
    positions=np.empty(0, np.int32),
    backup_write_id=np.empty(0, np.int64),
    backup_device=np.empty(0, np.uint8),
    backup_slot=np.empty(0, np.int32),
)


@dataclass(slots=True)
class _Offer:
    """What a request offers in one step, and what was made of it. Lists by offer."""

    keys: Sequence[Key]
    positions: Sequence[int]
    entries: list[int] = field(default_factory=list)
    # offer -> (write id, write id of the backup or -1, parent's key)
    writes: dict[int, tuple[int, int, Key]] = field(default_factory=dict)
    backups_fit: bool = True  # until one does not

    def group(self, i: int) -> int:
        return self.keys[i][-1]


def reserve(
    pool: Pool, keys: Sequence[Key], positions: Sequence[int], request: RequestState
) -> StorePlan:
    """Decide on one step's offers of a request, and reserve slots for those that are stored.

    Spine chunks are placed first, whatever their group's number: the others hang on them.
    """
    offer = _Offer(keys, positions)
    request.stamp = pool.tick()
    _learn(pool, offer, request)
    new = [i for i, entry in enumerate(offer.entries) if entry < 0]
    _count_misses(pool, offer, new)
    spine = [i for i in new if offer.group(i) in pool.rules.full]
    if spine:
        _place_spine(pool, offer, request, min(positions[i] for i in spine))
    if len(spine) < len(new):
        others = (positions[i] for i in new if offer.group(i) not in pool.rules.full)
        _place_others(pool, offer, request, min(others))
    return _plan(pool, offer)


def _learn(pool: Pool, offer: _Offer, request: RequestState) -> None:
    """Resolve the offered keys, add them to the request's chains, and touch all of these."""
    find, table = pool.table.index.get, pool.table
    offer.entries = [find(key, MISSING) for key in offer.keys]
    start, count = 0, len(offer.keys)
    while start < count:
        group, end = offer.group(start), start + 1
        while end < count and offer.group(end) == group:
            end += 1
        chain = request.chains[group]
        chain.learn(list(offer.positions[start:end]), offer.entries[start:end], table)
        start = end
    for chain in request.chains:
        table.touch(chain.resident(table)[1], request.stamp)


def _count_misses(pool: Pool, offer: _Offer, new: Sequence[int]) -> None:
    pool.counters.miss_chunks += len(new)
    for i in new:
        pool.counters.miss_tokens += pool.rules.tokens(offer.group(i), offer.positions[i])


def _in_order(pool: Pool, offer: _Offer, first: int, spine: bool) -> list[int]:
    """Return the offers of one kind of groups from position `first` on, by position and group."""
    chosen = [
        i
        for i, position in enumerate(offer.positions)
        if position >= first and (offer.group(i) in pool.rules.full) == spine
    ]
    return sorted(chosen, key=lambda i: (offer.positions[i], offer.group(i)))


def _place_spine(pool: Pool, offer: _Offer, request: RequestState, first: int) -> None:
    rules, table = pool.rules, pool.table
    load = rules.spine_load(request, table, np.array([first - 1], np.int32))[0].tolist()
    for i in _in_order(pool, offer, first, spine=True):
        group = offer.group(i)
        entry = _store(pool, offer, request, i, load)
        if entry >= 0 and not rules.is_partial(group, offer.positions[i]):
            load[table.device0[entry]] += rules.sizes[group]


def _place_others(pool: Pool, offer: _Offer, request: RequestState, first: int) -> None:
    table = pool.table
    order = _in_order(pool, offer, first, spine=False)
    ends = np.array([offer.positions[i] for i in order], np.int32)
    spine_loads = pool.rules.spine_load(request, table, ends).tolist()
    windows = WindowLoads(pool.rules, request, table, first)
    for i, spine_load in zip(order, spine_loads, strict=True):
        group = offer.group(i)
        load = [a + b for a, b in zip(spine_load, windows.before(group), strict=True)]
        entry = _store(pool, offer, request, i, load)
        if entry >= 0:
            windows.add(group, table.device0[entry])


def _store(pool: Pool, offer: _Offer, request: RequestState, i: int, load: Sequence[float]) -> int:
    """Return the entry of an offered chunk, made now unless it is there; MISSING if dropped."""
    if offer.entries[i] >= 0:
        return offer.entries[i]
    table, group, position = pool.table, offer.group(i), offer.positions[i]
    parent = pool.rules.parent(request, table, group, position)
    device = -1
    if parent != MISSING and offer.keys[i] not in table.index:
        device = _claim(pool, load, pool.rules.sizes[group], request.stamp)
    if device < 0:
        pool.counters.dropped_store_chunks += 1
        return MISSING
    leading = group in pool.rules.full
    backup = -1
    if pool.backup and pool.memory[device] and offer.backups_fit:
        backup = pool.claim_backup(device, pool.rules.sizes[group], request.stamp)
        offer.backups_fit = backup >= 0
    entry = table.add(
        offer.keys[i], parent, group, position, device, request.stamp, leading, backup
    )
    request.chains[group].set_entry(position, entry, table)
    parent_key = table.keys[parent] if parent >= 0 else b""
    if pool.backup and pool.memory[device] and backup < 0:
        pool.unbacked.append((entry, table.generation[entry]))
    write_id = pool.open_write(entry, WriteKind.STORE)
    backup_write_id = pool.open_write(entry, WriteKind.BACKUP) if backup >= 0 else -1
    offer.writes[i] = write_id, backup_write_id, parent_key
    offer.entries[i] = entry
    return entry


def _claim(pool: Pool, load: Sequence[float], size: int, stamp: int) -> int:
    """Return a device with a free slot for a chunk, colder ones evicted if need be; -1: none."""
    ranked = pool.rank(load, size)
    if not ranked:
        return -1
    wanted = ranked[0]
    if pool.memory[wanted] and not pool.has_room(wanted):
        limit = pool.table.slots[wanted].capacity // 4
        pool.memory_demand[wanted] = min(pool.memory_demand[wanted] + 1, limit)
    device = next((d for d in ranked if pool.has_room(d)), -1)
    if device < 0:
        device = pool.evict_for(ranked, stamp)
    if device >= 0:
        pool.memory_demand[device] = max(pool.memory_demand[device] - 1, 0)
    return device


def _plan(pool: Pool, offer: _Offer) -> StorePlan:
    table = pool.table
    chosen = sorted(offer.writes)
    entries = np.array([offer.entries[i] for i in chosen], dtype=np.int64)
    backup_write_id = np.array([offer.writes[i][1] for i in chosen], dtype=np.int64)
    backed_up = backup_write_id >= 0
    return StorePlan(
        write_id=np.array([offer.writes[i][0] for i in chosen], dtype=np.int64),
        group=table.group_view[entries],
        device=table.device0_view[entries],
        slot=table.slot0_view[entries],
        keys=[offer.keys[i] for i in chosen],
        parents=[offer.writes[i][2] for i in chosen],
        positions=table.position_view[entries],
        backup_write_id=backup_write_id,
        backup_device=np.where(backed_up, table.device1_view[entries], NO_DEVICE).astype(np.uint8),
        backup_slot=np.where(backed_up, table.slot1_view[entries], -1).astype(np.int32),
    )
