"""Each kind of fault does what it says, when it says; all else is as on any file.

That a faulty device without rules keeps the contract is shown where all kinds of devices are.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.errors import DeviceError
from kvpool.faults import ALWAYS, FaultKind, FaultRule
from kvpool.native import ALIGN, EVENT_DONE, KIND_LOAD, KIND_STORE, KIND_WRITE, Arena
from tests.native.rig import TIMEOUT_S, Rig

MakeRig = Callable[..., Rig]
pytestmark = pytest.mark.usefixtures("no_leaks")
SLOTS = 16


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(*rules: FaultRule, seed: int = 1, **options: Any) -> Rig:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        rigs.append(Rig("faulty", folder, rules=rules, seed=seed, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def store(rig: Rig, slots: range = range(1)) -> list[int]:
    """Store the same chunk in each slot; return the results."""
    done = rig.run([rig.op(KIND_STORE, slot, slot) for slot in slots])
    return [int(event["result"]) for event in done]


def load(rig: Rig, slots: range = range(1)) -> list[int]:
    """Load each slot into the first pages, verified; return the results."""
    done = rig.run([rig.load(slot, slot, rig.crc(range(4))) for slot in slots])
    return [int(event["result"]) for event in done]


def counted(rig: Rig) -> dict[FaultKind, int]:
    """Return the counts that are not 0."""
    return {kind: n for kind, n in rig.engine.fault_counts(rig.device).items() if n}


def wait_for(rig: Rig, kind: FaultKind, count: int) -> None:
    """Wait until `count` faults of a kind were begun."""
    for _ in range(10_000):
        if rig.engine.fault_counts(rig.device)[kind] >= count:
            return
        rig.engine.wait(0.001)
    pytest.fail(f"no {count} operations are {kind.name}")


# ---- kinds ----


def test_an_error_moves_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.ERROR, reads=True, writes=True, every=2))
    assert store(rig, range(4)) == [-errno.EIO, 0, -errno.EIO, 0]
    assert not any(rig.media(0, rig.slot_bytes)) and any(rig.media(1, rig.slot_bytes))
    assert load(rig, range(1, 2)) == [-errno.EIO]
    assert load(rig, range(1, 2)) == [0]
    assert counted(rig) == {FaultKind.ERROR: 3}
    statistics = rig.engine.statistics(rig.device)
    assert (statistics.read_failures, statistics.write_failures) == (1, 2)


def test_a_full_device_refuses_writes(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.FULL, writes=True, first=1, every=0))
    assert store(rig, range(3)) == [0, -errno.ENOSPC, 0]
    assert counted(rig) == {FaultKind.FULL: 1}


def test_a_stale_write_says_it_was_made(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.STALE, writes=True))
    before = rig.media(0, rig.slot_bytes)
    assert store(rig) == [0]
    assert rig.media(0, rig.slot_bytes) == before
    assert load(rig) == [-errno.EBADMSG]


@pytest.mark.parametrize("seed", range(6))
def test_a_torn_write_lands_from_its_start(make_rig: MakeRig, seed: int) -> None:
    rig = make_rig(FaultRule(FaultKind.TORN, writes=True), seed=seed)
    before = rig.random.bytes(rig.slot_bytes)
    rig.path.write_bytes(before + bytes((SLOTS - 1) * rig.slot_bytes))
    assert store(rig) == [0]
    expected = rig.payload(range(4)) + bytes(-rig.chunk_bytes % ALIGN)
    found = rig.media(0, rig.slot_bytes)
    landed = next(i for i in range(len(expected)) if found[i] != expected[i]) // 512 * 512
    assert found == expected[:landed] + before[landed:]
    assert counted(rig) == {FaultKind.TORN: 1}


def test_tears_differ(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.TORN, writes=True))
    store(rig, range(SLOTS))
    lengths = {len(rig.media(slot, rig.slot_bytes).rstrip(b"\0")) for slot in range(SLOTS)}
    assert len(lengths) > 4


@pytest.mark.parametrize("kind", [KIND_STORE, KIND_LOAD])
def test_one_bit_is_another(make_rig: MakeRig, kind: int) -> None:
    write = kind == KIND_STORE
    rig = make_rig(FaultRule(FaultKind.FLIPPED, reads=not write, writes=write))
    payload = np.frombuffer(rig.payload(range(4)), np.uint8)
    assert store(rig) == [0]
    assert load(rig) == [-errno.EBADMSG]
    flipped = np.frombuffer(rig.media(0, rig.chunk_bytes), np.uint8) ^ payload
    assert int(np.bitwise_count(flipped).sum()) == write


def test_a_bit_of_a_raw_read_is_another(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.FLIPPED, reads=True))
    store(rig)
    arena = Arena(rig.slot_bytes)
    rig.run([rig.op(3, buffer=arena.address)])
    media = np.frombuffer(rig.media(0, rig.slot_bytes), np.uint8)
    assert int(np.bitwise_count(media ^ arena.array[: rig.slot_bytes]).sum()) == 1
    arena.close()


def test_a_short_transfer_ends_in_an_error(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.SHORT, reads=True, writes=True))
    assert store(rig, range(SLOTS)) == [-errno.EIO] * SLOTS
    whole = rig.payload(range(4)) + bytes(-rig.chunk_bytes % ALIGN)
    lengths = set()
    for slot in range(SLOTS):
        media = rig.media(slot, len(whole))
        landed = len(media.rstrip(b"\0")) + ALIGN - 1 & -ALIGN
        assert media == whole[:landed] + bytes(len(whole) - landed) and landed < len(whole)
        lengths.add(landed)
    assert len(lengths) > 1
    assert load(rig) == [-errno.EIO]


def test_a_misdirected_write_lands_in_another_slot(make_rig: MakeRig) -> None:
    rig = make_rig(slots=SLOTS)
    rig.engine.set_faults(rig.device, 3, [misdirected(rig, range(4, 8), writes=True)])
    payload = rig.payload(range(4))
    assert store(rig, range(4, 5)) == [0]
    there = [slot for slot in range(SLOTS) if rig.media(slot, rig.chunk_bytes) == payload]
    assert len(there) == 1 and there[0] in (5, 6, 7)
    assert store(rig, range(1)) == [0], "outside of the range"
    assert rig.media(0, rig.chunk_bytes) == payload
    assert counted(rig) == {FaultKind.MISDIRECTED: 1}


def test_a_misdirected_read_comes_from_another_slot(make_rig: MakeRig) -> None:
    rig = make_rig(slots=SLOTS)
    store(rig, range(1))
    rig.engine.set_faults(rig.device, 3, [misdirected(rig, range(2), reads=True)])
    rig.poison()
    first = rig.crc(range(4))
    store(rig, range(1, 2))
    rig.poison()
    (event,) = rig.run([rig.load(0, 0, first)])
    assert event["result"] == 0, "slot 1 was read, which holds what was asked for"
    rig.engine.set_faults(rig.device, 3, [misdirected(rig, range(1), reads=True)])
    rig.run([rig.op(KIND_LOAD)])
    assert counted(rig) == {FaultKind.MISDIRECTED: 1}, "there is no other place"


def misdirected(rig: Rig, slots: range, **directions: bool) -> FaultRule:
    """Misdirect within `slots`."""
    return FaultRule(
        FaultKind.MISDIRECTED,
        first_offset=slots.start * rig.slot_bytes,
        end_offset=slots.stop * rig.slot_bytes,
        unit=rig.slot_bytes,
        **directions,
    )


def test_a_slow_operation_takes_longer(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.SLOW, reads=True, delay_us=50_000, first=1, every=0))
    store(rig)
    fast, slow = rig.run([rig.op(KIND_LOAD, tag) for tag in range(2)])
    assert fast["result"] == slow["result"] == 0
    assert slow["nanoseconds"] >= 50_000_000
    assert counted(rig) == {FaultKind.SLOW: 1}


def test_what_is_stuck_waits_for_its_release(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.STUCK, reads=True, first=1, every=0), threads=2)
    store(rig)
    crc = rig.crc(range(4))
    rig.submit([rig.load(tag, 0, crc) for tag in range(4)])
    assert {int(e["tag"]) for e in rig.drain(3)} == {0, 2, 3}, "one thread is left"
    assert rig.engine.statistics(rig.device).queue_depth == 1
    rig.engine.release_stuck(rig.device)
    (event,) = rig.drain(1)
    assert (event["tag"], event["result"]) == (1, 0)


def test_all_threads_stuck_and_again(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.STUCK, reads=True), threads=2)
    store(rig)
    rig.submit([rig.op(KIND_LOAD, tag) for tag in range(4)])
    wait_for(rig, FaultKind.STUCK, 2)
    assert not rig.engine.poll().size
    rig.engine.release_stuck(rig.device)
    rig.drain(2)
    wait_for(rig, FaultKind.STUCK, 4)
    rig.engine.release_stuck(rig.device)
    rig.drain(2)


def test_close_ends_what_is_stuck_or_slow(make_rig: MakeRig) -> None:
    """Not in an hour; the device is gone with the engine."""
    hour_us = 3_600_000_000
    rig = make_rig(
        FaultRule(FaultKind.STUCK, reads=True, every=2),
        FaultRule(FaultKind.SLOW, reads=True, delay_us=hour_us),
        threads=4,
    )
    store(rig)
    rig.submit([rig.op(KIND_LOAD, tag) for tag in range(8)])
    wait_for(rig, FaultKind.STUCK, 1)
    wait_for(rig, FaultKind.SLOW, 1)
    rig.engine.close()


# ---- scripts ----


def outcome(rig: Rig) -> tuple[list[int], list[int], list[bytes], dict[FaultKind, int]]:
    """Return all that can be seen of some operations."""
    stored, loaded = store(rig, range(SLOTS)), load(rig, range(SLOTS))
    media = [rig.media(slot, rig.slot_bytes) for slot in range(SLOTS)]
    return stored, loaded, media, counted(rig)


def mixed(rig: Rig, probability: int) -> list[FaultRule]:
    """Return a rule of every kind that ends by itself."""
    rules = [
        FaultRule(kind, writes=True, probability=probability)
        for kind in FaultKind
        if kind not in (FaultKind.STUCK, FaultKind.LOST)
    ]
    for rule in list(rules):
        if rule.kind not in (FaultKind.TORN, FaultKind.STALE, FaultKind.FULL):
            rules.append(rule._replace(reads=True, writes=False))
    return [rule._replace(unit=rig.slot_bytes, delay_us=100) for rule in rules]


@pytest.mark.parametrize("threads", [1, 4])
def test_the_same_seed_does_the_same(make_rig: MakeRig, threads: int) -> None:
    """Whatever the threads do; but where one write goes to another's place, their order counts."""
    outcomes = []
    for seed in (5, 5, 6):
        rig = make_rig(threads=threads)
        kinds = [FaultKind.MISDIRECTED] if threads > 1 else []
        rules = [rule for rule in mixed(rig, 9000) if rule.kind not in kinds]
        rig.engine.set_faults(rig.device, seed, rules)
        outcomes.append(outcome(rig))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != outcomes[2]
    assert len(outcomes[0][3]) > 3


