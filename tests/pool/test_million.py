"""A container with a million chunks: opened, and its table rebuilt, in seconds."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from kvpool import layout, native
from kvpool.device_config import parse_device
from kvpool.devices import Device, open_device
from kvpool.restore import restore
from kvpool.table import Table
from kvpool.types import Geometry, GroupGeometry, GroupKind
from tests.pool.containers import NAMESPACE

CHUNKS, CHAIN = 1_000_000, 1000  # chunks of a prefix
SLOT = 4096
HASH_BYTES, GROUP_BYTES = 32, 4  # of a key
GEOMETRY = Geometry((GroupGeometry(GroupKind.FULL, 256, SLOT),), 1, SLOT)


def open_flash(device: str, engine: native.Engine) -> Device:
    return open_device(
        parse_device(device),
        engine,
        namespace=NAMESPACE,
        rank=0,
        ranks=1,
        owner=0,
        slot_bytes=SLOT,
    )


def many_headers(entry: layout.LeaseEntry) -> layout.Records:
    """Return a header for each slot of a lease: prefixes of CHAIN chunks, one after another."""
    count = entry.slots
    headers = np.zeros(count, layout.HEADER_DTYPE)
    slots = np.arange(count, dtype=np.uint32)
    hashes = np.random.default_rng(0).integers(0, 256, (count, HASH_BYTES), np.uint8)
    # A valid header gives the constants that are the same in all.
    example = np.zeros(1, layout.HEADER_DTYPE)
    zero, one = np.zeros(1, np.int32), np.ones(1, np.uint32)
    key = bytes(HASH_BYTES + GROUP_BYTES)
    layout.fill_headers(
        example, zero, [key], [key], zero, zero, one * SLOT, one, entry.epoch, entry.tag
    )
    headers[:] = example
    headers["slot"], headers["position"] = slots, (slots % CHAIN + 1) * 256
    headers["payload_crc"] = slots * np.uint32(2654435761)
    headers["key"][:, :HASH_BYTES] = hashes
    inner = slots % CHAIN > 0
    headers["parent"][inner, :HASH_BYTES] = hashes[np.flatnonzero(inner) - 1]
    headers["parent_length"][~inner] = 0
    rows = headers.view(np.uint8).reshape(count, layout.HEADER_BYTES)
    for start in range(0, count, 8192):
        piece = slice(start, start + 8192)
        headers["crc"][piece] = layout.crc32c_rows(rows[piece, :-4])
    return headers


@pytest.mark.slow
def test_a_million_chunks(tmp_path: Path) -> None:
    size = layout.PROBE_OFFSET + (64 << 20) + layout.lease_bytes(CHUNKS, SLOT)
    device = f"file:{tmp_path}/pool?size={size}"
    engine = native.Engine(SLOT)
    made = open_flash(device, engine)
    file = tmp_path / "pool" / "container.kvpool"
    entry = layout.decode_lease(read(file, layout.TABLE_OFFSET, layout.LEASE_BYTES))
    assert made.slots == CHUNKS and entry is not None and entry.slots == CHUNKS
    headers = many_headers(entry)
    with open(file, "r+b") as opened:
        opened.seek(entry.start)
        opened.write(headers.tobytes())
    engine.close()
    made.close()

    engine = native.Engine(SLOT)
    started_s = time.perf_counter()
    flash = open_flash(device, engine)
    opened_s = time.perf_counter()
    survivors = flash.survivors
    table = Table([CHUNKS], [False])
    made_s = time.perf_counter()
    restored = restore(table, GEOMETRY, [[survivors]])
    restored_s = time.perf_counter()
    print(
        f"\n{CHUNKS} chunks: opened in {opened_s - started_s:.2f} s, table allocated in"
        f" {made_s - opened_s:.2f} s, restored in {restored_s - made_s:.2f} s"
    )
    assert survivors.slots.size == len(survivors.keys) == CHUNKS
    assert flash.damaged_headers == 0
    assert restored == [CHUNKS] and len(table.index) == CHUNKS
    ends = [survivors.keys[at] for at in range(CHAIN - 1, CHUNKS, CHAIN * 100)]
    for key in ends:  # each hangs, link by link, on the root of its own prefix
        at, links = table.index[key], 1
        while (parent := table.parent[at]) >= 0:
            at, links = parent, links + 1
        assert links == CHAIN
    assert flash.checksums[[0, 1, CHUNKS - 1]].tolist() == survivors.checksums[[0, 1, -1]].tolist()
    engine.close()
    flash.close()


def read(file: Path, offset: int, length: int) -> bytes:
    with open(file, "rb") as opened:
        opened.seek(offset)
        return opened.read(length)
