"""Files that fail as a script says, for tests: the binding of the faulty devices of native/.

What happens to an operation follows from the seed and from its number among the reads or the
writes of its device, in the order of submission; so a run can be repeated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from kvpool import native
from kvpool.errors import check

ALWAYS = 65536
"""The probability of what always happens."""


class FaultKind(IntEnum):
    """What a faulty device does wrong; kvio.h says it in detail. LOST is counted, not asked for."""

    ERROR, SHORT, TORN, FLIPPED, MISDIRECTED, STALE, SLOW, STUCK, FULL, LOST = range(10)


class FaultRule(NamedTuple):
    """Hits reads or writes number `first`, `first + every`, ... of a device, from 0 on.

    `every` 0 is `first` alone; `probability` is in 1 / ALWAYS. Only operations that begin in the
    range of offsets (bytes; an end of 0: no end) are hit. MISDIRECTED goes to, or comes from,
    another of the places `first_offset` + n * `unit` within that range; TORN, STALE and FULL are
    for writes. SLOW takes `delay_us` longer.
    """

    kind: FaultKind
    reads: bool = False
    writes: bool = False
    probability: int = ALWAYS
    first: int = 0
    every: int = 1
    first_offset: int = 0
    end_offset: int = 0
    unit: int = native.ALIGN
    delay_us: int = 0


class _Rule(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("first_offset", "end_offset", "unit")),
        *((name, ctypes.c_uint64) for name in ("first", "every")),
        *((name, ctypes.c_uint32) for name in ("kind", "directions", "probability", "delay_us")),
    ]


class _Script(ctypes.Structure):
    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("volatile_bytes", ctypes.c_uint64),
        ("rules", ctypes.POINTER(_Rule)),
        ("rule_count", ctypes.c_uint64),
    ]


_P, _U32, _I32 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int32
_PROTOTYPES: dict[str, tuple[Any, ...]] = {  # name: result, arguments...
    "kvio_add_faulty_device": (_I32, _P, _P, ctypes.POINTER(_Script)),
    "kvio_faulty_script": (_I32, _P, _U32, ctypes.POINTER(_Script)),
    "kvio_faulty_release": (_I32, _P, _U32),
    "kvio_faulty_sync": (_I32, _P, _U32),
    "kvio_faulty_crash": (_I32, _P, _U32),
    "kvio_faulty_counts": (_I32, _P, _U32, _P),
}


def _script(seed: int, rules: Sequence[FaultRule], volatile_bytes: int) -> _Script:
    raw = (_Rule * len(rules))()
    for target, rule in zip(raw, rules, strict=True):
        values = rule._asdict()
        target.directions = values.pop("reads") + 2 * values.pop("writes")
        for name, value in values.items():
            setattr(target, name, int(value))
    return _Script(seed, volatile_bytes, raw, len(rules))


class FaultEngine(native.Engine):
    """An engine that can have faulty devices beside others.

    Every method may raise DeviceError; EINVAL: the device is not faulty, or a rule is not valid.
    """

    def add_faulty_device(
        self,
        fd: int,
        length: int,
        *,
        seed: int,
        rules: Sequence[FaultRule] = (),
        volatile_bytes: int = 0,
        depth: int = 8,
        threads: int = 4,
        numa_node: int = -1,
    ) -> int:
        """Add a file of `length` bytes; the first rule that hits an operation decides.

        Of what was written since the last `sync`, the newest `volatile_bytes` vanish, tear or land
        at a `crash`, by the seed; what is older has landed.
        """
        config = native._DeviceConfig(
            kind=native._DEVICE_FILE,
            fd=fd,
            depth=depth,
            threads=threads,
            numa_node=numa_node,
            length=length,
        )
        script = ctypes.byref(_script(seed, rules, volatile_bytes))
        return self._call("kvio_add_faulty_device", ctypes.byref(config), script)

    def set_faults(
        self, device: int, seed: int, rules: Sequence[FaultRule], volatile_bytes: int = 0
    ) -> None:
        """Give a device another script, from the next operation that is begun on."""
        script = _script(seed, rules, volatile_bytes)
        self._call("kvio_faulty_script", device, ctypes.byref(script))

    def release_stuck(self, device: int) -> None:
        """Let the operations go on that are stuck now. `close` does so too."""
        self._call("kvio_faulty_release", device)

    def sync(self, device: int) -> None:
        """Have all writes that are done land, as a flush of the device does."""
        self._call("kvio_faulty_sync", device)

    def crash(self, device: int) -> None:
        """Have each write since the last `sync` land, vanish or tear. EBUSY: it is not idle."""
        self._call("kvio_faulty_crash", device)

    def fault_counts(self, device: int) -> dict[FaultKind, int]:
        """Return how many faults of each kind a device had since it was added."""
        counts = np.zeros(len(FaultKind), np.uint64)
        self._call("kvio_faulty_counts", device, counts.ctypes.data)
        return dict(zip(FaultKind, counts.tolist(), strict=True))

    def _call(self, name: str, *arguments: Any) -> int:
        function = getattr(self._native, name)
        function.restype, *argument_types = _PROTOTYPES[name]
        function.argtypes = argument_types
        return check(function(self._engine, *arguments), name)
