"""One rank of a pool and its scheduler's half, in one process, over memory as an engine has it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.geometry import CONTEXT_TOKENS, ModelGeometry, PagedMemory
from kvpool import native, probe
from kvpool.dataplane import DataPlane
from kvpool.device_config import DeviceConfig
from kvpool.devices import Device, open_device
from kvpool.jobs import FinishedJob
from kvpool.medium import FILE_NAME
from kvpool.orchestrator import Orchestrator
from kvpool.plan import StorePlan
from kvpool.types import Key

MAX_MEMORY_BYTES = 2 << 30  # of KV pages; a longer prefix goes through them in stretches
STALLED_S = 120.0
POLL_S = 0.01  # an engine polls once a step, not for every chunk; no figure contains it
NAMESPACE = hashlib.sha256(b"kvpool benchmark of retrieval").digest()

Int32 = npt.NDArray[np.int32]


class BenchmarkError(RuntimeError):
    """The figures would be worth nothing: the reason is in the message."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Chunks of one KV group, stored or loaded as one job in blocks 0, 1, ... of that group."""

    group: int
    first: int  # number of its first chunk in the prefix
    keys: list[Key]
    positions: list[int]  # end positions in tokens


class ObservedEngine(native.Engine):
    """Notes when each device has its last chunk of the newest load in the pages.

    `submitted_s` is when that load was handed over (perf_counter), `finished_s` how many seconds
    after that each device (by engine index) was done, by the engine's own clock.
    """

    _first_tag, _devices = 0, np.empty(0, np.uint32)
    submitted_s = 0.0

    def submit(self, ops: npt.NDArray[np.void], blocks: Int32) -> None:
        """Queue `ops`; those of a load are watched."""
        if ops.size and ops["kind"][0] == native.KIND_LOAD:
            self._first_tag, self._devices = int(ops["tag"][0]), ops["device"].copy()
            self.finished_s: dict[int, float] = {}
            self.submitted_s = time.perf_counter()
        super().submit(ops, blocks)

    def poll(self, capacity: int = 4096) -> npt.NDArray[np.void]:
        """Return events; those of a load are noted."""
        events = super().poll(capacity)
        place = events["tag"].astype(np.int64) - self._first_tag
        for i in np.flatnonzero((place >= 0) & (place < self._devices.size)):
            device, seconds = int(self._devices[place[i]]), int(events["nanoseconds"][i]) / 1e9
            self.finished_s[device] = max(self.finished_s.get(device, 0.0), seconds)
        return events


class Rig:
    """A pool on real devices, opened and measured, with KV memory for a stretch of a prefix."""

    def __init__(
        self,
        configs: Sequence[DeviceConfig],
        model: ModelGeometry,
        stretches: Sequence[Stretch],
    ) -> None:
        """Open and measure the devices. Raises what that raises."""
        self.model, self.configs, geometry = model, configs, model.geometry
        self.devices: list[Device] = []
        self.engine = ObservedEngine(geometry.slot_bytes)
        blocks = max(len(stretch.keys) for stretch in stretches) * geometry.blocks_per_chunk
        self.memory = PagedMemory(model, blocks)
        try:
            for config in configs:
                self.devices.append(self._open(config))
            self.memory.register(self.engine)
            self.profiles = probe.measure(self.engine, self.devices, anew=True)
        except BaseException:
            self.close()
            raise
        self.plane = DataPlane(self.engine, self.devices, geometry)
        self.orchestrator = Orchestrator(geometry, ranks=1, backup=False)  # each chunk once
        pairs = zip(self.devices, self.profiles, strict=True)
        self.orchestrator.attach([device.report(profile) for device, profile in pairs])

    def _open(self, config: DeviceConfig) -> Device:
        return open_device(
            config,
            self.engine,
            namespace=NAMESPACE,
            rank=0,
            ranks=1,
            owner=0,
            slot_bytes=self.model.geometry.slot_bytes,
        )

    def finish(self, job_id: int) -> FinishedJob:
        """Wait for the end of a job, telling the orchestrator. Raises BenchmarkError."""
        while True:
            self.plane.poll()
            for job in self.plane.take_finished():
                if job.job_id == job_id:
                    self.orchestrator.acknowledge(self.plane.take_report())
                    return job
            if not self.plane.wait(STALLED_S):
                raise BenchmarkError(f"nothing completed in {STALLED_S:.0f} s")
            time.sleep(POLL_S)

    def settle(self) -> None:
        """Wait until all writes, headers too, are on their devices."""
        while self.plane.busy() or self.orchestrator.pending_work():
            if not self.plane.wait(STALLED_S):
                raise BenchmarkError(f"writes did not end in {STALLED_S:.0f} s")
            self.plane.poll()
            self.orchestrator.acknowledge(self.plane.take_report())

    def blocks(self, stretch: Stretch) -> Int32:
        """Return the block ids that a stretch is stored from and loaded to."""
        return np.arange(len(stretch.keys) * self.model.geometry.blocks_per_chunk, dtype=np.int32)

    def path(self, device: int) -> Path | None:
        """Return the file or block device under a device of the pool; None for memory."""
        config = self.configs[device]
        if config.kind == "dram":
            return None
        path = config.rank_path(0)
        return path / FILE_NAME if config.kind == "file" else path

    def close(self) -> None:
        """Close engine, devices and memory, in this order."""
        self.engine.close()
        for device in self.devices:
            device.close()
        self.memory.close()


def make_stretches(model: ModelGeometry, prefix_bytes: int | None) -> list[Stretch]:
    """Return the prefix (None: of 128K tokens) in pieces that fit into MAX_MEMORY_BYTES."""
    stretches = []
    longest = model.geometry.groups[0].chunk_tokens
    tokens = CONTEXT_TOKENS
    if prefix_bytes is not None:
        tokens = longest * max(1, -(-prefix_bytes // model.geometry.groups[0].chunk_bytes))
    for group, shape in enumerate(model.geometry.groups):
        end, count = tokens // shape.chunk_tokens, model.chunks(group, tokens)
        room = max(1, MAX_MEMORY_BYTES // shape.chunk_bytes)
        for first in range(end - count, end, room):
            numbers = range(first, min(end, first + room))
            keys = [_key(group, number) for number in numbers]
            positions = [(number + 1) * shape.chunk_tokens for number in numbers]
            stretches.append(Stretch(group, first, keys, positions))
    return stretches


def _key(group: int, number: int) -> Key:
    return hashlib.sha256(f"chunk {number}".encode()).digest() + group.to_bytes(4, "big")


def store(rig: Rig, stretches: Sequence[Stretch]) -> list[StorePlan]:
    """Store the prefix; return where. Raises BenchmarkError: no room, or a chunk failed."""
    plans = []
    request = rig.orchestrator.begin("store")
    for job_id, stretch in enumerate(stretches):
        blocks = rig.blocks(stretch)
        for block in blocks.tolist():
            number = stretch.first * rig.model.geometry.blocks_per_chunk + block
            rig.memory.fill(stretch.group, block, number)
        plan = rig.orchestrator.reserve(stretch.keys, stretch.positions, request)
        if len(plan.keys) < len(stretch.keys):
            missing = len(stretch.keys) - len(plan.keys)
            raise BenchmarkError(f"no room for {missing} of {len(stretch.keys)} chunks")
        rig.plane.submit_store(job_id, plan, blocks)
        failed = rig.finish(job_id).failed
        rig.settle()
        if failed:
            raise BenchmarkError(f"{len(failed)} chunks could not be stored")
        plans.append(plan)
    rig.orchestrator.finish(request)
    return plans
