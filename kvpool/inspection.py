"""Looks into a container from outside: what it holds, and whether that is what was written.

It is opened for reading alone and nothing is locked, so engines that use it go on undisturbed. What
they write meanwhile can be met half-way: it is read again before it is called damaged.
"""

from __future__ import annotations

import mmap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import local
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvpool import layout, medium
from kvpool.container import read_around_damage
from kvpool.errors import ConfigurationError, ContainerError, DeviceError, ForeignContentError
from kvpool.layout import BLOCK_BYTES, HEADER_BYTES, LeaseEntry, StoredProfiles
from kvpool.medium import FILE_NAME
from kvpool.native import crc32c
from kvpool.units import format_bytes

SETTLE_S = 2.0  # how long an engine may need between a payload and its header
MAX_LISTED = 100  # damaged slots that a report names
_RETRY_S = 0.1
_PIECE_BYTES = 4 << 20  # of headers or of a payload, in memory at a time
_READERS = 4
_MAX_SUSPECTS = 4096  # chunks that wait to be looked at again
_BATCH = 64  # chunks that a reader takes at a time

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, at least one."""


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease and the headers in it: `chunks` counts the valid ones by KV group."""

    entry: LeaseEntry
    in_use: bool
    chunks: dict[int, int]
    stale_headers: int
    damaged_headers: int

    @property
    def fill(self) -> float:
        """The share of slots that hold a chunk, 0 to 1."""
        return sum(self.chunks.values()) / self.entry.slots


@dataclass(frozen=True, slots=True)
class ContainerView:
    """What a container holds. `damaged` names the parts of its metadata that cannot be read."""

    path: Path
    format_version: int
    uuid: str
    size: int
    created_ns: int
    probe_offset: int
    probe_bytes: int
    leases: list[LeaseView]
    profiles: StoredProfiles | None
    damaged: list[str]


