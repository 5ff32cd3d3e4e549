"""The data plane with the orchestrator on real devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.devices.flash import FlashDevice
from kvpool.types import Profile
from tests.dataplane.rig import Rig, chain, file_device

Make = Callable[..., Rig]


@pytest.fixture
def make_rig() -> Iterator[Make]:
    """Make rigs that are closed when the test ends."""
    rigs: list[Rig] = []

    def make(*arguments: object, **options: object) -> Rig:
        rigs.append(Rig(*arguments, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def check_roundtrip(rig: Rig, count: int) -> None:
    rig.fill(7, count)
    expected = rig.pages[:count].copy()
    assert rig.store(chain(1, count)) == count
    rig.pages[:count] = 0xEE
    finished = rig.load(chain(1, count))
    assert finished.failed == []
    assert np.array_equal(rig.pages[:count], expected)


def test_chunks_come_back_from_all_devices(make_rig: Make, tmp_path: Path) -> None:
    rig = make_rig(["dram:16MiB", file_device(tmp_path, "a", "64MiB")])
    check_roundtrip(rig, 100)
    for row in rig.orchestrator.snapshot().devices:
        assert row.hit_chunks == 50  # equal bandwidths, equal shares


def test_a_prefix_three_times_the_dram_loads_from_all_devices(
    make_rig: Make, tmp_path: Path
) -> None:
    rig = make_rig(["dram:4MiB", file_device(tmp_path, "a", "64MiB")])
    count = 3 * rig.devices[0].slots
    check_roundtrip(rig, count)
    assert all(row.hit_chunks > 0 for row in rig.orchestrator.snapshot().devices)


def test_a_chunk_that_does_not_verify_fails_alone_and_misses_after(
    make_rig: Make, tmp_path: Path
) -> None:
    rig = make_rig([file_device(tmp_path, "a", "64MiB")])
    rig.fill(3, 20)
    keys = chain(2, 20)
    rig.store(keys)
    request = rig.orchestrator.begin("peek")
    for key in keys:
        rig.orchestrator.lookup(key, request)
    plan = rig.orchestrator.plan_load(keys, request)
    rig.orchestrator.complete_load(request)
    offset = int(rig.devices[0].offsets(plan.slot[12:13])[0])
    with open(tmp_path / "a" / "container.kvpool", "r+b") as file:
        file.seek(offset + 100)
        file.write(b"\xff\x00\xff\x00")
        os.fsync(file.fileno())
    rig.pages[:] = 0xEE
    finished = rig.load(keys)
    assert finished.failed == [12]
    assert not rig.pages[12].any(), "bytes that did not verify must not stay in a page"
    assert rig.held(keys) == 12
    assert rig.orchestrator.snapshot().devices[0].retired_slots == 1


def test_a_truncated_file_is_a_miss_and_the_pool_goes_on(make_rig: Make, tmp_path: Path) -> None:
    rig = make_rig(["dram:8MiB", file_device(tmp_path, "a", "64MiB")])
    rig.fill(5, 60)
    keys = chain(3, 60)
    rig.store(keys)
    os.truncate(tmp_path / "a" / "container.kvpool", 1 << 20)
    assert rig.load(keys).failed
    held = rig.held(keys)
    assert held < 60
    expected = rig.pages[:60].copy()
    rig.store(keys)
    assert rig.load(keys[: rig.held(keys)]).failed == []
    assert np.array_equal(rig.pages[:held], expected[:held])


def test_spills_make_room_in_dram_and_keep_the_bytes(make_rig: Make, tmp_path: Path) -> None:
    fast, slow = Profile(8e9, 8e9, 1e-5, 8e9), Profile(1e9, 1e9, 1e-4, 1e9)
    rig = make_rig(
        ["dram:4MiB", file_device(tmp_path, "a", "64MiB")], profiles=[fast, slow], pages=64
    )
    contents = {}
    for name in range(6):
        rig.fill(name, 30)
        contents[name] = rig.pages[:30].copy()
        assert rig.store(chain(name, 30)) == 30
    assert rig.orchestrator.snapshot().spilled_chunks > 0
    for name, expected in contents.items():
        rig.pages[:] = 0
        assert rig.load(chain(name, 30)).failed == []
        assert np.array_equal(rig.pages[:30], expected)
    assert rig.orchestrator.snapshot().returned_chunks > 0
    rig.pages[:] = 0
    rig.load(chain(5, 30))
    assert np.array_equal(rig.pages[:30], contents[5])


def test_a_store_with_a_missing_block_is_refused(make_rig: Make) -> None:
    rig = make_rig(["dram:4MiB"])
    request = rig.orchestrator.begin("r")
    keys = chain(4, 3)
    plan = rig.orchestrator.reserve(keys, [256, 512, 768], request)
    rig.plane.submit_store(1, plan, np.array([0, -1, 2], dtype=np.int32))
    (finished,) = rig.settle()
    assert finished.failed == [1]
    assert rig.held(keys) == 1


def test_released_stores_end_at_once_and_are_acknowledged(make_rig: Make, tmp_path: Path) -> None:
    rig = make_rig([file_device(tmp_path, "a", "64MiB")], shapes=[1 << 20])
    rig.fill(1, 200)
    request = rig.orchestrator.begin("r")
    keys = chain(5, 200)
    plan = rig.orchestrator.reserve(keys, [256 * (i + 1) for i in range(200)], request)
    rig.plane.submit_store(9, plan, np.arange(len(plan.keys), dtype=np.int32))
    assert rig.plane.unfinished({9}) == {9}
    rig.plane.release_stores({9})
    while rig.plane.unfinished({9}):
        rig.plane.wait(1)
        rig.plane.poll()
    (finished,) = rig.plane.take_finished()
    assert len(finished.failed) > 100  # 1 MiB/s: most were never staged
    rig.engine.set_shape(rig.devices[0].index, 0, 0, 0)
    rig.settle()
    assert not rig.orchestrator.pending_work()


def test_a_device_that_slows_down_gets_less(make_rig: Make, tmp_path: Path) -> None:
    """Four shaped devices; one is halved while loads and stores run."""
    rates = [48 << 20, 36 << 20, 24 << 20, 12 << 20]
    profiles = [Profile(rate, rate, 1e-4, rate) for rate in rates]
    rig = make_rig(
        [file_device(tmp_path, name, "48MiB") for name in "abcd"],
        slot_bytes=256 << 10,
        pages=320,
        profiles=profiles,
        shapes=rates,
    )
    rig.fill(1, 320)
    rig.store(chain(1, 160))
    rates[0] //= 2
    rig.engine.set_shape(rig.devices[0].index, rates[0], rates[0], 0)
    expected = pytest.approx(rates[0] / sum(rates), rel=0.1)
    shares = []
    # On a busy machine single measurements stray: the share has to get there, not at once.
    for prefix in range(2, 7):
        for _ in range(3):
            rig.load(chain(prefix - 1, 160))
        rig.orchestrator.reset()
        rig.store(chain(prefix, 160))
        shares.append(rig.orchestrator.snapshot().devices[0].chunks / 160)
        if shares[-1] == expected:
            return
    pytest.fail(f"shares {shares}, expected {expected}")


def test_a_store_that_outlives_a_reset_leaves_no_header_nor_does_a_later_one(
    make_rig: Make, tmp_path: Path
) -> None:
    rig = make_rig([file_device(tmp_path, "a", "64MiB")])
    rig.fill(1, 40)
    rig.store(chain(6, 10))
    request = rig.orchestrator.begin("r")
    plan = rig.orchestrator.reserve(chain(7, 40), [256 * (i + 1) for i in range(40)], request)
    rig.plane.submit_store(1, plan, np.arange(40, dtype=np.int32))
    rig.orchestrator.reset()
    rig.plane.set_epoch(rig.orchestrator.epoch)
    rig.settle()
    rig.store(chain(8, 5))
    device = rig.devices[0]
    assert isinstance(device, FlashDevice)
    assert device.lease.read_headers().keys == []
