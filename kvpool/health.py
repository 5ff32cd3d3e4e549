"""What reports of the workers say about a device: whether it works, and how fast it is now."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvpool.types import DeviceCounters, DeviceReport, DeviceState

FAILURES_IN_A_ROW = 3
WINDOW_OPERATIONS = 100
FAILURES_IN_WINDOW = 10
SATURATED_WINDOW_S = 0.05
SLOWEST_CORRECTION = 0.001


@dataclass(slots=True)
class _RankHistory:
    """One rank's experience with one device."""

    failures_in_a_row: int = 0
    failed: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW_OPERATIONS))
    saturated_bytes: int = 0
    saturated_s: float = 0.0
    correction: float = 1.0


class DeviceHealth:
    """State and corrected read bandwidth of one device of the pool, over all its ranks."""

    def __init__(self, report: DeviceReport) -> None:
        self.report = report
        self.state = DeviceState.OK
        self.read_bandwidth_bytes_s = max(report.profile.read_bandwidth_bytes_s, 1.0)
        self._profile_bytes_s = self.read_bandwidth_bytes_s
        self._ranks: dict[int, _RankHistory] = {}

    def observe(self, rank: int, counters: DeviceCounters) -> bool:
        """Take in what a rank did; True where the device failed just now.

        Only what the device itself refused counts as a failure: a write that was dropped before
        it got there (staging full) says nothing about the device.
        """
        history = self._ranks.setdefault(rank, _RankHistory())
        self._correct(history, counters)
        self._count(history, counters)
        broken = (
            history.failures_in_a_row >= FAILURES_IN_A_ROW
            or sum(history.failed) >= FAILURES_IN_WINDOW
        )
        if broken and self.state is not DeviceState.FAILED:
            self.state = DeviceState.FAILED
            return True
        return False

    def _count(self, history: _RankHistory, counters: DeviceCounters) -> None:
        failures = counters.read_failures + counters.write_failures
        moved = counters.bytes_read + counters.bytes_written
        # Counters tell no order inside a report: a success in it ends the run of failures.
        history.failures_in_a_row = 0 if moved else history.failures_in_a_row + failures
        successes = -(-moved // max(self.report.slot_bytes, 1))
        history.failed.extend([False] * min(successes, WINDOW_OPERATIONS))
        history.failed.extend([True] * min(failures, WINDOW_OPERATIONS))

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
        history.saturated_bytes, history.saturated_s = 0, 0.0
        corrections = [rank.correction for rank in self._ranks.values()]
        mean = sum(corrections) / len(corrections)
        self.read_bandwidth_bytes_s = max(self._profile_bytes_s * mean, 1.0)
