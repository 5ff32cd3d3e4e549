"""What one request has offered so far: the chain of each KV group, and where chunks hang on it.

All FULL groups together form the spine: one chain, ordered by end position, then by group. Each
of its chunks hangs on the one before, so that what is left of a prefix after leaf-first eviction
is contiguous in every FULL group. WINDOW and STATE chunks hang on the last spine chunk that ends
no later than they do; in a model without FULL groups, on the previous chunk of their own group.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.table import BUSY, READABLE, Entries, Table
from kvpool.types import Geometry, GroupKind

ROOT, UNKNOWN, MISSING = -1, -2, -3
"""Instead of an entry: no parent is needed; never offered; offered, but not resident (now)."""

Loads = npt.NDArray[np.float64]


class Chain:
    """Chunks of one KV group by end position, each with the entry that it had when last seen.

    An entry that left the table, or serves another chunk, is told by its generation.
    """

    __slots__ = ("entries", "generations", "positions")

    def __init__(self) -> None:
        self.positions = array("i")
        self.entries = array("i")
        self.generations = array("I")

    def learn(self, positions: Sequence[int], entries: Sequence[int], table: Table) -> None:
        """Note chunks with the entries they have now; MISSING where they are not resident."""
        generations = [table.generation[entry] if entry >= 0 else 0 for entry in entries]
        rising = all(map(operator.lt, positions, positions[1:]))
        if rising and positions and (not self.positions or positions[0] > self.positions[-1]):
            self.positions.extend(positions)
            self.entries.extend(entries)
            self.generations.extend(generations)
            return
        for position, entry, generation in zip(positions, entries, generations, strict=True):
            self._put(position, entry, generation)

    def _put(self, position: int, entry: int, generation: int) -> None:
        i = bisect_left(self.positions, position)
        if i == len(self.positions) or self.positions[i] != position:
            self.positions.insert(i, position)
            self.entries.insert(i, entry)
            self.generations.insert(i, generation)
        else:
            self.entries[i], self.generations[i] = entry, generation

    def set_entry(self, position: int, entry: int, table: Table) -> None:
        """Note the entry of a chunk that was offered before."""
        i = bisect_left(self.positions, position)
        self.entries[i], self.generations[i] = entry, table.generation[entry]

    def entry_at(self, i: int, table: Table) -> int:
        """Return the entry of the i-th chunk, MISSING where it is not resident."""
        entry = self.entries[i]
        if entry >= 0 and table.generation[entry] == self.generations[i]:
            return entry
        return MISSING

    def find(self, position: int, table: Table) -> int:
        """Return the entry of the chunk that ends at `position`, else UNKNOWN or MISSING."""
        i = bisect_left(self.positions, position)
        if i < len(self.positions) and self.positions[i] == position:
            return self.entry_at(i, table)
        return UNKNOWN

    def resident(self, table: Table) -> tuple[npt.NDArray[np.int32], Entries]:
        """Return end positions and entries of all chunks that are resident. Shape (n,) each."""
        entries = np.array(self.entries, dtype=np.int64)
        known = np.flatnonzero(entries >= 0)
        generations = np.array(self.generations, dtype=np.uint32)[known]
        alive = known[table.generation_view[entries[known]] == generations]
        return np.array(self.positions, dtype=np.int32)[alive], entries[alive]


class RequestState:
    """A request's memory in the control plane. Opaque to callers; made by `Orchestrator.begin`."""

    __slots__ = ("chains", "epoch", "load_id", "looked_up", "request_id", "stamp")

    def __init__(self, request_id: str, groups: int, epoch: int) -> None:
        self.request_id = request_id
        self.chains = [Chain() for _ in range(groups)]
        self.epoch, self.stamp = epoch, 0
        self.looked_up = 0  # the entry found last, of whatever chunk it may be by now
        self.load_id: int | None = None

    def forget_chains(self) -> None:
        """Drop what was offered."""
        self.chains = [Chain() for _ in self.chains]

    def forget(self, epoch: int) -> None:
        """Drop what was offered and the load under way: the table was emptied."""
        self.forget_chains()
        self.epoch, self.load_id = epoch, None


