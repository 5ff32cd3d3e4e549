"""What every device of the pool owes, and what is owed to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.container import Container
from kvpool.native import Arena
from kvpool.plan import StoredHeaders
from kvpool.types import DeviceReport, Key, PageType, Profile

Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]

HeaderWrites = UInt64
"""Shape (n, 3): offset on the device, address in memory, length in bytes, of header writes."""

NO_WRITES: HeaderWrites = np.empty((0, 3), np.uint64)


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """What it takes to measure a device.

    `offset` and `length` (bytes) are the scratch room of a container, or the slots of a module:
    what is there is overwritten. `parallel` is how many transfers the device works on at once;
    `settings` names what else decides a figure.
    """

    name: str
    index: int
    offset: int
    length: int
    parallel: int
    settings: str
    container: Container | None = None
    memory: Arena | None = None


class Device(ABC):
    """One rank's part of a device: `slots` slots of `slot_bytes`, each for one chunk.

    A device translates slots to offsets and keeps what is known of each slot; the native engine
    moves the bytes, under `index`. `name` is its label, unique in a pool, the same on all ranks;
    `checksums` (shape (slots,)) holds the CRC32C of each slot's payload as it was written;
    `damaged_headers` counts those that a restart met, each the loss of one chunk.

    The caller guarantees: one thread for all methods; slots are within range; a slot is recorded
    after its payload was written; two header writes with one offset are never in flight together;
    the engine is closed before the device.
    The implementer owes: slots that never overlap each other or anything else; offsets that are
    multiples of 4096; a size that is never passed; after a restart, `survivors` holds only what
    was recorded since the last `set_epoch`.
    Never: a header that describes a slot before its payload was recorded.
    """

    name: str
    kind: str
    slots: int
    slot_bytes: int
    index: int
    checksums: UInt32
    survivors: StoredHeaders
    damaged_headers: int = 0

    @abstractmethod
    def offsets(self, slots: Int32) -> UInt64:
        """Return the byte offsets of the slots' payloads, shape (n,). Raises IndexError."""

    @abstractmethod
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
        """Note what was written to `slots` (all of n); return the header writes to submit.

        `positions` are end positions in tokens, `lengths` payload bytes. Raises IndexError.
        """

    @abstractmethod
    def forget(self, slots: Int32) -> HeaderWrites:
        """Note that `slots` hold nothing; return the header writes to submit. Raises IndexError."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Make all that was recorded before invalid, durably before it returns.

        Every call does, whatever the number: a device's own epoch becomes at least `epoch`, and
        a new one. Raises DeviceError.
        """

    @property
    @abstractmethod
    def probe_target(self) -> ProbeTarget:
        """What `kvpool.probe` needs to measure the device."""

    @property
    @abstractmethod
    def page_type(self) -> PageType:
        """The pages that its transfers use."""

    @property
    @abstractmethod
    def io_path(self) -> str:
        """How bytes are moved: "copy", "uring" or "threads"."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; what is stored durably stays. May be called twice."""

    def report(self, profile: Profile) -> DeviceReport:
        """Return what the scheduler is told about the device."""
        return DeviceReport(
            name=self.name,
            kind=self.kind,
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            profile=profile,
            page_type=self.page_type,
            io_path=self.io_path,
        )