@dataclass(slots=True)
class LeaseReport:
    """What reading all chunks of a lease found; `stale` headers are of before a reset, no damage.

    `in_use` chunks were replaced while they were read. `damaged_slots` names at most MAX_LISTED.
    """

    entry: LeaseEntry
    good: int = 0
    damaged: int = 0
    damaged_headers: int = 0
    stale: int = 0
    in_use: int = 0
    damaged_slots: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """What verifying a container found; see `ContainerView.damaged` and `LeaseReport`."""

    path: Path
    leases: list[LeaseReport]
    damaged: list[str]

    @property
    def all_right(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged and not any(r.damaged or r.damaged_headers for r in self.leases)


@dataclass(frozen=True, slots=True)
class _Chunk:
    slot: int
    header: bytes
    length: int
    crc: int


class Inspection:
    """An open look into a container; a context manager."""

    def __init__(self, what: str) -> None:
        """Open `what`: a folder, a container's file, a block device, or a device string.

        Raises ConfigurationError, ForeignContentError, ContainerError (none there, unfinished,
        damaged, cut off, of another version) and OSError.
        """
        path = container_path(what)
        try:
            self._medium = medium.open_read_only(path)
        except FileNotFoundError:
            raise ContainerError(f"{path}: there is no container") from None
        try:
            superblock = medium.recognise(self._medium)
            if superblock is None:
                raise ContainerError(f"{path}: there is no container, or one never finished")
            if self._medium.size < superblock.size:
                size = format_bytes(superblock.size)
                raise ContainerError(f"{path}: has {self._medium.size} bytes of {size}")
        except ForeignContentError:
            self._medium.close()
            raise ForeignContentError(f"{path}: is not a container of kvpool") from None
        except BaseException:
            self._medium.close()
            raise
        self._superblock = superblock
        self._buffers = local()

    def view(self) -> ContainerView:
        """Read the metadata and all headers. Raises DeviceError where metadata cannot be read."""
        superblock = self._superblock
        entries, damaged = self._metadata()
        profiles = layout.decode_profiles(self._medium.read(layout.PROFILE_OFFSET, BLOCK_BYTES))
        return ContainerView(
            path=self._medium.path,
            format_version=layout.FORMAT_VERSION,
            uuid=uuid.UUID(bytes=superblock.uuid).hex,
            size=superblock.size,
            created_ns=superblock.created_ns,
            probe_offset=layout.PROBE_OFFSET,
            probe_bytes=superblock.probe_bytes,
            leases=[self._view_lease(entry) for entry in entries],
            profiles=profiles,
            damaged=damaged,
        )

    def verify(self, progress: Progress = lambda done, total: None) -> Report:
        """Read every payload that a valid header describes, and compare its CRC32C."""
        entries, damaged = self._metadata()
        total = done = 0
        for entry in entries:
            for headers, found, first in self._headers(entry):
                total += int(headers["length"][found.valid - first].sum())
        reports = []
        with ThreadPoolExecutor(_READERS) as readers:
            for entry in entries:
                report, suspects = LeaseReport(entry), list[_Chunk]()
                for headers, found, first in self._headers(entry):
                    report.stale += found.stale.size
                    report.damaged_headers += found.damaged.size
                    chunks = _chunks(headers, found.valid, first)
                    batches = [chunks[i : i + _BATCH] for i in range(0, len(chunks), _BATCH)]
                    bad = readers.map(lambda batch, entry=entry: self._bad(entry, batch), batches)
                    for batch, wrong in zip(batches, bad, strict=True):
                        suspects += wrong
                        report.good += len(batch) - len(wrong)
                        done += sum(chunk.length for chunk in batch)
                        progress(min(done, total), max(total, 1))
                    if len(suspects) >= _MAX_SUSPECTS:
                        self._settle(report, suspects)
                        suspects = []
                self._settle(report, suspects)
                reports.append(report)
        return Report(self._medium.path, reports, damaged)

    def close(self) -> None:
        self._medium.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- metadata ---------------------------------------------------------------------------

    def _metadata(self) -> tuple[list[LeaseEntry], list[str]]:
        """Return the leases, and the names of the parts that are damaged."""
        for _ in range(3):  # an entry that is just being written is whole the next time
            table = self._medium.read(layout.TABLE_OFFSET, layout.TABLE_BYTES)
            entries = layout.decode_table(table, self._superblock)
            size = layout.LEASE_BYTES
            damaged = [
                f"lease table entry {i}"
                for i, entry in enumerate(entries)
                if entry is None and any(table[i * size : (i + 1) * size])
            ]
            for name, offset in zip("AB", layout.SUPERBLOCK_OFFSETS, strict=True):
                block = self._medium.read(offset, BLOCK_BYTES)
                damaged += [] if layout.decode_superblock(block) else [f"superblock {name}"]
            block = self._medium.read(layout.PROFILE_OFFSET, BLOCK_BYTES)
            damaged += ["profile"] if any(block) and not layout.decode_profiles(block) else []
            if not damaged:
                break
        present = [entry for entry in entries if entry is not None]
        return sorted(present, key=lambda entry: entry.start), damaged

    def _in_use(self, entry: LeaseEntry) -> bool:
        return self._medium.locked_by_others(entry.start, entry.length) is not None

    def _view_lease(self, entry: LeaseEntry) -> LeaseView:
        chunks, stale, damaged = dict[int, int](), 0, 0
        for headers, found, first in self._headers(entry):
            groups = np.bincount(headers["group"][found.valid - first])
            for group in np.flatnonzero(groups).tolist():
                chunks[group] = chunks.get(group, 0) + int(groups[group])
            stale, damaged = stale + found.stale.size, damaged + found.damaged.size
        in_use = self._in_use(entry)
        return LeaseView(entry, in_use, dict(sorted(chunks.items())), stale, damaged)

    def _headers(
        self, entry: LeaseEntry
    ) -> Iterator[tuple[layout.Records, layout.SortedHeaders, int]]:
        """Yield a lease's headers piece by piece: records, what they are, the first one's slot."""
        table_bytes = layout.header_table_bytes(entry.slots)
        memory = mmap.mmap(-1, min(_PIECE_BYTES, table_bytes))
        for at in range(0, table_bytes, _PIECE_BYTES):
            view = memoryview(memory)[: min(_PIECE_BYTES, table_bytes - at)]
            read_around_damage(self._medium, entry.start + at, view)
            first = at // HEADER_BYTES
            headers = np.frombuffer(view, layout.HEADER_DTYPE)[: entry.slots - first]
            found = layout.sort_headers(headers, entry.epoch, entry.tag, entry.slot_bytes, first)
            yield headers, found, first

    # ---- payloads ---------------------------------------------------------------------------

    def _bad(self, entry: LeaseEntry, chunks: Sequence[_Chunk]) -> list[_Chunk]:
        """Return those whose payload is not what its header says, or cannot be read."""
        return [chunk for chunk in chunks if self._checksum(entry, chunk) != chunk.crc]

    def _checksum(self, entry: LeaseEntry, chunk: _Chunk) -> int | None:
        offset = entry.start + layout.header_table_bytes(entry.slots)
        offset += chunk.slot * entry.slot_bytes
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = memoryview(mmap.mmap(-1, _PIECE_BYTES))
        buffer, crc = self._buffers.memory, 0
        for at in range(0, chunk.length, _PIECE_BYTES):
            length = min(_PIECE_BYTES, chunk.length - at)
            try:
                read = self._medium.read_into(offset + at, buffer[: layout.align_up(length)])
            except DeviceError:
                return None
            if read < length:
                return None
            crc = crc32c(buffer[:length], crc)
        return crc

    def _settle(self, report: LeaseReport, suspects: list[_Chunk]) -> None:
        """Look again at what did not fit: an engine may have been writing it."""
        entry, deadline_s = report.entry, time.monotonic() + SETTLE_S
        while suspects:
            if not self._is_current(entry):
                report.in_use += len(suspects)
                return
            same = [chunk for chunk in suspects if self._header(entry, chunk.slot) == chunk.header]
            report.in_use += len(suspects) - len(same)
            suspects = self._bad(entry, same)
            report.good += len(same) - len(suspects)
            if not self._in_use(entry) or time.monotonic() >= deadline_s:
                break
            if suspects:
                time.sleep(_RETRY_S)
        report.damaged += len(suspects)
        listed = suspects[: MAX_LISTED - len(report.damaged_slots)]
        report.damaged_slots += [chunk.slot for chunk in listed]

    def _is_current(self, entry: LeaseEntry) -> bool:
        """Whether the lease is still the same one, without a reset since."""
        now, _ = self._metadata()
        return any((e.start, e.tag, e.epoch) == (entry.start, entry.tag, entry.epoch) for e in now)

    def _header(self, entry: LeaseEntry, slot: int) -> bytes | None:
        at = slot * HEADER_BYTES
        try:
            block = self._medium.read(entry.start + at // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES)
        except DeviceError:
            return None
        return block[at % BLOCK_BYTES : at % BLOCK_BYTES + HEADER_BYTES]


def _chunks(headers: layout.Records, slots: npt.NDArray[np.int32], first: int) -> list[_Chunk]:
    part = headers[slots - first]
    lengths, crcs = part["length"].tolist(), part["payload_crc"].tolist()
    raw = part.tobytes()
    return [
        _Chunk(slot, raw[i * HEADER_BYTES : (i + 1) * HEADER_BYTES], lengths[i], crcs[i])
        for i, slot in enumerate(slots.tolist())
    ]


def container_path(what: str) -> Path:
    """Return the file or block device that `what` names. Raises ConfigurationError."""
    kind, colon, rest = what.partition(":")
    allowed = "a folder, a container's file, a block device, file:FOLDER or block:DEVICE"
    if colon and kind in ("file", "block"):
        what = rest.partition("?")[0]
    elif colon and kind == "dram":
        raise ConfigurationError("PATH", what, f"{allowed}: memory holds nothing that lasts")
    if "{rank}" in what:
        raise ConfigurationError("PATH", what, "the path of one rank, without {rank}")
    if not what or "\0" in what:
        raise ConfigurationError("PATH", what, allowed)
    path = Path(what)
    return path / FILE_NAME if path.is_dir() else path
