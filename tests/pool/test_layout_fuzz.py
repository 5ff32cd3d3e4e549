"""Mutated metadata: refused with an error of kvpool's own, or read for what is intact, never more.

Mutations are drawn from a seed that a failure prints. Half of them get a fitting checksum: that
says that bytes were written so, not that they make sense.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvpool import layout
from kvpool.container import Container
from kvpool.errors import KVPoolError
from kvpool.inspection import Inspection
from kvpool.layout import HEADER_BYTES, LEASE_BYTES, READY, LeaseEntry, StoredProfiles, Superblock
from kvpool.medium import FILE_NAME
from kvpool.native import crc32c
from kvpool.types import Profile
from tests.pool.containers import MIB, NAMESPACE, poke, record
from tests.pool.device_contract import keys
from tests.pool.rank import Rank

SUPERBLOCKS, LEASES = layout._SUPERBLOCK, layout._LEASE
PROFILES_BLOCK, HEADERS = layout._PROFILE, layout.HEADER_DTYPE
CORPUS = Path(__file__).parent / "corpus"
SIZE, SLOT, SLOTS = 8 * MIB, 16 << 10, 70
EXTENTS = layout.PROBE_OFFSET + layout.probe_bytes(SIZE)
DECODER_RUNS, CONTAINER_RUNS = 2000, 120

NUMBERS = [0, 1, 2, 64, 4095, 4096, SLOT, EXTENTS, SIZE - MIB, SIZE, SIZE + 4096]
NUMBERS += [(1 << bits) + more for bits in (31, 32, 62, 63) for more in (-1, 0)] + [(1 << 64) - 1]

# What the files of the corpus hold.
SUPERBLOCK = Superblock(READY, 2, bytes(range(16)), 1 << 30, 64 << 20, 1_700_000_000_000_000_000)
LEASE = LeaseEntry(
    namespace=bytes(range(32)),
    rank=1,
    owner="0",
    start=65 << 20,
    length=layout.lease_bytes(100, 65536),
    slot_bytes=65536,
    slots=100,
    epoch=3,
    created_ns=1_700_000_000_000_000_000,
    used_ns=1_700_000_001_000_000_000,
    tag=0x1234567890ABCDEF,
    pid=4242,
)
PROFILES = StoredProfiles(
    "0" * 36, 1_700_000_002_000_000_000, bytes(32), (Profile(2e9, 1e9, 8e-5, 1.5e9),)
)


def headers() -> layout.Records:
    """Return four headers of LEASE."""
    found = np.zeros(4, layout.HEADER_DTYPE)
    slots = np.arange(4, dtype=np.int32)
    names = [b"key %d" % slot for slot in slots]
    layout.fill_headers(
        found,
        slots,
        names,
        [b"", *names[:-1]],
        (slots + 1) * 256,
        np.zeros(4, np.uint8),
        np.full(4, 65536, np.uint32),
        slots.astype(np.uint32) * 77,
        LEASE.epoch,
        LEASE.tag,
    )
    return found


def encoded() -> dict[str, bytes]:
    """Return what each file of the corpus is to be."""
    return {
        "superblock": layout.encode_superblock(SUPERBLOCK),
        "lease": layout.encode_lease(LEASE),
        "profile": layout.encode_profiles(PROFILES),
        "headers": headers().tobytes(),
    }


def seal(data: bytearray, start: int, end: int) -> None:
    """Give a structure the checksum that fits."""
    data[end - 4 : end] = crc32c(bytes(data[start : end - 4])).to_bytes(4, "little")


def mutate(data: bytearray, chance: random.Random, start: int, kind: np.dtype[np.void]) -> None:
    """Change some of the structure at `start`: bits, numbers, zeros, pieces of elsewhere."""
    used = sum(kind[name].itemsize for name in kind.names or () if name not in ("reserved", "crc"))
    for _ in range(chance.randint(1, 3)):
        length = chance.choice((1, 4, 8))
        at = start + chance.randrange(used - length)
        how = chance.randrange(6)
        if how == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            data[at : at + length] = bytes(length)
        elif how == 2:
            data[at : at + length] = chance.randbytes(length)
        elif how == 3:
            other = start + chance.randrange(used - length)
            data[at : at + length] = data[other : other + length]
        else:
            numbers = [name for name in kind.names or () if kind[name].kind == "u"]
            field, offset = (kind.fields or {})[chance.choice(numbers)][:2]
            number = chance.choice(NUMBERS).to_bytes(8, "little")[: field.itemsize]
            data[start + offset : start + offset + field.itemsize] = number


def seeds(count: int) -> Iterator[random.Random]:
    """Yield seeded generators; a failure shows the number of the one it happened with."""
    for seed in range(count):
        try:
            yield random.Random(seed)
        except GeneratorExit:
            print(f"\nseed {seed}")
            raise


# ---- structures -----------------------------------------------------------------------------


def test_the_format_is_what_it_was() -> None:
    """What this version writes can be read by it later: the kept bytes say what it wrote."""
    for name, content in encoded().items():
        assert (CORPUS / name).read_bytes() == content, name
    assert layout.decode_superblock((CORPUS / "superblock").read_bytes()) == SUPERBLOCK
    assert layout.decode_lease((CORPUS / "lease").read_bytes()) == LEASE
    assert layout.decode_profiles((CORPUS / "profile").read_bytes()) == PROFILES


def test_superblocks_leases_and_profiles() -> None:
    files = {name: (CORPUS / name).read_bytes() for name in ("superblock", "lease", "profile")}
    accepted = 0
    for chance in seeds(DECODER_RUNS):
        name = chance.choice(sorted(files))
        data = bytearray(files[name])
        mutate(data, chance, 0, KINDS[name])
        if chance.random() < 0.5:
            seal(data, 0, len(data))
        if chance.random() < 0.02:
            del data[chance.randrange(len(data)) :]
        block = bytes(data)
        layout.unknown_version(block)
        found = [decode(block) for decode in DECODERS if decode(block) is not None]
        for decoded in found:
            assert crc32c(block[:-4]) == int.from_bytes(block[-4:], "little")
            check_sane(decoded)
        accepted += len(found)
    assert accepted > DECODER_RUNS // 20, "mutations that leave nothing to accept test little"


KINDS = {"superblock": SUPERBLOCKS, "lease": LEASES, "profile": PROFILES_BLOCK}
DECODERS = (layout.decode_superblock, layout.decode_lease, layout.decode_profiles)


def check_sane(decoded: object) -> None:
    if isinstance(decoded, Superblock):
        assert decoded.extents_offset <= decoded.size and decoded.size % 4096 == 0
        layout.encode_superblock(decoded)
    elif isinstance(decoded, LeaseEntry):
        assert decoded.length == layout.lease_bytes(decoded.slots, decoded.slot_bytes) > 0
        assert decoded.start % 4096 == decoded.slot_bytes % 4096 == 0
        layout.encode_lease(decoded)
    elif isinstance(decoded, StoredProfiles):
        assert len(decoded.profiles) <= layout.MAX_PROFILES
        assert all(profile.read_bandwidth_bytes_s >= 0 for profile in decoded.profiles)


def test_headers() -> None:
    kept = (CORPUS / "headers").read_bytes()
    for chance in seeds(DECODER_RUNS):
        data = bytearray(kept)
        row = chance.randrange(4)
        mutate(data, chance, row * HEADER_BYTES, HEADERS)
        if chance.random() < 0.5:
            seal(data, row * HEADER_BYTES, (row + 1) * HEADER_BYTES)
        records = np.frombuffer(bytes(data), layout.HEADER_DTYPE)
        found = layout.sort_headers(records, LEASE.epoch, LEASE.tag, LEASE.slot_bytes)
        valid, others = found.valid.tolist(), {0, 1, 2, 3} - {row}
        assert others <= set(valid), "the others lost nothing"
        sorted_once = [*valid, *found.stale.tolist(), *found.damaged.tolist()]
        empty = not any(data[row * HEADER_BYTES : (row + 1) * HEADER_BYTES])
        assert sorted(sorted_once) == sorted(others if empty else {*others, row})
        assert records["slot"][found.valid].tolist() == valid
        assert set(records["epoch"][found.valid].tolist()) <= {LEASE.epoch}
        assert set(records["lease_tag"][found.valid].tolist()) <= {LEASE.tag}
        stored = layout.decode_headers(records, found.valid)
        for slot, key, length in zip(valid, stored.keys, stored.lengths.tolist(), strict=True):
            assert intact(data[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES])
            assert 1 <= len(key) <= layout.KEY_ROOM and 1 <= length <= LEASE.slot_bytes
        assert (stored.positions >= 0).all()


def intact(row: bytearray) -> bool:
    return crc32c(bytes(row[:-4])) == int.from_bytes(row[-4:], "little")


# ---- containers -----------------------------------------------------------------------------


@pytest.fixture
def image(folder: Path) -> bytes:
    """A container with a lease, of which three in four slots have a header."""
    with closing(Container.open(folder, SIZE)) as opened:
        lease = opened.acquire(NAMESPACE, 0, "0", SLOTS, SLOT)
        record(opened, lease, [slot for slot in range(SLOTS) if slot % 4])
        opened.write_profiles(PROFILES)
        path = opened.path
    return path.read_bytes()


def structures() -> list[tuple[int, np.dtype[np.void]]]:
    """Return where each structure of a container lies, and what it is."""
    leases = [layout.TABLE_OFFSET + i * LEASE_BYTES for i in (0, 0, 1, 63)]
    rows = [EXTENTS + slot * HEADER_BYTES for slot in range(6)]
    return [
        *((offset, SUPERBLOCKS) for offset in layout.SUPERBLOCK_OFFSETS),
        (layout.PROFILE_OFFSET, PROFILES_BLOCK),
        *((offset, LEASES) for offset in leases),
        *((offset, HEADERS) for offset in rows),
    ]


def put(file: Path, data: bytes) -> None:
    """Give a container's file its content; all but metadata and the first headers is zeros."""
    if not file.exists() or os.stat(file).st_size != len(data):
        file.write_bytes(data)
    with open(file, "r+b") as opened:
        for start, length in ((0, layout.METADATA_BYTES), (EXTENTS, MIB)):
            opened.seek(start)
            opened.write(data[start : start + length])