@pytest.mark.parametrize("probability", [0, 6553, ALWAYS])
def test_probability(make_rig: MakeRig, probability: int) -> None:
    rule = FaultRule(FaultKind.ERROR, writes=True, probability=probability)
    rig = make_rig(rule, queue_entries=1024)
    rig.run([rig.op(KIND_STORE, tag, tag % SLOTS) for tag in range(600)])
    found = rig.engine.fault_counts(rig.device)[FaultKind.ERROR]
    assert abs(found - 600 * probability / ALWAYS) < 30 * (0 < probability < ALWAYS) + 1


def test_reads_and_writes_are_numbered_apart(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.ERROR, reads=True, writes=True, first=2, every=3))
    assert store(rig, range(7)) == [0, 0, -errno.EIO, 0, 0, -errno.EIO, 0]
    assert load(rig, range(1)) == load(rig, range(1)) == [0]
    assert load(rig, range(1)) == [-errno.EIO]


def test_the_first_rule_that_hits_decides(make_rig: MakeRig) -> None:
    full = FaultRule(FaultKind.FULL, writes=True, every=2)
    rig = make_rig(full, FaultRule(FaultKind.ERROR, writes=True))
    assert store(rig, range(4)) == [-errno.ENOSPC, -errno.EIO] * 2


