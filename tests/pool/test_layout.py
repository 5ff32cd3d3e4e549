"""The bytes of a container: what is encoded is decoded, and a changed bit is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import layout
from kvpool.layout import LeaseEntry, StoredProfiles, Superblock
from kvpool.native import crc32c
from kvpool.types import Profile

U32 = st.integers(0, (1 << 32) - 1)
U63 = st.integers(0, (1 << 63) - 1)
DIGEST = st.binary(min_size=32, max_size=32)

superblocks = st.builds(
    Superblock,
    st.sampled_from([layout.READY, layout.CREATING]),
    U63,
    st.binary(min_size=16, max_size=16),
    U63,
    U63,
    U63,
)
leases = st.builds(
    LeaseEntry,
    namespace=DIGEST,
    rank=U32,
    owner=st.text(st.characters(codec="utf-8"), max_size=16),
    start=U63,
    length=U63,
    slot_bytes=U63,
    slots=U63,
    epoch=U32,
    created_ns=U63,
    used_ns=U63,
    tag=U63,
    pid=U32,
)
rates = st.floats(0, 1e12)


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)


@given(superblocks, st.integers(0, 4096 * 8 - 1))
def test_superblocks(superblock: Superblock, bit: int) -> None:
    block = layout.encode_superblock(superblock)
    assert len(block) == 4096
    assert layout.decode_superblock(block) == superblock
    assert layout.unknown_version(block) is None
    assert layout.decode_superblock(flip(block, bit)) is None


def test_a_version_to_come_is_known_as_such() -> None:
    block = bytearray(layout.encode_superblock(Superblock(1, 1, bytes(16), 1 << 30, 1 << 20, 0)))
    block[8:12] = (7).to_bytes(4, "little")
    block[-4:] = crc32c(block[:-4]).to_bytes(4, "little")
    assert layout.unknown_version(bytes(block)) == 7
    assert layout.decode_superblock(bytes(block)) is None
    assert layout.unknown_version(flip(bytes(block), 20000)) is None


@given(leases, st.integers(0, 256 * 8 - 1))
def test_lease_entries(entry: LeaseEntry, bit: int) -> None:
    block = layout.encode_lease(entry)
    assert len(block) == 256
    assert layout.decode_lease(block) == entry
    assert layout.decode_lease(flip(block, bit)) is None


def test_a_free_lease_entry() -> None:
    assert layout.decode_lease(layout.encode_lease(None)) is None
    assert not any(layout.encode_lease(None))


@given(
    st.builds(
        StoredProfiles,
        st.text("0123456789abcdef-", min_size=36, max_size=36),
        U63,
        DIGEST,
        st.lists(st.builds(Profile, rates, rates, rates, rates), max_size=8).map(tuple),
    ),
    st.integers(0, 4096 * 8 - 1),
)
def test_profiles(stored: StoredProfiles, bit: int) -> None:
    block = layout.encode_profiles(stored)
    assert len(block) == 4096
    assert layout.decode_profiles(block) == stored
    assert layout.decode_profiles(flip(block, bit)) is None
    assert layout.decode_profiles(bytes(4096)) is None


def test_structures_do_not_overlap() -> None:
    assert layout.SUPERBLOCKS_BYTES == layout.TABLE_OFFSET
    assert layout.TABLE_OFFSET + 64 * 256 == layout.PROFILE_OFFSET
    assert layout.PROFILE_OFFSET + 4096 == layout.METADATA_BYTES <= layout.PROBE_OFFSET


@given(st.integers(8 << 20, 1 << 45))
def test_the_probe_area_is_a_sixteenth_between_4_and_64_mib(size: int) -> None:
    length = layout.probe_bytes(size)
    assert 4 << 20 <= length <= 64 << 20
    assert length % (1 << 20) == 0
    assert length == 4 << 20 or length <= size // 16


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 14).map(lambda pages: pages * 4096))
def test_as_many_slots_as_fit(room: int, slot_bytes: int) -> None:
    slots = layout.slots_within(room, slot_bytes)
    assert slots == 0 or layout.lease_bytes(slots, slot_bytes) <= room
    assert layout.lease_bytes(slots + 1, slot_bytes) > room


# ---- headers --------------------------------------------------------------------------------


def filled(count: int, *, epoch: int = 3, tag: int = 77) -> layout.Records:
    """Return a table of `count` headers, all valid in slots of 8192 bytes."""
    random = np.random.default_rng(count)
    headers = np.zeros(count, layout.HEADER_DTYPE)
    slots = np.arange(count, dtype=np.int32)
    keys = [random.bytes(int(n)) for n in random.integers(1, 41, count)]
    parents = [random.bytes(int(n)) for n in random.integers(0, 41, count)]
    lengths = random.integers(1, 8193, count)
    checksums = random.integers(0, 1 << 32, count)
    layout.fill_headers(
        headers, slots, keys, parents, slots * 16, slots % 7, lengths, checksums, epoch, tag
    )
    stored = layout.decode_headers(headers, slots)
    assert (stored.keys, stored.parents) == (keys, parents)
    assert stored.positions.tolist() == (slots * 16).tolist()
    assert stored.groups.tolist() == (slots % 7).tolist()
    assert stored.lengths.tolist() == lengths.tolist()
    assert stored.checksums.tolist() == checksums.tolist()
    return headers


def test_headers_are_found_again() -> None:
    headers = filled(20000)
    assert layout.valid_headers(headers, 3, 77, 8192).tolist() == list(range(20000))


def test_keys_that_end_in_zeros_keep_them() -> None:
    headers = np.zeros(1, layout.HEADER_DTYPE)
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    layout.fill_headers(
        headers, zero, [b"k" * 32 + bytes(4)], [bytes(36)], one, one, one, one, 1, 1
    )
    stored = layout.decode_headers(headers, layout.valid_headers(headers, 1, 1, 4096))
    assert stored.keys == [b"k" * 32 + bytes(4)] and stored.parents == [bytes(36)]


def test_headers_of_elsewhere_or_before_do_not_count() -> None:
    headers = filled(100)
    assert layout.valid_headers(headers, 4, 77, 8192).size == 0, "another epoch"
    assert layout.valid_headers(headers, 3, 78, 8192).size == 0, "another lease"
    headers[[7, 8]] = headers[[8, 7]]
    valid = layout.valid_headers(headers, 3, 77, 8192).tolist()
    assert valid == [slot for slot in range(100) if slot not in (7, 8)], "another slot"
    too_long = headers["length"][:7] > 1000
    assert not set(np.flatnonzero(too_long)) & set(layout.valid_headers(headers, 3, 77, 1000))


@given(st.integers(0, 128 * 8 - 1))
def test_a_changed_bit_makes_a_header_invalid(bit: int) -> None:
    headers = filled(3)
    rows = headers.view(np.uint8).reshape(3, -1)
    rows[1, bit // 8] ^= 1 << bit % 8
    assert layout.valid_headers(headers, 3, 77, 8192).tolist() == [0, 2]


def test_keys_that_do_not_fit_are_refused() -> None:
    headers = np.zeros(1, layout.HEADER_DTYPE)
    zero = np.zeros(1, np.int32)
    for key, parent in ((b"", b""), (b"k" * 41, b""), (b"k", b"p" * 41)):
        with pytest.raises(ValueError, match="a key has"):
            layout.fill_headers(headers, zero, [key], [parent], zero, zero, zero, zero, 1, 1)
    assert not headers.view(np.uint8).any()


@given(st.integers(0, 50), st.integers(0, 32).map(lambda n: 2 * n), st.integers(0, 1 << 32))
def test_checksums_of_rows_are_those_of_the_engine(count: int, width: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (count, width), np.uint8)
    expected = [crc32c(row) for row in rows]
    assert layout.crc32c_rows(rows).tolist() == expected


def test_the_standard_check_value() -> None:
    row = np.frombuffer(b"12345678", np.uint8).reshape(1, -1)
    assert layout.crc32c_rows(row).tolist() == [crc32c(b"12345678")] == [0x6087809A]
