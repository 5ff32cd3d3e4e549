"""What one rank tells the orchestrator about its devices: collected here, taken once a step."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvpool import native
from kvpool.devices.base import Device
from kvpool.health import FAILURES_IN_A_ROW
from kvpool.types import DeviceCounters, WorkerReport


class Reporter:
    """Collects a `WorkerReport`."""

    def __init__(self, engine: native.Engine, devices: Sequence[Device], rank: int) -> None:
        self._engine, self._devices, self._rank = engine, devices, rank
        self._report = WorkerReport()
        self._reported = [engine.statistics(device.index) for device in devices]
        self._stalls, self._errors = [0] * len(devices), [0] * len(devices)
        self._refusals = [0] * len(devices)

    def finish_writes(self, write_ids: Iterable[int | np.integer]) -> None:
        """Acknowledge writes that were made."""
        for write_id in write_ids:
            _count(self._report.finished_writes, int(write_id))

    def fail_writes(self, write_ids: Iterable[int | np.integer]) -> None:
        """Acknowledge writes that will not be made, or did not succeed."""
        for write_id in write_ids:
            _count(self._report.failed_writes, int(write_id))

    def end_load(
        self, load_id: int, failed: Sequence[int], last_part: bool, seconds: float
    ) -> None:
        """Note the end of a load, or of a part of it, and the positions that were not read."""
        if failed:
            self._report.failed_loads.setdefault(load_id, set()).update(failed)
        if last_part:
            _count(self._report.finished_loads, load_id)
        self._report.load_seconds.append(seconds)

    def release_store(self, seconds: float) -> None:
        """Note how long a store's source pages were in use."""
        self._report.store_seconds.append(seconds)

    def end_trial(self, device: int, ok: bool) -> None:
        """Note the outcome of a trial."""
        self._report.trials[(device, self._rank)] = ok

    def stalled(self, device: int) -> None:
        """Note that a device does not answer."""
        self._stalls[device] += 1
        self._errors[device] = errno.ETIMEDOUT

    def refused(self, device: int, error: int) -> None:
        """Note that a device did not take what it has to: that is as bad as writes that fail."""
        self._refusals[device] += 1
        self._errors[device] = error

    def note_errors(self, device: npt.NDArray[np.integer], events: npt.NDArray[np.void]) -> None:
        """Remember the newest error of each event's device, for the announcement."""
        bad = (events["result"] < 0) & (events["result"] != -errno.ECANCELED)
        for index, result in zip(device[bad].tolist(), events["result"][bad].tolist(), strict=True):
            self._errors[index] = -result

    def take(self) -> WorkerReport:
        """Return what happened since the last call."""
        report, self._report = self._report, WorkerReport()
        for index, device in enumerate(self._devices):
            now, before = self._engine.statistics(device.index), self._reported[index]
            if now == before and not self._stalls[index] and not self._errors[index]:
                continue
            counters = _difference(now, before)
            counters.stalls, counters.error = self._stalls[index], self._errors[index]
            counters.write_failures += FAILURES_IN_A_ROW * self._refusals[index]
            self._refusals[index] = 0
            report.counters[(index, self._rank)] = counters
            self._reported[index] = now
            self._stalls[index] = self._errors[index] = 0
        return report


def _count(counts: dict[int, int], key: int) -> None:
    counts[key] = counts.get(key, 0) + 1


def _difference(now: native.Statistics, before: native.Statistics) -> DeviceCounters:
    return DeviceCounters(
        bytes_read=now.bytes_read - before.bytes_read,
        bytes_written=now.bytes_written - before.bytes_written,
        read_busy_s=(now.read_busy_ns - before.read_busy_ns) / 1e9,
        write_busy_s=(now.write_busy_ns - before.write_busy_ns) / 1e9,
        saturated_read_bytes=now.saturated_read_bytes - before.saturated_read_bytes,
        saturated_read_s=(now.saturated_read_ns - before.saturated_read_ns) / 1e9,
        read_failures=now.read_failures - before.read_failures,
        write_failures=now.write_failures - before.write_failures,
        checksum_failures=now.checksum_failures - before.checksum_failures,
        queue_depth=now.queue_depth,
    )
