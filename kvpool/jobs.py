"""What the data plane keeps of the jobs that are under way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.devices.base import HeaderWrites
from kvpool.plan import Int32, Int64, LoadPlan, StorePlan, UInt8
from kvpool.types import Key

Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class FinishedJob:
    """A load that ended, or a store whose source pages are free again.

    `failed` holds the positions in the plan that were not read (load) or not accepted (store).
    """

    job_id: int
    is_load: bool
    failed: list[int]
    payload_bytes: int
    seconds: float


@dataclass(slots=True)
class Headers:
    """What the headers of a batch of written chunks say."""

    group: UInt8
    device: UInt8
    slot: Int32
    keys: list[Key]
    parents: list[Key]
    positions: Int32

    def select(self, chosen: Int64) -> Headers:
        """Return those of the chosen chunks, shape (n,)."""
        return Headers(
            self.group[chosen],
            self.device[chosen],
            self.slot[chosen],
            [self.keys[i] for i in chosen],
            [self.parents[i] for i in chosen],
            self.positions[chosen],
        )


@dataclass(slots=True, kw_only=True)
class Job:
    """Operations with consecutive tags from `first_tag` on; one operation a chunk."""

    job_id: int = -1
    first_tag: int
    count: int
    started_s: float = field(default_factory=time.monotonic)
    payload_bytes: int = 0
    failed: list[int] = field(default_factory=list)
    # By operation; one may have ended here although its device has not answered yet.
    ended: Bools = field(default_factory=lambda: np.empty(0, np.bool_))


@dataclass(slots=True, kw_only=True)
class Load(Job):
    """Chunks that are read into pages, a part of a plan or all of it."""

    plan: LoadPlan
    position: Int64  # operation -> position in the plan
    first_position: int
    last_part: bool


@dataclass(slots=True, kw_only=True)
class Write(Job):
    """A store or a batch of spills."""

    is_store: bool
    position: Int64  # operation -> position in the plan
    write_id: Int64
    headers: Headers
    staged: Bools
    plan: StorePlan | None = None  # of a store: says what is backed up
    released: bool = False  # told to the caller


@dataclass(slots=True, kw_only=True)
class HeaderWrite(Job):
    """Blocks of a device's header table."""

    device: int
    offsets: list[int]

    def devices(self) -> Int64:
        """Return the device of each operation, shape (count,)."""
        return np.full(self.count, self.device)


def header_blocks(rows: HeaderWrites) -> dict[int, tuple[int, int]]:
    """Return what header writes say: offset -> (address, length)."""
    return {offset: (address, length) for offset, address, length in rows.tolist()}
