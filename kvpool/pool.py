"""What all decisions of the control plane share: table, devices, open writes, counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvpool import placement
from kvpool.health import DeviceHealth
from kvpool.prefix import PrefixRules
from kvpool.table import Table
from kvpool.types import DeviceReport, DeviceState, Geometry

MEMORY_KIND = "dram"


class WriteKind(Enum):
    """Why a chunk is written: it is new, it is kept in memory as it passes, it leaves memory for a
    slower device, it is copied to one so that a restart finds it."""

    STORE = "store"
    KEEP = "keep"
    SPILL = "spill"
    BACKUP = "backup"


@dataclass(slots=True)
class Write:
    """A write of one entry that not all ranks have acknowledged."""

    entry: int
    kind: WriteKind
    source: int  # device that the chunk lay on when the write was decided
    ranks_left: int
    failed: bool = False


@dataclass(slots=True)
class Counters:
    """Counted since the start, for the snapshot; `hit_*` by device."""

    hit_chunks: list[int] = field(default_factory=list)
    hit_tokens: list[int] = field(default_factory=list)
    miss_chunks: int = 0
    miss_tokens: int = 0
    stored_chunks: int = 0
    dropped_store_chunks: int = 0
    evicted_chunks: int = 0
    spilled_chunks: int = 0
    returned_chunks: int = 0
    backed_up_chunks: int = 0


class Pool:
    """The table and the devices behind it, from the moment the workers have reported them."""

    def __init__(
        self,
        geometry: Geometry,
        ranks: int,
        policy: str,
        devices: Sequence[DeviceReport],
        backup: bool,
    ) -> None:
        self.ranks, self.policy, self.backup = ranks, policy, backup
        self.rules = PrefixRules(geometry)
        self.devices = [DeviceHealth(report) for report in devices]
        self.memory = [report.kind == MEMORY_KIND for report in devices]
        self.table = Table([report.slots for report in devices], self.memory)
        self.writes: dict[int, Write] = {}
        self.spills_from = [0] * len(devices)  # in flight, by memory device
        self.backups_from = [0] * len(devices)  # the same
        self.backup_bytes = [0] * len(devices)  # since the start, by slower device
        # Chunks (entry, generation) that went to memory and got no backup yet, oldest first.
        self.unbacked: deque[tuple[int, int]] = deque(maxlen=max(self.table.capacity, 1))
        self.counters = Counters([0] * len(devices), [0] * len(devices))
        # Slots that placement wanted in memory and did not find: spilling makes room for them.
        self.memory_demand = [0] * len(devices)
        self._clock = self._last_write_id = 0
        self.refresh_bandwidths()

    def refresh_bandwidths(self) -> None:
        """Take over states and corrected bandwidths of the devices."""
        self.bandwidth = [device.read_bandwidth_bytes_s for device in self.devices]
        self.usable = [i for i, device in enumerate(self.devices) if device.state is DeviceState.OK]
        self.slower = [device for device in self.usable if not self.memory[device]]
        self.usable_memory = [device for device in self.usable if self.memory[device]]
        self.together_bytes_s = sum(
            self.devices[i].report.profile.together_read_bandwidth_bytes_s for i in self.usable
        )

    def tick(self) -> int:
        """Return a stamp newer than all before."""
        self._clock += 1
        return self._clock

    def open_write(self, entry: int, kind: WriteKind) -> int:
        """Expect every rank's acknowledgement of a write of `entry`; return its id."""
        self._last_write_id += 1
        source = self.table.device0[entry]
        self.writes[self._last_write_id] = Write(entry, kind, source, self.ranks)
        self.spills_from[source] += kind is WriteKind.SPILL
        self.backups_from[source] += kind is WriteKind.BACKUP
        return self._last_write_id

    def acknowledge_write(self, write_id: int, ranks: int, ok: bool) -> None:
        """So many ranks more have ended a write; the last one, or the first failure, decides."""
        write = self.writes.get(write_id)
        if write is None:
            return
        write.ranks_left -= ranks
        if not ok and not write.failed:
            write.failed = True
            if write.kind is WriteKind.STORE and self.table.resident(write.entry):
                self.table.drop(write.entry)
        if write.ranks_left <= 0:
            del self.writes[write_id]
            self._end_write(write)

    def _end_write(self, write: Write) -> None:
        table, counters = self.table, self.counters
        self.spills_from[write.source] -= write.kind is WriteKind.SPILL
        self.backups_from[write.source] -= write.kind is WriteKind.BACKUP
        target = table.device0 if write.kind is WriteKind.STORE else table.device1
        lost = self.devices[target[write.entry]].state is DeviceState.FAILED
        kept = not write.failed and not lost and table.resident(write.entry)
        if write.kind is WriteKind.BACKUP:
            table.end_backup(write.entry, kept)
        else:
            table.end_write(write.entry, kept)
        if write.kind is WriteKind.STORE:
            counters.stored_chunks += kept
            counters.dropped_store_chunks += not kept
        counters.spilled_chunks += kept and write.kind is WriteKind.SPILL
        counters.returned_chunks += kept and write.kind is WriteKind.KEEP
        counters.backed_up_chunks += kept and write.kind is WriteKind.BACKUP
        if write.kind is WriteKind.BACKUP and not kept and table.resident(write.entry):
            self.unbacked.append((write.entry, table.generation[write.entry]))

    def has_room(self, device: int) -> bool:
        """Whether a slot of the device is free."""
        return len(self.table.slots[device].free) > 0

    def rank(self, load: Sequence[float], size: float) -> list[int]:
        """Return the devices that take new chunks, best first, by the pool's placement policy."""
        if self.policy == "serial":
            return placement.rank_serial(self.usable, self.memory)
        if self.policy == "link_aware":
            return placement.rank_link_aware(
                load, size, self.bandwidth, self.usable, self.together_bytes_s
            )
        return placement.rank_proportional(load, size, self.bandwidth, self.usable)

    def share_weight(self, device: int) -> float:
        """Return the device's part of the bandwidth of all that take new chunks."""
        if device not in self.usable:
            return 0.0
        return self.bandwidth[device] / sum(self.bandwidth[i] for i in self.usable)

    def claim_backup(self, memory: int, size: int, stamp: int) -> int:
        """Return a slower device with a free slot for the copy of a chunk in memory; -1: none.

        Memory does not outlive the process, and what is left of a prefix without its first chunks
        is nothing. Colder chunks make room. A chunk that is being copied cannot leave memory, so at
        most half of a module's are at a time.
        """
        if self.backups_from[memory] * 2 >= self.table.slots[memory].capacity:
            return -1
        order = sorted(self.slower, key=lambda d: (self.backup_bytes[d] + size) / self.bandwidth[d])
        device = next((d for d in order if self.has_room(d)), -1)
        if device < 0 and self.table.leaves.any_below(stamp):
            device = self.evict_for(order, stamp)
        if device >= 0:
            self.backup_bytes[device] += size
        return device

    def evict_for(self, devices: Sequence[int], limit: int) -> int:
        """Free a slot by evicting chunks colder than `limit`; return its device, -1 if none."""
        evicted = self.table.evict_for(devices, limit) if devices else None
        if evicted is None:
            return -1
        device, chunks = evicted
        self.counters.evicted_chunks += chunks
        return device
