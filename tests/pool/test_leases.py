"""Leases: who gets which range of a container, and what it keeps."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvpool import layout
from kvpool.container import Container
from kvpool.errors import ContainerError, DeviceError
from kvpool.medium import Medium
from tests.pool.containers import NAMESPACE, OTHER, SLOT, THIRD, poke, record, take


def test_a_lease_is_taken_again_with_what_it_stores(container: Container, folder: Path) -> None:
    lease = take(container)
    assert lease.fresh
    record(container, lease, [0, 3])
    container.close()
    opened = Container.open(folder)
    again = take(opened)
    assert not again.fresh and again.start == lease.start
    stored = again.read_headers()
    assert stored.slots.tolist() == [0, 3] and stored.keys == [b"key-0", b"key-3"]
    opened.close()


@pytest.mark.parametrize("change", ["namespace", "rank", "owner", "slots", "slot_bytes"])
def test_another_identity_or_geometry_starts_empty(container: Container, change: str) -> None:
    lease = take(container)
    record(container, lease, [0])
    lease.close()
    wanted = {"namespace": NAMESPACE, "rank": 0, "owner": "0", "slots": 4, "slot_bytes": SLOT}
    different = {"namespace": OTHER, "rank": 1, "owner": "1", "slots": 5, "slot_bytes": 2 * SLOT}
    other = container.acquire(**{**wanted, change: different[change]})  # type: ignore[arg-type]
    assert other.fresh and other.start != lease.start
    assert other.read_headers().keys == []


def test_offsets_are_disjoint_aligned_and_inside(container: Container) -> None:
    slots = container.slots_for(2, SLOT)
    ends: list[tuple[int, int]] = []
    for rank in range(2):
        lease = take(container, slots=slots, rank=rank)
        offsets = lease.offsets(np.arange(slots, dtype=np.int32))
        assert offsets.dtype == np.uint64 and not (offsets % 4096).any()
        headers = [
            lease.header_block(block)[:3:2] for block in range(layout.align_up(slots, 32) // 32)
        ]
        ends += [(int(offset), int(offset) + SLOT) for offset in offsets]
        ends += [(offset, offset + length) for offset, length in headers]
    ends.sort()
    area = sum(container.probe_area)
    assert ends[0][0] >= area and ends[-1][1] <= container.size
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ends))


def test_slots_out_of_range_are_refused(container: Container) -> None:
    lease = take(container)
    for slots in ([-1], [4], [0, 4]):
        chosen = np.array(slots, np.int32)
        with pytest.raises(IndexError):
            lease.offsets(chosen)
        with pytest.raises(IndexError):
            lease.clear_headers(chosen)
    with pytest.raises(IndexError):
        lease.header_block(1)


def test_header_blocks_that_changed(container: Container) -> None:
    lease = take(container, slots=100)
    chosen = np.array([99, 0, 31, 32, 5], np.int32)
    ones = np.ones(5, np.uint32)
    keys = [b"k"] * 5
    blocks = lease.set_headers(chosen, keys, keys, chosen, ones.astype(np.uint8), ones, ones, 1)
    assert blocks.tolist() == [0, 1, 3]
    assert lease.clear_headers(np.array([40], np.int32)).tolist() == [1]
    offset, address, length = lease.header_block(1)
    assert (offset, length) == (lease.start + 4096, 4096) and address % 4096 == 0
    assert ctypes.string_at(address, 128) == lease.headers[32].tobytes()


def test_an_epoch_makes_all_before_invalid(container: Container, folder: Path) -> None:
    lease = take(container)
    record(container, lease, [0, 1])
    lease.advance_epoch(5)
    record(container, lease, [1])
    with pytest.raises(ValueError, match="before 5"):
        lease.advance_epoch(4)
    container.close()
    opened = Container.open(folder)
    again = take(opened)
    assert again.epoch == 5 and again.read_headers().keys == [b"key-1"]
    opened.close()


def test_a_released_lease_gives_its_room_back(container: Container) -> None:
    lease = take(container)
    record(container, lease, [0])
    lease.release()
    assert container.leases() == []
    again = take(container)
    assert again.fresh and again.start == lease.start and again.read_headers().keys == []


def test_idle_leases_are_dropped_oldest_first(container: Container) -> None:
    third = container.slots_for(3, SLOT)
    for name in (NAMESPACE, OTHER, THIRD):
        take(container, name, third).close()
    take(container, NAMESPACE, third).close()  # used again: OTHER is the oldest now
    take(container, b"4" * 32, third)
    left = {entry.namespace for entry, _ in container.leases()}
    assert left == {NAMESPACE, THIRD, b"4" * 32}


def test_the_holders_own_lease_of_another_size_goes_first(container: Container) -> None:
    third = container.slots_for(3, SLOT)
    for name in (OTHER, NAMESPACE, THIRD):
        take(container, name, third).close()
    take(container, NAMESPACE, third - 1)
    left = [(entry.namespace, entry.slots) for entry, _ in container.leases()]
    assert sorted(left) == [(NAMESPACE, third - 1), (OTHER, third), (THIRD, third)]


def test_what_is_in_use_is_never_dropped(container: Container) -> None:
    half = container.slots_for(2, SLOT)
    take(container, NAMESPACE, half)
    take(container, OTHER, half).close()
    with pytest.raises(ContainerError) as caught:
        take(container, THIRD, half + half // 2)
    assert NAMESPACE.hex()[:12] in str(caught.value) and "in use" in str(caught.value)
    assert OTHER.hex()[:12] in str(caught.value) and "idle" in str(caught.value)
    assert str(os.getpid()) in str(caught.value) and "\n" not in str(caught.value)
    assert len(container.leases()) == 2, "nothing was dropped in vain"


def test_the_table_has_room_for_64(container: Container) -> None:
    held = [take(container, rank=rank, slots=1) for rank in range(64)]
    with pytest.raises(ContainerError):
        take(container, rank=64, slots=1)
    held[7].close()
    assert take(container, rank=64, slots=1).start == held[7].start


def test_a_damaged_table_entry_does_not_free_what_is_in_use(
    container: Container, folder: Path
) -> None:
    """The lock on the range counts, not the table."""
    lease = take(container)
    poke(container.path, layout.TABLE_OFFSET + 16, b"\xff" * 8)
    second = Container.open(folder)
    assert second.leases() == []
    other = take(second, OTHER)
    assert other.start >= lease.start + lease.length
    second.close()


def test_two_of_one_name_get_leases_of_their_own(container: Container, folder: Path) -> None:
    second = Container.open(folder)
    assert take(container).start != take(second).start
    second.close()


def test_the_holder_is_waited_for(container: Container, folder: Path) -> None:
    """A successor takes over the lease of a predecessor that ends within the grace."""
    lease = take(container)
    second = Container.open(folder)
    closing = threading.Timer(0.1, lease.close)
    closing.start()
    taken = second.acquire(NAMESPACE, 0, "0", 4, SLOT, grace_s=30)
    closing.join()
    assert taken.start == lease.start and not taken.fresh
    second.close()


@pytest.mark.parametrize(
    "wrong", [{"namespace": b"short"}, {"slots": 0}, {"slot_bytes": 4097}, {"owner": "x" * 65}]
)
def test_wrong_arguments(container: Container, wrong: dict[str, object]) -> None:
    wanted = {"namespace": NAMESPACE, "rank": 0, "owner": "0", "slots": 4, "slot_bytes": SLOT}
    with pytest.raises(ValueError):
        container.acquire(**{**wanted, **wrong})  # type: ignore[arg-type]


def test_headers_that_cannot_be_read_are_damaged(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = take(container, slots=100)
    record(container, lease, list(range(100)))
    read_into, bad = Medium.read_into, range(lease.start + 4096, lease.start + 8192)

    def failing(self: Medium, offset: int, buffer: memoryview) -> int:
        if offset < bad.stop and bad.start < offset + len(buffer):
            raise DeviceError("read", 5)
        return read_into(self, offset, buffer)

    monkeypatch.setattr(Medium, "read_into", failing)
    stored = lease.read_headers()
    assert stored.slots.tolist() == [slot for slot in range(100) if not 32 <= slot < 64]
    assert lease.damaged_headers == 32
    assert not lease.headers[32:64].view(np.uint8).any()
    monkeypatch.setattr("kvpool.container._MOST_UNREADABLE", 0)
    with pytest.raises(DeviceError):
        lease.read_headers()


def test_a_million_headers_are_read(tmp_path: Path) -> None:
    container = Container.open(tmp_path / "big", 8 << 30)
    slots = 1_000_000
    lease = container.acquire(NAMESPACE, 0, "0", slots, 4096)
    chosen = np.arange(0, slots, 1000, dtype=np.int32)
    record(container, lease, chosen.tolist())
    stored = lease.read_headers()
    assert stored.slots.tolist() == chosen.tolist()
    container.close()
