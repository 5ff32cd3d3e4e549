"""The ctypes binding of native/ (see native/kvio.h for what each call promises), and nothing else.

The library is loaded at first use, so a process that moves no bytes does not need it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

import kvpool
from kvpool.errors import KVPoolError, check
from kvpool.types import PageType

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]

ALIGN = 4096
"""Offsets, READ and WRITE buffers and their lengths are multiples of this, in bytes."""
NO_DEVICE = 0xFFFFFFFF
KIND_LOAD, KIND_STORE, KIND_MOVE, KIND_READ, KIND_WRITE = range(5)
FLAG_VERIFY, FLAG_UNCHECKED = 1, 2
EVENT_STAGED, EVENT_DONE, EVENT_ABANDONED = range(3)

OP_DTYPE = np.dtype(
    [(name, "<u8") for name in ("tag", "offset", "keep_offset", "buffer")]
    + [(name, "<u4") for name in ("kind", "device", "keep", "group")]
    + [(name, "<u4") for name in ("length", "crc", "first_block", "flags")]
)
EVENT_DTYPE = np.dtype(
    [("tag", "<u8"), ("nanoseconds", "<u8"), ("result", "<i4")]
    + [(name, "<u4") for name in ("crc", "kind", "kept")]
)

_LIBRARY = "libkvio.so"
_PAGE_TYPES = (PageType.RESERVED_HUGE, PageType.TRANSPARENT_HUGE, PageType.PLAIN)
_DEVICE_MEMORY, _DEVICE_FILE, _DEVICE_NIL = range(3)


class NativeLibraryError(KVPoolError):
    """The native engine is missing, or was built from other sources than this package."""


class IoPath(IntEnum):
    """How a file device does its I/O; AUTO takes io_uring where the kernel allows it."""

    AUTO = 0
    URING = 1
    THREADS = 2


class Shape(TypedDict, total=False):
    """A device serves no faster than this; 0 is unshaped."""

    read_bytes_s: int
    write_bytes_s: int
    latency_us: int


class Statistics(NamedTuple):
    """Counters of one device since it was added; `queue_depth` is a gauge (operations)."""

    bytes_read: int
    bytes_written: int
    read_busy_ns: int
    write_busy_ns: int
    saturated_read_bytes: int
    saturated_read_ns: int
    read_failures: int
    write_failures: int
    checksum_failures: int
    queue_depth: int

    @property
    def done(self) -> tuple[int, ...]:
        """What changes when an operation ends, well or not; busy times grow while none does."""
        return (*self[:2], *self[6:9])


class _Arena(ctypes.Structure):
    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("length", ctypes.c_uint64),
        ("page_type", ctypes.c_uint32),
        ("numa_node", ctypes.c_int32),
    ]


class _Config(ctypes.Structure):
    _fields_ = [
        ("slot_bytes", ctypes.c_uint64),
        ("store_buffers", ctypes.c_uint32),
        ("queue_entries", ctypes.c_uint32),
        ("staging_numa_node", ctypes.c_int32),
    ]


class _DeviceConfig(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("io_path", ctypes.c_uint32),
        ("fd", ctypes.c_int32),
        ("depth", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("numa_node", ctypes.c_int32),
        ("memory", ctypes.c_void_p),
        ("length", ctypes.c_uint64),
        ("shaped_read_bytes_s", ctypes.c_uint64),
        ("shaped_write_bytes_s", ctypes.c_uint64),
        ("shaped_latency_us", ctypes.c_uint32),
    ]


class _Statistics(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in Statistics._fields[:-1]),
        ("queue_depth", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


_P, _U32, _U64, _I32 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32
_PROTOTYPES: dict[str, tuple[Any, ...]] = {  # name: result, arguments...
    "kvio_abi": (_U64,),
    "kvio_arena_map": (_I32, _U64, _I32, ctypes.POINTER(_Arena)),
    "kvio_arena_unmap": (_I32, ctypes.POINTER(_Arena)),
    "kvio_crc32c": (_U32, _U32, _P, _U64),
    "kvio_copy_crc32c": (_U32, _U32, _P, _P, _U64),
    "kvio_create": (_I32, ctypes.POINTER(_Config), ctypes.POINTER(_P)),
    "kvio_destroy": (None, _P),
    "kvio_eventfd": (_I32, _P),
    "kvio_staging_page_type": (_I32, _P),
    "kvio_add_device": (_I32, _P, ctypes.POINTER(_DeviceConfig)),
    "kvio_device_io_path": (_I32, _P, _U32),
    "kvio_set_shape": (_I32, _P, _U32, _U64, _U64, _U32),
    "kvio_add_group": (_I32, _P, _U32, _P, _P, _P, _U32),
    "kvio_submit": (_I32, _P, _P, _U32, _P, _U32),
    "kvio_cancel_stores": (_I32, _P, _U64, _U64),
    "kvio_abandon_loads": (_I32, _P, _U32),
    "kvio_poll": (_I32, _P, _P, _U32),
    "kvio_wait": (_I32, _P, _U32),
    "kvio_device_statistics": (_I32, _P, _U32, ctypes.POINTER(_Statistics)),
}
# One byte a structure, as kvio_abi() packs them.
_ABI = sum(
    size << (8 * index)
    for index, size in enumerate(
        (
            OP_DTYPE.itemsize,
            EVENT_DTYPE.itemsize,
            ctypes.sizeof(_Statistics),
            ctypes.sizeof(_DeviceConfig),
            ctypes.sizeof(_Config),
            ctypes.sizeof(_Arena),
        )
    )
)


def _open(folders: Iterable[str]) -> ctypes.CDLL:
    tried = [Path(folder) / _LIBRARY for folder in folders]
    for path in tried:
        if path.exists():
            return ctypes.CDLL(str(path), use_errno=False)
    raise NativeLibraryError(
        f"{_LIBRARY} is not in {', '.join(str(path.parent) for path in tried)}: build it with"
        " `pip install .`, or with `cmake -S native -B build && cmake --build build` and copy"
        f" build/{_LIBRARY} there"
    )


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    try:
        for name, (result, *arguments) in _PROTOTYPES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise NativeLibraryError(f"{_LIBRARY} lacks a function: build it again ({error})") from None
    if (found := library.kvio_abi()) != _ABI:
        raise NativeLibraryError(
            f"{_LIBRARY} has layout {found:#x}, this package needs {_ABI:#x}: build it again"
        )
    return library


@cache
def _library() -> ctypes.CDLL:
    return _declare(_open(kvpool.__path__))


def _bytes(buffer: Buffer) -> npt.NDArray[np.uint8]:
    """A flat view of a contiguous buffer; ValueError where it is not contiguous."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError("the array is not contiguous")
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, np.uint8)


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC32C (Castagnoli) of `data`, continued from `crc`."""
    view = _bytes(data)
    return int(_library().kvio_crc32c(crc, view.ctypes.data, view.nbytes))


def copy_crc32c(destination: npt.NDArray[Any], source: npt.NDArray[Any]) -> int:
    """Copy `source` to `destination` (contiguous, as many bytes) and return its CRC32C."""
    to, origin = _bytes(destination), _bytes(source)
    if to.nbytes != origin.nbytes or not to.flags.writeable:
        raise ValueError(f"cannot copy {origin.nbytes} bytes to {to.nbytes} bytes")
    return int(_library().kvio_copy_crc32c(0, to.ctypes.data, origin.ctypes.data, to.nbytes))


class Arena:
    """Memory on huge pages where they are to be had, bound to a NUMA node (-1: any), faulted in.

    `length` becomes a multiple of 2 MiB. Raises DeviceError (EINVAL: no such node) and
    OutOfSpaceError. Neither `array` nor an engine may use the memory after `close`.
    """

    def __init__(self, length: int, numa_node: int = -1) -> None:
        self._arena = _Arena()
        result = _library().kvio_arena_map(length, numa_node, ctypes.byref(self._arena))
        check(result, f"arena of {length} bytes on NUMA node {numa_node}")
        self.address = int(self._arena.memory)
        self.length = int(self._arena.length)
        self.page_type: PageType = _PAGE_TYPES[self._arena.page_type]
        self.numa_node = int(self._arena.numa_node)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory, shape (length,)."""
        if not self._arena.memory:
            raise ValueError("the arena is closed")
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.length).from_address(self.address))

    def close(self) -> None:
        """Give the memory back."""
        if self._arena.memory:
            check(_library().kvio_arena_unmap(ctypes.byref(self._arena)), "arena")
            self._arena.memory = None

    def __del__(self) -> None:
        arena = getattr(self, "_arena", None)
        if arena is not None and arena.memory:
            self.close()


