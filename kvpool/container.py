"""Containers: who may use which bytes of a file or block device. The sole owner of offsets.

`kvpool.layout` says what lies where. Several engines and ranks share a container:

- A **lease** is one contiguous range of the extent area, for (namespace, rank, owner). Its holder
  keeps an exclusive lock on the range's bytes, so a range that is locked is in use whatever the
  table says, and a killed holder's lease is free once its last transfer has ended.
- The lease table changes under a lock on the table's bytes, the superblocks under one on theirs.
- Locks are open file description locks: they follow `fd`, and end with its last duplicate.

A container is created in an order that leaves, at every moment, nothing, something that says it
is unfinished, or a container. What kvpool did not write is never overwritten.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpool import layout, medium
from kvpool.errors import ContainerError, DeviceError
from kvpool.layout import (
    BLOCK_BYTES,
    TABLE_BYTES,
    TABLE_OFFSET,
    LeaseEntry,
    StoredProfiles,
    Superblock,
)
from kvpool.medium import Medium
from kvpool.plan import StoredHeaders
from kvpool.types import Key
from kvpool.units import format_bytes

UInt64 = npt.NDArray[np.uint64]
Int32 = npt.NDArray[np.int32]

_RETRY_S = 0.01
DYING_S = 30.0
_READ_BYTES = 64 << 20
_MOST_UNREADABLE = 256  # header blocks, in one read


class Container:
    """An open container. All offsets and lengths are multiples of 4096 bytes.

    The caller owns one thread for all methods.
    """

    def __init__(self, opened: Medium, superblock: Superblock) -> None:
        """Take over an open medium and what was read from it; use `open` instead."""
        self._medium, self._superblock = opened, superblock
        self._held: dict[int, Lease] = {}  # by start of the range

    @classmethod
    def open(cls, path: str | Path, size: int | None = None, *, create: bool = True) -> Container:
        """Open the container on the block device `path`, or in the folder `path`.

        `size` is what it may take, in bytes: a smaller container grows, a larger one is refused.
        None is all of a block device, and a file as it is. Where there is no container one is
        created if `create`. Raises ConfigurationError (path or size), ForeignContentError (not
        ours, left untouched), ContainerError (damaged, of an unknown version, in use, none) and
        OutOfSpaceError.
        """
        return cls(*medium.attach(Path(path), size, create))

    @classmethod
    def format(cls, path: str | Path, size: int | None = None, *, force: bool = False) -> None:
        """Write an empty container in place of one of ours or, with `force`, of anything.

        `size` as for `open`; None keeps a file's size. Raises what `open` raises, ContainerError
        also where it is in use.
        """
        medium.overwrite(Path(path), size, force)

    # ---- what it is -------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The file or block device."""
        return self._medium.path

    @property
    def fd(self) -> int:
        """Opened O_DIRECT; for the engine's transfers."""
        return self._medium.fd

    @property
    def size(self) -> int:
        """Bytes of the whole container; nothing beyond is ever written."""
        return self._superblock.size

    @property
    def uuid(self) -> str:
        return uuid.UUID(bytes=self._superblock.uuid).hex

    @property
    def probe_area(self) -> tuple[int, int]:
        """Offset and length of the scratch room for measurements."""
        return layout.PROBE_OFFSET, self._superblock.probe_bytes

    def slots_for(self, ranks: int, slot_bytes: int) -> int:
        """Return how many slots each of `ranks` equal leases has; 0 where none fits."""
        room = self._superblock.extents_bytes // ranks // BLOCK_BYTES * BLOCK_BYTES
        return layout.slots_within(room, slot_bytes)

    # ---- leases -----------------------------------------------------------------------------

    def acquire(
        self,
        namespace: bytes,
        rank: int,
        owner: str,
        slots: int,
        slot_bytes: int,
        *,
        grace_s: float = 1.0,
    ) -> Lease:
        """Lease `slots` slots of `slot_bytes`, and lock them until the lease is closed.

        The holder's own idle lease of the same geometry is taken again, with what it stores.
        Otherwise free room is used, then that of idle leases, oldest first. `grace_s` is how long
        to wait for the holder's lease while it is still locked (a predecessor that is ending). A
        lock outlives a killed process until its last transfer has ended: that is waited for.
        Raises ContainerError, which says who holds what.
        """
        if len(namespace) != 32 or len(owner.encode()) > layout.OWNER_ROOM:
            raise ValueError(f"namespace has 32 bytes, owner at most {layout.OWNER_ROOM}")
        if slots < 1 or slot_bytes < 1 or slot_bytes % BLOCK_BYTES:
            raise ValueError(f"{slots} slots of {slot_bytes} bytes")
        wanted = LeaseEntry(
            namespace,
            rank,
            owner,
            start=0,
            length=layout.lease_bytes(slots, slot_bytes),
            slot_bytes=slot_bytes,
            slots=slots,
            epoch=1,
            created_ns=time.time_ns(),
            used_ns=time.time_ns(),
            tag=secrets.randbits(63) | 1,
            pid=os.getpid(),
        )
        started_s = time.monotonic()
        while True:
            with self._medium.locked(TABLE_OFFSET, TABLE_BYTES):
                table = _Table(self._medium, self._superblock)
                passed_s = time.monotonic() - started_s
                dying = passed_s < DYING_S and self._any_dying(table)
                taken, wait = self._retake(table, wanted)
                if taken is None and not (wait and (dying or passed_s < grace_s)):
                    taken = self._allocate(table, wanted, raises=not dying)
            if taken is not None:
                self._held[taken.start] = taken
                return taken
            time.sleep(_RETRY_S)

    def leases(self) -> list[tuple[LeaseEntry, bool]]:
        """Return all leases and whether each is in use (locked), by this process or another."""
        with self._medium.locked(TABLE_OFFSET, TABLE_BYTES):
            entries = [
                entry
                for entry in _Table(self._medium, self._superblock).entries
                if entry is not None
            ]
            return [(entry, not self._idle(entry)) for entry in entries]

    def _idle(self, entry: LeaseEntry) -> bool:
        held = entry.start in self._held
        return not held and self._medium.locked_by_others(entry.start, entry.length) is None

    def _retake(self, table: _Table, wanted: LeaseEntry) -> tuple[Lease | None, bool]:
        """Return the holder's lease of before, else None and whether it might become idle."""
        wait = False
        for index, entry in enumerate(table.entries):
            if entry is None or not _same_use(entry, wanted) or entry.start in self._held:
                continue
            if self._medium.try_lock(entry.start, entry.length):
                entry = replace(entry, used_ns=wanted.used_ns, pid=wanted.pid)
                table.write({index: entry})
                return Lease(self, index, entry, fresh=False), False
            wait = True
        return None, wait

    def _any_dying(self, table: _Table) -> bool:
        """Whether a lease is locked whose holder has ended."""
        entries = [entry for entry in table.entries if entry is not None]
        return any(not _is_alive(entry.pid) and not self._idle(entry) for entry in entries)

    def _allocate(self, table: _Table, wanted: LeaseEntry, *, raises: bool) -> Lease | None:
        """Find and lock a range, dropping idle leases where that is what it takes."""
        idle = [(i, e) for i, e in enumerate(table.entries) if e and self._idle(e)]
        # Dropped from the end: the holder's own leases of another geometry, then the oldest.
        victims = sorted(idle, key=lambda ie: (_same_holder(ie[1], wanted), -ie[1].used_ns))
        dropped: set[int] = set()
        blocked: list[tuple[int, int]] = []  # locked, though the table does not say so
        while True:
            kept = [e for i, e in enumerate(table.entries) if e and i not in dropped]
            # Its own locks do not stop a holder, and the table may have lost an entry.
            mine = [(lease.start, lease.start + lease.length) for lease in self._held.values()]
            used = [(entry.start, entry.end) for entry in kept] + mine + blocked
            start = self._gap(used, wanted.length)
            if start is None or len(kept) == layout.LEASES:
                if not victims and not raises:
                    return None
                if not victims:
                    raise self._no_room(table, wanted)
                dropped.add(victims.pop()[0])
            elif not self._medium.try_lock(start, wanted.length):
                lock = self._medium.locked_by_others(start, wanted.length)
                blocked += [lock] if lock else []
            else:
                return self._write_lease(table, replace(wanted, start=start), dropped)

    def _gap(self, used: list[tuple[int, int]], length: int) -> int | None:
        start = self._superblock.extents_offset
        for first, end in sorted(used):
            if start + length <= first:
                break
            start = max(start, layout.align_up(end))
        return start if start + length <= self.size else None

    def _write_lease(self, table: _Table, entry: LeaseEntry, dropped: set[int]) -> Lease:
        """Make `entry`, whose range is locked, the lease of its range; it starts empty."""
        if dropped:
            table.write(dict.fromkeys(dropped))
        # Headers of whoever was here before must not be taken for this lease's.
        self._medium.write_zeros(entry.start, layout.header_table_bytes(entry.slots))
        self._medium.sync()
        index = table.entries.index(None)
        table.write({index: entry})
        return Lease(self, index, entry, fresh=True)

    def _no_room(self, table: _Table, wanted: LeaseEntry) -> ContainerError:
        holders = [
            f"namespace {entry.namespace.hex()[:12]} rank {entry.rank} owner {entry.owner!r}"
            f" pid {entry.pid} holds {format_bytes(entry.length)}"
            f" ({'idle' if self._idle(entry) else 'in use'})"
            for entry in table.entries
            if entry is not None
        ]
        return ContainerError(
            f"{self.path}: no room for {format_bytes(wanted.length)} within"
            f" {format_bytes(self._superblock.extents_bytes)}: {'; '.join(holders) or 'no leases'}"
        )

    def _update(self, index: int, entry: LeaseEntry | None) -> None:
        with self._medium.locked(TABLE_OFFSET, TABLE_BYTES):
            _Table(self._medium, self._superblock).write({index: entry})

    # ---- profile ----------------------------------------------------------------------------

    def read_profiles(self) -> StoredProfiles | None:
        """Return what the last measurement stored; None where nothing valid is there."""
        return layout.decode_profiles(self._medium.read(layout.PROFILE_OFFSET, BLOCK_BYTES))

    def write_profiles(self, stored: StoredProfiles) -> None:
        """Store a measurement for others that use this container."""
        self._medium.write(layout.PROFILE_OFFSET, layout.encode_profiles(stored))
        self._medium.sync()

    def try_lock_probe_area(self) -> bool:
        """Take the right to use the probe area; False where another process has it."""
        return self._medium.try_lock(*self.probe_area)

    def unlock_probe_area(self) -> None:
        self._medium.unlock(*self.probe_area)

    def close(self) -> None:
        """Close all leases and the file. No transfer may be in flight."""
        for lease in list(self._held.values()):
            lease.close()
        self._medium.close()


