"""Warm restart: the table is built from the headers that all ranks found on their devices.

What is left of a prefix must be contiguous, so a chunk whose parent is gone is forgotten. Nothing
says how recently a chunk was used: all that was restored is older than what comes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvpool.plan import StoredHeaders
from kvpool.table import READABLE, Table
from kvpool.types import Geometry, GroupKind, Key

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_ROOT, _MISSING = -1, -2


@dataclass(slots=True)
class _Chunks:
    """Chunks that all ranks have: lists and arrays of shape (n,)."""

    keys: list[Key]
    parents: list[Key]
    positions: Int64
    groups: Int64
    device: Int64
    slot: Int64

    def select(self, chosen: Int64) -> _Chunks:
        if chosen.size == len(self.keys) and (np.diff(chosen) == 1).all():
            return self
        places = chosen.tolist()
        return _Chunks(
            [self.keys[i] for i in places],
            [self.parents[i] for i in places],
            self.positions[chosen],
            self.groups[chosen],
            self.device[chosen],
            self.slot[chosen],
        )


def restore(
    table: Table, geometry: Geometry, survivors: Sequence[Sequence[StoredHeaders]]
) -> list[int]:
    """Fill an empty table; return how many chunks came back on each device.

    `survivors[rank][device]` is what a rank found. A chunk counts where every rank has it in the
    same slot, its KV group is one of `geometry`, and all its ancestors count too.
    """
    chunks = _common(table, survivors)
    last = np.frombuffer(b"".join([key[-1:] or b"\xff" for key in chunks.keys]), np.uint8)
    known = (last == chunks.groups) & (chunks.groups < len(geometry.groups))
    chunks = chunks.select(np.flatnonzero(known))
    place: dict[Key, int] = {}
    for i, key in enumerate(chunks.keys):
        place.setdefault(key, i)
    if len(place) < len(chunks.keys):  # of equal ones the first counts
        chunks = chunks.select(np.fromiter(place.values(), np.int64, len(place)))
        place = dict(zip(chunks.keys, range(len(place)), strict=True))
    place[b""] = _ROOT
    parent = np.fromiter(
        map(place.get, chunks.parents, repeat(_MISSING)), np.int64, len(chunks.parents)
    )
    alive, root = _reach_a_root(parent)
    full = [group.kind is GroupKind.FULL for group in geometry.groups]
    # Chains lie together, so that a look-up along one stays in the caches.
    order = np.lexsort((chunks.groups, chunks.positions, root))
    order = order[alive[order]]
    entry = np.full(len(chunks.keys) + 1, -1, np.int64)  # the last one serves roots
    entry[order] = np.arange(order.size)
    _fill(table, chunks.select(order), entry[parent[order]], np.array(full, np.bool_))
    found = np.bincount(chunks.device[order], minlength=len(table.slots))
    return [int(count) for count in found]


def _common(table: Table, survivors: Sequence[Sequence[StoredHeaders]]) -> _Chunks:
    """Return what all ranks have, in slots that the table knows."""
    found: list[_Chunks] = []
    for device, slots in enumerate(table.slots):
        ranks = [rank[device] for rank in survivors]
        chosen = np.flatnonzero(ranks[0].slots < slots.capacity)
        for other in ranks[1:]:
            chosen = chosen[_agree(ranks[0], other, chosen)]
        whole = ranks[0]
        found.append(
            _Chunks(
                [whole.keys[i] for i in chosen.tolist()],
                [whole.parents[i] for i in chosen.tolist()],
                whole.positions[chosen].astype(np.int64),
                whole.groups[chosen].astype(np.int64),
                np.full(chosen.size, device, np.int64),
                whole.slots[chosen].astype(np.int64),
            )
        )
    return _Chunks(
        [key for part in found for key in part.keys],
        [key for part in found for key in part.parents],
        *(
            np.concatenate([np.empty(0, np.int64), *(getattr(part, name) for part in found)])
            for name in ("positions", "groups", "device", "slot")
        ),
    )


def _agree(first: StoredHeaders, other: StoredHeaders, chosen: Int64) -> Bools:
    """Return for each chosen chunk of one rank whether another has the same in the same slot."""
    at = np.searchsorted(other.slots, first.slots[chosen])
    at = np.minimum(at, max(other.slots.size - 1, 0))
    if not other.slots.size:
        return np.zeros(chosen.size, np.bool_)
    same: Bools = (
        (other.slots[at] == first.slots[chosen])
        & (other.positions[at] == first.positions[chosen])
        & (other.groups[at] == first.groups[chosen])
    )
    keys = [first.keys[i] == other.keys[j] for i, j in zip(chosen, at, strict=True)]
    parents = [first.parents[i] == other.parents[j] for i, j in zip(chosen, at, strict=True)]
    same &= np.array(keys, np.bool_) & np.array(parents, np.bool_)
    return same


def _reach_a_root(parent: Int64) -> tuple[Bools, Int64]:
    """Return which chunks hang on a root, at whatever depth, and each one's topmost ancestor.

    Each round doubles how far up everyone looks; what goes in circles never arrives.
    """
    count = parent.size
    jump = np.where(parent >= 0, parent, np.arange(count))
    for _ in range(max(count, 2).bit_length()):
        jump = jump[jump]
    return parent[jump] == _ROOT, jump


def _fill(table: Table, chunks: _Chunks, parent: Int64, full: Bools) -> None:
    """Write entries 0, 1, ... of an empty table. `parent[i]` is an entry, -1: a root."""
    count = len(chunks.keys)
    table.keys[:count] = chunks.keys
    table.index.update(zip(chunks.keys, range(count), strict=True))
    table.free = array("i", range(table.capacity - 1, count - 1, -1))
    for device, slots in enumerate(table.slots):
        free = np.ones(slots.capacity, np.bool_)
        free[chunks.slot[chunks.device == device]] = False
        slots.free = array("i", np.flatnonzero(free)[::-1].tolist())
    table.state_view[:count] = READABLE
    table.group_view[:count], table.position_view[:count] = chunks.groups, chunks.positions
    table.device0_view[:count], table.slot0_view[:count] = chunks.device, chunks.slot
    table.parent_view[:count] = parent
    # Siblings: the one that prefixes go on with comes first.
    order = np.lexsort((chunks.positions, ~full[chunks.groups], parent))
    order = order[parent[order] >= 0]
    above = parent[order]
    begins = np.concatenate([[True], above[1:] != above[:-1]])[: order.size]
    first_child, following, before = (
        np.frombuffer(column, np.int32)
        for column in (table.first_child, table.next_sibling, table.previous_sibling)
    )
    first_child[above[begins]] = order[begins]
    younger, older = order[~begins], order[np.flatnonzero(~begins) - 1]
    following[older], before[younger] = younger, older
    table.children_view[:] = np.bincount(above, minlength=table.capacity)[: table.capacity]
    table.leaves.push_all(np.flatnonzero(table.children_view[:count] == 0).tolist())
