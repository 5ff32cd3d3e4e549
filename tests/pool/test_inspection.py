"""`kvpool inspect` and `kvpool verify`: what they show, what they find, what they leave alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvpool import inspection, layout, probe
from kvpool.cli import main
from kvpool.container import Container, Lease
from kvpool.errors import DeviceError
from kvpool.medium import Medium
from kvpool.native import crc32c
from tests.pool.containers import NAMESPACE, OTHER, SIZE, SLOT, poke
from tests.pool.loop import loop_device, needs_loop_devices

SLOTS = 40
LENGTH = SLOT - 100


def kvpool(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def view(what: str | Path) -> dict[str, Any]:
    result = kvpool("inspect", "--json", what)
    assert result.exit_code == 0, result.output
    shown: dict[str, Any] = json.loads(result.stdout)
    return shown


def verify(what: str | Path) -> tuple[int, dict[str, Any]]:
    result = kvpool("verify", "--json", what)
    return result.exit_code, json.loads(result.stdout)


def take(container: Container, name: bytes = NAMESPACE, rank: int = 0) -> Lease:
    return container.acquire(name, rank, "0", SLOTS, SLOT, grace_s=0)


def payload(slot: int, seed: int = 0) -> bytes:
    return np.random.default_rng([slot, seed]).bytes(LENGTH)


def store(container: Container, lease: Lease, slots: list[int], seed: int = 0) -> None:
    """Write payloads, and headers that describe them; a slot's KV group is its number mod 3."""
    describe(container, lease, slots, seed)
    for slot, offset in zip(slots, lease.offsets(np.array(slots, np.int32)), strict=True):
        poke(container.path, int(offset), payload(slot, seed))


def describe(container: Container, lease: Lease, slots: list[int], seed: int = 0) -> None:
    chosen = np.array(slots, np.int32)
    blocks = lease.set_headers(
        chosen,
        [b"%d-%d" % (slot, seed) for slot in slots],
        [b""] * len(slots),
        chosen,
        (chosen % 3).astype(np.uint8),
        np.full(chosen.size, LENGTH, np.uint32),
        np.array([crc32c(payload(slot, seed)) for slot in slots], np.uint32),
        lease.epoch,
    )
    for block in blocks.tolist():
        rows = lease.headers[block * 32 : block * 32 + 32].tobytes().ljust(4096, b"\0")
        poke(container.path, lease.start + block * 4096, rows)


def payload_offset(lease: Lease, slot: int) -> int:
    return int(lease.offsets(np.array([slot], np.int32))[0])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WRITE_S", "READ_S", "TOGETHER_S"):
        monkeypatch.setattr(probe, name, 0.02)


# ---- inspect --------------------------------------------------------------------------------


def test_what_is_there_is_shown(container: Container, folder: Path) -> None:
    first, second = take(container), take(container, OTHER, rank=7)
    store(container, first, [0, 1, 2, 3, 39])
    shown = view(folder)
    assert (shown["format_version"], shown["size"]) == (1, SIZE)
    assert shown["uuid"] == container.uuid and shown["damaged"] == []
    one, two = shown["leases"]
    assert (one["namespace"], one["rank"], one["owner"]) == (NAMESPACE.hex(), 0, "0")
    assert one["chunks"] == {"0": 3, "1": 1, "2": 1} and one["fill"] == 5 / SLOTS
    assert one["in_use"] and one["pid"] == os.getpid() and one["epoch"] == 1
    assert (two["namespace"], two["rank"], two["chunks"]) == (OTHER.hex(), 7, {})
    second.close()
    one, two = view(folder)["leases"]
    assert one["in_use"] and not two["in_use"] and 0 <= two["unused_s"] < 3600


def test_the_table_says_the_same(container: Container, folder: Path, quick: None) -> None:
    lease = take(container)
    store(container, lease, [0, 1])
    lease.close()
    assert kvpool("probe", f"file:{folder}?size=16MiB").exit_code == 0
    result = kvpool("inspect", folder)
    assert result.exit_code == 0
    for text in (container.uuid, NAMESPACE.hex()[:12], "0: 1, 1: 1", "idle", "5.0", "read GB/s"):
        assert text in result.stdout


def test_without_leases(container: Container, folder: Path) -> None:
    assert view(folder)["leases"] == []
    assert "no leases" in kvpool("inspect", folder).stdout
    assert kvpool("verify", folder).exit_code == 0