def use(folder: Path, create: bool) -> None:
    """Open a container as an engine does, and check whatever it accepts."""
    with closing(Container.open(folder, SIZE if create else None, create=create)) as opened:
        assert opened.size <= os.stat(opened.path).st_size
        opened.read_profiles()
        opened.leases()
        lease = opened.acquire(NAMESPACE, 0, "0", SLOTS, SLOT, grace_s=0)
        assert sum(opened.probe_area) <= lease.start
        assert lease.start + lease.length <= opened.size
        stored = lease.read_headers()
        rows = lease.headers.view(np.uint8).reshape(-1, HEADER_BYTES)
        assert all(intact(bytearray(rows[slot].tobytes())) for slot in stored.slots)
        assert not rows[np.setdiff1d(np.arange(SLOTS), stored.slots)].any()
        lease.advance_epoch(lease.epoch + 1)


def test_containers(folder: Path, image: bytes) -> None:
    file, places = folder / FILE_NAME, structures()
    refused = 0
    for chance in seeds(CONTAINER_RUNS):
        data = bytearray(image)
        chosen = chance.sample(places, chance.randint(1, 3))
        for start, kind in places[:2] if chance.random() < 0.3 else chosen:
            mutate(data, chance, start, kind)
            if chance.random() < 0.7:
                seal(data, start, start + kind.itemsize)
        put(file, data)
        try:
            with Inspection(str(folder)) as opened:
                opened.view()
                opened.verify()
        except KVPoolError:
            pass
        assert file.read_bytes() == data, "looking changes nothing"
        try:
            use(folder, create=chance.random() < 0.5)
        except KVPoolError:
            refused += 1
            assert file.read_bytes() == data, "what is refused is left as it is"
    assert CONTAINER_RUNS // 20 < refused < CONTAINER_RUNS // 2