class PrefixRules:
    """Where chunks hang, and what a load that ends at a chunk reads. Pure, but for the table."""

    def __init__(self, geometry: Geometry) -> None:
        self.groups = geometry.groups
        self.full = [i for i, g in enumerate(self.groups) if g.kind is GroupKind.FULL]
        self.sizes = [group.chunk_bytes for group in self.groups]

    def window(self, group: int) -> int:
        """Return how many chunks of a WINDOW or STATE group a load reads."""
        if self.groups[group].kind is GroupKind.STATE:
            return 1
        return max(self.groups[group].window_chunks or 1, 1)

    def tokens(self, group: int, position: int) -> int:
        """Return how many tokens the chunk of `group` that ends at `position` covers."""
        return (position - 1) % self.groups[group].chunk_tokens + 1

    def is_partial(self, group: int, position: int) -> bool:
        """Whether a chunk that ends there is the tail of a prompt, shorter than a whole chunk."""
        return position % self.groups[group].chunk_tokens != 0

    def parent(self, request: RequestState, table: Table, group: int, position: int) -> int:
        """Return the entry that a chunk hangs on, ROOT, or MISSING: it must not be stored."""
        if position <= 0:
            return MISSING
        if group in self.full:
            start = position - self.tokens(group, position)
            if start and request.chains[group].find(start, table) < 0:
                return MISSING
            return self._on_spine(request, table, group, position)
        if self.full:
            return self._on_spine(request, table, len(self.groups), position)
        chain = request.chains[group]
        i = bisect_left(chain.positions, position) - 1
        return max(chain.entry_at(i, table), ROOT) if i >= 0 else ROOT

    def _on_spine(self, request: RequestState, table: Table, group: int, position: int) -> int:
        """Return the last spine chunk before (position, group), in that order.

        Tails of prompts are left out, but for those that end at the very position.
        """
        best = (0, -1, ROOT)
        for other in self.full:
            positions = request.chains[other].positions
            end = position if other < group else position - 1
            i = bisect_right(positions, end) - 1
            while i >= 0 and positions[i] != position and self.is_partial(other, positions[i]):
                i -= 1
            if i >= 0 and (positions[i], other) > best[:2]:
                best = (positions[i], other, request.chains[other].entry_at(i, table))
        return best[2]

    def spine_load(self, request: RequestState, table: Table, ends: npt.NDArray[np.int32]) -> Loads:
        """Return what the FULL groups read from each device in loads that end at `ends`.

        Shape (len(ends), devices), in bytes; only chunks that are resident count.
        """
        loads = np.zeros((len(ends), len(table.slots)))
        for group in self.full:
            positions, entries = request.chains[group].resident(table)
            whole = positions % self.groups[group].chunk_tokens == 0
            positions, entries = positions[whole], entries[whole]
            reads = np.zeros((len(entries) + 1, len(table.slots)))
            reads[np.arange(1, len(entries) + 1), placed_on(table, entries)] = self.sizes[group]
            loads += reads.cumsum(axis=0)[np.searchsorted(positions, ends, side="right")]
        return loads

    def last_chunks(
        self, request: RequestState, table: Table, group: int, position: int, count: int
    ) -> list[int]:
        """Return the entries of at most `count` resident chunks that end before `position`."""
        chain = request.chains[group]
        i = bisect_left(chain.positions, position) - 1
        entries: list[int] = []
        while i >= 0 and len(entries) < count:
            entry = chain.entry_at(i, table)
            if entry >= 0:
                entries.append(entry)
            i -= 1
        return entries[::-1]


def placed_on(table: Table, entries: Entries) -> npt.NDArray[np.uint8]:
    """Return the device that each chunk lies on; a spill under way counts as done."""
    first = table.device0_view[entries]
    spilling = (table.flags_view[entries] & BUSY != 0) & (table.state_view[entries] == READABLE)
    if not spilling.any():
        return first
    memory = np.array(table.memory, np.bool_)
    return np.where(spilling & memory[first], table.device1_view[entries], first)


class WindowLoads:
    """What the last chunks of all WINDOW and STATE groups read from each device, while one walks
    along a prefix."""

    def __init__(self, rules: PrefixRules, request: RequestState, table: Table, start: int) -> None:
        self._sizes = rules.sizes
        self._total = [0.0] * len(table.slots)
        self._windows: dict[int, tuple[int, deque[int]]] = {}
        for group in range(len(rules.groups)):
            if group in rules.full:
                continue
            count = rules.window(group)
            self._windows[group] = count, deque()
            entries = rules.last_chunks(request, table, group, start, count)
            for device in placed_on(table, np.array(entries, dtype=np.int64)).tolist():
                self.add(group, device)

    def add(self, group: int, device: int) -> None:
        """The next chunk of `group` lies on `device`; what leaves the window counts no more."""
        count, devices = self._windows[group]
        devices.append(device)
        self._total[device] += self._sizes[group]
        if len(devices) > count:
            self._total[devices.popleft()] -= self._sizes[group]

    def before(self, group: int) -> list[float]:
        """Return the loads in bytes by device, without the place of the next chunk of `group`."""
        count, devices = self._windows[group]
        loads = list(self._total)
        if len(devices) == count:
            loads[devices[0]] -= self._sizes[group]
        return loads