def test_every_way_to_name_it(container: Container, folder: Path) -> None:
    for what in (folder, container.path, f"file:{folder}", f"file:{folder}?size=16MiB"):
        assert view(what)["uuid"] == container.uuid
        assert verify(what)[0] == 0


@needs_loop_devices
def test_a_block_device(tmp_path: Path) -> None:
    with loop_device(tmp_path / "disk", SIZE) as device:
        opened = Container.open(device)
        store(opened, take(opened), [0, 1])
        for what in (device, f"block:{device}"):
            assert view(what)["leases"][0]["in_use"]
            code, report = verify(what)
            assert code == 0 and report["leases"][0]["good"] == 2
        opened.close()


# ---- verify ---------------------------------------------------------------------------------


def test_all_right(container: Container, folder: Path) -> None:
    lease = take(container)
    store(container, lease, list(range(SLOTS)))
    lease.close()
    code, report = verify(folder)
    assert code == 0 and report["all_right"]
    assert [lease["good"] for lease in report["leases"]] == [SLOTS]
    assert "all right" in kvpool("verify", folder).stdout


@pytest.mark.parametrize("at", [0, 4095, 4096, LENGTH - 1])
@pytest.mark.parametrize("in_use", [False, True])
def test_a_changed_payload_is_found(
    container: Container, folder: Path, at: int, in_use: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "SETTLE_S", 0.0)
    monkeypatch.setattr(inspection, "_PIECE_BYTES", 8192)
    lease = take(container)
    store(container, lease, [3, 4, 5])
    poke(container.path, payload_offset(lease, 4) + at, bytes([payload(4)[at] ^ 1]))
    poke(container.path, payload_offset(lease, 5) + LENGTH, b"beyond")
    if not in_use:
        lease.close()
    code, report = verify(folder)
    (found,) = report["leases"]
    assert code == 1 and not report["all_right"]
    assert (found["good"], found["damaged"], found["damaged_slots"]) == (2, 1, [4])
    assert "damaged" in kvpool("verify", folder).stdout


def test_headers_damaged_and_stale_are_told_apart(container: Container, folder: Path) -> None:
    lease = take(container)
    store(container, lease, list(range(10)))
    lease.advance_epoch(2)
    store(container, lease, [0, 1, 2, 3])
    poke(container.path, lease.start + 2 * 128 + 20, b"\xff")
    lease.close()
    code, report = verify(folder)
    (found,) = report["leases"]
    assert code == 1
    assert (found["good"], found["stale"], found["damaged_headers"]) == (3, 6, 1)
    (shown,) = view(folder)["leases"]
    assert (shown["stale_headers"], shown["damaged_headers"]) == (6, 1)
    assert sum(shown["chunks"].values()) == 3


@pytest.mark.parametrize(
    ("offset", "what"),
    [
        (512, "superblock A"),
        (4096 + 512, "superblock B"),
        (layout.TABLE_OFFSET + 16, "lease table entry 0"),
        (layout.TABLE_OFFSET + 5 * 256 + 16, "lease table entry 5"),
        (layout.PROFILE_OFFSET + 16, "profile"),
    ],
)
def test_damaged_metadata_is_named(
    container: Container, folder: Path, offset: int, what: str
) -> None:
    take(container).close()
    poke(container.path, offset, b"\xff")
    code, report = verify(folder)
    assert code == 1 and report["damaged"] == [what] == view(folder)["damaged"]
    assert what in kvpool("verify", folder).stdout and what in kvpool("inspect", folder).stdout


