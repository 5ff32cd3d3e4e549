"""Measures devices, alone and all together, through the native engine.

Media are measured with plain reads and writes in a container's probe area, which is written
first: extents that were only reserved read at the speed of memory. Modules are measured with
verified loads of whole payloads into pages, by an engine of their own, since that needs a KV
group. What a pool measured is kept in its containers for a day, or until the next boot.
"""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import time
from collections.abc import Iterator, Sequence

from kvpool import native
from kvpool.container import Container
from kvpool.devices.base import Device, ProbeTarget
from kvpool.errors import ContainerError
from kvpool.host import Host
from kvpool.layout import StoredProfiles
from kvpool.probe_stream import SMALL_BYTES, Stream, run
from kvpool.types import Profile

MAX_TRANSFER_BYTES = 4 << 20
MAX_AGE_S = 86400.0
WRITE_S, READ_S, TOGETHER_S = 0.4, 0.5, 0.5
_LATENCY_READS, _LATENCY_S = 16, 0.1
_LOCK_S = 60.0


def measure(
    engine: native.Engine,
    devices: Sequence[Device],
    *,
    anew: bool = False,
) -> list[Profile]:
    """Return what each device was measured to do, in order.

    Call it before anything is stored: modules are overwritten. `engine` must be idle, and serves
    `devices`. A measurement that another rank stored, of the same pool on this boot and at most a
    day old, is taken unless `anew`. Raises DeviceError (ETIMEDOUT where a device hangs).
    """
    slot_bytes = min((device.slot_bytes for device in devices), default=MAX_TRANSFER_BYTES)
    return measure_targets(engine, [d.probe_target for d in devices], slot_bytes, anew=anew)


def measure_targets(
    engine: native.Engine,
    targets: Sequence[ProbeTarget],
    slot_bytes: int,
    *,
    anew: bool = False,
) -> list[Profile]:
    """As `measure`, of targets and with slots of `slot_bytes`."""
    transfer_bytes = min(slot_bytes, MAX_TRANSFER_BYTES)
    signature = _signature(targets, transfer_bytes)
    containers = [target.container for target in targets if target.container is not None]
    with _probe_areas(containers):
        if not anew and (profiles := _stored(containers, signature)):
            return profiles
        profiles = _measure(engine, targets, transfer_bytes)
        stored = StoredProfiles(Host().boot_id(), time.time_ns(), signature, tuple(profiles))
        for container in containers:
            container.write_profiles(stored)
    return profiles


# ---- what is stored -------------------------------------------------------------------------


def _signature(targets: Sequence[ProbeTarget], transfer_bytes: int) -> bytes:
    """Return a digest (32 bytes) of the pool and of how it is measured."""
    lines = [f"{target.name}\0{target.parallel}\0{target.settings}" for target in targets]
    return hashlib.sha256("\n".join([str(transfer_bytes), *lines]).encode()).digest()


def _stored(containers: Sequence[Container], signature: bytes) -> list[Profile]:
    """Return the profiles that all containers agree on and that still count, else []."""
    found = [container.read_profiles() for container in containers]
    first = found[0] if found else None
    if first is None or any(stored != first for stored in found):
        return []
    age_s = (time.time_ns() - first.measured_ns) / 1e9
    same = first.signature == signature and first.boot_id == Host().boot_id() != ""
    return list(first.profiles) if same and 0 <= age_s < MAX_AGE_S else []


@contextlib.contextmanager
def _probe_areas(containers: Sequence[Container]) -> Iterator[None]:
    """Hold the probe areas of all containers, in one order for all processes."""
    deadline_s = time.monotonic() + _LOCK_S
    with contextlib.ExitStack() as held:
        for container in sorted(containers, key=lambda container: container.uuid):
            while not container.try_lock_probe_area():
                if time.monotonic() > deadline_s:
                    raise ContainerError(f"{container.path}: another process measures it too long")
                time.sleep(0.02)
            held.callback(container.unlock_probe_area)
        yield


# ---- measuring ------------------------------------------------------------------------------


def _measure(
    engine: native.Engine, targets: Sequence[ProbeTarget], transfer_bytes: int
) -> list[Profile]:
    with contextlib.ExitStack() as opened:
        modules = None
        streams = []
        for target in targets:
            serving, index = engine, target.index
            if target.memory is not None:
                modules = modules or opened.enter_context(native.Engine(transfer_bytes, 1))
                serving = modules
                index = modules.add_memory_device(target.memory, target.parallel)
            stream = Stream(serving, index, target, transfer_bytes)
            streams.append(opened.enter_context(contextlib.closing(stream)))
        alone = [_measure_alone(stream) for stream in streams]
        together = [read for _, read, _ in alone]
        if len(streams) > 1:
            together = run(streams, False, TOGETHER_S)
    return [
        Profile(read, write, latency_s, read_together)
        for (write, read, latency_s), read_together in zip(alone, together, strict=True)
    ]


def _measure_alone(stream: Stream) -> tuple[float, float, float]:
    """Return write rate, read rate (bytes/s) and read latency (s)."""
    # A module's small payloads overwrite large ones, a medium's small reads want written room.
    latency_s = _latency_s(stream) if stream.is_module else 0.0
    stream.estimate(write=True)
    (write,) = run([stream], True, WRITE_S)
    stream.estimate(write=False)
    (read,) = run([stream], False, READ_S)
    return write, read, latency_s or _latency_s(stream)


def _latency_s(stream: Stream) -> float:
    """Return the median time of small reads, one after another."""
    deadline_s = time.monotonic() + _LATENCY_S
    found: list[float] = []
    while not found or (len(found) < _LATENCY_READS and time.monotonic() < deadline_s):
        if stream.is_module:
            stream.once(True, SMALL_BYTES, len(found))
        found.append(stream.once(False, SMALL_BYTES, len(found)))
    return statistics.median(found)
