"""An engine with one device under test, a DRAM module beside it and paged memory in front."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvpool.faults import FaultEngine, FaultRule
from kvpool.native import (
    EVENT_DONE,
    EVENT_STAGED,
    FLAG_VERIFY,
    KIND_LOAD,
    KIND_READ,
    KIND_WRITE,
    NO_DEVICE,
    OP_DTYPE,
    Arena,
    IoPath,
    Shape,
    crc32c,
)

KINDS = ("uring", "threads", "memory", "faulty")
FILES = KINDS[:2]
TIMEOUT_S = 60.0
MIB = 1 << 20

Event = Any  # one record of EVENT_DTYPE
Ops = npt.NDArray[np.void]


class Rig:
    """`device` is the one under test, `module` a DRAM device of as many slots."""

    def __init__(
        self,
        kind: str,
        directory: Path,
        *,
        lengths: Sequence[int] = (3000, 1536),
        blocks: int = 64,
        blocks_per_chunk: int = 4,
        slot_bytes: int = 64 << 10,
        slots: int = 16,
        store_buffers: int = 4,
        queue_entries: int = 256,
        depth: int = 3,
        threads: int = 2,
        seed: int = 0,
        rules: Sequence[FaultRule] = (),
        volatile_bytes: int = 0,
        **shape: int,
    ) -> None:
        self.kind, self.slot_bytes, self.slots = kind, slot_bytes, slots
        self.lengths, self.blocks_per_chunk = tuple(lengths), blocks_per_chunk
        self.faults = dict(seed=seed, rules=rules, volatile_bytes=volatile_bytes)
        self.random = np.random.default_rng(seed)
        # Strides that are no multiple of the length leave gaps, which nothing may touch.
        self.pages = [
            self._bytes((blocks, length + 64 * (1 + i))) for i, length in enumerate(lengths)
        ]
        self.chunk_bytes = blocks_per_chunk * sum(lengths)
        self.arenas = [Arena(slots * slot_bytes) for _ in range(2)]
        self.path = directory / "device"
        self.fd = -1
        self.engine = FaultEngine(slot_bytes, store_buffers, queue_entries)
        self.device = self._add_device(kind, depth, threads, **shape)
        self.module = self.engine.add_memory_device(self.arenas[1])
        self.group = self.add_group(blocks_per_chunk)
        self.events: list[Event] = []

    def _bytes(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        return self.random.integers(0, 256, shape, dtype=np.uint8)

    def _add_device(self, kind: str, depth: int, threads: int, **shape: int) -> int:
        length = self.slots * self.slot_bytes
        if kind == "memory":
            return self.engine.add_memory_device(self.arenas[0], threads, **shape)
        if kind == "nil":
            return self.engine.add_nil_device(length, **shape)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.ftruncate(self.fd, length)
        if kind == "faulty":
            device = self.engine.add_faulty_device(
                self.fd, length, depth=depth, threads=threads, **self.faults
            )
            self.engine.set_shape(device, **(dict.fromkeys(Shape.__annotations__, 0) | shape))
            return device
        path = IoPath.URING if kind == "uring" else IoPath.THREADS
        return self.engine.add_file_device(
            self.fd,
            length,
            depth,
            threads,
            io_path=path,
            **shape,
        )

    def add_group(self, blocks_per_chunk: int) -> int:
        bases = [array.ctypes.data for array in self.pages]
        strides = [array.strides[0] for array in self.pages]
        return self.engine.add_group(bases, strides, self.lengths, blocks_per_chunk)

    def op(self, kind: int, tag: int = 0, slot: int = 0, **values: int) -> Ops:
        """One operation on a slot of the device, shape (1,)."""
        op = np.zeros(1, OP_DTYPE)
        raw = kind in (KIND_READ, KIND_WRITE)
        op["kind"], op["tag"], op["device"], op["group"] = kind, tag, self.device, self.group
        op["offset"], op["keep"] = slot * self.slot_bytes, NO_DEVICE
        op["length"] = self.slot_bytes if raw else self.chunk_bytes
        for name, value in values.items():
            op[name] = value
        return op

    def load(self, tag: int, slot: int, crc: int, **values: int) -> Ops:
        return self.op(KIND_LOAD, tag, slot, crc=crc, flags=FLAG_VERIFY, **values)

    def submit(self, ops: Sequence[Ops] | Ops, blocks: Sequence[int] | None = None) -> None:
        ids = range(self.blocks_per_chunk) if blocks is None else blocks
        joined = ops if isinstance(ops, np.ndarray) else np.concatenate(ops)
        self.engine.submit(joined, np.array(ids, np.int32))

    def drain(self, done: int) -> list[Event]:
        """Wait until `done` more operations have ended; return all events since the last drain."""
        start = len(self.events)
        missing = done
        while missing > 0:
            assert self.engine.wait(TIMEOUT_S), f"{missing} of {done} operations did not end"
            polled = self.engine.poll()
            missing -= int((polled["kind"] == EVENT_DONE).sum())
            self.events += list(polled)
        assert missing == 0
        return self.events[start:]

    def wait_staged(self, count: int) -> list[Event]:
        """Wait until `count` stores are staged; return all events up to then."""
        events: list[Event] = []
        while sum(event["kind"] == EVENT_STAGED for event in events) < count:
            assert self.engine.wait(TIMEOUT_S)
            events += list(self.engine.poll())
        return events

    def run(self, ops: Sequence[Ops] | Ops, blocks: Sequence[int] | None = None) -> list[Event]:
        """Submit and wait; return the DONE events in the order of the tags."""
        self.submit(ops, blocks)
        events = self.drain(sum(op.size for op in ops))
        return sorted((e for e in events if e["kind"] == EVENT_DONE), key=lambda e: int(e["tag"]))

    def payload(self, blocks: Sequence[int]) -> bytes:
        """What a chunk of these blocks is on a device."""
        return b"".join(
            array[block, :length].tobytes()
            for block in blocks
            for array, length in zip(self.pages, self.lengths, strict=True)
        )

    def crc(self, blocks: Sequence[int]) -> int:
        return crc32c(self.payload(blocks))

    def poison(self) -> None:
        """Change every byte of the pages."""
        for array in self.pages:
            array ^= 0xFF

    def media(self, slot: int, length: int) -> bytes:
        """Bytes of a slot as they lie on the device."""
        start = slot * self.slot_bytes
        if self.kind == "memory":
            return self.arenas[0].array[start : start + length].tobytes()
        return self.path.read_bytes()[start : start + length]

    def corrupt(self, slot: int) -> None:
        """Flip a bit of the payload on the device."""
        position = slot * self.slot_bytes + self.chunk_bytes // 2
        if self.kind == "memory":
            self.arenas[0].array[position] ^= 1
            return
        with self.path.open("r+b") as file:
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fsync(file.fileno())

    def module_bytes(self, slot: int, length: int) -> bytes:
        start = slot * self.slot_bytes
        return self.arenas[1].array[start : start + length].tobytes()

    def close(self) -> None:
        self.engine.close()
        for arena in self.arenas:
            arena.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
