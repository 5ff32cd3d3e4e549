"""The control plane: look-ups, loads, stores, spills, acknowledgements. Decides, moves no byte.

The caller owns one thread for all methods. No method does I/O, blocks, logs or reads a clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvpool import cost, spills, stores
from kvpool.errors import ConfigurationError
from kvpool.loads import Loads
from kvpool.placement import POLICIES
from kvpool.plan import LoadPlan, MovePlan, StoredHeaders, StorePlan
from kvpool.pool import Counters, Pool
from kvpool.prefix import RequestState
from kvpool.restore import restore
from kvpool.table import READABLE
from kvpool.types import (
    NO_DEVICE,
    DeviceReport,
    DeviceSnapshot,
    DeviceState,
    Geometry,
    GroupKind,
    Key,
    Outcome,
    PoolSnapshot,
    WorkerReport,
)

__all__ = ["Orchestrator", "RequestState"]

_HIT, _PENDING, _MISS = Outcome.HIT, Outcome.PENDING, Outcome.MISS


class Orchestrator:
    """Decides for one engine of `ranks` ranks, whose slots and devices are the same everywhere.

    Guaranteed by the caller: every write id of a plan is acknowledged by every rank, as finished
    or failed, whatever becomes of its request; so is the end of every load, or `complete_load` is
    called. Owed: a slot is not handed out while anything of its old content may be read or
    written; what is left of a prefix is contiguous. Never: a chunk that was not written by all
    ranks is a hit.
    """

    def __init__(
        self,
        geometry: Geometry,
        ranks: int,
        placement: str = "proportional",
        backup: bool = True,
    ) -> None:
        """Raise `ConfigurationError` for a policy, rank count or geometry that is not known.

        With `backup`, chunks that are stored in memory get a copy on a slower device.
        """
        if placement not in POLICIES:
            raise ConfigurationError("placement", placement, "one of " + ", ".join(POLICIES))
        if ranks < 1:
            raise ConfigurationError("ranks", ranks, "1 or more")
        if not 1 <= len(geometry.groups) <= 256:
            raise ConfigurationError("groups", len(geometry.groups), "1 to 256 KV groups")
        for group in geometry.groups:
            if group.kind is GroupKind.WINDOW and not group.window_chunks:
                raise ConfigurationError("window_chunks", group.window_chunks, "1 or more")
        self._geometry, self._ranks, self._policy = geometry, ranks, placement
        self._backup = backup
        self._epoch = 0
        self._announcements: list[str] = []
        self._pool: Pool | None = None
        self._loads: Loads | None = None
        # What look-ups need of the table; until there is one, a table with one free entry.
        self._find = dict[Key, int]().get
        self._keys, self._state, self._first_child = [b""], bytearray(1), array("i", [-1])
        self._hits = self._pendings = self._misses = 0

    def attach(
        self,
        devices: Sequence[DeviceReport],
        survivors: Sequence[Sequence[StoredHeaders]] = (),
    ) -> list[int]:
        """Take in the devices, in the order in which plans number them. Once, after start.

        `survivors[rank][device]` is what each rank found on its devices; returns how many chunks
        came back on each. Until then all look-ups miss and nothing is stored. Raises
        `ConfigurationError` where there are more devices or slots than can be numbered.
        """
        if self._pool is not None:
            raise RuntimeError("devices are attached once")
        if len(devices) >= NO_DEVICE:
            raise ConfigurationError("devices", len(devices), f"fewer than {NO_DEVICE}")
        self._pool = Pool(self._geometry, self._ranks, self._policy, devices, self._backup)
        self._loads = Loads(self._pool)
        table = self._pool.table
        if table.capacity:
            self._find = table.index.get
            self._keys, self._state, self._first_child = table.keys, table.state, table.first_child
        if not survivors:
            return [0] * len(devices)
        return restore(table, self._geometry, survivors)

    def begin(self, request_id: str) -> RequestState:
        """Return the state of a new request, to be handed in with all calls made for it."""
        return RequestState(request_id, len(self._geometry.groups), self._epoch)

    # ---- look-ups ---------------------------------------------------------------------------

    def lookup(self, key: Key, request: RequestState) -> Outcome:
        """Say whether a chunk is readable (HIT), being written (PENDING), or not there (MISS)."""
        # Mostly it is the chunk below the one asked for before. To compare that one's key costs
        # less than the index: neighbours in a chain lie together in memory, hashes anywhere.
        child = self._first_child[request.looked_up]
        entry = child if self._keys[child] == key else self._find(key)
        if entry is None:
            self._misses += 1
            return _MISS
        request.looked_up = entry
        if self._state[entry] == READABLE:
            self._hits += 1
            return _HIT
        self._pendings += 1
        return _PENDING

    def location_kind(self, key: Key) -> str | None:
        """Return the kind of device that a readable chunk would be read from, memory first."""
        entry = self._find(key)
        if entry is None or self._pool is None or self._state[entry] != READABLE:
            return None
        table = self._pool.table
        second = table.has_copy(entry) and self._pool.memory[table.device1[entry]]
        device = table.device1[entry] if second else table.device0[entry]
        return self._pool.devices[device].report.kind

    # ---- loads ------------------------------------------------------------------------------

    def plan_load(self, keys: Sequence[Key], request: RequestState) -> LoadPlan:
        """Pin chunks and say where to read them; one load at a time a request. Never refuses.

        A chunk that is not readable any more is in the plan with NO_DEVICE and slot -1. Where
        `keep_device` is set, the kept copy is acknowledged as a write under `keep_write_id`.
        """
        assert self._loads is not None, "before attach nothing is a hit"
        self._enter(request)
        return self._loads.plan(keys, request)

    def load_bounds(self) -> cost.Bounds:
        """Return what a load costs now, wherever its chunks lie."""
        assert self._loads is not None, "before attach nothing is a hit"
        return self._loads.bounds()

    def load_seconds(self, reads: cost.Reads, ends: cost.Int64) -> cost.Float64:
        """Return the expected seconds of a load that ends at each of `ends`, in tokens.

        Behind the loads under way, as if it started now. Shape (len(ends),).
        """
        assert self._loads is not None, "before attach nothing is a hit"
        return self._loads.seconds(reads, ends)

    def complete_load(self, request: RequestState) -> None:
        """The request's load is over: unpin. Does nothing a second time, or after a reset."""
        if self._loads is not None and request.epoch == self._epoch:
            if request.load_id is not None:
                self._loads.complete(request.load_id)
            request.load_id = None

    # ---- stores and spills ------------------------------------------------------------------

    def reserve(
        self, keys: Sequence[Key], positions: Sequence[int], request: RequestState
    ) -> StorePlan:
        """Reserve slots for those of the offered chunks that are not there and fit.

        `positions` are end positions in tokens, rising within each group. Chunks that are there
        are touched. The plan holds the others in the order offered, without those that are
        dropped: no slot can be freed for them, or the chunk that they hang on is not there.
        """
        self._enter(request)
        if self._pool is None:
            return stores.NOTHING
        return stores.reserve(self._pool, keys, positions, request)

    def take_moves(self) -> MovePlan | None:
        """Return the spills decided now, if any. Call once a scheduler step."""
        return None if self._pool is None else spills.take_moves(self._pool)

    # ---- what workers say -------------------------------------------------------------------

    def acknowledge(self, report: WorkerReport) -> None:
        """Take in a report. Ids that are unknown, or over, are ignored."""
        if self._pool is None or self._loads is None:
            return
        for (device, _), counters in report.counters.items():
            self._loads.note_read(device, counters.bytes_read / self._ranks)
        for load_id, positions in report.failed_loads.items():
            self._loads.fail(load_id, positions)
        for load_id, ranks in report.finished_loads.items():
            self._loads.rank_finished(load_id, ranks)
        for write_id, ranks in report.failed_writes.items():
            self._pool.acknowledge_write(write_id, ranks, ok=False)
        for write_id, ranks in report.finished_writes.items():
            self._pool.acknowledge_write(write_id, ranks, ok=True)
        for (device, rank), counters in report.counters.items():
            if self._pool.devices[device].observe(rank, counters):
                self._got_worse(self._pool, device)
        for (device, rank), ok in report.trials.items():
            health = self._pool.devices[device]
            if health.passed_trial(rank, ok, self._ranks):
                self._announcements.append(f"{health.report.name}: works again and is used again")
        if report.counters or report.trials:
            self._pool.refresh_bandwidths()

    def _got_worse(self, pool: Pool, device: int) -> None:
        health = pool.devices[device]
        if health.state is DeviceState.READ_ONLY:
            what = "nothing is written to it any more, what it holds is read"
        else:
            what = f"left the pool, {pool.table.lose_device(device)} chunks were dropped"
        self._announcements.append(f"{health.report.name}: {health.reason}: {what}")

    def broken_devices(self) -> list[int]:
        """Return the devices that are not OK, for a trial."""
        devices = self._pool.devices if self._pool is not None else []
        return [i for i, health in enumerate(devices) if health.state is not DeviceState.OK]

    def take_announcements(self) -> list[str]:
        """Return what an operator should read, once."""
        announcements, self._announcements = self._announcements, []
        return announcements

    # ---- ends -------------------------------------------------------------------------------

    def finish(self, request: RequestState) -> None:
        """The request is over; its load and writes may still be acknowledged."""
        request.forget_chains()

    def reset(self) -> None:
        """Forget all chunks and loads at once and begin a new epoch.

        Slots that are being written or read come back with the acknowledgement of that.
        """
        self._epoch += 1
        if self._pool is not None:
            self._pool.table.clear()

    @property
    def epoch(self) -> int:
        """How often everything was forgotten."""
        return self._epoch

    def pending_work(self) -> bool:
        """Whether writes, spills or kept copies are not yet acknowledged by all ranks."""
        return self._pool is not None and bool(self._pool.writes)

    def _enter(self, request: RequestState) -> None:
        """A request that lived through a reset starts over."""
        if request.epoch != self._epoch:
            request.forget(self._epoch)

    def snapshot(self) -> PoolSnapshot:
        """Return gauges as of now and counters since the start. Costs nothing per chunk."""
        counters = self._pool.counters if self._pool else Counters()
        devices = range(len(self._pool.devices)) if self._pool else range(0)
        return PoolSnapshot(
            devices=tuple(self._snapshot_device(device) for device in devices),
            miss_chunks=counters.miss_chunks,
            miss_tokens=counters.miss_tokens,
            stored_chunks=counters.stored_chunks,
            dropped_store_chunks=counters.dropped_store_chunks,
            evicted_chunks=counters.evicted_chunks,
            spilled_chunks=counters.spilled_chunks,
            returned_chunks=counters.returned_chunks,
            backed_up_chunks=counters.backed_up_chunks,
            pending_writes=len(self._pool.writes) if self._pool else 0,
            lookup_hits=self._hits,
            lookup_pendings=self._pendings,
            lookup_misses=self._misses,
        )

    def _snapshot_device(self, device: int) -> DeviceSnapshot:
        assert self._pool is not None
        health, slots = self._pool.devices[device], self._pool.table.slots[device]
        return DeviceSnapshot(
            name=health.report.name,
            kind=health.report.kind,
            state=health.state,
            slots=slots.capacity,
            slot_bytes=health.report.slot_bytes,
            chunks=slots.used - slots.doomed,
            retired_slots=slots.retired,
            read_bandwidth_bytes_s=health.read_bandwidth_bytes_s,
            share_weight=self._pool.share_weight(device),
            hit_chunks=self._pool.counters.hit_chunks[device],
            hit_tokens=self._pool.counters.hit_tokens[device],
            slots_used=slots.used,
        )
