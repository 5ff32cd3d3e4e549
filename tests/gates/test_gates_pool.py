"""Gates that need no engine: what operators of such systems report, and what ours does instead.

Each test has a sibling, `..._without_the_guard`, in which the guard is taken out: there the same
check fails, so it is the guard that matters.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool import config, dataplane, native
from kvpool.container import Container
from kvpool.dataplane import DataPlane
from kvpool.errors import ConfigurationError, KVPoolError
from kvpool.faults import FaultKind, FaultRule
from kvpool.health import DeviceHealth
from kvpool.jobs import Write
from kvpool.loads import Loads
from kvpool.metrics import Collector
from kvpool.plan import merge_reports
from kvpool.types import DeviceState, WorkerReport
from tests.control.rig import device, hits, load, make, store
from tests.dataplane.rig import Rig, chain, file_device
from tests.faulty_engine import FaultyEngine

SLOT = 64 << 10
STUCK_WRITES = FaultRule(FaultKind.STUCK, writes=True)


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    """Pools that are closed at the end, their devices mended."""
    opened: list[Rig] = []
    yield opened
    for rig in opened:
        if isinstance(rig.engine, FaultyEngine):
            rig.engine.mend_files()
            rig.plane.drain(20.0)
            while any(rig.engine.statistics(device.index).queue_depth for device in rig.devices):
                rig.plane.wait(0.02)
                rig.plane.poll()
        rig.close()


def pool(rigs: list[Rig], folder: Path, *, dram: str = "", size: str = "32MiB") -> Rig:
    devices = [f"dram:{dram}"] if dram else []
    rigs.append(Rig([*devices, file_device(folder, "a", size)], engine=FaultyEngine(SLOT)))
    return rigs[-1]


def break_files(rig: Rig, *rules: FaultRule) -> None:
    assert isinstance(rig.engine, FaultyEngine)
    rig.engine.break_files(7, rules)


def stored(rig: Rig, name: int = 1, count: int = 24) -> np.ndarray:
    rig.fill(name, count)
    rig.store(chain(name, count))
    return rig.pages[:count].copy()


# ---- 3: a damaged chunk is a miss -----------------------------------------------------------

DAMAGE = {
    "unreadable": FaultRule(FaultKind.ERROR, reads=True, first=3, every=0),
    "short": FaultRule(FaultKind.SHORT, reads=True, first=3, every=0),
    "flipped": FaultRule(FaultKind.FLIPPED, reads=True, first=3, every=0),
    "misplaced": FaultRule(FaultKind.MISDIRECTED, reads=True, first=3, every=0, unit=SLOT),
    "torn": FaultRule(FaultKind.TORN, writes=True, first=3, every=0),
    "vanished": FaultRule(FaultKind.STALE, writes=True, first=3, every=0),
}
SILENT = ("flipped", "misplaced", "torn", "vanished")


def check_damage(rig: Rig, rule: FaultRule) -> None:
    break_files(rig, rule)
    content = stored(rig)
    rig.pages[:] = 0
    failed = rig.load(chain(1, 24)).failed
    good = [i for i in range(24) if i not in failed]
    assert np.array_equal(rig.pages[good], content[good]), "wrong bytes count as loaded"
    assert len(failed) == 1 and rig.held(chain(1, 24)) == failed[0]
    assert rig.orchestrator.snapshot().devices[0].retired_slots == 1
    counted = rig.engine.statistics(rig.devices[0].index)
    assert counted.read_failures + counted.checksum_failures == 1
    rig.fill(1, 24)
    rig.store(chain(1, 24))
    rig.pages[:] = 0
    assert rig.load(chain(1, 24)).failed == [] and np.array_equal(rig.pages[:24], content)


@pytest.mark.parametrize("damage", DAMAGE)
def test_gate_03_a_damaged_chunk_is_a_miss(damage: str, tmp_path: Path, rigs: list[Rig]) -> None:
    check_damage(pool(rigs, tmp_path), DAMAGE[damage])


@pytest.mark.parametrize("damage", SILENT)
def test_gate_03_without_the_guard(
    damage: str, tmp_path: Path, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "FLAG_VERIFY", 0)
    with pytest.raises(AssertionError):
        check_damage(pool(rigs, tmp_path), DAMAGE[damage])


# ---- 2: after a restart, the right bytes or a miss ------------------------------------------


def check_swapped_payloads(folder: Path, rigs: list[Rig]) -> None:
    """Two chunks changed places on the medium while nobody looked."""
    first = pool(rigs, folder)
    content = stored(first)
    offsets = [int(first.devices[0].offsets(np.array([slot], np.int32))[0]) for slot in (2, 5)]
    rigs.remove(first)
    first.close()
    with (folder / "a" / "container.kvpool").open("r+b", buffering=0) as file:
        payloads = [os.pread(file.fileno(), SLOT, offset) for offset in offsets]
        for payload, offset in zip(payloads, reversed(offsets), strict=True):
            os.pwrite(file.fileno(), payload, offset)
        os.fsync(file.fileno())
    second = pool(rigs, folder)
    assert second.held(chain(1, 24)) == 24, "the headers say that they are there"
    failed = second.load(chain(1, 24)).failed
    good = [i for i in range(24) if i not in failed]
    assert np.array_equal(second.pages[good], content[good]), "another chunk's bytes"
    assert len(failed) == 2


def test_gate_02_chunks_that_changed_places_before_a_restart(
    tmp_path: Path, rigs: list[Rig]
) -> None:
    check_swapped_payloads(tmp_path, rigs)


def test_gate_02_without_the_guard(
    tmp_path: Path, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "FLAG_VERIFY", 0)
    with pytest.raises(AssertionError, match="another chunk"):
        check_swapped_payloads(tmp_path, rigs)


# ---- 4: sizes are limits --------------------------------------------------------------------


def check_size(folder: Path, rigs: list[Rig]) -> None:
    rig = pool(rigs, folder, size="8MiB")
    for name in range(12):
        stored(rig, name)
    status = (folder / "a" / "container.kvpool").stat()
    assert status.st_size <= 8 << 20
    # The file system keeps a block or two of its own for it.
    assert status.st_blocks * 512 <= (8 << 20) + (64 << 10)
    assert rig.held(chain(11, 24)) == 24, "the newest is there"


def test_gate_04_a_file_never_passes_its_size(tmp_path: Path, rigs: list[Rig]) -> None:
    check_size(tmp_path, rigs)


def test_gate_04_without_the_guard(
    tmp_path: Path, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Container.slots_for
    monkeypatch.setattr(Container, "slots_for", lambda *args: counted(*args) * 2)
    with pytest.raises((AssertionError, KVPoolError)):
        check_size(tmp_path, rigs)


def check_full_disk(rig: Rig) -> None:
    content = stored(rig)
    break_files(rig, FaultRule(FaultKind.FULL, writes=True))
    stored(rig, 2)
    state = rig.orchestrator.snapshot().devices[0].state
    rig.pages[:] = 0
    assert rig.load(chain(1, 24)).failed == [] and np.array_equal(rig.pages[:24], content)
    refused = rig.engine.statistics(rig.devices[0].index).write_failures
    stored(rig, 3)
    assert rig.engine.statistics(rig.devices[0].index).write_failures == refused, "it goes on"
    assert state is DeviceState.READ_ONLY


def test_gate_04_a_full_disk_ends_writing_and_not_serving(tmp_path: Path, rigs: list[Rig]) -> None:
    check_full_disk(pool(rigs, tmp_path))


def test_gate_04_a_full_disk_without_the_guard(
    tmp_path: Path, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceHealth, "observe", lambda *_: False)
    with pytest.raises(AssertionError, match="it goes on"):
        check_full_disk(pool(rigs, tmp_path))


# ---- 7: a prefix larger than memory ---------------------------------------------------------


def check_large_prefix(rig: Rig) -> None:
    content = stored(rig, count=96)
    assert rig.devices[0].slots * 3 <= 96
    rig.pages[:] = 0
    assert rig.held(chain(1, 96)) == 96
    assert rig.load(chain(1, 96)).failed == [] and np.array_equal(rig.pages[:96], content)
    assert all(row.hit_chunks for row in rig.orchestrator.snapshot().devices), "from all devices"


def test_gate_07_a_prefix_three_times_memory(tmp_path: Path, rigs: list[Rig]) -> None:
    check_large_prefix(pool(rigs, tmp_path, dram="2MiB"))


def test_gate_07_without_the_guard(tmp_path: Path, rigs: list[Rig]) -> None:
    rigs.append(Rig(["dram:2MiB"]))
    with pytest.raises(AssertionError):
        check_large_prefix(rigs[-1])


# ---- 10: ranks agree ------------------------------------------------------------------------


def check_ranks() -> None:
    """Rank 1 could not verify a chunk; rank 0 could. Both have to compute it."""
    orchestrator = make([device("file", 40, 1.0)], ranks=2)
    store(orchestrator, "a", 8)
    plan, _ = load(orchestrator, "a", 8)
    rank0 = WorkerReport(finished_loads={plan.load_id: 1})
    rank1 = WorkerReport(finished_loads={plan.load_id: 1}, failed_loads={plan.load_id: {5}})
    orchestrator.acknowledge(merge_reports(rank0, rank1))
    assert hits(orchestrator, "a", 8) == 5


def test_gate_10_a_chunk_that_one_rank_lost_is_a_miss_for_all() -> None:
    check_ranks()


def test_gate_10_without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loads, "fail", lambda *_: None)
    with pytest.raises(AssertionError):
        check_ranks()


# ---- 11: a dead device ----------------------------------------------------------------------


def check_dead_device(rig: Rig) -> None:
    stored(rig)
    break_files(rig, FaultRule(FaultKind.ERROR, reads=True, writes=True))
    lines = []
    for name in (1, 2, 3):
        if rig.held(chain(1, 24)) == 24:
            rig.load(chain(1, 24))
        rig.fill(name, 24)
        rig.store(chain(name, 24))
        lines += rig.orchestrator.take_announcements()
    collector = Collector()
    samples = collector.collect(rig.orchestrator.snapshot())
    up = {s.labels[0]: s.value for s in samples if s.name == "kvpool_device_up"}
    assert list(up.values()) == [1, 0], "the metrics tell"
    assert len(lines) == 1 and "left the pool" in lines[0], "it is said once"
    assert rig.store(chain(4, 24)) == 24 and rig.load(chain(4, 24)).failed == []


def test_gate_11_a_dead_device_leaves_the_pool(tmp_path: Path, rigs: list[Rig]) -> None:
    check_dead_device(pool(rigs, tmp_path, dram="16MiB"))


def test_gate_11_without_the_guard(
    tmp_path: Path, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceHealth, "observe", lambda *_: False)
    with pytest.raises(AssertionError, match="the metrics tell"):
        check_dead_device(pool(rigs, tmp_path, dram="16MiB"))


# ---- 13: every key is used or refused -------------------------------------------------------


def check_keys() -> None:
    devices = ["dram:64MiB"]
    plain = config.from_mapping({"devices": devices})
    for key in config._KEYS:
        if key in ("devices", "config"):
            continue
        values = ([1, "serial", True, False, "x"] if key not in config.VLLM_KEYS else ["x"]).copy()
        used = []
        for value in values:
            try:
                used.append(config.from_mapping({"devices": devices, key: value}) != plain)
            except ConfigurationError as error:
                assert key in str(error)
        assert any(used), f"{key} is accepted and changes nothing"
    for unknown in ("device", "blocks_per_chunks", "size"):
        with pytest.raises(ConfigurationError, match=unknown):
            config.from_mapping({"devices": devices, unknown: 1})


def test_gate_13_every_key_is_used_or_refused() -> None:
    check_keys()


def test_gate_13_without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_refuse_unknown", lambda *_: None)
    with pytest.raises(pytest.fail.Exception):
        check_keys()


# ---- 14: metrics say what happened ----------------------------------------------------------


def check_metrics(rig: Rig) -> None:
    """24 chunks are stored and loaded twice: so many bytes, chunks and misses."""
    collector = Collector()
    counted: Counter[str] = Counter()
    for turn in range(3):
        rig.fill(1, 24)
        rig.store(chain(1, 24)) if turn == 0 else rig.load(chain(1, 24))
        collector.add_report(rig.last_report, [device.name for device in rig.devices])
        for sample in collector.collect(rig.orchestrator.snapshot()):
            if sample.name.endswith("_total"):
                counted[sample.name] += int(sample.value)
    assert counted["kvpool_read_bytes_total"] == 2 * 24 * SLOT
    assert counted["kvpool_hit_chunks_total"] == 48
    assert counted["kvpool_stored_chunks_total"] == counted["kvpool_miss_chunks_total"] == 24


def test_gate_14_metrics_of_a_known_workload(tmp_path: Path, rigs: list[Rig]) -> None:
    check_metrics(pool(rigs, tmp_path))


def test_gate_14_without_the_guard(
    tmp_path: Path, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Collector, "add_report", lambda *_: None)
    with pytest.raises(AssertionError):
        check_metrics(pool(rigs, tmp_path))


# ---- 15: memory is bounded ------------------------------------------------------------------


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_memory(rig: Rig, leak: list[bytearray] | None) -> None:
    sizes, leaked = {}, resident_bytes() // 5000  # by a fifth in a thousand requests
    for request in range(1, 1001):
        name = request % 40
        rig.store(chain(name, 16))
        rig.load(chain(name, rig.held(chain(name, 16))))
        if leak is not None:
            leak.append(bytearray(b"x") * leaked)
        if request in (100, 1000):
            sizes[request] = resident_bytes()
    assert sizes[1000] <= sizes[100] * 1.05


def test_gate_15_memory_after_a_thousand_requests(tmp_path: Path, rigs: list[Rig]) -> None:
    check_memory(pool(rigs, tmp_path, dram="16MiB"), None)


def test_gate_15_without_the_guard(tmp_path: Path, rigs: list[Rig]) -> None:
    """The guard is that nothing is kept: here something is with each request."""
    with pytest.raises(AssertionError):
        check_memory(pool(rigs, tmp_path, dram="16MiB"), [])


# ---- 20: a store waits for no medium --------------------------------------------------------


def check_slow_medium(rig: Rig) -> None:
    """The file answers no write; more is stored than staging holds."""
    break_files(rig, STUCK_WRITES)
    staging = 16
    request = rig.orchestrator.begin("store")
    count = staging * 4
    rig.fill(1, count)
    positions = [(i + 1) * 16 for i in range(count)]
    plan = rig.orchestrator.reserve(chain(1, count), positions, request)
    rig.plane.submit_store(5, plan, np.arange(count, dtype=np.int32))
    rig.plane.wait(5.0)
    rig.plane.release_stores({5})  # what vLLM asks before it reuses pages
    for _ in range(100):
        rig.plane.poll()
        if not rig.plane.unfinished({5}):
            break
        rig.plane.wait(0.05)
    assert not rig.plane.unfinished({5}), "the pages are still in use"
    report = rig.plane.take_report()
    staged = len(plan.keys) - len(report.failed_writes)
    assert 0 < staged <= staging + rig.devices[0].probe_target.parallel, "the rest is dropped"
    assert all(counters.error != errno.EIO for counters in report.counters.values())


def test_gate_20_pages_are_free_when_they_are_staged(tmp_path: Path, rigs: list[Rig]) -> None:
    check_slow_medium(pool(rigs, tmp_path))


def test_gate_20_without_the_guard(
    tmp_path: Path, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = DataPlane._release_pages

    def when_written(plane: DataPlane, job: Write) -> None:
        if job.ended.all():
            released(plane, job)

    monkeypatch.setattr(dataplane.DataPlane, "_release_pages", when_written)
    with pytest.raises(AssertionError, match="the pages are still in use"):
        check_slow_medium(pool(rigs, tmp_path))
