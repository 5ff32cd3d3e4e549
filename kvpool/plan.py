"""What the control plane tells the data plane to do, and how reports of several ranks add up.

One plan a job crosses the process border, as arrays. A plan names devices, slots and table
entries, never addresses: each rank has the same slots at addresses of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from kvpool.types import NO_DEVICE, DeviceCounters, Key, WorkerReport

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Chunks to read, in the order of the keys that were asked for. All arrays have shape (n,).

    `keep_device` is a DRAM device that keeps a copy of the chunk as it passes through host memory
    (NO_DEVICE: none), in `keep_slot`, acknowledged under `keep_write_id`.
    """

    load_id: int
    group: UInt8
    device: UInt8
    slot: Int32
    keep_device: UInt8
    keep_slot: Int32
    keep_write_id: Int64


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Chunks to write, in the order of the keys that were offered. All arrays have shape (n,).

    `keys`, `parents` (b"" for a root) and `positions` (end position in tokens) go into the
    headers on disk. Each chunk is acknowledged under its own `write_id`. A chunk with a
    `backup_device` (else NO_DEVICE) is copied to `backup_slot` there once it is written, which is
    acknowledged under `backup_write_id` (else -1).
    """

    write_id: Int64
    group: UInt8
    device: UInt8
    slot: Int32
    keys: list[Key]
    parents: list[Key]
    positions: Int32
    backup_write_id: Int64
    backup_device: UInt8
    backup_slot: Int32

    def backups(self, positions: Int64) -> MovePlan:
        """Return the backups of the chunks at `positions`, of those that are to have one."""
        chosen = positions[self.backup_device[positions] != NO_DEVICE]
        return MovePlan(
            write_id=self.backup_write_id[chosen],
            group=self.group[chosen],
            source_device=self.device[chosen],
            source_slot=self.slot[chosen],
            device=self.backup_device[chosen],
            slot=self.backup_slot[chosen],
            keys=[self.keys[i] for i in chosen],
            parents=[self.parents[i] for i in chosen],
            positions=self.positions[chosen],
        )


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Chunks to copy from a DRAM slot to a slot of a slower device: spills, or backups of what was
    just stored. Shape (n,) each.
    """

    write_id: Int64
    group: UInt8
    source_device: UInt8
    source_slot: Int32
    device: UInt8
    slot: Int32
    keys: list[Key] = field(default_factory=list)
    parents: list[Key] = field(default_factory=list)
    positions: Int32 = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class StoredHeaders:
    """Headers that survived: lists and arrays of shape (n,), by ascending slot."""

    slots: Int32
    keys: list[Key]
    parents: list[Key]
    positions: Int32
    groups: UInt8
    lengths: UInt32
    checksums: UInt32

    @classmethod
    def none(cls) -> StoredHeaders:
        """Return what a fresh lease has."""
        number = np.empty(0, np.int32)
        crc = np.empty(0, np.uint32)
        return cls(number, [], [], number, np.empty(0, np.uint8), crc, crc)


def add_counters(total: DeviceCounters, part: DeviceCounters) -> None:
    """Add `part` to `total`; of `queue_depth` and `error` the newer value counts."""
    error = part.error or total.error
    for item in fields(DeviceCounters):
        setattr(total, item.name, getattr(total, item.name) + getattr(part, item.name))
    total.queue_depth, total.error = part.queue_depth, error


def merge_reports(first: WorkerReport, second: WorkerReport) -> WorkerReport:
    """Return what two reports (of two ranks, or of two steps) say together."""
    merged = WorkerReport()
    for report in (first, second):
        for target, source in (
            (merged.finished_writes, report.finished_writes),
            (merged.failed_writes, report.failed_writes),
            (merged.finished_loads, report.finished_loads),
        ):
            for write_id, ranks in source.items():
                target[write_id] = target.get(write_id, 0) + ranks
        for load_id, positions in report.failed_loads.items():
            merged.failed_loads.setdefault(load_id, set()).update(positions)
        for label, counters in report.counters.items():
            add_counters(merged.counters.setdefault(label, DeviceCounters()), counters)
        merged.trials.update(report.trials)
        merged.load_seconds += report.load_seconds
        merged.store_seconds += report.store_seconds
    return merged
