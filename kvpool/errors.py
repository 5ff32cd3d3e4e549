"""The closed set of exceptions, and the only table from errno to them.

Outcomes that are part of ordinary work (a miss, a full pool, a failed chunk) are values, not
exceptions: see `kvpool.types.Outcome` and `WorkerReport`.
"""

from __future__ import annotations

import errno
import os


class KVPoolError(Exception):
    """Base of all exceptions that kvpool raises on purpose."""


class ConfigurationError(KVPoolError):
    """A key or value that the user gave is not usable. Raised before anything is changed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key}={value!r}: {allowed}")
        self.key, self.value, self.allowed = key, value, allowed


class ForeignContentError(KVPoolError):
    """A file or device holds something that kvpool did not write; it is left untouched."""


class ContainerError(KVPoolError):
    """A container is ours but cannot be used: unknown format version, damaged, fully leased."""


class DeviceError(KVPoolError):
    """A device failed an operation; `errno` tells which way."""

    def __init__(self, what: str, error_number: int) -> None:
        super().__init__(f"{what}: {os.strerror(error_number)} (errno {error_number})")
        self.errno = error_number


class OutOfSpaceError(DeviceError):
    """No room: ENOSPC, EDQUOT or ENOMEM."""


class QueueFullError(DeviceError):
    """A bounded queue or the staging area is full: EAGAIN or ENOBUFS."""


_BY_ERRNO: dict[int, type[DeviceError]] = {
    errno.ENOSPC: OutOfSpaceError,
    errno.EDQUOT: OutOfSpaceError,
    errno.ENOMEM: OutOfSpaceError,
    errno.EAGAIN: QueueFullError,
    errno.ENOBUFS: QueueFullError,
}


def check(result: int, what: str) -> int:
    """Return `result` of a native call, or raise its exception where it is a negative errno."""
    if result >= 0:
        return result
    raise _BY_ERRNO.get(-result, DeviceError)(what, -result)
