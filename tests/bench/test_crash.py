"""The crash harness: a few kills of a real pool, and lies planted so that it must see them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from bench import crash
from bench.crash_writer import (
    BRANCHES,
    FAMILIES,
    FILE_DEVICES,
    LEDGER_NAME,
    NEEDLES,
    SLOT_BYTES,
    STEM_CHUNKS,
    Findings,
    Ledger,
    Pool,
    Prefix,
    content,
    needle_prompt,
)
from kvpool.devices.flash import FlashDevice
from kvpool.layout import HEADER_BYTES, HEADER_DTYPE
from kvpool.medium import FILE_NAME
from kvpool.native import crc32c

FEWEST_KILLS, MOST_KILLS = 3, 20  # the more only where nothing came back yet
STORED = [Prefix(family, 0, 16) for family in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pool that holds STORED and was closed."""
    pool = Pool(tmp_path, Ledger(tmp_path / LEDGER_NAME))
    for prefix in STORED:
        pool.store(prefix)
        pool.finish(Findings())
    pool.close()
    return tmp_path


def check(folder: Path) -> crash.Tally:
    harness = crash.Harness("plane", folder, seed=0)
    harness.check()
    return harness.tally


def container(folder: Path, device: int) -> Path:
    return folder / FILE_DEVICES[device - 1] / FILE_NAME


def test_gate_16_after_kills_nothing_comes_back_that_is_a_lie(tmp_path: Path, seed: int) -> None:
    harness = crash.Harness("plane", tmp_path, seed)
    tally = harness.tally
    while tally.kills < FEWEST_KILLS or (not tally.hits and tally.kills < MOST_KILLS):
        harness.kill_one()
    harness.check()
    assert tally.verdict() == ""
    assert tally.hits and tally.loaded


def test_what_was_stored_comes_back(folder: Path) -> None:
    tally = check(folder)
    count = sum(prefix.length for prefix in STORED)
    stems = len(STORED) * (BRANCHES - 1) * STEM_CHUNKS  # which other branches load again
    assert (tally.hits, tally.loaded, tally.missed) == (count, count + stems, 0)
    assert tally.verdict() == ""


def test_gate_16_payloads_that_were_swapped_with_their_checksums_are_seen(folder: Path) -> None:
    pool = Pool(folder, Ledger(folder / LEDGER_NAME))
    device = pool.devices[1]
    slots, keys = device.survivors.slots[:2], device.survivors.keys[:2]
    offsets = [int(offset) for offset in device.offsets(slots)]
    assert isinstance(device, FlashDevice)
    start = device.lease.start
    pool.close()
    with open(container(folder, 1), "r+b") as file:
        payloads = []
        for offset in offsets:
            file.seek(offset)
            payloads.append(file.read(SLOT_BYTES))
        for slot, offset, payload in zip(slots, offsets, reversed(payloads), strict=True):
            file.seek(offset)
            file.write(payload)
            file.seek(start + int(slot) * HEADER_BYTES)
            header = np.frombuffer(bytearray(file.read(HEADER_BYTES)), HEADER_DTYPE)
            header["payload_crc"] = crc32c(payload)
            header["crc"] = crc32c(header.tobytes()[:-4])
            file.seek(start + int(slot) * HEADER_BYTES)
            file.write(header.tobytes())
    tally = check(folder)
    assert (tally.wrong, tally.phantom) == (2, 0)
    assert all(key.hex()[: crash.NAME_LETTERS] in tally.lies[0] for key in keys)
    assert "wrong" in tally.verdict()


def test_a_payload_that_does_not_fit_its_checksum_is_a_miss(folder: Path) -> None:
    pool = Pool(folder, Ledger(folder / LEDGER_NAME))
    offset = int(pool.devices[1].offsets(pool.devices[1].survivors.slots[:1])[0])
    pool.close()
    with open(container(folder, 1), "r+b") as file:
        file.seek(offset)
        file.write(b"changed!")
    tally = check(folder)
    assert tally.missed and tally.verdict() == ""


def test_what_comes_back_from_before_a_reset_is_a_phantom(folder: Path) -> None:
    ledger = Ledger(folder / LEDGER_NAME)
    ledger.note("reset")  # it never reached the pool
    ledger.close()
    tally = check(folder)
    assert tally.phantom == sum(prefix.length for prefix in STORED) and not tally.wrong
    assert "phantom" in tally.verdict()


def test_what_was_stored_under_a_key_before_a_reset_is_a_phantom(folder: Path) -> None:
    ledger = Ledger(folder / LEDGER_NAME)
    ledger.note("reset")
    ledger.note("store", 0, 0, 16)  # which never reached the pool either
    ledger.close()
    assert check(folder).phantom == sum(prefix.length for prefix in STORED)


def test_a_pool_that_does_not_open_is_reported(folder: Path) -> None:
    with open(container(folder, 1), "r+b") as file:
        file.write(b"somebody else's" * 1000)
    tally = check(folder)
    assert len(tally.opens_failed) == 1
    assert "ForeignContentError" in tally.verdict()


def test_a_run_in_which_nothing_came_back_proves_nothing() -> None:
    assert "nothing" in crash.Tally(kills=3).verdict()


def test_a_power_cut_mixes_whole_sectors_of_what_differs(rng: random.Random) -> None:
    sectors, first = 64, 8
    old = np.zeros(sectors * crash.SECTOR_BYTES, np.uint8)
    new = np.ones_like(old)
    new[-crash.SECTOR_BYTES :] = 0
    outcomes = set()
    for _ in range(100):
        mixed, count = crash.tear(old, new, first, rng)
        rows = mixed.reshape(sectors, -1)
        assert (rows == rows[:, :1]).all(), "a sector is of one moment"
        assert (rows[:first] == 1).all() and (rows[first:-1, 0] == 0).sum() == count
        outcomes.add(count)
    assert {0, sectors - first - 1} < outcomes, "all lands, all vanishes, and something between"
    unchanged, count = crash.tear(new, new, first, rng)
    assert count == 0 and np.array_equal(unchanged, new)


def test_no_two_chunks_or_needles_are_alike() -> None:
    keys = {
        key
        for family in range(FAMILIES)
        for branch in range(BRANCHES)
        for key in Prefix(family, branch).chunk_keys()
    }
    contents = {content(key, generation).tobytes() for key in keys for generation in (0, 1)}
    assert len(contents) == 2 * len(keys)
    assert len({tuple(needle_prompt(number)) for number in range(NEEDLES)}) == NEEDLES


def test_bad_options_are_refused_with_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--kills", "0"], ["--folder", str(folder)], ["--json", str(folder)]):
        assert crash.main(words) == 2
        refusal = capsys.readouterr().err
        assert refusal.startswith("crash: ") and refusal.count("\n") == 1
