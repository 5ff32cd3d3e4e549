"""A stream of transfers on one device, kept going for a while and timed: what `probe` runs."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import select
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool import native
from kvpool.devices.base import ProbeTarget
from kvpool.errors import DeviceError, check

SMALL_BYTES = native.ALIGN
_QUEUED_BYTES = 16 << 20  # keeps enough small transfers queued while Python looks elsewhere
_BUFFERS_BYTES = 256 << 20  # bounds the memory of a stream
_MODULE_BYTES, _PAGES_BYTES = 256 << 20, 64 << 20  # more than the processor's caches hold
_QUEUED_S = 0.1  # bounds how long a slow device needs for what is queued
_LONG_S, _SHORT_S = 0.04, 0.02  # a longer transfer is shortened, so that enough of them count
_SHORTEST_BYTES = 256 << 10
_LEAST_LANES = 4
_TRIES = 3
_HANGS_S = 10.0
_NO_BLOCKS = np.empty(0, np.int32)

_ids = itertools.count(1)
# Memory that a device which hangs might still use; never freed.
_abandoned: list[native.Arena] = []


class Stream:
    """Transfers of up to `transfer_bytes` in slices of a target's area, round and round.

    Media get WRITE and READ; modules STORE and verified LOAD, from and into pages of a KV group
    that is added to `engine`. Only what this stream wrote is read.
    """

    def __init__(
        self, engine: native.Engine, index: int, target: ProbeTarget, transfer_bytes: int
    ) -> None:
        self.engine, self.id, self.is_module = engine, next(_ids), target.memory is not None
        self._index, self._target, self._transfer_bytes = index, target, transfer_bytes
        wanted = max(target.parallel * 3 // 2 + 1, _QUEUED_BYTES // transfer_bytes)
        lanes = max(2, min(wanted, _BUFFERS_BYTES // transfer_bytes, 256))
        self._area_bytes = min(target.length, _MODULE_BYTES) if self.is_module else target.length
        self._pages = max(lanes, _PAGES_BYTES // transfer_bytes) if self.is_module else lanes
        self._memory = native.Arena(self._pages * transfer_bytes)
        noise = np.random.default_rng(0).integers(0, 256, transfer_bytes, np.uint8)
        self._memory.array[: self._pages * transfer_bytes].reshape(self._pages, -1)[:] = noise
        self._free, self._lanes = list(range(lanes)), lanes
        self._slice_of_lane = np.zeros(lanes, np.int64)
        self._submitted_s = np.zeros(lanes)
        self._groups: dict[int, int] = {}  # payload bytes -> KV group
        self._checksums: dict[int, int] = {}  # slice of a module -> CRC32C
        self._written_bytes = 0  # from the start of the area, without a gap
        self._plans: dict[bool, tuple[int, int]] = {}  # write? -> length, transfers at a time
        self._error = 0
        self._set(True, transfer_bytes, 1)

    def estimate(self, write: bool) -> None:
        """Choose length and number of the transfers of a run by trying single ones.

        Some wait for things that others do not, so one that seems slow is tried again.
        """
        length, spent_s, seconds = self._transfer_bytes, 0.0, math.inf
        for tried in range(1, _TRIES + 1):
            seconds = min(seconds, taken_s := self.once(write, length, 0))
            spent_s += taken_s
            if seconds * self._lanes <= _QUEUED_S or (tried > 1 and spent_s > _QUEUED_S):
                break
        if seconds > _LONG_S and not self.is_module:
            shorter = int(length * _SHORT_S / seconds) // _SHORTEST_BYTES * _SHORTEST_BYTES
            length = min(length, max(shorter, _SHORTEST_BYTES))
            seconds *= length / self._transfer_bytes
        lanes = max(_LEAST_LANES, int(_QUEUED_S / seconds))
        self._plans[write] = length, min(self._lanes, lanes)

    def once(self, write: bool, length: int, index: int) -> float:
        """Do one transfer of `length` bytes in slice `index`; return its seconds."""
        self._set(write, length, 1)
        self._submit(np.array([self._free.pop()]), np.array([index]))
        events = advance([self])
        while self.in_flight:
            events = advance([self])
        self.check()
        return max(int(events[0][1]["nanoseconds"][0]), 1) / 1e9

    def begin(self, write: bool) -> None:
        """Start a run, for which `estimate` was called."""
        self._set(write, *self._plans[write])

    def _set(self, write: bool, length: int, limit: int) -> None:
        self._write, self._length, self._limit, self._next = write, length, limit, 0
        self._spans: list[npt.NDArray[np.float64]] = []  # (2, n): begin and end of transfers
        self._started_s, self._done = time.monotonic(), 0

    def refill(self) -> None:
        """Queue as many transfers as may be under way: more where they turn out to be fast."""
        passed_s = max(time.monotonic() - self._started_s, _QUEUED_S / 10)
        fitting = int(self._done * _QUEUED_S / passed_s)
        self._limit = max(self._limit, min(self._lanes, fitting))
        count = len(self._free) - (self._lanes - self._limit)
        if count > 0 and not self._error:
            lanes, self._free = self._free[:count], self._free[count:]
            self._submit(np.array(lanes), np.arange(self._next, self._next + count))
            self._next += count

    def take(self, events: npt.NDArray[np.void]) -> None:
        """Take in DONE events of this stream."""
        lanes = (events["tag"] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        self._free += lanes.tolist()
        begin_s = self._submitted_s[lanes]
        self._done += lanes.size
        self._spans.append(np.stack([begin_s, begin_s + events["nanoseconds"] / 1e9]))
        failed = events["result"][events["result"] < 0]
        self._error = self._error or (int(failed[0]) if failed.size else 0)
        if self._write:
            slices = self._slice_of_lane[lanes]
            reached = (int(slices.max()) + 1) * self._length
            self._written_bytes = max(self._written_bytes, reached)
            self._checksums.update(zip(slices.tolist(), events["crc"].tolist(), strict=True))

    def rate_bytes_s(self) -> float:
        """Return the rate of the run, over the time in which something was under way.

        Events tell how long a transfer took, so it does not matter when Python comes round to
        them; nor to refilling, which leaves gaps on a busy machine. Raises DeviceError.
        """
        self.check()
        begin_s, end_s = np.concatenate(self._spans, axis=1)
        order = np.argsort(begin_s)
        reached_s = np.maximum.accumulate(end_s[order])
        gaps_s = np.maximum(begin_s[order][1:] - reached_s[:-1], 0.0).sum()
        busy_s = float(reached_s[-1] - begin_s.min() - gaps_s)
        return float(begin_s.size * self._length / max(busy_s, 1e-9))

    @property
    def in_flight(self) -> int:
        return self._lanes - len(self._free)

    def check(self) -> None:
        """Raise DeviceError where a transfer failed."""
        what = "write" if self._write else "read"
        check(self._error, f"{self._target.name}: {what} of {self._length} bytes to measure it")

    def close(self) -> None:
        """Wait for what is under way and free the memory."""
        if self.in_flight:
            with contextlib.suppress(DeviceError):
                while self.in_flight:
                    advance([self])
        if self.in_flight:
            _abandoned.append(self._memory)
        else:
            self._memory.close()

    def _submit(self, lanes: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]) -> None:
        readable = self._area_bytes if self._write else self._written_bytes
        slices = indices % max(1, readable // self._length)
        self._slice_of_lane[lanes] = slices
        ops = np.zeros(lanes.size, native.OP_DTYPE)
        ops["tag"] = lanes | self.id << 32
        ops["offset"] = self._target.offset + slices * self._length
        ops["device"], ops["keep"], ops["length"] = self._index, native.NO_DEVICE, self._length
        if self.is_module:
            blocks = (indices % self._pages).astype(np.int32)
            ops["kind"] = native.KIND_STORE if self._write else native.KIND_LOAD
            ops["group"], ops["first_block"] = self._group(), np.arange(lanes.size)
            if not self._write:
                ops["flags"] = native.FLAG_VERIFY
                ops["crc"] = [self._checksums[index] for index in slices.tolist()]
        else:
            blocks = _NO_BLOCKS
            ops["kind"] = native.KIND_WRITE if self._write else native.KIND_READ
            ops["buffer"] = self._memory.address + lanes * self._transfer_bytes
        self._submitted_s[lanes] = time.monotonic()
        self.engine.submit(ops, blocks)

    def _group(self) -> int:
        """Return the KV group whose chunks have the present length."""
        if self._length not in self._groups:
            self._groups[self._length] = self.engine.add_group(
                [self._memory.address], [self._transfer_bytes], [self._length], 1
            )
        return self._groups[self._length]


def run(streams: Sequence[Stream], write: bool, seconds: float) -> list[float]:
    """Run all streams at once for about `seconds`; return their rates in bytes/s.

    Raises DeviceError where a transfer failed, ETIMEDOUT where none ends for long.
    """
    end_s = time.monotonic() + seconds
    for stream in streams:
        stream.begin(write)
        stream.refill()
    while any(stream.in_flight for stream in streams):
        advance(streams)
        if time.monotonic() < end_s:
            for stream in streams:
                stream.refill()
    return [stream.rate_bytes_s() for stream in streams]


def advance(streams: Sequence[Stream]) -> list[tuple[Stream, npt.NDArray[np.void]]]:
    """Wait for transfers to end and hand each stream its own. Raises DeviceError (ETIMEDOUT)."""
    engines = list({id(stream.engine): stream.engine for stream in streams}.values())
    poller = select.poll()
    for engine in engines:
        poller.register(engine.eventfd, select.POLLIN)
    deadline_s = time.monotonic() + _HANGS_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        events = np.concatenate([engine.poll() for engine in engines])
        events = events[events["kind"] == native.EVENT_DONE]
        if events.size:
            owners = events["tag"] >> np.uint64(32)
            found = [(s, events[owners == s.id]) for s in streams if (owners == s.id).any()]
            for stream, mine in found:
                stream.take(mine)
            return found
        poller.poll(left_s * 1000)
    raise DeviceError("a device does not answer", errno.ETIMEDOUT)
