"""The bytes of a container: what is encoded is decoded, and a changed bit is noticed."""

from __future__ import annotations

from dataclasses import replace

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

PAGES = st.integers(1, 1 << 40)
superblocks = st.builds(
    lambda state, generation, uuid, probe_pages, pages, created_ns: Superblock(
        state,
        generation,
        uuid,
        layout.PROBE_OFFSET + (probe_pages + pages) * 4096,
        probe_pages * 4096,
        created_ns,
    ),
    st.sampled_from([layout.READY, layout.CREATING]),
    U63,
    st.binary(min_size=16, max_size=16),
    PAGES,
    PAGES,
    U63,
)
leases = st.builds(
    lambda start, slot_pages, slots, **others: LeaseEntry(
        start=start * 4096,
        length=layout.lease_bytes(slots, slot_pages * 4096),
        slot_bytes=slot_pages * 4096,
        slots=slots,
        **others,
    ),
    start=PAGES,
    slot_pages=st.integers(1, 1 << 18),
    slots=st.integers(1, (1 << 31) - 1),
    namespace=DIGEST,
    rank=U32,
    owner=st.text(st.characters(codec="utf-8"), max_size=16),
    epoch=st.integers(1, layout.MAX_EPOCH),
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": 3},
        {"generation": 1 << 63},
        {"size": (1 << 30) + 1},
        {"size": 1 << 62},
        {"size": 1 << 20},
        {"probe_bytes": 1 << 30},
        {"probe_bytes": 100},
    ],
)
def test_an_intact_superblock_that_makes_no_sense(wrong: dict[str, int]) -> None:
    superblock = Superblock(layout.READY, 1, bytes(16), 1 << 30, 64 << 20, 0)
    assert layout.decode_superblock(layout.encode_superblock(superblock)) == superblock
    changed = layout.encode_superblock(replace(superblock, **wrong))  # type: ignore[arg-type]
    assert layout.decode_superblock(changed) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 4097},
        {"length": 0},
        {"length": 1 << 20},
        {"slots": 0, "length": 0},
        {"slots": 1 << 31, "length": layout.lease_bytes(1 << 31, 8192)},
        {"slot_bytes": 4097, "length": layout.lease_bytes(100, 4097)},
        {"slot_bytes": 0, "length": layout.lease_bytes(100, 0)},
        {"epoch": 0},
        {"epoch": layout.MAX_EPOCH + 1},
    ],
)
def test_an_intact_lease_entry_that_makes_no_sense(wrong: dict[str, int]) -> None:
    length = layout.lease_bytes(100, 8192)
    entry = LeaseEntry(bytes(32), 0, "0", 8 << 20, length, 8192, 100, 1, 0, 0, 1, 1)
    assert layout.decode_lease(layout.encode_lease(entry)) == entry
    changed = layout.encode_lease(replace(entry, **wrong))  # type: ignore[arg-type]
    assert layout.decode_lease(changed) is None


def test_a_lease_outside_the_container_is_none_of_its_table() -> None:
    superblock = Superblock(layout.READY, 1, bytes(16), 16 << 20, 4 << 20, 0)
    length = layout.lease_bytes(100, 8192)
    first, last = superblock.extents_offset, superblock.size - length
    assert last % 4096 == 0
    table = bytearray(layout.TABLE_BYTES)
    for index, start in enumerate((first, last, first - 4096, last + 4096)):
        entry = LeaseEntry(bytes(32), 0, "0", start, length, 8192, 100, 1, 0, 0, 1, 1)
        table[index * 256 : index * 256 + 256] = layout.encode_lease(entry)
    found = layout.decode_table(bytes(table), superblock)
    assert [entry.start for entry in found if entry is not None] == [first, last]


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


def test_intact_profiles_that_make_no_sense() -> None:
    good = Profile(1.0, 2.0, 3.0, 4.0)
    for wrong in (-1.0, float("nan"), float("inf")):
        stored = StoredProfiles("boot", 0, bytes(32), (good, replace(good, read_latency_s=wrong)))
        assert layout.decode_profiles(layout.encode_profiles(stored)) is None
    block = bytearray(layout.encode_profiles(StoredProfiles("boot", 0, bytes(32), (good,))))
    for count, devices in ((1, 1), (64, 64), (65, None)):
        block[4:8] = count.to_bytes(4, "little")
        block[-4:] = crc32c(block[:-4]).to_bytes(4, "little")
        stored_now = layout.decode_profiles(bytes(block))
        assert (None if stored_now is None else len(stored_now.profiles)) == devices


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


def valid_headers(headers: layout.Records, epoch: int, tag: int, slot_bytes: int) -> list[int]:
    return [int(slot) for slot in layout.sort_headers(headers, epoch, tag, slot_bytes).valid]


def test_headers_are_found_again() -> None:
    headers = filled(20000)
    assert valid_headers(headers, 3, 77, 8192) == list(range(20000))


def test_keys_that_end_in_zeros_keep_them() -> None:
    headers = np.zeros(1, layout.HEADER_DTYPE)
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    layout.fill_headers(
        headers, zero, [b"k" * 32 + bytes(4)], [bytes(36)], one, one, one, one, 1, 1
    )
    stored = layout.decode_headers(headers, zero)
    assert stored.keys == [b"k" * 32 + bytes(4)] and stored.parents == [bytes(36)]


def test_headers_of_elsewhere_or_before_do_not_count() -> None:
    headers = filled(100)
    assert valid_headers(headers, 4, 77, 8192) == [], "another epoch"
    assert valid_headers(headers, 3, 78, 8192) == [], "another lease"
    assert layout.sort_headers(headers, 4, 77, 8192).stale.size == 100
    headers[[7, 8]] = headers[[8, 7]]
    valid = valid_headers(headers, 3, 77, 8192)
    assert valid == [slot for slot in range(100) if slot not in (7, 8)], "another slot"
    assert layout.sort_headers(headers, 3, 77, 8192).damaged.tolist() == [7, 8]
    too_long = headers["length"][:7] > 1000
    assert not set(np.flatnonzero(too_long)) & set(valid_headers(headers, 3, 77, 1000))


@given(st.integers(0, 128 * 8 - 1))
def test_a_changed_bit_makes_a_header_invalid(bit: int) -> None:
    headers = filled(4)
    headers[3] = np.zeros((), layout.HEADER_DTYPE)
    rows = headers.view(np.uint8).reshape(4, -1)
    rows[1, bit // 8] ^= 1 << bit % 8
    found = layout.sort_headers(headers, 3, 77, 8192)
    assert found.valid.tolist() == [0, 2]
    assert found.damaged.tolist() == [1], "an empty one is not damaged"
    assert found.stale.size == 0


def test_a_part_of_a_table_is_sorted_as_it_is_in_the_whole() -> None:
    headers = filled(100)
    part = layout.sort_headers(headers[60:], 3, 77, 8192, first_slot=60)
    assert part.valid.tolist() == list(range(60, 100))
    assert layout.sort_headers(headers[60:], 3, 77, 8192).damaged.size == 40


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