def test_many_damaged_chunks_are_counted_and_few_named(
    container: Container, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_MAX_SUSPECTS", 2)
    monkeypatch.setattr(inspection, "MAX_LISTED", 3)
    lease = take(container)
    describe(container, lease, list(range(SLOTS)))  # and no payload
    lease.close()
    (found,) = verify(folder)[1]["leases"]
    assert (found["good"], found["damaged"], found["damaged_slots"]) == (0, SLOTS, [0, 1, 2])


def test_what_cannot_be_read_is_damaged(
    container: Container, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = container.acquire(NAMESPACE, 0, "0", 100, SLOT)
    store(container, lease, list(range(100)))
    lease.close()
    read_into = Medium.read_into
    bad = {lease.start + 4096, payload_offset(lease, 7)}  # slots 32 to 63, and 7

    def failing(self: Medium, offset: int, buffer: memoryview) -> int:
        if any(offset <= at < offset + len(buffer) for at in bad):
            raise DeviceError("read", 5)
        return read_into(self, offset, buffer)

    monkeypatch.setattr(Medium, "read_into", failing)
    code, report = verify(folder)
    (found,) = report["leases"]
    assert code == 1
    assert (found["good"], found["damaged"], found["damaged_slots"]) == (67, 1, [7])
    assert found["damaged_headers"] == 32


# ---- while an engine uses it ----------------------------------------------------------------


def test_nothing_is_changed_or_locked(container: Container, folder: Path) -> None:
    lease = take(container)
    store(container, lease, [0, 1])
    before = container.path.read_bytes()
    with inspection.Inspection(str(folder)) as opened:
        opened.view()
        opened.verify()
        another = Container.open(folder)  # an engine that starts meanwhile waits for nothing
        take(another, OTHER).release()
        another.close()
        lease.advance_epoch(1)
    assert container.path.read_bytes() == before


def between_looks(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Have `action` happen where `verify` waits for an engine."""
    monkeypatch.setattr(inspection.time, "sleep", lambda seconds: action())


def test_a_payload_whose_header_is_under_way_is_no_damage(
    container: Container, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = take(container)
    store(container, lease, [0, 1, 2])
    poke(container.path, payload_offset(lease, 1), payload(1, seed=1))
    between_looks(monkeypatch, lambda: describe(container, lease, [1], seed=1))
    code, report = verify(folder)
    (found,) = report["leases"]
    assert code == 0 and (found["good"], found["damaged"], found["in_use"]) == (2, 0, 1)


def test_a_payload_that_is_whole_the_next_time_is_good(
    container: Container, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = take(container)
    describe(container, lease, [1])
    between_looks(monkeypatch, lambda: store(container, lease, [1]))
    code, report = verify(folder)
    assert code == 0 and report["leases"][0]["good"] == 1


@pytest.mark.parametrize("event", ["reset", "released"])
def test_a_lease_that_ends_meanwhile_is_no_damage(
    container: Container, folder: Path, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = take(container)
    describe(container, lease, [1, 2])
    end = lease.release if event == "released" else lambda: lease.advance_epoch(9)
    between_looks(monkeypatch, end)
    code, report = verify(folder)
    assert code == 0 and report["leases"][0]["in_use"] == 2


# ---- what is refused ------------------------------------------------------------------------


def refused(what: str | Path, text: str) -> None:
    for command in ("inspect", "verify"):
        result = kvpool(command, what)
        assert result.exit_code == 2 and text in result.stderr, result.output
        assert result.stderr.startswith("kvpool: ") and result.stderr.count("\n") == 1


def test_what_is_not_ours(tmp_path: Path) -> None:
    file = tmp_path / "container.kvpool"
    refused(tmp_path, "there is no container")
    refused(tmp_path / "none", "there is no container")
    file.write_bytes(b"precious")
    refused(tmp_path, "is not a container of kvpool")
    file.unlink()
    file.mkdir()
    refused(tmp_path, "is a folder")
    file.rmdir()
    os.mkfifo(file)
    refused(tmp_path, "is a FIFO")
    refused(tmp_path / "container.kvpool" / "deeper", "Not a directory")
    refused("dram:1GiB", "memory holds nothing")
    refused("file:/a/{rank}?size=1GiB", "without {rank}")
    refused("/dev/null", "is a device")


def test_links_are_not_followed(container: Container, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "container.kvpool").symlink_to(container.path)
    refused(tmp_path / "other", "is a symbolic link")
    refused(tmp_path / "other" / "container.kvpool", "is a symbolic link")


def test_what_cannot_be_used(container: Container, folder: Path) -> None:
    container.close()
    whole = container.path.read_bytes()
    os.truncate(container.path, SIZE - 4096)
    refused(folder, f"{SIZE - 4096} bytes of 16MiB")
    os.truncate(container.path, 0)
    refused(folder, "never finished")
    container.path.write_bytes(bytes(100) + whole[100:4096] + bytes(100) + whole[4196:])
    refused(folder, "is not a container of kvpool")
    block = bytearray(whole[:4096])
    block[8:12] = (99).to_bytes(4, "little")
    block[-4:] = crc32c(block[:-4]).to_bytes(4, "little")
    container.path.write_bytes(bytes(block) + whole[4096:])
    refused(folder, "format version 99")
