"""A module of host memory: slots on huge pages of one NUMA node. Nothing outlives the process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.device_config import MIN_DRAM_BYTES, DeviceConfig
from kvpool.devices.base import (
    NO_WRITES,
    Device,
    HeaderWrites,
    Int32,
    ProbeTarget,
    UInt8,
    UInt32,
    UInt64,
)
from kvpool.errors import ConfigurationError
from kvpool.host import Host
from kvpool.native import Arena, Engine
from kvpool.plan import StoredHeaders
from kvpool.types import Key, PageType
from kvpool.units import format_bytes

_MOST_THREADS = 4


class DramDevice(Device):
    """One rank's share of a module; the memory is mapped and faulted in here."""

    kind = "dram"

    def __init__(self, config: DeviceConfig, engine: Engine, ranks: int, slot_bytes: int) -> None:
        """Raises ConfigurationError where no slot fits, OutOfSpaceError, DeviceError."""
        self.name, self.slot_bytes = config.name, slot_bytes
        # The memory is mapped in huge pages: a share is rounded down to them, never passed.
        share = (config.rank_size_bytes(ranks) or 0) // MIN_DRAM_BYTES * MIN_DRAM_BYTES
        self.slots = share // slot_bytes
        if self.slots < 1:
            least = format_bytes(-(-slot_bytes // MIN_DRAM_BYTES) * MIN_DRAM_BYTES * ranks)
            allowed = f"at least {least}: one slot of {format_bytes(slot_bytes)} for {ranks} ranks"
            raise ConfigurationError(f"devices: {str(config)!r}: size", config.size_bytes, allowed)
        self._threads = config.threads or default_threads(Host().cpus(config.numa))
        node = -1 if config.numa is None else config.numa
        self._arena = Arena(self.slots * slot_bytes, node)
        self.index = engine.add_memory_device(self._arena, self._threads)
        self.checksums = np.zeros(self.slots, np.uint32)
        self.survivors = StoredHeaders.none()

    def offsets(self, slots: Int32) -> UInt64:
        self._check(slots)
        return slots.astype(np.uint64) * np.uint64(self.slot_bytes)

    def record(
        self,
        slots: Int32,
        keys: Sequence[Key],
        parents: Sequence[Key],
        positions: Int32,
        groups: UInt8,
        lengths: UInt32,
        checksums: UInt32,
    ) -> HeaderWrites:
        self._check(slots)
        self.checksums[slots] = checksums
        return NO_WRITES

    def forget(self, slots: Int32) -> HeaderWrites:
        self._check(slots)
        return NO_WRITES

    def set_epoch(self, epoch: int) -> None:
        """Nothing outlives the process, so nothing has to be made invalid."""

    @property
    def probe_target(self) -> ProbeTarget:
        return ProbeTarget(
            self.name,
            self.index,
            0,
            self.slots * self.slot_bytes,
            self._threads,
            self.page_type.value,
            memory=self._arena,
        )

    @property
    def page_type(self) -> PageType:
        return self._arena.page_type

    @property
    def io_path(self) -> str:
        return "copy"

    def close(self) -> None:
        self._arena.close()

    def _check(self, slots: Int32) -> None:
        if slots.size and not (int(slots.min()) >= 0 and int(slots.max()) < self.slots):
            raise IndexError(f"slots {slots.min()} to {slots.max()} of {self.slots}")


def default_threads(cpus: int) -> int:
    """Return how many threads copy for a module whose node has `cpus` processors."""
    return max(1, min(_MOST_THREADS, cpus // 2))
