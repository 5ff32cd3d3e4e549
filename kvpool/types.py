"""The pool's nouns: keys, geometry, profiles, reports. Data without behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

# A chunk's key: vLLM's chunk hash followed by the KV group's index (4 bytes, big endian).
Key = bytes

NO_DEVICE = 255
"""Device index that means "no location"."""


class Outcome(Enum):
    """Answer of a look-up. Values, not exceptions: a miss is ordinary."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"
    RETRY = "retry"


class DeviceState(Enum):
    """Health of a device: READ_ONLY takes no new chunks, FAILED serves none either."""

    OK = "ok"
    READ_ONLY = "read_only"
    FAILED = "failed"


class PageType(Enum):
    """Pages that back a memory region, best first: it decides disk speed."""

    RESERVED_HUGE = "reserved_huge"
    TRANSPARENT_HUGE = "transparent_huge"
    PLAIN = "plain"


class GroupKind(Enum):
    """What a load reads back of a KV group that ends at some chunk."""

    FULL = "full"  # every chunk from the start
    WINDOW = "window"  # the last `window_chunks` chunks
    STATE = "state"  # one recurrent state


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV cache group as the pool sees it.

    `chunk_bytes` is the payload of one chunk on one rank; `window_chunks` is how many chunks a
    load reads back from its end (None: all of them).
    """

    kind: GroupKind
    chunk_tokens: int
    chunk_bytes: int
    window_chunks: int | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """All KV groups of one engine; a slot holds one chunk of any group."""

    groups: tuple[GroupGeometry, ...]
    blocks_per_chunk: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """What a device was measured to do, alone and while all devices of the pool read together."""

    read_bandwidth_bytes_s: float
    write_bandwidth_bytes_s: float
    read_latency_s: float
    together_read_bandwidth_bytes_s: float


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What a worker tells the scheduler about one device at start.

    `slots` is what this rank may use; `name` is the device string's kind and address, unique in a
    pool and used as the metrics' label.
    """

    name: str
    kind: str
    slots: int
    slot_bytes: int
    profile: Profile
    page_type: PageType | None = None
    io_path: str = ""


@dataclass(slots=True)
class DeviceCounters:
    """What one device of one rank did since the previous report. Additive over reports."""

    bytes_read: int = 0
    bytes_written: int = 0
    read_busy_s: float = 0.0
    write_busy_s: float = 0.0
    # Reads completed, and time passed, while reads queued and no write was in flight: the only
    # time in which a rate says what the device can do.
    saturated_read_bytes: int = 0
    saturated_read_s: float = 0.0
    read_failures: int = 0
    write_failures: int = 0
    checksum_failures: int = 0
    stalls: int = 0  # times that it stopped answering
    error: int = 0  # errno of the newest failure, 0: none
    queue_depth: int = 0  # a gauge: requests queued or in flight at the time of the report


@dataclass(slots=True)
class WorkerReport:
    """What one rank tells the scheduler after a step; `merge` in plan.py adds ranks up.

    `finished_writes` and `failed_writes` map a write id to the number of ranks that said so.
    `failed_loads` maps a load id to the positions in its plan that could not be read or verified.
    """

    finished_writes: dict[int, int] = field(default_factory=dict)
    failed_writes: dict[int, int] = field(default_factory=dict)
    failed_loads: dict[int, set[int]] = field(default_factory=dict)
    finished_loads: dict[int, int] = field(default_factory=dict)  # load id -> ranks
    # (device index, rank) -> counters
    counters: dict[tuple[int, int], DeviceCounters] = field(default_factory=dict)
    # (device index, rank) -> whether a trial of a device that had failed succeeded
    trials: dict[tuple[int, int], bool] = field(default_factory=dict)
    load_seconds: list[float] = field(default_factory=list)
    store_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """One device as the control plane sees it now; `hit_*` count since the start."""

    name: str
    kind: str
    state: DeviceState
    slots: int
    slot_bytes: int
    chunks: int
    retired_slots: int
    read_bandwidth_bytes_s: float
    share_weight: float
    hit_chunks: int
    hit_tokens: int
    slots_used: int = 0  # by chunks, and by what was dropped but may still be read or written


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The pool now; all but `pending_writes` and the devices' gauges count since the start."""

    devices: tuple[DeviceSnapshot, ...]
    miss_chunks: int
    miss_tokens: int
    stored_chunks: int
    dropped_store_chunks: int
    evicted_chunks: int
    spilled_chunks: int
    returned_chunks: int
    backed_up_chunks: int
    pending_writes: int
    lookup_hits: int = 0
    lookup_pendings: int = 0
    lookup_misses: int = 0
