"""Ranks for the fault tests: each an engine whose files fail, a data plane, and KV memory."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool import native
from kvpool.dataplane import DataPlane
from kvpool.device_config import parse_devices
from kvpool.devices import open_device
from kvpool.devices.flash import FlashDevice
from kvpool.faults import FaultKind, FaultRule
from kvpool.plan import merge_reports
from kvpool.types import Geometry, GroupGeometry, GroupKind, Key, WorkerReport
from tests.faulty_engine import FaultyEngine

TOKENS = 16
BLOCKS_PER_CHUNK = 2
SLOT_BYTES = 64 << 10
BLOCK_BYTES = SLOT_BYTES // BLOCKS_PER_CHUNK
FRAMES = 144
"""Chunks that paged memory holds; frame f has blocks BLOCKS_PER_CHUNK * f and following."""
FILLER = 0xEE
HANG_S = 60.0
NAMESPACE = b"n" * 32

FULL = GroupGeometry(GroupKind.FULL, TOKENS, SLOT_BYTES)
SMALL_FULL = GroupGeometry(GroupKind.FULL, TOKENS, 20_000)
WINDOW = GroupGeometry(GroupKind.WINDOW, TOKENS, 40_000, 3)
GROUPS = ((FULL,), (FULL, WINDOW), (SMALL_FULL, FULL))

_WORDS = np.arange(SLOT_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def content(key: Key, version: int, rank: int, length: int) -> npt.NDArray[np.uint8]:
    """Return the payload of one store of a chunk on one rank: no two are alike."""
    name = zlib.crc32(key) << 32 | version << 4 | rank
    words: npt.NDArray[np.uint64] = _WORDS[: length // 8] ^ np.uint64(name)
    return words.view(np.uint8)


@dataclass(frozen=True)
class FaultRates:
    """How often each kind of fault happens to reads and writes, in 1/65536."""

    reads: dict[FaultKind, int]
    writes: dict[FaultKind, int]

    def rules(self, first_offset: int) -> list[FaultRule]:
        """Return rules, under which nothing strays before `first_offset`."""
        return [
            FaultRule(
                kind,
                reads=reads,
                writes=not reads,
                probability=probability,
                first_offset=first_offset,
                unit=SLOT_BYTES,
                delay_us=3000,
            )
            for reads, rates in ((True, self.reads), (False, self.writes))
            for kind, probability in rates.items()
        ]


class Rank:
    """One worker. Blocks of group g have the length of that group, at one stride for all."""

    def __init__(
        self,
        devices: Sequence[str],
        geometry: Geometry,
        ranks: int,
        store_buffers: int,
        queue_entries: int,
        volatile_bytes: int,
        *,
        rank: int,
    ) -> None:
        self.rank, self.geometry = rank, geometry
        self.engine = FaultyEngine(SLOT_BYTES, store_buffers, queue_entries)
        self.engine.volatile_bytes = volatile_bytes
        self.memory = native.Arena(FRAMES * SLOT_BYTES)
        shape = (FRAMES, BLOCKS_PER_CHUNK, BLOCK_BYTES)
        self.frames = self.memory.array[: FRAMES * SLOT_BYTES].reshape(shape)
        for group in geometry.groups:
            length = group.chunk_bytes // BLOCKS_PER_CHUNK
            self.engine.add_group([self.memory.address], [BLOCK_BYTES], [length], BLOCKS_PER_CHUNK)
        self.devices = [
            open_device(
                config,
                self.engine,
                namespace=NAMESPACE,
                rank=rank,
                ranks=ranks,
                owner=0,
                slot_bytes=SLOT_BYTES,
            )
            for config in parse_devices(list(devices))
        ]
        self.files = [device for device in self.devices if isinstance(device, FlashDevice)]
        self.plane = DataPlane(self.engine, self.devices, geometry, rank)
        self.oldest_version = 0  # that may be found after a restart
        self.inbox: list[Callable[[], None]] = []  # what it was told and has not begun
        self.mail: list[WorkerReport] = []

    def break_files(self, seed: int, rates: FaultRates) -> None:
        """Have files fail from now on."""
        for index, device in enumerate(self.files):
            start = int(device.offsets(np.zeros(1, np.int32))[0])
            rules, volatile_bytes = rates.rules(start), self.engine.volatile_bytes
            self.engine.set_faults(device.index, seed * 16 + index, rules, volatile_bytes)

    def chunk(self, frame: int, group: int) -> npt.NDArray[np.uint8]:
        """Return the pages of a chunk, shape (blocks, bytes of a block)."""
        return self.frames[frame, :, : self.geometry.groups[group].chunk_bytes // BLOCKS_PER_CHUNK]

    def expected(self, key: Key, version: int) -> npt.NDArray[np.uint8]:
        """Return what belongs into the pages of a chunk, shaped as they are."""
        length = self.geometry.groups[key[-1]].chunk_bytes
        return content(key, version, self.rank, length).reshape(BLOCKS_PER_CHUNK, -1)

    def catch_up(self) -> None:
        """Begin all that it was told, in order."""
        told, self.inbox = self.inbox, []
        for begin in told:
            begin()

    def collect(self) -> None:
        """Put what happened since the last time into the mail."""
        self.mail.append(self.plane.take_report())

    def take_mail(self) -> WorkerReport:
        """Return all mail as one report."""
        merged = WorkerReport()
        for report in self.mail:
            merged = merge_reports(merged, report)
        self.mail = []
        return merged

    def check_idle(self) -> None:
        """Nothing is left under way."""
        assert not self.plane.busy()
        for device in self.devices:
            assert self.engine.statistics(device.index).queue_depth == 0

    def begin_epoch(self, epoch: int, oldest_version: int) -> None:
        """Make invalid what was stored before, durably."""
        self.plane.set_epoch(epoch)
        self.oldest_version = oldest_version

    def crash(self) -> None:
        """The machine dies: what was not flushed lands, is lost or torn."""
        self.engine.mend_files()
        deadline_s = time.monotonic() + HANG_S
        for device in self.files:
            while self.engine.statistics(device.index).queue_depth:
                assert time.monotonic() < deadline_s, "hangs"
                self.engine.poll()
                self.engine.wait(0.01)
            self.engine.crash(device.index)

    def close(self) -> None:
        self.plane.close()
        self.memory.close()
