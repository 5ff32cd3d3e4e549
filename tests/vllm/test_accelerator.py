"""The data plane for device memory, with a copier that reaches ordinary memory in its place.

What is left out is CUDA itself: streams, events and the pinned registration.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvpool import native
from kvpool.config import from_mapping
from kvpool.connectors.vllm.accelerator import AcceleratorPlane, DevicePages, add_host_groups
from kvpool.dataplane import DataPlane
from kvpool.devices import open_device
from kvpool.jobs import FinishedJob
from kvpool.orchestrator import Orchestrator
from kvpool.plan import Int32, Int64, LoadPlan, StorePlan
from kvpool.types import Geometry, GroupGeometry, GroupKind, Outcome, Profile
from tests.dataplane.rig import chain, file_device

pytestmark = pytest.mark.vllm

PER_CHUNK = 4
TOKENS = 64
LENGTHS = [4096, 12288, 1536]  # of three tensors; the third is padded to a stride of 4096
STRIDES = [4096, 12288, 4096]
BLOCKS = 400
SLOT_BYTES = 73728  # 4 blocks of 17920 bytes, rounded up


class LateCopier:
    """Copies when it is asked for the second time whether it has: copies overlap with reads."""

    def __init__(self) -> None:
        self.waiting: list[tuple[list[int], Int64, Int64, Int64]] = []

    def copy(self, source: Int64, destination: Int64, sizes: Int64) -> list[int]:
        ticket = [2]
        self.waiting.append((ticket, source, destination, sizes))
        return ticket

    def done(self, ticket: list[int]) -> bool:
        ticket[0] -= 1
        if ticket[0] == 0:
            self._move(ticket)
        return ticket[0] <= 0

    def wait(self, ticket: list[int]) -> None:
        ticket[0] = 0
        self._move(ticket)

    def _move(self, ticket: list[int]) -> None:
        for entry in [entry for entry in self.waiting if entry[0] is ticket]:
            for source, destination, size in zip(
                *(column.tolist() for column in entry[1:]), strict=True
            ):
                ctypes.memmove(destination, source, size)
            self.waiting.remove(entry)


class Rig:
    """Device pages in numpy arrays, and a pool of a DRAM module and a file."""

    def __init__(self, folder: Path, host_chunks: int) -> None:
        geometry = Geometry(
            (GroupGeometry(GroupKind.FULL, TOKENS * PER_CHUNK, PER_CHUNK * sum(LENGTHS)),),
            PER_CHUNK,
            SLOT_BYTES,
        )
        self.tensors = [np.zeros((BLOCKS, stride), np.uint8) for stride in STRIDES]
        pages = DevicePages(
            np.array([tensor.ctypes.data for tensor in self.tensors]),
            np.array(STRIDES),
            np.array(LENGTHS),
        )
        self.engine = native.Engine(SLOT_BYTES)
        host = native.Arena(2 << 20)
        arena = HostArena(host, host_chunks * PER_CHUNK * sum(LENGTHS))
        add_host_groups(self.engine, [pages], arena, PER_CHUNK)  # type: ignore[arg-type]
        config = from_mapping({"devices": ["dram:4MiB", file_device(folder, "a", "64MiB")]})
        devices = [
            open_device(
                device,
                self.engine,
                namespace=bytes(32),
                rank=0,
                ranks=1,
                owner=0,
                slot_bytes=SLOT_BYTES,
            )
            for device in config.devices
        ]
        self.copier = LateCopier()
        self.plane = AcceleratorPlane(
            DataPlane(self.engine, devices, geometry),
            self.copier,
            [pages],
            geometry,
            arena,  # type: ignore[arg-type]
        )
        self.orchestrator = Orchestrator(geometry, 1)
        profile = Profile(1e9, 1e9, 1e-4, 1e9)
        self.orchestrator.attach([device.report(profile) for device in devices])

    def content(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the payload bytes of blocks."""
        return [
            b"".join(
                tensor[block, :length].tobytes()
                for tensor, length in zip(self.tensors, LENGTHS, strict=True)
            )
            for block in blocks
        ]

    def run(self, *jobs: int) -> list[FinishedJob]:
        """Run until the named jobs have ended."""
        finished: list[FinishedJob] = []
        while {job.job_id for job in finished} != set(jobs):
            self.plane.wait(0.1)
            self.plane.poll()
            finished += self.plane.take_finished()
            self.orchestrator.acknowledge(self.plane.take_report())
        while self.orchestrator.pending_work():
            self.plane.poll()
            self.orchestrator.acknowledge(self.plane.take_report())
        return finished

    def reserve(self, keys: list[bytes]) -> StorePlan:
        request = self.orchestrator.begin("store")
        positions = [(i + 1) * TOKENS * PER_CHUNK for i in range(len(keys))]
        return self.orchestrator.reserve(keys, positions, request)

    def plan_load(self, keys: list[bytes]) -> LoadPlan:
        request = self.orchestrator.begin("load")
        for key in keys:
            assert self.orchestrator.lookup(key, request) is Outcome.HIT
        return self.orchestrator.plan_load(keys, request)


class HostArena:
    """An arena of which only `length` bytes are used, so that parts have to take turns."""

    def __init__(self, arena: native.Arena, length: int) -> None:
        self.arena, self.address, self.length = arena, arena.address, length


@pytest.fixture(params=[3, 20], ids=["few-host-chunks", "many-host-chunks"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, request.param)
    yield made
    made.plane.close()


def blocks_of(chunks: int, first: int) -> Int32:
    return np.arange(first, first + chunks * PER_CHUNK, dtype=np.int32)


def test_pages_come_back_through_few_host_chunks(rig: Rig) -> None:
    random = np.random.default_rng(5)
    for tensor in rig.tensors:
        tensor[:] = random.integers(0, 256, tensor.shape, dtype=np.uint8)
    keys = chain(1, 30)
    source, target = blocks_of(30, 0), blocks_of(30, 200)[::-1].copy()
    expected = rig.content(source.tolist())
    rig.plane.submit_store(1, rig.reserve(keys), source)
    assert rig.plane.unfinished({1, 2}) == {1}
    (stored,) = rig.run(1)
    assert stored.failed == []
    target[5] = -1  # a block that is not wanted keeps what it holds
    kept = rig.content([int(blocks_of(30, 200)[::-1][5])])
    rig.plane.submit_load(2, rig.plan_load(keys), target)
    (loaded,) = rig.run(2)
    assert loaded.failed == []
    wanted = [i for i in range(target.size) if i != 5]
    assert rig.content(target[wanted].tolist()) == [expected[i] for i in wanted]
    assert rig.content([int(blocks_of(30, 200)[::-1][5])]) == kept


def test_stores_that_have_not_begun_can_be_released(rig: Rig) -> None:
    keys = chain(2, 60)
    rig.plane.submit_store(1, rig.reserve(keys), blocks_of(60, 0))
    rig.plane.release_stores({1})
    (finished,) = rig.run(1)
    assert finished.job_id == 1
    assert not rig.orchestrator.pending_work()
    assert rig.orchestrator.snapshot().devices[0].chunks < 60