class Lease:
    """A locked range of a container: `slots` slots of `slot_bytes`, and their headers.

    `headers` (layout.HEADER_DTYPE, shape (slots,)) is the header table in memory, page-aligned;
    `fresh` says that nothing was stored before. `damaged_headers` is how many `read_headers` met
    that are neither empty nor what was ever written there: each has cost one chunk.
    """

    def __init__(self, container: Container, index: int, entry: LeaseEntry, fresh: bool) -> None:
        self._container, self._index, self._entry, self.fresh = container, index, entry, fresh
        self.start, self.slots, self.slot_bytes = entry.start, entry.slots, entry.slot_bytes
        self.damaged_headers = 0
        self._header_table_bytes = layout.header_table_bytes(entry.slots)
        self._memory = mmap.mmap(-1, self._header_table_bytes)
        raw = np.frombuffer(self._memory, np.uint8)
        self._address = int(raw.ctypes.data)
        self.headers = raw.view(layout.HEADER_DTYPE)[: entry.slots]

    @property
    def epoch(self) -> int:
        """The epoch of the headers that count."""
        return self._entry.epoch

    @property
    def length(self) -> int:
        return self._entry.length

    def offsets(self, slots: Int32) -> UInt64:
        """Return the absolute offsets of the slots' payloads, in bytes, shape (n,)."""
        self._check(slots)
        payload = self.start + self._header_table_bytes
        return slots.astype(np.uint64) * np.uint64(self.slot_bytes) + np.uint64(payload)

    def set_headers(
        self,
        slots: Int32,
        keys: Sequence[Key],
        parents: Sequence[Key],
        positions: npt.NDArray[np.int32],
        groups: npt.NDArray[np.uint8],
        lengths: npt.NDArray[np.uint32],
        checksums: npt.NDArray[np.uint32],
        epoch: int,
    ) -> Int32:
        """Describe what `slots` hold (arrays and lists of n), in memory.

        Returns the header blocks that changed, each once, ascending; see `header_block`.
        """
        self._check(slots)
        layout.fill_headers(
            self.headers,
            slots,
            keys,
            parents,
            positions,
            groups,
            lengths,
            checksums,
            epoch,
            self._entry.tag,
        )
        return _header_blocks(slots)

    def clear_headers(self, slots: Int32) -> Int32:
        """Say in memory that `slots` hold nothing; returns the header blocks that changed."""
        self._check(slots)
        self.headers[slots] = np.zeros((), layout.HEADER_DTYPE)
        return _header_blocks(slots)

    def header_block(self, block: int) -> tuple[int, int, int]:
        """Return (offset, address, length) with which block `block` of the table is written.

        Two writes of one block must not be in flight together: the older could land last.
        """
        at = block * BLOCK_BYTES
        if not 0 <= at < self._header_table_bytes:
            raise IndexError(f"header block {block} of {self._header_table_bytes // BLOCK_BYTES}")
        return self.start + at, self._address + at, BLOCK_BYTES

    def read_headers(self) -> StoredHeaders:
        """Read the header table into memory and return the valid headers of this epoch.

        What cannot be read counts as damaged. Raises DeviceError where that is much.
        """
        container, view = self._container, memoryview(self._memory)
        for at in range(0, self._header_table_bytes, _READ_BYTES):
            read_around_damage(container._medium, self.start + at, view[at : at + _READ_BYTES])
        found = layout.sort_headers(self.headers, self.epoch, self._entry.tag, self.slot_bytes)
        self.damaged_headers = found.damaged.size
        for slots in (found.stale, found.damaged):
            self.headers[slots] = np.zeros((), layout.HEADER_DTYPE)
        return layout.decode_headers(self.headers, found.valid)

    def advance_epoch(self, epoch: int) -> None:
        """Make all headers of earlier epochs invalid, durably."""
        if epoch < self.epoch:
            raise ValueError(f"epoch {epoch} is before {self.epoch}")
        entry = replace(self._entry, epoch=epoch)
        self._container._update(self._index, entry)
        self._entry = entry

    def close(self) -> None:
        """Let go of the range; what it stores stays, for the next holder of the same name."""
        self._end(replace(self._entry, used_ns=time.time_ns()))

    def release(self) -> None:
        """Let go of the range and give its room back."""
        self._end(None)

    def _end(self, entry: LeaseEntry | None) -> None:
        container = self._container
        if container._held.pop(self.start, None) is self:
            try:
                container._update(self._index, entry)
            finally:
                container._medium.unlock(self.start, self.length)

    def _check(self, slots: Int32) -> None:
        if slots.size and not (int(slots.min()) >= 0 and int(slots.max()) < self.slots):
            raise IndexError(f"slots {slots.min()} to {slots.max()} of {self.slots}")


