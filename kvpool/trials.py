"""Trials of devices that failed: write to the probe area, read it back, compare."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool import native
from kvpool.devices.base import ProbeTarget
from kvpool.jobs import Job

TRIAL_BYTES = 64 << 10


class Trial:
    """One rank's trial of one device: a write, and when that has ended a read of the same place.

    Ranks that share a container use places of their own where there is room.
    """

    def __init__(self, device: int, target: ProbeTarget, rank: int) -> None:
        self.device, self._index = device, target.index
        places = max(target.length // TRIAL_BYTES, 1)
        self._offset = target.offset + rank % places * TRIAL_BYTES
        self._length = min(TRIAL_BYTES, target.length)
        self._arena = native.Arena(2 * TRIAL_BYTES)
        self._written = self._arena.array[: self._length]
        self._read = self._arena.array[TRIAL_BYTES : TRIAL_BYTES + self._length]
        self._written[:] = np.random.default_rng().integers(0, 256, self._length, np.uint8)
        self.reading = False

    def operation(self, tag: int) -> npt.NDArray[np.void]:
        """Return what comes next, shape (1,)."""
        ops = np.zeros(1, native.OP_DTYPE)
        ops["tag"], ops["device"], ops["keep"] = tag, self._index, native.NO_DEVICE
        ops["offset"], ops["length"] = self._offset, self._length
        ops["kind"] = native.KIND_READ if self.reading else native.KIND_WRITE
        ops["buffer"] = (self._read if self.reading else self._written).ctypes.data
        return ops

    def passed(self) -> bool:
        """Whether what was read is what was written."""
        return bool(np.array_equal(self._read, self._written))


@dataclass(slots=True, kw_only=True)
class TrialJob(Job):
    """An operation of a trial, under way."""

    trial: Trial
