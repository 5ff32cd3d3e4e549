"""Loads: which copy of each chunk is read, and which ones come back to memory on the way."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool import cost, placement
from kvpool.plan import Int32, Int64, LoadPlan, UInt8
from kvpool.pool import Pool, WriteKind
from kvpool.prefix import RequestState
from kvpool.table import HELD, READABLE, Entries
from kvpool.types import NO_DEVICE, DeviceState, Key

_GROUP = operator.itemgetter(-1)


@dataclass(slots=True)
class _Load:
    """A load under way: what it pins and where it reads, by position in its plan (-1: nowhere)."""

    entries: Entries
    device: UInt8
    slot: Int32
    ranks_left: int
    bytes_: npt.NDArray[np.float64]  # by device

    def pinned(self) -> Entries:
        return self.entries[self.entries >= 0]


class Loads:
    """All loads that are not over. A load is over when vLLM or all ranks say so."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._open: dict[int, _Load] = {}
        self._last_id = 0
        self._sizes = np.array(pool.rules.sizes, dtype=np.float64)
        self._tokens = np.array([group.chunk_tokens for group in pool.rules.groups], np.int64)
        self._memory = np.zeros(NO_DEVICE + 1, np.bool_)
        self._memory[: len(pool.memory)] = pool.memory
        rules = pool.rules
        self._token_bytes = sum(
            (rules.sizes[i] / rules.groups[i].chunk_tokens for i in rules.full), 0.0
        )
        # Chunks of which a load uses a part, and windows, which may need one chunk more.
        self._once_bytes = sum(
            size * (2 if i in rules.full else rules.window(i) + 1)
            for i, size in enumerate(rules.sizes)
        )
        # Of the loads under way, by device: what they read, and what of that was reported.
        self._planned_bytes = np.zeros(len(pool.devices))
        self._read_bytes = np.zeros(len(pool.devices))

    def plan(self, keys: Sequence[Key], request: RequestState) -> LoadPlan:
        """Pin what is readable of `keys` and say where to read it."""
        keys = list(keys)
        table, count = self._pool.table, len(keys)
        request.stamp = self._pool.tick()
        group = np.frombuffer(bytearray(map(_GROUP, keys)), np.uint8)
        entries = self._resolve(keys, group)
        found = np.flatnonzero(entries >= 0)
        pinned = entries[found]
        device, slot = np.full(count, NO_DEVICE, np.uint8), np.full(count, -1, np.int32)
        device[found], slot[found] = self._locate(pinned)
        table.pin(pinned)
        self._touch(pinned, request.stamp)
        self._count_hits(pinned, device[found])
        keep_device, keep_slot, keep_write_id = self._keep(entries, found)
        self._last_id += 1
        bytes_ = self._by_device(device[found], self._sizes[group[found]])
        self._planned_bytes += bytes_
        self._open[self._last_id] = _Load(entries, device, slot, self._pool.ranks, bytes_)
        request.load_id = self._last_id
        return LoadPlan(self._last_id, group, device, slot, keep_device, keep_slot, keep_write_id)

    def _resolve(self, keys: Sequence[Key], group: UInt8) -> Entries:
        """Return the keys' entries, -1 where a chunk cannot be read (any more). Shape (n,)."""
        entries = np.empty(len(keys), np.int64)
        starts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(keys)]
        for start, end in itertools.pairwise(starts):
            entries[start:end] = self._resolve_run(keys[start:end])
        found = np.flatnonzero(entries >= 0)
        unreadable = self._pool.table.state_view[entries[found]] != READABLE
        entries[found[unreadable]] = -1
        return entries

    def _resolve_run(self, keys: Sequence[Key]) -> list[int]:
        """Return the entries of keys of one group, -1 where there is none.

        Where they are a piece of the spine, the way up from the last one finds them all: that
        costs less than asking the index, whose memory is visited in no order.
        """
        table = self._pool.table
        if len(keys) and keys[-1][-1] in self._pool.rules.full:
            entries = table.ancestors(table.index.get(keys[-1], -1), keys[-1][-1], len(keys))
            if [table.keys[entry] for entry in entries] == keys:
                return entries
        return [table.index.get(key, -1) for key in keys]

    def _locate(self, entries: Entries) -> tuple[UInt8, Int32]:
        """Return device and slot to read each chunk from, so that all devices finish together."""
        table = self._pool.table
        device, slot = table.device0_view[entries], table.slot0_view[entries]
        second = table.device1_view[entries]
        both = (second != NO_DEVICE) & (table.flags_view[entries] & HELD == 0)
        if both.any():
            size = self._sizes[table.group_view[entries]]
            load = self._by_device(device[~both], size[~both])
            take = placement.choose_copies(
                load.tolist(),
                size[both].tolist(),
                device[both].tolist(),
                second[both].tolist(),
                self._pool.bandwidth,
            )
            taken = np.flatnonzero(both)[np.array(take, np.bool_)]
            device[taken], slot[taken] = second[taken], table.slot1_view[entries[taken]]
        return device, slot

    def _by_device(self, device: UInt8, weight: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.bincount(device, weight, minlength=len(self._pool.devices)).astype(np.float64)

    def _touch(self, entries: Entries, stamp: int) -> None:
        """Touch what is read, and above it what the accelerator still had."""
        table = self._pool.table
        table.touch(entries, stamp)
        parents = table.parent_view[entries]
        above = entries[(parents >= 0) & (table.stamp_view[parents] != stamp)]
        for entry in above.tolist():
            table.touch_ancestors(entry, stamp)

    def _count_hits(self, entries: Entries, device: UInt8) -> None:
        table, counters = self._pool.table, self._pool.counters
        whole = self._tokens[table.group_view[entries]]
        tokens = (table.position_view[entries] - 1) % whole + 1
        chunks = np.bincount(device, minlength=len(self._pool.devices))
        by_device = self._by_device(device, tokens.astype(np.float64))
        for i in range(len(self._pool.devices)):
            counters.hit_chunks[i] += int(chunks[i])
            counters.hit_tokens[i] += int(by_device[i])

    def _keep(self, entries: Entries, found: Int64) -> tuple[UInt8, Int32, Int64]:
        """Reserve memory for chunks that lie only on slower devices. Shape (n,) each."""
        count = len(entries)
        keep_device, keep_slot = np.full(count, NO_DEVICE, np.uint8), np.full(count, -1, np.int32)
        keep_write_id = np.full(count, -1, np.int64)
        pool, table = self._pool, self._pool.table
        for i in self._returns(entries[found]):
            position = int(found[i])
            entry = int(entries[position])
            device = min(
                (device for device in pool.usable_memory if pool.has_room(device)),
                key=lambda device: (table.slots[device].used / pool.bandwidth[device], device),
            )
            keep_device[position], keep_slot[position] = device, table.begin_copy(entry, device)
            keep_write_id[position] = pool.open_write(entry, WriteKind.KEEP)
        return keep_device, keep_slot, keep_write_id

    def _returns(self, entries: Entries) -> list[int]:
        """Return which of the chunks come back to memory, as far as free slots go."""
        pool, table = self._pool, self._pool.table
        room = sum(len(table.slots[device].free) for device in pool.usable_memory)
        if not room or not pool.slower:
            return []
        first, second = table.device0_view[entries], table.device1_view[entries]
        in_memory = self._memory[first] | self._memory[second]  # or on the way there
        if in_memory.all():
            return []
        return placement.choose_returns(
            in_memory.tolist(),
            self._sizes[table.group_view[entries]].tolist(),
            sum(pool.share_weight(device) for device in pool.usable_memory),
            room,
        )

    def fail(self, load_id: int, positions: set[int]) -> None:
        """Some rank could not read or verify chunks: they miss from now on, their slots retire."""
        load = self._open.get(load_id)
        if load is None:
            return
        table = self._pool.table
        for position in sorted(positions):
            entry = int(load.entries[position])
            if entry >= 0:
                table.retire(entry, int(load.device[position]), int(load.slot[position]))

    def rank_finished(self, load_id: int, ranks: int) -> None:
        """So many ranks more have ended the load; with the last, nothing is read any more."""
        load = self._open.get(load_id)
        if load is None:
            return
        load.ranks_left -= ranks
        if load.ranks_left <= 0:
            self.complete(load_id)

    def complete(self, load_id: int) -> None:
        """Unpin a load's chunks; nothing happens where that was done."""
        load = self._open.pop(load_id, None)
        if load is not None:
            self._pool.table.unpin(load.pinned())
            self._planned_bytes -= load.bytes_
            self._read_bytes = np.maximum(self._read_bytes - load.bytes_, 0.0)

    # ---- what a load costs ------------------------------------------------------------------

    def note_read(self, device: int, bytes_: float) -> None:
        """So many bytes were read from a device, of each rank's chunks."""
        self._read_bytes[device] = min(
            self._read_bytes[device] + bytes_, self._planned_bytes[device]
        )

    def queued_bytes(self) -> list[float]:
        """Return what the loads under way still have to read, by device, as far as is known."""
        left: list[float] = (self._planned_bytes - self._read_bytes).tolist()
        return left

    def bounds(self) -> cost.Bounds:
        """Return what a load costs now, wherever its chunks lie."""
        pool, queued = self._pool, self.queued_bytes()
        devices = [i for i, d in enumerate(pool.devices) if d.state is not DeviceState.FAILED]
        bandwidth = [pool.bandwidth[i] for i in devices] or [1.0]
        behind_s = [
            queued[i] / pool.bandwidth[i] + pool.devices[i].report.profile.read_latency_s
            for i in devices
        ]
        return cost.Bounds(
            self._token_bytes / min(bandwidth),
            self._once_bytes / min(bandwidth) + max(behind_s, default=0.0),
            self._token_bytes / sum(bandwidth),
        )

    def seconds(self, reads: cost.Reads, ends: Int64) -> npt.NDArray[np.float64]:
        """Return the expected seconds of loads that end at each of `ends`, in tokens."""
        table, devices = self._pool.table, self._pool.devices
        entries = np.array([table.index.get(key, -1) for key in reads.keys], np.int64)
        found = np.flatnonzero(entries >= 0)
        entries = entries[found]
        device, _ = self._locate(entries)
        return cost.load_seconds(
            ends,
            reads.ends[found],
            reads.counts[found] * self._sizes[table.group_view[entries]],
            device,
            self.queued_bytes(),
            self._pool.bandwidth,
            [health.report.profile.read_latency_s for health in devices],
        )