def read_around_damage(opened: Medium, offset: int, buffer: memoryview) -> None:
    """Read header blocks; those that cannot be read are filled with what is no header.

    Raises DeviceError where a device fails so often that going on would take for ever.
    """
    try:
        opened.read_into(offset, buffer)
        return
    except DeviceError:
        failures = 0
    for at in range(0, len(buffer), BLOCK_BYTES):
        try:
            opened.read_into(offset + at, buffer[at : at + BLOCK_BYTES])
        except DeviceError:
            failures += 1
            if failures > _MOST_UNREADABLE:
                raise
            buffer[at : at + BLOCK_BYTES] = b"\xff" * BLOCK_BYTES


class _Table:
    """The lease table as read under its lock, and as `write` leaves it."""

    def __init__(self, opened: Medium, superblock: Superblock) -> None:
        self._medium = opened
        self._raw = bytearray(opened.read(TABLE_OFFSET, TABLE_BYTES))
        self.entries = layout.decode_table(bytes(self._raw), superblock)

    def write(self, changes: dict[int, LeaseEntry | None]) -> None:
        """Replace entries (None: free), durably."""
        for index, entry in changes.items():
            at = index * layout.LEASE_BYTES
            self._raw[at : at + layout.LEASE_BYTES] = layout.encode_lease(entry)
            self.entries[index] = entry
        for block in sorted({i * layout.LEASE_BYTES // BLOCK_BYTES for i in changes}):
            at = block * BLOCK_BYTES
            self._medium.write(TABLE_OFFSET + at, bytes(self._raw[at : at + BLOCK_BYTES]))
        self._medium.sync()


def _same_use(entry: LeaseEntry, wanted: LeaseEntry) -> bool:
    geometry = (entry.slots, entry.slot_bytes) == (wanted.slots, wanted.slot_bytes)
    return geometry and _same_holder(entry, wanted)


def _same_holder(entry: LeaseEntry, wanted: LeaseEntry) -> bool:
    holder = (wanted.namespace, wanted.rank, wanted.owner)
    return (entry.namespace, entry.rank, entry.owner) == holder


def _header_blocks(slots: Int32) -> Int32:
    return np.unique(slots // (BLOCK_BYTES // layout.HEADER_BYTES)).astype(np.int32)


def _is_alive(pid: int) -> bool:
    """Whether a process of this number runs here; one of another machine or container may not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
