"""What tests of containers share: small leases, headers that name their slots, raw writes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np

from kvpool.container import Container, Lease

MIB = 1 << 20
SIZE = 16 * MIB
SLOT = 64 << 10
NAMESPACE, OTHER, THIRD = (bytes([n]) * 32 for n in (1, 2, 3))


def take(container: Container, name: bytes = NAMESPACE, slots: int = 4, rank: int = 0) -> Lease:
    """Acquire a lease without waiting for a predecessor."""
    return container.acquire(name, rank, "0", slots, SLOT, grace_s=0)


def record(container: Container, lease: Lease, slots: list[int]) -> None:
    """Write headers that name each slot, to the medium."""
    chosen = np.array(slots, np.int32)
    keys = [b"key-%d" % slot for slot in slots]
    ones = np.ones(chosen.size, np.uint32)
    blocks = lease.set_headers(
        chosen, keys, [b""] * len(slots), chosen, ones.astype(np.uint8), ones, ones, lease.epoch
    )
    for block in blocks:
        offset, address, length = lease.header_block(int(block))
        poke(container.path, offset, ctypes.string_at(address, length))


def poke(file: Path, offset: int, data: bytes) -> None:
    """Write somewhere in a file, past whatever kvpool thinks of it."""
    with open(file, "r+b") as opened:
        opened.seek(offset)
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
