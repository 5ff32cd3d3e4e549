"""Lazy heap of table entries, coldest first: touching an entry costs a column write, no more."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Protocol

ENTRY_BITS = 28
POSITION_BITS = 32
_ENTRY_MASK = (1 << ENTRY_BITS) - 1
_POSITION_LIMIT = (1 << POSITION_BITS) - 1
_STAMP_SHIFT = ENTRY_BITS + POSITION_BITS


class Cells(Protocol):
    """A column of the table: integers by entry."""

    def __getitem__(self, entry: int, /) -> int: ...

    def __setitem__(self, entry: int, value: int, /) -> None: ...


class LazyHeap:
    """Entries by (stamp, position descending), where stamps may grow without the heap knowing.

    A record is a lower bound of its entry's stamp, checked and renewed when it comes to the top.
    `flags[entry] & bit` says that the entry has its one record, so the heap holds at most as many
    records as the table has entries. A record outlives its entry and then serves the next chunk
    that gets the same entry, whose stamp can only be newer.
    """

    def __init__(self, stamp: Cells, position: Cells, flags: Cells, bit: int) -> None:
        self._stamp, self._position, self._flags, self._bit = stamp, position, flags, bit
        # One integer a record: a third of the memory of a tuple.
        self._records: list[int] = []

    def __len__(self) -> int:
        return len(self._records)

    def _record(self, entry: int) -> int:
        return (
            (self._stamp[entry] << _STAMP_SHIFT)
            | ((_POSITION_LIMIT - self._position[entry]) << ENTRY_BITS)
            | entry
        )

    def push(self, entry: int) -> None:
        """Add an entry; nothing happens where it has a record."""
        if not self._flags[entry] & self._bit:
            self._flags[entry] |= self._bit
            heapq.heappush(self._records, self._record(entry))

    def push_all(self, entries: Iterable[int]) -> None:
        """Add entries; those that have a record are left alone."""
        for entry in entries:
            self.push(entry)

    def _renew(self, limit: int) -> int:
        """Bring the coldest entry to the top and return it; -1 where it is not below `limit`."""
        records = self._records
        while records and records[0] >> _STAMP_SHIFT < limit:
            entry = records[0] & _ENTRY_MASK
            current = self._record(entry)
            if current == records[0]:
                return entry
            heapq.heapreplace(records, current)
        return -1

    def any_below(self, limit: int) -> bool:
        """Whether an entry has a stamp below `limit`."""
        return self._renew(limit) >= 0

    def pop_below(self, limit: int) -> int:
        """Remove and return the coldest entry; -1 where none has a stamp below `limit`."""
        entry = self._renew(limit)
        if entry >= 0:
            heapq.heappop(self._records)
            self._flags[entry] &= ~self._bit & 0xFF
        return entry

    def clear(self) -> None:
        """Forget all records; the caller clears the flags."""
        self._records.clear()
