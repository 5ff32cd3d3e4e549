"""The global lookup table: key -> where the chunk is, and the state machine of an entry.

An entry is an index into columns that are allocated at start; one entry holds at least one slot,
so there are as many entries as slots. Its life:

    free --add--> writing --end_write(ok)--> readable
    writing --end_write(failed)--> free
    writing, readable --end_backup--> the same        (a chunk in memory got its copy, or did not)
    readable --begin_copy / end_write--> readable     (a second copy is made: keep or spill)
    writing, readable --drop--> free, or doomed where it is pinned or a write is under way
    doomed --unpin, end_write, end_backup--> free

`writing` and `readable` entries are *resident*: the index knows them, they have a parent and
children, and a parent is resident as long as its children are. Slots go back with the entry,
never earlier. Whatever is not in this list raises `TransitionError`: it is a bug of the caller.

Columns come twice: as an array for single cells, and as a numpy view on it (`..._view`) for many.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigurationError, KVPoolError
from kvpool.recency import ENTRY_BITS, LazyHeap
from kvpool.slots import Slots
from kvpool.types import NO_DEVICE, Key

FREE, WRITING, READABLE, DOOMED = range(4)
STATE_NAMES = ("free", "writing", "readable", "doomed")

# Flags. A busy entry has one write (store, keep or spill) that is not acknowledged yet; of one that
# is being backed up, a copy is on its way from memory to a slower device. Both may be so at once.
BUSY, BACKING = 1, 32
HELD = BUSY | BACKING
RETIRE_FIRST, RETIRE_SECOND = 2, 4
_LEAF_QUEUED, _SPILL_QUEUED = 8, 16
_QUEUED = _LEAF_QUEUED | _SPILL_QUEUED

VICTIM_LIMIT = 256
"""Most chunks that are given up for one new one."""

Entries = npt.NDArray[np.int64]


class TransitionError(KVPoolError):
    """An entry was asked for a step that its state does not allow."""


def _view(column: Any, kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.frombuffer(column, dtype=kind)


class Table:
    """Entries, their tree, pins, slots, and the two orders in which chunks are given up.

    `slots[d]` is the number of slots of device d, `memory[d]` whether it is DRAM. Of two copies
    one is in memory: the second (`device1`) of a chunk that was kept as it passed, the first of
    one that was backed up. While a spill or a backup is under way, the second is its target.
    """

    def __init__(self, slots: Sequence[int], memory: Sequence[bool]) -> None:
        capacity = sum(slots)
        if capacity >= 1 << ENTRY_BITS:
            raise ConfigurationError("slots", capacity, f"fewer than {1 << ENTRY_BITS} in all")
        self.capacity = capacity
        self.slots = [Slots(count) for count in slots]
        self.memory = list(memory)
        self._spills = any(memory) and not all(memory)
        self.index: dict[Key, int] = {}
        self.keys: list[Key] = [b""] * capacity
        self.free = array("i", range(capacity - 1, -1, -1))
        self._allocate_columns(capacity)
        self._memory_view = np.zeros(NO_DEVICE + 1, np.bool_)
        self._memory_view[: len(memory)] = memory
        self.leaves = LazyHeap(self.stamp, self.position, self.flags, _LEAF_QUEUED)
        self.spillable = LazyHeap(self.stamp, self.position, self.flags, _SPILL_QUEUED)

    def _allocate_columns(self, capacity: int) -> None:
        def links() -> array[int]:
            return array("i", [-1]) * capacity

        self.parent, self.first_child = links(), links()
        self.next_sibling, self.previous_sibling = links(), links()
        self.children = array("i", [0]) * capacity
        self.position, self.pins = array("i", [0]) * capacity, array("i", [0]) * capacity
        self.stamp = array("q", [0]) * capacity
        # Counts how often the entry left the index: (entry, generation) names a chunk for ever.
        self.generation = array("I", [0]) * capacity
        self.slot0, self.slot1 = links(), links()
        self.state, self.flags, self.group = (bytearray(capacity) for _ in range(3))
        self.device0 = bytearray([NO_DEVICE]) * capacity
        self.device1 = bytearray([NO_DEVICE]) * capacity
        self.parent_view = _view(self.parent, np.int32)
        self.children_view = _view(self.children, np.int32)
        self.position_view, self.pins_view = (
            _view(self.position, np.int32),
            _view(self.pins, np.int32),
        )
        self.stamp_view = _view(self.stamp, np.int64)
        self.generation_view = _view(self.generation, np.uint32)
        self.slot0_view, self.slot1_view = _view(self.slot0, np.int32), _view(self.slot1, np.int32)
        self.state_view, self.flags_view = _view(self.state, np.uint8), _view(self.flags, np.uint8)
        self.group_view = _view(self.group, np.uint8)
        self.device0_view = _view(self.device0, np.uint8)
        self.device1_view = _view(self.device1, np.uint8)

    # ---- states -----------------------------------------------------------------------------

    def add(
        self,
        key: Key,
        parent: int,
        group: int,
        position: int,
        device: int,
        stamp: int,
        leading: bool = True,
        backup: int = -1,
    ) -> int:
        """Make an entry that is being written to a free slot of `device`; `parent` -1: a root.

        A `leading` child is found first below its parent: the one that prefixes go on with. With
        `backup`, a device, the chunk is then copied to a slot of that one too.
        """
        if key in self.index:
            raise TransitionError(f"{key.hex()}: already there")
        if parent >= 0 and not self.resident(parent):
            raise TransitionError(f"{key.hex()}: parent {self._name(parent)} is not resident")
        slot = self.slots[device].free.pop()
        entry = self.free.pop()
        self.index[key] = entry
        self.keys[entry] = key
        self.state[entry] = WRITING
        self.flags[entry] = (self.flags[entry] & _QUEUED) | BUSY
        self.group[entry], self.position[entry], self.stamp[entry] = group, position, stamp
        self.device0[entry], self.slot0[entry] = device, slot
        if backup >= 0:
            self.device1[entry], self.slot1[entry] = backup, self.slots[backup].free.pop()
            self.flags[entry] |= BACKING
        if parent >= 0:
            before = -1 if leading else self.first_child[parent]
            self._link(parent, entry, before)
        return entry

    def resident(self, entry: int) -> bool:
        """Whether the index knows the entry: it is being written or readable."""
        return self.state[entry] in (WRITING, READABLE)

    def end_write(self, entry: int, ok: bool) -> None:
        """The entry's write was acknowledged by all ranks. A spill swaps the entry's locations."""
        if not self.flags[entry] & BUSY:
            raise TransitionError(f"{self._name(entry)}: no write is under way")
        if self.state[entry] == WRITING and not ok:
            self.drop(entry)
        self.flags[entry] &= ~BUSY
        if self.state[entry] == DOOMED:
            self._release_doomed(entry)
            return
        if self.state[entry] == READABLE:
            self._end_copy(entry, ok)
        self.state[entry] = READABLE
        self._offer(entry)

    def end_backup(self, entry: int, ok: bool) -> None:
        """The entry's backup was acknowledged by all ranks; its store may not have been yet."""
        if not self.flags[entry] & BACKING:
            raise TransitionError(f"{self._name(entry)}: no backup is under way")
        self.flags[entry] &= ~BACKING
        if self.state[entry] == DOOMED:
            self._release_doomed(entry)
            return
        if not ok:
            self._free_second(entry)
        self._offer(entry)

    def begin_copy(self, entry: int, device: int) -> int:
        """Reserve a slot of `device` for a second copy of a readable chunk, and return it."""
        if self.state[entry] != READABLE or self.flags[entry] & HELD:
            raise TransitionError(f"{self._name(entry)}: cannot be copied now")
        if self.device1[entry] != NO_DEVICE:
            raise TransitionError(f"{self._name(entry)}: has two copies")
        slot = self.slots[device].free.pop()
        self.device1[entry], self.slot1[entry] = device, slot
        self.flags[entry] |= BUSY
        return slot

    def begin_backup(self, entry: int, device: int) -> int:
        """Reserve a slot of `device` for a copy of a chunk in memory that stays there too."""
        slot = self.begin_copy(entry, device)
        self.flags[entry] ^= HELD  # from busy to being backed up
        return slot

    def _end_copy(self, entry: int, ok: bool) -> None:
        moved = self.memory[self.device0[entry]]
        if ok and moved:
            self._swap_locations(entry)
        if not ok or (moved and not self.pins[entry]):
            self._free_second(entry)

    def drop_memory_copy(self, entry: int) -> None:
        """Free the slot in memory of an entry that has two copies and that nobody reads."""
        if not self.has_copy(entry) or self.pins[entry]:
            raise TransitionError(f"{self._name(entry)}: no copy to drop now")
        if self.memory[self.device0[entry]]:
            self._swap_locations(entry)
        self._free_second(entry)
        self._offer(entry)

    def _swap_locations(self, entry: int) -> None:
        first, second = self.device0[entry], self.device1[entry]
        self.device0[entry], self.device1[entry] = second, first
        slot, other = self.slot0[entry], self.slot1[entry]
        self.slot0[entry], self.slot1[entry] = other, slot

    def _free_second(self, entry: int) -> None:
        retire = bool(self.flags[entry] & RETIRE_SECOND)
        self.slots[self.device1[entry]].give_back(self.slot1[entry], retire)
        self.device1[entry], self.slot1[entry] = NO_DEVICE, -1

    def drop(self, entry: int) -> int:
        """Remove an entry and all below it from the index; return how many chunks that were.

        Those that are pinned or under a write keep their slots until that ends.
        """
        if not self.resident(entry):
            raise TransitionError(f"{self._name(entry)}: is not resident")
        self._unlink(entry)
        below, count = [entry], 0
        while below:
            current = below.pop()
            child = self.first_child[current]
            while child >= 0:
                below.append(child)
                child = self.next_sibling[child]
            self._remove(current)
            count += 1
        return count

    def _remove(self, entry: int) -> None:
        del self.index[self.keys[entry]]
        self.keys[entry] = b""
        self.generation[entry] = (self.generation[entry] + 1) & 0xFFFFFFFF
        self.parent[entry] = self.first_child[entry] = -1
        self.next_sibling[entry] = self.previous_sibling[entry] = -1
        self.children[entry] = 0
        self.state[entry] = DOOMED
        self._count_doomed(entry, 1)
        self._release_doomed(entry)

    def _count_doomed(self, entry: int, change: int) -> None:
        self.slots[self.device0[entry]].doomed += change
        if self.device1[entry] != NO_DEVICE:
            self.slots[self.device1[entry]].doomed += change

    def _release_doomed(self, entry: int) -> None:
        """Free a doomed entry, unless it is still pinned or under a write."""
        if self.pins[entry] or self.flags[entry] & HELD:
            return
        self._count_doomed(entry, -1)
        if self.device1[entry] != NO_DEVICE:
            self._free_second(entry)
        retire = bool(self.flags[entry] & RETIRE_FIRST)
        self.slots[self.device0[entry]].give_back(self.slot0[entry], retire)
        self.device0[entry], self.slot0[entry] = NO_DEVICE, -1
        self.flags[entry] &= _QUEUED
        self.state[entry] = FREE
        self.free.append(entry)

    def pin(self, entries: Entries) -> None:
        """Keep readable chunks where they are until `unpin`. Shape (n,), each entry once."""
        if not (self.state_view[entries] == READABLE).all():
            raise TransitionError("only readable chunks can be pinned")
        self.pins_view[entries] += 1

    def unpin(self, entries: Entries) -> None:
        """Undo one `pin` of the same entries; doomed ones are freed with their last pin."""
        if not (self.pins_view[entries] > 0).all():
            raise TransitionError("unpinned more often than pinned")
        self.pins_view[entries] -= 1
        idle = entries[self.pins_view[entries] == 0]
        doomed = self.state_view[idle] == DOOMED
        for entry in idle[doomed].tolist():
            self._release_doomed(entry)
        self._offer_many(idle[~doomed])

    def retire(self, entry: int, device: int, slot: int) -> None:
        """Drop an entry whose chunk could not be read from `slot`, which is never used again.

        It goes out of use when the entry is freed; nothing happens to a slot that it has no more.
        """
        if self.device0[entry] == device and self.slot0[entry] == slot:
            self.flags[entry] |= RETIRE_FIRST
        elif self.device1[entry] == device and self.slot1[entry] == slot:
            self.flags[entry] |= RETIRE_SECOND
        if self.resident(entry):
            self.drop(entry)

    def clear(self) -> None:
        """Drop everything at once."""
        resident = (self.state_view == WRITING) | (self.state_view == READABLE)
        held = (self.pins_view != 0) | ((self.flags_view & HELD) != 0)
        for links in (self.parent, self.first_child, self.next_sibling, self.previous_sibling):
            _view(links, np.int32).fill(-1)
        self.children_view.fill(0)
        self.flags_view &= 0xFF ^ _QUEUED
        self.leaves.clear()
        self.spillable.clear()
        self.generation_view[resident] += np.uint32(1)
        self.keys[:] = [b""] * self.capacity
        self.index.clear()
        self.state_view[resident] = DOOMED
        for entry in np.flatnonzero(resident & held).tolist():
            self._count_doomed(entry, 1)
        self._free_many(np.flatnonzero(resident & ~held))

    def _free_many(self, entries: Entries) -> None:
        for device, slots in enumerate(self.slots):
            for devices, column in (
                (self.device0_view, self.slot0_view),
                (self.device1_view, self.slot1_view),
            ):
                slots.free.frombytes(column[entries[devices[entries] == device]].tobytes())
        self.device0_view[entries] = self.device1_view[entries] = NO_DEVICE
        self.slot0_view[entries] = self.slot1_view[entries] = -1
        self.flags_view[entries] = 0
        self.state_view[entries] = FREE
        self.free.frombytes(entries.astype(np.int32).tobytes())

    def lose_device(self, device: int) -> int:
        """Drop all that lies on a broken device and nowhere else; return how many chunks."""
        resident = (self.state_view == WRITING) | (self.state_view == READABLE)
        idle = (self.flags_view & HELD) == 0
        for entry in np.flatnonzero(resident & idle & (self.device1_view == device)).tolist():
            self._free_second(entry)
            self._offer(entry)
        dropped = 0
        for entry in np.flatnonzero(resident & (self.device0_view == device)).tolist():
            if not self.resident(entry):
                continue  # went with a parent
            if self.has_copy(entry):
                self._swap_locations(entry)
                self._free_second(entry)
            else:
                dropped += self.drop(entry)
        return dropped

    def has_copy(self, entry: int) -> bool:
        """Whether the chunk can be read from two places."""
        return self.device1[entry] != NO_DEVICE and not self.flags[entry] & HELD

    def _name(self, entry: int) -> str:
        state = STATE_NAMES[self.state[entry]]
        return f"entry {entry} ({self.keys[entry].hex() or 'no key'}, {state})"

    # ---- tree -------------------------------------------------------------------------------

    def _link(self, parent: int, child: int, before: int) -> None:
        """Hang `child` on `parent`, behind its child `before`; -1: in front of all."""
        after = self.next_sibling[before] if before >= 0 else self.first_child[parent]
        self.parent[child] = parent
        self.previous_sibling[child], self.next_sibling[child] = before, after
        if after >= 0:
            self.previous_sibling[after] = child
        if before >= 0:
            self.next_sibling[before] = child
        else:
            self.first_child[parent] = child
        self.children[parent] += 1

    def _unlink(self, child: int) -> None:
        parent = self.parent[child]
        if parent < 0:
            return
        before, after = self.previous_sibling[child], self.next_sibling[child]
        if before >= 0:
            self.next_sibling[before] = after
        else:
            self.first_child[parent] = after
        if after >= 0:
            self.previous_sibling[after] = before
        self.children[parent] -= 1
        self._offer(parent)

    def ancestors(self, entry: int, group: int, count: int) -> list[int]:
        """Return at most `count` entries of `group` on the way up to `entry`, that one the last."""
        parent, groups = self.parent, self.group
        entries: list[int] = []
        while entry >= 0 and len(entries) < count:
            if groups[entry] == group:
                entries.append(entry)
            entry = parent[entry]
        entries.reverse()
        return entries

    # ---- giving up --------------------------------------------------------------------------

    def touch(self, entries: Entries, stamp: int) -> None:
        """Note a use of resident entries. `stamp` never goes down from call to call."""
        self.stamp_view[entries] = stamp

    def touch_ancestors(self, entry: int, stamp: int) -> None:
        """Note a use of all that lies above an entry, up to what has the stamp already."""
        entry = self.parent[entry]
        while entry >= 0 and self.stamp[entry] != stamp:
            self.stamp[entry] = stamp
            entry = self.parent[entry]

    def is_idle(self, entry: int) -> bool:
        """Whether a chunk is readable, and nothing reads or writes it."""
        return (
            self.state[entry] == READABLE and not self.pins[entry] and not self.flags[entry] & HELD
        )

    def in_memory(self, entry: int) -> bool:
        """Whether one of the chunk's locations is in memory."""
        return bool(
            self._memory_view[self.device0[entry]] or self._memory_view[self.device1[entry]]
        )

    def _offer(self, entry: int) -> None:
        """Queue an idle entry for eviction and spilling, where it qualifies."""
        if not self.is_idle(entry):
            return  # offered again when that ends
        if not self.children[entry]:
            self.leaves.push(entry)
        if self._spills and self.in_memory(entry):
            self.spillable.push(entry)

    def _offer_many(self, entries: Entries) -> None:
        """`_offer` for unpinned resident entries. Few lack a record, so the loop is short."""
        flags = self.flags_view[entries]
        idle = (self.state_view[entries] == READABLE) & ((flags & HELD) == 0)
        leaf = idle & (self.children_view[entries] == 0) & ((flags & _LEAF_QUEUED) == 0)
        self.leaves.push_all(entries[leaf].tolist())
        if self._spills:
            memory = self._memory_view[self.device0_view[entries]]
            memory |= self._memory_view[self.device1_view[entries]]
            chosen = idle & memory & ((flags & _SPILL_QUEUED) == 0)
            self.spillable.push_all(entries[chosen].tolist())

    def evict_for(self, devices: Sequence[int], limit: int) -> tuple[int, int] | None:
        """Evict leaves, coldest prefix first, until one of `devices` has a free slot.

        Only chunks with a stamp below `limit` go, never pinned or busy ones, and none at all
        unless a slot comes free. `devices` come in order of preference; a later one is taken only
        where no victim frees a slot of an earlier one. Returns (device, chunks evicted).
        """
        victims: list[int] = []
        left: dict[int, int] = {}  # parent -> children that are not victims
        found: dict[int, int] = {}  # device -> victims up to the first that lies on it
        while len(victims) < VICTIM_LIMIT and devices[0] not in found:
            entry = self.leaves.pop_below(limit)
            if entry < 0:
                break
            if not self.is_idle(entry) or left.get(entry, self.children[entry]):
                continue  # offered again when that changes
            victims.append(entry)
            found.setdefault(self.device0[entry], len(victims))
            found.setdefault(self.device1[entry], len(victims))
            parent = self.parent[entry]
            if parent >= 0:
                left[parent] = left.get(parent, self.children[parent]) - 1
                if not left[parent]:
                    self.leaves.push(parent)
        device = next((device for device in devices if device in found), None)
        wanted = found[device] if device is not None else 0
        self.leaves.push_all(victims[wanted:])
        for entry in victims[:wanted]:
            self.drop(entry)
        return None if device is None else (device, wanted)

    def pop_spillable(self) -> int:
        """Take the coldest idle chunk in memory out of the queue; -1 where there is none.

        The caller moves it or puts it back with `spillable.push`.
        """
        while (entry := self.spillable.pop_below(1 << 62)) >= 0:
            if self.is_idle(entry) and self.in_memory(entry):
                return entry
        return -1