@pytest.mark.parametrize("damaged", [1, 2, 33, 100])
def test_damaged_headers_cost_exactly_their_chunks(tmp_path: Path, damaged: int) -> None:
    device = f"file:{tmp_path}/pool?size={SIZE}"
    with Rank(device, slot_bytes=SLOT) as rank:
        used = list(range(120))
        rank.store(used[:60], keys(60))
        rank.store(used[60:], [b"more " + key for key in keys(60)])
        start = rank.device.offsets(np.zeros(1, np.int32))[0]
        start = int(start) - layout.header_table_bytes(rank.device.slots)
    chance = random.Random(damaged)
    victims = set(chance.sample(used, damaged))
    file = tmp_path / "pool" / "container.kvpool"
    content = file.read_bytes()
    for slot in victims:
        at = start + slot * HEADER_BYTES + chance.randrange(HEADER_BYTES)
        poke(file, at, bytes([content[at] ^ 1 << chance.randrange(8)]))
    with Rank(device, slot_bytes=SLOT) as rank:
        assert set(rank.device.survivors.slots.tolist()) == set(used) - victims
        assert rank.device.damaged_headers == damaged
        good = [slot for slot in used if slot not in victims][:60]
        assert rank.load(good) == [0] * len(good), f"seed {damaged}"


def test_a_whole_container_has_no_damaged_headers(tmp_path: Path) -> None:
    device = f"file:{tmp_path}/pool?size={SIZE}"
    for _ in range(2):
        with Rank(device, slot_bytes=SLOT) as rank:
            assert rank.device.damaged_headers == 0
            rank.store([0, 1], keys(2))
            rank.device.set_epoch(0)