def _shape(shape: Shape) -> dict[str, int]:
    return {f"shaped_{key}": value for key, value in shape.items()}  # type: ignore[misc]


class Engine:
    """Moves chunks between paged memory and devices.

    Every method may raise DeviceError with the errno that kvio.h names. Submit, poll and wait
    from one thread at a time; `close` when no other thread uses the engine.
    """

    def __init__(
        self,
        slot_bytes: int,
        store_buffers: int = 16,
        queue_entries: int = 65536,
        staging_numa_node: int = -1,
    ) -> None:
        self._engine = ctypes.c_void_p()
        self._native = _library()
        self._arenas: list[Arena] = []  # a device's memory lives as long as the engine
        config = _Config(slot_bytes, store_buffers, queue_entries, staging_numa_node)
        result = self._native.kvio_create(ctypes.byref(config), ctypes.byref(self._engine))
        check(result, f"engine with {config.store_buffers} slots of {slot_bytes} bytes")

    def add_memory_device(self, arena: Arena, threads: int = 1, **shape: Unpack[Shape]) -> int:
        """Add a DRAM module with `threads` copying threads; return its index."""
        self._arenas.append(arena)
        return self._add(
            _DeviceConfig(
                kind=_DEVICE_MEMORY,
                fd=-1,
                threads=threads,
                numa_node=arena.numa_node,
                memory=arena.address,
                length=arena.length,
                **_shape(shape),
            )
        )

    def add_file_device(
        self,
        fd: int,
        length: int,
        depth: int = 8,
        threads: int = 4,
        numa_node: int = -1,
        io_path: IoPath = IoPath.AUTO,
        **shape: Unpack[Shape],
    ) -> int:
        """Add a file or block device, `fd` opened O_DIRECT and kept open by the caller."""
        return self._add(
            _DeviceConfig(
                kind=_DEVICE_FILE,
                io_path=int(io_path),
                fd=fd,
                depth=depth,
                threads=threads,
                numa_node=numa_node,
                length=length,
                **_shape(shape),
            )
        )

    def add_nil_device(self, length: int, **shape: Unpack[Shape]) -> int:
        """Add a device that does nothing, at once: what the engine itself costs."""
        return self._add(
            _DeviceConfig(
                kind=_DEVICE_NIL, fd=-1, threads=1, numa_node=-1, length=length, **_shape(shape)
            )
        )

    def _add(self, config: _DeviceConfig) -> int:
        return check(self._native.kvio_add_device(self._engine, ctypes.byref(config)), "device")

    def set_shape(
        self, device: int, read_bytes_s: int, write_bytes_s: int, latency_us: int
    ) -> None:
        """Change how fast a device serves, while it runs; 0 is unshaped."""
        result = self._native.kvio_set_shape(
            self._engine, device, read_bytes_s, write_bytes_s, latency_us
        )
        check(result, f"shape of device {device}")

    def io_path(self, device: int) -> str:
        """Return "uring" or "threads" for a file device, else ""."""
        path = check(self._native.kvio_device_io_path(self._engine, device), f"device {device}")
        return ("", "uring", "threads")[path]

    def add_group(
        self,
        bases: Sequence[int],
        strides: Sequence[int],
        lengths: Sequence[int],
        blocks_per_chunk: int,
    ) -> int:
        """Add a KV group: tensor t has block b at address bases[t] + b * strides[t] (bytes).

        A chunk's payload is, for each of its blocks, `lengths[t]` bytes of each tensor t.
        """
        if not len(bases) == len(strides) == len(lengths):
            raise ValueError("bases, strides and lengths differ in length")
        base, stride = np.asarray(bases, np.uint64), np.asarray(strides, np.uint64)
        length = np.asarray(lengths, np.uint32)
        result = self._native.kvio_add_group(
            self._engine,
            len(bases),
            base.ctypes.data,
            stride.ctypes.data,
            length.ctypes.data,
            blocks_per_chunk,
        )
        return check(result, f"group of {len(bases)} tensors, {blocks_per_chunk} blocks a chunk")

    def submit(self, ops: npt.NDArray[np.void], blocks: npt.NDArray[np.int32]) -> None:
        """Queue all of `ops` (OP_DTYPE, shape (n,)) or none.

        `blocks` are the block ids that their `first_block` points into. Raises QueueFullError
        where a queue would overflow, DeviceError(EINVAL) for bad operations.
        """
        if ops.dtype != OP_DTYPE or blocks.dtype != np.int32:
            raise TypeError(f"ops have dtype {ops.dtype}, blocks {blocks.dtype}")
        ops, blocks = np.ascontiguousarray(ops), np.ascontiguousarray(blocks)
        result = self._native.kvio_submit(
            self._engine, ops.ctypes.data, ops.size, blocks.ctypes.data, blocks.size
        )
        check(result, f"submission of {ops.size} operations")

    def cancel_stores(self, first_tag: int, last_tag: int) -> int:
        """Drop stores that are not staged, tags first_tag to last_tag; return how many."""
        result = self._native.kvio_cancel_stores(self._engine, first_tag, last_tag)
        return check(result, f"cancel of stores {first_tag} to {last_tag}")

    def abandon_loads(self, device: int) -> int:
        """Give up the loads of a device that does not answer; return how many those are.

        They end in ABANDONED events or, where they waited, DONE (ETIMEDOUT), and do not touch
        pages any more.
        """
        result = self._native.kvio_abandon_loads(self._engine, device)
        return check(result, f"abandoned loads of device {device}")

    def poll(self, capacity: int = 4096) -> npt.NDArray[np.void]:
        """Return up to `capacity` events (EVENT_DTYPE) at once, maybe none."""
        events = np.empty(capacity, EVENT_DTYPE)
        count = self._native.kvio_poll(self._engine, events.ctypes.data, capacity)
        return events[: check(count, "poll")].copy()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something; False when the time is over, or a signal came."""
        timeout_us = min(max(math.ceil(timeout_s * 1e6), 0), 0xFFFFFFFF)
        return bool(check(self._native.kvio_wait(self._engine, timeout_us), "wait"))

    @property
    def eventfd(self) -> int:
        """A file descriptor that is readable while `poll` would return events."""
        return check(self._native.kvio_eventfd(self._engine), "eventfd")

    def statistics(self, device: int) -> Statistics:
        """Return the counters of a device."""
        raw = _Statistics()
        result = self._native.kvio_device_statistics(self._engine, device, ctypes.byref(raw))
        check(result, f"statistics of device {device}")
        return Statistics(*(getattr(raw, name) for name in Statistics._fields))

    @property
    def staging_page_type(self) -> PageType:
        """Pages under the staging slots, the worst of all devices."""
        return _PAGE_TYPES[check(self._native.kvio_staging_page_type(self._engine), "staging")]

    def close(self) -> None:
        """Finish what is in flight on devices, drop what is queued, end all threads."""
        engine, self._engine = self._engine, ctypes.c_void_p()
        if engine:
            self._native.kvio_destroy(engine)
        self._arenas.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self.close()
