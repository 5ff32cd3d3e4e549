"""Warm restart: what one pool stored, the next one on the same devices finds."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import DeviceError
from kvpool.types import NO_DEVICE, DeviceState
from tests.dataplane.rig import CHUNK_TOKENS, Rig, chain, file_device

pytestmark = pytest.mark.usefixtures("no_leaks")


@contextmanager
def running(folder: Path, *, backup: bool = True, dram: str = "4MiB") -> Iterator[Rig]:
    devices = [f"dram:{dram}", file_device(folder, "a", "32MiB"), file_device(folder, "b", "32MiB")]
    rig = Rig(devices, backup=backup)
    try:
        yield rig
    finally:
        rig.close()


def test_what_was_stored_is_hit_by_the_next_pool(tmp_path: Path) -> None:
    prefixes = [chain(name, 24) for name in range(3)]
    contents = []
    with running(tmp_path) as rig:
        for name, keys in enumerate(prefixes):
            rig.fill(name, len(keys))
            contents.append(rig.pages[: len(keys)].copy())
            assert rig.store(keys) == len(keys)
        in_memory = rig.orchestrator.snapshot().devices[0].chunks
        assert in_memory > 8, "some of it lies in memory"
    with running(tmp_path) as rig:
        assert sum(rig.restored) == 3 * 24 and rig.restored[0] == 0
        for keys, content in zip(prefixes, contents, strict=True):
            assert rig.held(keys) == len(keys)
            rig.pages[:] = 0
            assert rig.load(keys).failed == []
            assert np.array_equal(rig.pages[: len(keys)], content)


def test_without_backups_a_prefix_ends_where_memory_held_it(tmp_path: Path) -> None:
    keys = chain(1, 24)
    with running(tmp_path, backup=False) as rig:
        rig.fill(1, 24)
        rig.store(keys)
        first = next(
            i for i, key in enumerate(keys) if rig.orchestrator.location_kind(key) == "dram"
        )
    with running(tmp_path, backup=False) as rig:
        assert rig.held(keys) == first < 24


def test_a_backed_up_chunk_leaves_memory_without_a_write(tmp_path: Path) -> None:
    with running(tmp_path, dram="2MiB") as rig:
        for name in range(4):
            rig.fill(name, 32)
            rig.store(chain(name, 32))
        now = rig.orchestrator.snapshot()
        assert now.backed_up_chunks > 0 and now.spilled_chunks > 0
        counted = [rig.engine.statistics(device.index) for device in rig.devices]
        chunks = sum(row.bytes_written for row in counted[1:]) // (64 << 10)
        stored = now.stored_chunks
        assert chunks <= stored + 8, "each chunk is written to an SSD once, and some headers"


def test_after_a_reset_nothing_comes_back(tmp_path: Path) -> None:
    keys = chain(1, 20)
    with running(tmp_path) as rig:
        rig.fill(1, 20)
        rig.store(keys)
        rig.orchestrator.reset()
        rig.plane.set_epoch(rig.orchestrator.epoch)
        rig.fill(2, 20)
        newer = chain(2, 20)
        rig.store(newer)
        assert rig.held(newer) == 20
    with running(tmp_path) as rig:
        assert rig.held(keys) == 0
        assert rig.held(newer) == 0, "other weights may have been loaded in between"


def test_a_chunk_that_changed_on_the_medium_is_a_miss(tmp_path: Path) -> None:
    keys = chain(1, 20)
    with running(tmp_path) as rig:
        rig.fill(1, 20)
        rig.store(keys)
    with running(tmp_path) as rig:
        plan = rig.orchestrator.plan_load(keys, request := rig.orchestrator.begin("look"))
        rig.orchestrator.complete_load(request)
        device, slot = int(plan.device[7]), plan.slot[7:8]
        assert device != NO_DEVICE
        offset = int(rig.devices[device].offsets(slot)[0])
        path = tmp_path / ("a" if device == 1 else "b") / "container.kvpool"
    with path.open("r+b", buffering=0) as opened:
        os.pwrite(opened.fileno(), b"changed!", offset + 4096)
        os.fsync(opened.fileno())
    with running(tmp_path) as rig:
        assert rig.held(keys) == 20, "the header is whole"
        assert rig.load(keys).failed == [7]
        assert rig.held(keys) == 7


def test_a_store_goes_on_where_the_restored_prefix_ends(tmp_path: Path) -> None:
    keys = chain(1, 40)
    with running(tmp_path) as rig:
        rig.fill(1, 40)
        rig.store(keys[:20])
    with running(tmp_path) as rig:
        rig.fill(1, 40)
        content = rig.pages[:40].copy()
        assert rig.store(keys) == 20
        assert rig.held(keys) == 40
        rig.pages[:] = 0
        assert rig.load(keys).failed == []
        assert np.array_equal(rig.pages[:40], content)


def test_a_spill_that_was_decided_before_a_reset_leaves_no_header(tmp_path: Path) -> None:
    with running(tmp_path, backup=False, dram="2MiB") as rig:
        moves = None
        while moves is None:
            rig.fill(1, 32)
            request = rig.orchestrator.begin("store")
            keys = chain(rig._next_job(), 30)
            positions = [(i + 1) * CHUNK_TOKENS for i in range(30)]
            plan = rig.orchestrator.reserve(keys, positions, request)
            page = {key: i for i, key in enumerate(keys)}
            blocks = np.array([page[key] for key in plan.keys], np.int32)
            rig.plane.submit_store(rig._next_job(), plan, blocks)
            rig.plane.drain(20.0)
            rig.orchestrator.acknowledge(rig.plane.take_report())
            moves = rig.orchestrator.take_moves()
        rig.orchestrator.reset()
        rig.plane.set_epoch(rig.orchestrator.epoch)
        rig.plane.submit_moves(moves)
        rig.settle()
    with running(tmp_path, backup=False, dram="2MiB") as rig:
        assert sum(rig.restored) == 0


def test_a_damaged_chunk_does_not_come_back_in_place_of_its_new_copy(tmp_path: Path) -> None:
    keys = chain(1, 20)
    with running(tmp_path, backup=False, dram="2MiB") as rig:
        rig.fill(1, 20)
        rig.store(keys)
        plan = rig.orchestrator.plan_load(keys, request := rig.orchestrator.begin("look"))
        rig.orchestrator.complete_load(request)
        on_file = next(i for i in range(20) if plan.device[i] > 0)
        offset = int(rig.devices[plan.device[on_file]].offsets(plan.slot[[on_file]])[0])
        path = tmp_path / " ab"[plan.device[on_file]] / "container.kvpool"
        with path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"changed!", offset)
            os.fsync(file.fileno())
        assert rig.load(keys).failed == [on_file]
        rig.settle()
    with running(tmp_path, backup=False, dram="2MiB") as rig:
        found = [key for device in rig.devices for key in device.survivors.keys]
        assert keys[on_file] not in found


def test_a_reset_goes_on_where_a_device_cannot_note_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, backup=False, dram="2MiB") as rig:
        rig.fill(1, 20)
        rig.store(chain(1, 20))

        def refuse(epoch: int) -> None:
            raise DeviceError("superblock", errno.EPERM)

        monkeypatch.setattr(rig.devices[1], "set_epoch", refuse)
        rig.orchestrator.reset()
        rig.plane.set_epoch(rig.orchestrator.epoch)
        rig.settle()
        states = [row.state for row in rig.orchestrator.snapshot().devices]
        assert states == [DeviceState.OK, DeviceState.READ_ONLY, DeviceState.OK]
        assert rig.store(chain(2, 20)) == 20
    with running(tmp_path, backup=False, dram="2MiB") as rig:
        assert not rig.devices[2].survivors.keys
        assert not set(chain(2, 20)) & set(rig.devices[1].survivors.keys)


def test_after_a_reset_the_header_that_is_taken_back_brings_no_others(tmp_path: Path) -> None:
    """A block of the header table is written whole: it must not tell of chunks after the reset."""
    with running(tmp_path, backup=False, dram="2MiB") as rig:
        rig.orchestrator.reset()
        rig.plane.set_epoch(rig.orchestrator.epoch)
        keys = chain(1, 20)
        rig.fill(1, 20)
        rig.store(keys)
        plan = rig.orchestrator.plan_load(keys, request := rig.orchestrator.begin("look"))
        rig.orchestrator.complete_load(request)
        damaged = [i for i in range(20) if plan.device[i] > 0][-1]
        offset = int(rig.devices[plan.device[damaged]].offsets(plan.slot[[damaged]])[0])
        path = tmp_path / " ab"[plan.device[damaged]] / "container.kvpool"
        with path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"changed!", offset)
            os.fsync(file.fileno())
        assert rig.load(keys).failed == [damaged]
        rig.settle()
    with running(tmp_path, backup=False, dram="2MiB") as rig:
        assert not any(device.survivors.keys for device in rig.devices)