def test_another_script(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.ERROR, writes=True))
    assert store(rig) == [-errno.EIO]
    rig.engine.set_faults(rig.device, 1, [])
    assert store(rig) == load(rig) == [0]
    assert counted(rig) == {FaultKind.ERROR: 1}, "counts go on"


BAD = [
    FaultRule(FaultKind.LOST, writes=True),
    FaultRule(FaultKind.ERROR),
    FaultRule(FaultKind.ERROR, writes=True, probability=ALWAYS + 1),
    FaultRule(FaultKind.TORN, reads=True, writes=True),
    FaultRule(FaultKind.STALE, reads=True),
    FaultRule(FaultKind.FULL, reads=True),
    FaultRule(FaultKind.MISDIRECTED, writes=True, unit=0),
    FaultRule(FaultKind.MISDIRECTED, writes=True, unit=512),
    FaultRule(FaultKind.MISDIRECTED, writes=True, first_offset=1),
]


@pytest.mark.parametrize("rule", BAD)
def test_bad_rules(make_rig: MakeRig, rule: FaultRule) -> None:
    rig = make_rig()
    for change in (
        lambda: rig.engine.set_faults(rig.device, 1, [rule]),
        lambda: rig.engine.add_faulty_device(rig.fd, 1 << 20, seed=1, rules=[rule]),
        lambda: rig.engine.set_faults(rig.module, 1, []),
        lambda: rig.engine.set_faults(rig.device, 1, [FaultRule(FaultKind.FULL, writes=True)] * 65),
    ):
        with pytest.raises(DeviceError) as caught:
            change()
        assert caught.value.errno == errno.EINVAL
    assert store(rig) == [0]


