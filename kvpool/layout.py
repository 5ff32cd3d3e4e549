"""The bytes of a container: structures, their checks, and where each lies. Pure; no I/O.

All integers are little endian; every structure ends in the CRC32C of the bytes before it.

    offset        bytes     what
    0             4096      superblock A \\  the valid one with the higher generation counts
    4096          4096      superblock B /
    8192          16384     lease table: 64 entries of 256 bytes
    24576         4096      profile: what the pool's devices were measured to do
    1 MiB         probe     probe area: scratch room for measurements, 4 to 64 MiB
    1 MiB+probe   rest      extents, leased; a lease is its header table, then its slots

A lease's header table has 128 bytes a slot and is padded to 4096; a slot has `slot_bytes`, a
multiple of 4096. Of all format versions to come, three things stay as they are: the first 12
bytes of a superblock (magic, version), its length and the place of its CRC32C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.native import crc32c
from kvpool.plan import StoredHeaders
from kvpool.types import Key, Profile

Records = npt.NDArray[np.void]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]
Int32 = npt.NDArray[np.int32]

FORMAT_VERSION = 1
BLOCK_BYTES = 4096
SUPERBLOCK_OFFSETS = (0, 4096)
SUPERBLOCKS_BYTES = 8192
TABLE_OFFSET, LEASES, LEASE_BYTES = 8192, 64, 256
TABLE_BYTES = LEASES * LEASE_BYTES
PROFILE_OFFSET = TABLE_OFFSET + TABLE_BYTES
METADATA_BYTES = PROFILE_OFFSET + BLOCK_BYTES
PROBE_OFFSET = 1 << 20
HEADER_BYTES = 128
KEY_ROOM = 40  # bytes for a key: vLLM's hashes have 32 at most, the group adds 4
OWNER_ROOM = 64
MAX_PROFILES = 64
MAX_BYTES = 1 << 62  # what locks can name
MAX_EPOCH = (1 << 32) - 2  # one more can still be stored

_PIECE = 8192  # headers that are worked on at a time: 1 MiB stays in the processor's cache

READY, CREATING = 1, 2
_MAGIC = b"KVPOOL\r\n"
_LEASE_MAGIC, _HEADER_MAGIC, _PROFILE_MAGIC = 0x4C564B01, 0x48564B01, 0x50564B01

_SUPERBLOCK = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("state", "<u4"),
        ("generation", "<u8"),
        ("uuid", "u1", (16,)),
        ("size", "<u8"),
        ("probe_bytes", "<u8"),
        ("created_ns", "<u8"),
        ("reserved", "u1", (4028,)),
        ("crc", "<u4"),
    ]
)
_LEASE = np.dtype(
    [
        ("magic", "<u4"),
        ("rank", "<u4"),
        ("namespace", "u1", (32,)),
        ("owner", "u1", (OWNER_ROOM,)),
        *((name, "<u8") for name in ("start", "length", "slot_bytes", "slots")),
        *((name, "<u8") for name in ("created_ns", "used_ns", "tag")),
        *((name, "<u4") for name in ("epoch", "pid", "owner_length")),
        ("reserved", "u1", (80,)),
        ("crc", "<u4"),
    ]
)
HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        *((name, "u1") for name in ("key_length", "parent_length", "group", "reserved")),
        ("key", "u1", (KEY_ROOM,)),
        ("parent", "u1", (KEY_ROOM,)),
        *((name, "<u4") for name in ("position", "epoch", "length", "payload_crc")),
        ("lease_tag", "<u8"),
        ("slot", "<u4"),
        ("unused", "<u8"),
        ("crc", "<u4"),
    ]
)
_PROFILE = np.dtype(
    [
        ("magic", "<u4"),
        ("count", "<u4"),
        ("boot_id", "S48"),
        ("measured_ns", "<u8"),
        ("signature", "u1", (32,)),
        ("rates", "<f8", (MAX_PROFILES, 4)),
        ("reserved", "u1", (1948,)),
        ("crc", "<u4"),
    ]
)
assert _SUPERBLOCK.itemsize == _PROFILE.itemsize == BLOCK_BYTES
assert _LEASE.itemsize == LEASE_BYTES and HEADER_DTYPE.itemsize == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Superblock:
    """What identifies a container; sizes in bytes. `state` is READY or CREATING."""

    state: int
    generation: int
    uuid: bytes
    size: int
    probe_bytes: int
    created_ns: int

    @property
    def extents_offset(self) -> int:
        return PROBE_OFFSET + self.probe_bytes

    @property
    def extents_bytes(self) -> int:
        return (self.size - self.extents_offset) // BLOCK_BYTES * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class LeaseEntry:
    """One line of the lease table: who has which range, in bytes, times in ns since 1970.

    `tag` is random and stands in every header of the lease; `pid` held it last.
    """

    namespace: bytes
    rank: int
    owner: str
    start: int
    length: int
    slot_bytes: int
    slots: int
    epoch: int
    created_ns: int
    used_ns: int
    tag: int
    pid: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class StoredProfiles:
    """What the devices of a pool, in its order, were measured to do.

    `signature` (32 bytes) stands for the pool and for how it was measured.
    """

    boot_id: str
    measured_ns: int
    signature: bytes
    profiles: tuple[Profile, ...]


@dataclass(frozen=True, slots=True)
class SortedHeaders:
    """Slots by what their header says, ascending each; those of empty headers are in none.

    `stale` were written before the last reset, or by an earlier lease of the same range. `damaged`
    are neither zeros nor what was ever written to that place.
    """

    valid: Int32
    stale: Int32
    damaged: Int32


def align_up(size: int, unit: int = BLOCK_BYTES) -> int:
    """Return `size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def probe_bytes(size: int) -> int:
    """Return the length of the probe area of a new container of `size` bytes."""
    return min(64 << 20, max(4 << 20, size // 16 >> 20 << 20))


def header_table_bytes(slots: int) -> int:
    """Return the length of the header table of a lease of `slots` slots."""
    return align_up(slots * HEADER_BYTES)


def lease_bytes(slots: int, slot_bytes: int) -> int:
    """Return the length of a lease: header table and slots."""
    return header_table_bytes(slots) + slots * slot_bytes


def slots_within(room: int, slot_bytes: int) -> int:
    """Return how many slots a lease of at most `room` bytes has; 0 where none fits."""
    slots = max(0, room) // (slot_bytes + HEADER_BYTES)
    while slots and lease_bytes(slots, slot_bytes) > room:
        slots -= 1
    return slots


# ---- superblocks ----------------------------------------------------------------------------


def encode_superblock(superblock: Superblock) -> bytes:
    """Return the 4096 bytes of a superblock, of this code's version."""
    record = np.zeros((), _SUPERBLOCK)
    record["magic"], record["version"] = _MAGIC, FORMAT_VERSION
    for name in ("state", "generation", "size", "probe_bytes", "created_ns"):
        record[name] = getattr(superblock, name)
    record["uuid"] = np.frombuffer(superblock.uuid, np.uint8)
    return _sealed(record)


def has_magic(block: bytes) -> bool:
    """Whether a block begins as a superblock does, of whatever version."""
    return block[:8] == _MAGIC


def unknown_version(block: bytes) -> int | None:
    """Return the version of an intact superblock that this code does not know, else None."""
    version = int.from_bytes(block[8:12], "little")
    intact = has_magic(block) and crc32c(block[:-4]) == int.from_bytes(block[-4:], "little")
    return version if intact and version != FORMAT_VERSION else None


def decode_superblock(block: bytes) -> Superblock | None:
    """Return the superblock in a 4096-byte block; None where there is no valid one."""
    record = _unsealed(block, _SUPERBLOCK)
    if record is None or not has_magic(block) or int(record["version"]) != FORMAT_VERSION:
        return None
    names = ("size", "probe_bytes", "created_ns")
    superblock = Superblock(
        int(record["state"]),
        int(record["generation"]),
        record["uuid"].tobytes(),
        *(int(record[name]) for name in names),
    )
    return superblock if _is_sane(superblock) else None


def _is_sane(superblock: Superblock) -> bool:
    """Whether sizes make sense: an intact checksum says that they were written so, no more."""
    aligned = not (superblock.size % BLOCK_BYTES or superblock.probe_bytes % BLOCK_BYTES)
    fits = superblock.extents_offset <= superblock.size < MAX_BYTES
    known = superblock.state in (READY, CREATING) and superblock.generation < 1 << 63
    return known and aligned and fits


# ---- lease table ----------------------------------------------------------------------------


def encode_lease(entry: LeaseEntry | None) -> bytes:
    """Return the 256 bytes of an entry; zeros for a free one."""
    if entry is None:
        return bytes(LEASE_BYTES)
    record = np.zeros((), _LEASE)
    record["magic"] = _LEASE_MAGIC
    owner = entry.owner.encode()
    record["owner"][: len(owner)] = np.frombuffer(owner, np.uint8)
    record["owner_length"] = len(owner)
    record["namespace"] = np.frombuffer(entry.namespace, np.uint8)
    for name in ("rank", "start", "length", "slot_bytes", "slots", "epoch"):
        record[name] = getattr(entry, name)
    for name in ("created_ns", "used_ns", "tag", "pid"):
        record[name] = getattr(entry, name)
    return _sealed(record)


def decode_lease(block: bytes) -> LeaseEntry | None:
    """Return the entry in 256 bytes; None where it is free or damaged.

    Whether the range lies inside the container is for those to say who know its size.
    """
    record = _unsealed(block, _LEASE)
    if record is None or int(record["magic"]) != _LEASE_MAGIC:
        return None
    names = ("start", "length", "slot_bytes", "slots", "epoch", "created_ns", "used_ns")
    try:
        owner = record["owner"].tobytes()[: int(record["owner_length"])].decode()
    except UnicodeDecodeError:
        return None
    entry = LeaseEntry(
        record["namespace"].tobytes(),
        int(record["rank"]),
        owner,
        *(int(record[name]) for name in (*names, "tag", "pid")),
    )
    aligned = not (entry.start % BLOCK_BYTES or entry.slot_bytes % BLOCK_BYTES)
    whole = entry.length == lease_bytes(entry.slots, entry.slot_bytes) > 0
    fits = 0 < entry.epoch <= MAX_EPOCH and entry.slots < 1 << 31
    return entry if aligned and whole and fits and entry.slot_bytes else None


def decode_table(table: bytes, superblock: Superblock) -> list[LeaseEntry | None]:
    """Return the entries of a lease table; None where one is free, damaged or names no extents."""
    pieces = (table[at : at + LEASE_BYTES] for at in range(0, TABLE_BYTES, LEASE_BYTES))
    first, end = superblock.extents_offset, superblock.size
    return [
        entry if entry is not None and first <= entry.start and entry.end <= end else None
        for entry in map(decode_lease, pieces)
    ]


# ---- profile --------------------------------------------------------------------------------


def encode_profiles(stored: StoredProfiles) -> bytes:
    """Return the 4096 bytes of a profile block; at most MAX_PROFILES devices."""
    record = np.zeros((), _PROFILE)
    record["magic"], record["count"] = _PROFILE_MAGIC, len(stored.profiles)
    record["boot_id"], record["measured_ns"] = stored.boot_id.encode(), stored.measured_ns
    record["signature"] = np.frombuffer(stored.signature, np.uint8)
    for index, profile in enumerate(stored.profiles):
        record["rates"][index] = (
            profile.read_bandwidth_bytes_s,
            profile.write_bandwidth_bytes_s,
            profile.read_latency_s,
            profile.together_read_bandwidth_bytes_s,
        )
    return _sealed(record)


def decode_profiles(block: bytes) -> StoredProfiles | None:
    """Return what a profile block says; None where there is no valid one."""
    record = _unsealed(block, _PROFILE)
    if record is None or int(record["magic"]) != _PROFILE_MAGIC:
        return None
    count = int(record["count"])
    rates = record["rates"][:count].tolist()
    if count > MAX_PROFILES or not all(0 <= r < float("inf") for line in rates for r in line):
        return None
    return StoredProfiles(
        bytes(record["boot_id"]).decode(errors="replace"),
        int(record["measured_ns"]),
        record["signature"].tobytes(),
        tuple(Profile(*rate) for rate in rates),
    )


# ---- headers --------------------------------------------------------------------------------


def fill_headers(
    headers: Records,
    slots: Int32,
    keys: Sequence[Key],
    parents: Sequence[Key],
    positions: npt.NDArray[Any],
    groups: npt.NDArray[Any],
    lengths: npt.NDArray[Any],
    checksums: npt.NDArray[Any],
    epoch: int,
    lease_tag: int,
) -> None:
    """Write the headers of `slots` into `headers` (HEADER_DTYPE). Arrays have shape (n,)."""
    if max(map(len, [*keys, *parents]), default=0) > KEY_ROOM or not all(keys):
        raise ValueError(f"a key has 1 to {KEY_ROOM} bytes, a parent at most {KEY_ROOM}")
    part = np.zeros(slots.size, HEADER_DTYPE)
    part["magic"], part["lease_tag"], part["epoch"] = _HEADER_MAGIC, lease_tag, epoch
    part["key_length"], part["parent_length"] = list(map(len, keys)), list(map(len, parents))
    part["key"], part["parent"] = _room(keys), _room(parents)
    part["position"], part["group"], part["slot"] = positions, groups, slots
    part["length"], part["payload_crc"] = lengths, checksums
    rows = part.view(np.uint8).reshape(-1, HEADER_BYTES)
    part["crc"] = [crc32c(row[:-4]) for row in rows]
    headers[slots] = part


def sort_headers(
    headers: Records, epoch: int, lease_tag: int, slot_bytes: int, first_slot: int = 0
) -> SortedHeaders:
    """Tell headers of this lease, epoch and place from others. `headers` begins at `first_slot`."""
    rows = headers.view(np.uint8).reshape(-1, HEADER_BYTES)
    written = np.flatnonzero(rows.view(np.uint64).any(axis=1))
    intact = np.empty(written.size, np.bool_)
    current = np.empty(written.size, np.bool_)
    fitting = np.empty(written.size, np.bool_)
    for start in range(0, written.size, _PIECE):
        piece = slice(start, start + _PIECE)
        part = headers[written[piece]]
        data = part.view(np.uint8).reshape(-1, HEADER_BYTES)[:, :-4]
        intact[piece] = (part["magic"] == _HEADER_MAGIC) & (crc32c_rows(data) == part["crc"])
        current[piece] = (part["epoch"] == epoch) & (part["lease_tag"] == lease_tag)
        fitting[piece] = (
            (part["slot"] == (written[piece] + first_slot).astype(np.uint32))
            & (part["length"] - np.uint32(1) < slot_bytes)  # 0 wraps
            & (part["key_length"] - np.uint8(1) < KEY_ROOM)
            & (part["parent_length"] <= KEY_ROOM)
            & (part["position"] < 1 << 31)
        )
    slots = (written + first_slot).astype(np.int32)
    good = intact & current & fitting
    stale = intact & ~current
    return SortedHeaders(slots[good], slots[stale], slots[~good & ~stale])


def decode_headers(headers: Records, slots: Int32) -> StoredHeaders:
    """Return the headers of `slots`, which are valid, as lists and arrays."""
    keys, parents = list[Key](), list[Key]()
    for start in range(0, slots.size, _PIECE):
        part = headers[slots[start : start + _PIECE]]
        keys += _unroom(part["key"], part["key_length"])
        parents += _unroom(part["parent"], part["parent_length"])
    return StoredHeaders(
        slots,
        keys,
        parents,
        headers["position"][slots].astype(np.int32),
        headers["group"][slots],
        headers["length"][slots],
        headers["payload_crc"][slots],
    )


def crc32c_rows(rows: UInt8) -> UInt32:
    """Return the CRC32C of each row, shape (n,), of bytes of shape (n, an even number)."""
    table = _crc_table()
    words = np.ascontiguousarray(rows).view("<u2").T
    crc = np.full(rows.shape[0], 0xFFFFFFFF, np.uint32)
    for word in np.ascontiguousarray(words):
        crc = table[(crc ^ word) & np.uint32(0xFFFF)] ^ (crc >> np.uint32(16))
    return ~crc


@cache
def _crc_table() -> UInt32:
    """Return what 16 bits at the low end of the register do to it, shape (65536,)."""
    crc = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        crc = np.where(crc & 1, np.uint32(0x82F63B78), np.uint32(0)) ^ (crc >> np.uint32(1))
    return crc


def _room(keys: Sequence[Key]) -> UInt8:
    joined = b"".join(key.ljust(KEY_ROOM, b"\0") for key in keys)
    return np.frombuffer(joined, np.uint8).reshape(-1, KEY_ROOM)


def _unroom(room: UInt8, lengths: UInt8) -> list[Key]:
    keys: list[Key] = [b""] * lengths.size
    for length in np.flatnonzero(np.bincount(lengths)).tolist():  # one or two, as a rule
        at = np.flatnonzero(lengths == length)
        if length:
            found = np.ascontiguousarray(room[at, :length]).view(f"V{length}").ravel().tolist()
            if at.size == lengths.size:
                return list(found)
            for index, key in zip(at.tolist(), found, strict=True):
                keys[index] = key
    return keys


def _sealed(record: npt.NDArray[np.void]) -> bytes:
    raw = record.tobytes()
    return raw[:-4] + crc32c(raw[:-4]).to_bytes(4, "little")


def _unsealed(block: bytes, dtype: np.dtype[np.void]) -> Any:
    """Return the record in `block`, or None where its CRC32C does not fit."""
    if len(block) != dtype.itemsize or crc32c(block[:-4]) != int.from_bytes(block[-4:], "little"):
        return None
    return np.frombuffer(block, dtype)[0]
