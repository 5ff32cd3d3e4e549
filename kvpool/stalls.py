"""Tells a device that does not answer from one that has nothing to do. Pure: the caller reads the
clock."""

from __future__ import annotations

STALLED_S = 10.0
"""How long a device may be silent with something queued. The slowest disks answer in less."""


class StallWatch:
    """Watches devices by what they have done so far."""

    def __init__(self, devices: int, stalled_s: float = STALLED_S) -> None:
        self._stalled_s = stalled_s
        self._done: list[tuple[int, ...]] = [()] * devices
        self._since_s = [0.0] * devices
        self._stalled = [False] * devices

    def observe(self, device: int, done: tuple[int, ...], queue_depth: int, now_s: float) -> bool:
        """Note what a device has done by now; True where it stopped answering, told once.

        `done` is anything that changes when an operation ends, well or not.
        """
        if not queue_depth or done != self._done[device]:
            self._done[device], self._since_s[device] = done, now_s
            self._stalled[device] = False
            return False
        if self._stalled[device] or now_s - self._since_s[device] < self._stalled_s:
            return False
        self._stalled[device] = True
        return True

    @property
    def any_stalled(self) -> bool:
        """Whether some device owes an answer."""
        return any(self._stalled)
