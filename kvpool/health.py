"""What reports of the workers say about a device: whether it works, and how fast it is now.

OK --writes fail--> READ_ONLY --reads fail, no answer, far too slow--> FAILED
OK --reads fail, no answer, far too slow--> FAILED
READ_ONLY, FAILED --a trial on every rank succeeds--> OK
"""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass, field

from kvpool.types import DeviceCounters, DeviceReport, DeviceState

FAILURES_IN_A_ROW = 3
WINDOW_OPERATIONS = 100
FAILURES_IN_WINDOW = 10
SATURATED_WINDOW_S = 0.05
SLOWEST_CORRECTION = 0.001
TOO_SLOW = 0.02
"""Part of its profile below which a device is out, once it was so slow for TOO_SLOW_S."""
TOO_SLOW_S = 2.0


@dataclass(slots=True)
class _Failures:
    """The newest operations of one kind."""

    in_a_row: int = 0
    failed: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW_OPERATIONS))

    def count(self, failures: int, moved_bytes: int, slot_bytes: int) -> None:
        # Counters tell no order inside a report: a success in it ends the run of failures.
        self.in_a_row = 0 if moved_bytes else self.in_a_row + failures
        successes = -(-moved_bytes // max(slot_bytes, 1))
        self.failed.extend([False] * min(successes, WINDOW_OPERATIONS))
        self.failed.extend([True] * min(failures, WINDOW_OPERATIONS))

    def too_many(self) -> bool:
        return self.in_a_row >= FAILURES_IN_A_ROW or sum(self.failed) >= FAILURES_IN_WINDOW


@dataclass(slots=True)
class _RankHistory:
    """One rank's experience with one device."""

    reads: _Failures = field(default_factory=_Failures)
    writes: _Failures = field(default_factory=_Failures)
    saturated_bytes: int = 0
    saturated_s: float = 0.0
    correction: float = 1.0
    slow_s: float = 0.0


class DeviceHealth:
    """State and corrected read bandwidth of one device of the pool, over all its ranks.

    `reason` says why the device is not OK.
    """

    def __init__(self, report: DeviceReport) -> None:
        self.report = report
        self.state, self.reason = DeviceState.OK, ""
        self.read_bandwidth_bytes_s = max(report.profile.read_bandwidth_bytes_s, 1.0)
        self._profile_bytes_s = self.read_bandwidth_bytes_s
        self._ranks: dict[int, _RankHistory] = {}
        self._passed: set[int] = set()  # ranks whose trial succeeded

    def observe(self, rank: int, counters: DeviceCounters) -> bool:
        """Take in what a rank did; True where the device just got worse.

        Only what the device itself refused counts as a failure: a write that was dropped before
        it got there (staging full) says nothing about the device.
        """
        history = self._ranks.setdefault(rank, _RankHistory())
        self._correct(history, counters)
        size = self.report.slot_bytes
        history.reads.count(counters.read_failures, counters.bytes_read, size)
        history.writes.count(counters.write_failures, counters.bytes_written, size)
        state, reason = self._judge(history, counters)
        worse = self.state is not DeviceState.FAILED and state not in (DeviceState.OK, self.state)
        if worse:
            self.state, self.reason = state, reason
            self._passed.clear()
        return worse

    def _judge(self, history: _RankHistory, counters: DeviceCounters) -> tuple[DeviceState, str]:
        why = f" ({errno.errorcode.get(counters.error, counters.error)})" if counters.error else ""
        if counters.stalls:
            return DeviceState.FAILED, "does not answer"
        if history.reads.too_many():
            return DeviceState.FAILED, f"reads fail{why}"
        if history.slow_s >= TOO_SLOW_S:
            return DeviceState.FAILED, f"reads at less than {TOO_SLOW:.0%} of its measured speed"
        if history.writes.too_many():
            return DeviceState.READ_ONLY, f"writes fail{why}"
        return DeviceState.OK, ""

    def passed_trial(self, rank: int, ok: bool, ranks: int) -> bool:
        """A rank wrote and read it for a trial; True where that brought the device back."""
        if self.state is DeviceState.OK:
            return False
        self._passed = self._passed | {rank} if ok else set()
        if len(self._passed) < ranks:
            return False
        self.state, self.reason = DeviceState.OK, ""
        self.read_bandwidth_bytes_s = self._profile_bytes_s
        self._ranks.clear()
        self._passed.clear()
        return True

    def _correct(self, history: _RankHistory, counters: DeviceCounters) -> None:
        """Move the correction half way to the measured rate for every window of saturated time."""
        history.saturated_bytes += counters.saturated_read_bytes
        history.saturated_s += counters.saturated_read_s
        if history.saturated_s < SATURATED_WINDOW_S:
            return
        measured = history.saturated_bytes / history.saturated_s / self._profile_bytes_s
        old = 0.5 ** (history.saturated_s / SATURATED_WINDOW_S)
        corrected = old * history.correction + (1 - old) * measured
        history.correction = max(corrected, SLOWEST_CORRECTION)
        history.slow_s = history.slow_s + history.saturated_s if measured < TOO_SLOW else 0.0
        history.saturated_bytes, history.saturated_s = 0, 0.0
        corrections = [rank.correction for rank in self._ranks.values()]
        mean = sum(corrections) / len(corrections)
        self.read_bandwidth_bytes_s = max(self._profile_bytes_s * mean, 1.0)