# ---- crashes ----


def write(rig: Rig, slot: int, content: bytes) -> None:
    arena = Arena(rig.slot_bytes)
    arena.array[: rig.slot_bytes] = np.frombuffer(content, np.uint8)
    (event,) = rig.run([rig.op(KIND_WRITE, slot=slot, buffer=arena.address)])
    assert event["result"] == 0
    arena.close()


def fate(found: bytes, before: bytes, after: bytes) -> str:
    """Say what became of a write."""
    if found in (before, after):
        return "landed" if found == after else "vanished"
    landed = next(i for i in range(len(after)) if found[i] != after[i]) // 512 * 512
    assert landed and found == after[:landed] + before[landed:]
    return "torn"


def test_each_unsynced_write_lands_vanishes_or_tears(make_rig: MakeRig) -> None:
    fates = []
    for seed in (4, 4, 5):
        rig = make_rig(seed=seed, volatile_bytes=64 << 20)
        old, new = ([rig.random.bytes(rig.slot_bytes) for _ in range(SLOTS)] for _ in range(2))
        for slot in range(SLOTS):
            write(rig, slot, old[slot])
        rig.engine.sync(rig.device)
        for slot in range(1, SLOTS):
            write(rig, slot, new[slot])
        rig.engine.crash(rig.device)
        media = [rig.media(slot, rig.slot_bytes) for slot in range(SLOTS)]
        assert media[0] == old[0], "what was synced stays"
        fates.append([fate(media[i], old[i], new[i]) for i in range(1, SLOTS)])
        lost = rig.engine.fault_counts(rig.device)[FaultKind.LOST]
        assert lost == sum(each != "landed" for each in fates[-1])
        rig.engine.crash(rig.device)
        assert [rig.media(slot, rig.slot_bytes) for slot in range(SLOTS)] == media
    assert fates[0] == fates[1] != fates[2]
    assert set(fates[0]) == {"landed", "vanished", "torn"}


def test_a_place_that_was_written_twice(make_rig: MakeRig) -> None:
    """The later write may vanish while the earlier one stays, sector by sector."""
    found = set()
    for seed in range(24):
        rig = make_rig(seed=seed, volatile_bytes=64 << 20)
        contents = [bytes([number]) * rig.slot_bytes for number in range(3)]
        for content in contents[1:]:
            write(rig, 0, content)
        rig.engine.crash(rig.device)
        media = rig.media(0, rig.slot_bytes)
        found.add(tuple(sorted({media[i] for i in range(0, len(media), 512)})))
    assert {(0,), (1,), (2,)} <= found


def test_the_log_of_unsynced_writes_is_bounded(make_rig: MakeRig) -> None:
    rig = make_rig(volatile_bytes=2 * (64 << 10))
    for slot in range(SLOTS):
        write(rig, slot, b"\1" * rig.slot_bytes)
    rig.engine.crash(rig.device)
    landed = [rig.media(slot, rig.slot_bytes) == b"\1" * rig.slot_bytes for slot in range(SLOTS)]
    assert landed[:-2] == [True] * (SLOTS - 2), "what is older has landed"


def test_only_an_idle_device_crashes(make_rig: MakeRig) -> None:
    rig = make_rig(FaultRule(FaultKind.STUCK, reads=True), volatile_bytes=1 << 20)
    rig.submit(rig.op(KIND_LOAD))
    with pytest.raises(DeviceError) as caught:
        rig.engine.crash(rig.device)
    assert caught.value.errno == errno.EBUSY
    wait_for(rig, FaultKind.STUCK, 1)
    rig.engine.release_stuck(rig.device)
    assert rig.engine.wait(TIMEOUT_S)
    assert [int(event["kind"]) for event in rig.engine.poll()] == [EVENT_DONE]
    rig.engine.crash(rig.device)
