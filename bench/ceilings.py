"""What the hardware can do at most, measured without any of kvpool's own code.

Copies run in as many threads as a DRAM module uses, reads go with O_DIRECT into huge pages at a
queue depth that keeps an SSD busy. Everything that is handed to `measure` runs at once.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 << 20
MAP_HUGETLB = 0x40000  # Linux; `mmap` names it from Python 3.13 on
SECTOR_BYTES = 512  # of /proc/diskstats, whatever the device says

UInt8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Faulted-in memory, aligned to 2 MiB. `page_type`: reserved_huge, transparent_huge, plain."""

    memory: UInt8
    page_type: str

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return int(self.memory.ctypes.data)


@dataclass(frozen=True, slots=True)
class ReadWork:
    """`pieces` (offset, bytes) of a file or block device to read with O_DIRECT, in this order."""

    path: Path
    pieces: Sequence[tuple[int, int]]
    depth: int = 16


@dataclass(frozen=True, slots=True)
class CopyWork:
    """Copy `bytes` from `source` to `destination` (same size), round and round, by `threads`.

    Pieces are as large as they may be: the C library copies large ones past the caches.
    """

    source: UInt8
    destination: UInt8
    bytes: int
    threads: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What one work did: bytes moved and seconds from the common start to its own end."""

    bytes: int
    seconds: float

    @property
    def bandwidth_bytes_s(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """Reads that a block device has completed since the machine started."""

    requests: int
    bytes: int

    def kib_per_request(self, before: DiskCounters) -> float | None:
        """KiB a device request since `before`; None where there was no request."""
        requests = self.requests - before.requests
        return (self.bytes - before.bytes) / 1024 / requests if requests else None


def map_buffer(size_bytes: int) -> Buffer:
    """Return at least `size_bytes` (whole huge pages) of faulted-in memory, huge where possible."""
    size = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = np.frombuffer(mmap.mmap(-1, size, flags=flags | MAP_HUGETLB), np.uint8)
        page_type = "reserved_huge"
    except OSError:  # none reserved
        mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=flags)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(mapping, np.uint8)
        skip = -whole.ctypes.data % HUGE_PAGE_BYTES
        memory, page_type = whole[skip : skip + size], ""
    memory[:: mmap.PAGESIZE] = 1
    return Buffer(memory, page_type or _transparent(memory))


def measure(works: Sequence[ReadWork | CopyWork]) -> list[Measured]:
    """Run all works at once and return what each did, in their order. Raises OSError."""
    with _open_pieces(works) as jobs:
        return _race(jobs)


def disk_of(path: Path) -> str:
    """Return the kernel's name of the block device that `path` is or lies on ("" for none)."""
    status = os.stat(path)
    number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return link.resolve().name if link.exists() else ""


def disk_counters(disk: str) -> DiskCounters:
    """Return the reads of `disk` ("sda", "loop0") so far; zeros where there is no such disk."""
    for line in Path("/proc/diskstats").read_text().splitlines():
        words = line.split()
        if words[2] == disk:
            return DiskCounters(int(words[3]), int(words[5]) * SECTOR_BYTES)
    return DiskCounters(0, 0)


def cpu_seconds() -> float:
    """Return user and system CPU seconds of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def fio_read(path: Path, size_bytes: int) -> float | None:
    """Return fio's own reading of `path` in bytes/s (io_uring, 4 MiB, depth 16); None without fio.

    Its buffers lie on plain pages, so it is a second opinion and not the ceiling; on an emulated
    SSD its requests are cut, and charged twice (see `bench.emulate`).
    """
    if shutil.which("fio") is None:
        return None
    options = {
        "filename": str(path), "size": str(size_bytes), "rw": "read", "bs": "4M",
        "iodepth": "16", "ioengine": "io_uring", "direct": "1", "output-format": "json",
    }  # fmt: skip
    command = ["fio", "--name=read", "--readonly", *(f"--{k}={v}" for k, v in options.items())]
    answer = subprocess.run(command, capture_output=True, check=False)
    if answer.returncode != 0:
        return None
    return float(json.loads(answer.stdout)["jobs"][0]["read"]["bw_bytes"])


def _transparent(memory: UInt8) -> str:
    """Return the page type of a private mapping, as the kernel reports it."""
    start, inside, huge_kib = memory.ctypes.data, False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low < start + memory.size and high > start
        elif inside and head == "AnonHugePages:":
            huge_kib += int(line.split()[1])
    return "transparent_huge" if huge_kib * 1024 >= memory.size else "plain"


@dataclass(slots=True)
class _Job:
    """One work as `threads` threads that call `step` (it returns bytes, 0 at the end)."""

    threads: int
    step: Callable[[int], int]
    pieces: int


@contextmanager
def _open_pieces(works: Sequence[ReadWork | CopyWork]) -> Iterator[list[_Job]]:
    files: list[int] = []
    try:
        jobs = []
        for work in works:
            if isinstance(work, CopyWork):
                jobs.append(_copy_job(work))
            else:
                files.append(os.open(work.path, os.O_RDONLY | os.O_DIRECT))
                jobs.append(_read_job(work, files[-1]))
        yield jobs
    finally:
        for file in files:
            os.close(file)


def _copy_job(work: CopyWork) -> _Job:
    source, destination = work.source.ctypes.data, work.destination.ctypes.data
    size = min(work.source.size, work.destination.size)
    piece = min(size, -(-work.bytes // work.threads))
    rounds = size // piece

    def step(index: int) -> int:
        offset = index % rounds * piece
        length = min(piece, work.bytes - index * piece)
        ctypes.memmove(destination + offset, source + offset, length)  # without the GIL
        return length

    return _Job(work.threads, step, -(-work.bytes // piece))


def _read_job(work: ReadWork, file: int) -> _Job:
    largest = max(length for _, length in work.pieces)
    buffer = map_buffer(largest * work.depth).memory
    views = [buffer[n * largest : (n + 1) * largest].data for n in range(work.depth)]
    free = list(range(work.depth))  # pop and append are atomic

    def step(index: int) -> int:
        offset, length = work.pieces[index]
        place = free.pop()
        done = os.preadv(file, [views[place][:length]], offset)
        free.append(place)
        if done != length:
            raise OSError(f"{work.path}: {done} of {length} bytes at offset {offset}")
        return done

    return _Job(min(work.depth, len(work.pieces)), step, len(work.pieces))


def _race(jobs: Sequence[_Job]) -> list[Measured]:
    barrier = threading.Barrier(sum(job.threads for job in jobs) + 1)
    totals, ends = [0] * len(jobs), [0.0] * len(jobs)
    failures: list[OSError] = []
    lock = threading.Lock()

    def run(number: int, job: _Job, pieces: Iterator[int]) -> None:
        done = 0
        barrier.wait()
        try:
            for index in pieces:  # next() of a range iterator is atomic
                done += job.step(index)
        except OSError as error:
            failures.append(error)
        with lock:
            totals[number] += done
            ends[number] = time.perf_counter()

    threads = []
    for number, job in enumerate(jobs):
        pieces = iter(range(job.pieces))
        for _ in range(job.threads):
            threads.append(threading.Thread(target=run, args=(number, job, pieces)))
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [Measured(total, end - start) for total, end in zip(totals, ends, strict=True)]
