"""Devices that refuse, fall silent and come back: serving goes on, and nothing waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.faults import FaultKind, FaultRule
from kvpool.types import DeviceState
from tests.dataplane.rig import Rig, chain, file_device
from tests.faulty_engine import FaultyEngine

STALLED_S = 0.2
WAIT_S = 20.0
STUCK_READS = FaultRule(FaultKind.STUCK, reads=True)
STUCK_WRITES = FaultRule(FaultKind.STUCK, writes=True)
FULL = FaultRule(FaultKind.FULL, writes=True)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Memory and a file that can be broken; everything goes to both in equal shares."""
    devices = ["dram:16MiB", file_device(tmp_path, "a", "32MiB")]
    opened = Rig(devices, engine=FaultyEngine(64 << 10), stalled_s=STALLED_S)
    yield opened
    engine_of(opened).mend_files()
    file = opened.devices[1].index
    until(opened, lambda: not opened.engine.statistics(file).queue_depth)
    opened.close()


def engine_of(rig: Rig) -> FaultyEngine:
    assert isinstance(rig.engine, FaultyEngine)
    return rig.engine


def state(rig: Rig) -> DeviceState:
    return rig.orchestrator.snapshot().devices[1].state


def until(rig: Rig, ready: Callable[[], bool]) -> None:
    """Step until something is so."""
    deadline_s = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline_s
        rig.plane.wait(0.02)
        rig.plane.poll()
        rig.orchestrator.acknowledge(rig.plane.take_report())


def stored(rig: Rig, name: int = 1, count: int = 24) -> np.ndarray:
    rig.fill(name, count)
    assert rig.store(chain(name, count)) == count
    return rig.pages[:count].copy()


def test_a_load_from_a_silent_device_ends_and_touches_no_page_later(rig: Rig) -> None:
    content = stored(rig)
    engine_of(rig).break_files(1, [STUCK_READS])
    rig.pages[:] = 0
    keys, request = chain(1, 24), rig.orchestrator.begin("load")
    plan = rig.orchestrator.plan_load(keys, request)
    rig.plane.submit_load(99, plan, np.arange(24, dtype=np.int32))
    until(rig, lambda: not rig.plane.unfinished({99}))
    (job,) = rig.plane.take_finished()
    on_file = np.flatnonzero(plan.device == 1).tolist()
    assert job.failed == on_file and 0 < len(on_file) < 24
    assert state(rig) is DeviceState.FAILED
    assert rig.held(keys) == on_file[0]
    (line,) = rig.orchestrator.take_announcements()
    assert "does not answer" in line
    # Now the pages are others'; the device answers late.
    rig.pages[:] = 7
    engine_of(rig).mend_files()
    until(rig, lambda: rig.engine.statistics(rig.devices[1].index).queue_depth == 0)
    assert (rig.pages == 7).all()
    assert not np.array_equal(content, rig.pages[:24])


def test_stores_on_a_silent_device_end_too(rig: Rig) -> None:
    engine_of(rig).break_files(1, [STUCK_WRITES])
    rig.fill(1, 24)
    request = rig.orchestrator.begin("store")
    positions = [(i + 1) * 16 for i in range(24)]
    plan = rig.orchestrator.reserve(chain(1, 24), positions, request)
    rig.plane.submit_store(5, plan, np.arange(24, dtype=np.int32))
    until(rig, lambda: not rig.orchestrator.pending_work())
    assert state(rig) is DeviceState.FAILED and not rig.plane.unfinished({5})
    rig.orchestrator.finish(request)
    assert rig.store(chain(2, 8)) == 8, "memory takes it"
    assert rig.load(chain(2, 8)).failed == []


def test_a_full_device_is_read_and_not_written(rig: Rig) -> None:
    content = stored(rig)
    engine_of(rig).break_files(1, [FULL])
    rig.fill(2, 24)
    rig.store(chain(2, 24))
    assert state(rig) is DeviceState.READ_ONLY
    (line,) = rig.orchestrator.take_announcements()
    assert "ENOSPC" in line
    written = rig.engine.statistics(rig.devices[1].index).write_failures
    rig.fill(3, 24)
    assert rig.store(chain(3, 24)) == 24
    assert rig.engine.statistics(rig.devices[1].index).write_failures == written
    rig.pages[:] = 0
    assert rig.load(chain(1, 24)).failed == []
    assert np.array_equal(rig.pages[:24], content)


def test_a_trial_brings_a_device_back(rig: Rig) -> None:
    stored(rig)
    engine_of(rig).break_files(1, [FULL])
    rig.store(chain(2, 24))
    assert rig.orchestrator.broken_devices() == [1]
    rig.plane.try_devices([1])
    rig.settle()
    assert state(rig) is DeviceState.READ_ONLY, "it is still full"
    engine_of(rig).mend_files()
    rig.plane.try_devices([1])
    rig.settle()
    assert state(rig) is DeviceState.OK and rig.orchestrator.broken_devices() == []
    assert "used again" in rig.orchestrator.take_announcements()[-1]
    written = rig.engine.statistics(rig.devices[1].index).bytes_written
    stored(rig, 4)
    assert rig.engine.statistics(rig.devices[1].index).bytes_written > written


@pytest.mark.parametrize("kind", [FaultKind.STALE, FaultKind.FLIPPED, FaultKind.ERROR])
def test_a_trial_of_a_device_that_lies_fails(rig: Rig, kind: FaultKind) -> None:
    stored(rig)
    engine_of(rig).break_files(1, [FULL])
    rig.store(chain(2, 24))
    writes = kind is FaultKind.STALE
    engine_of(rig).break_files(2, [FaultRule(kind, reads=not writes, writes=writes)])
    rig.plane.try_devices([1])
    rig.settle()
    assert rig.orchestrator.broken_devices() == [1]


def test_late_answers_of_a_job_that_is_over_beside_an_older_trial(rig: Rig) -> None:
    stored(rig)
    engine_of(rig).break_files(1, [FaultRule(FaultKind.STUCK, writes=True), STUCK_READS])
    rig.plane.try_devices([1])
    plan = rig.orchestrator.plan_load(chain(1, 24), rig.orchestrator.begin("load"))
    rig.plane.submit_load(99, plan, np.arange(24, dtype=np.int32))
    until(rig, lambda: not rig.plane.unfinished({99}))
    # The reads answer while the trial's write, whose tag is the next lower one, is still under way.
    file = rig.devices[1].index
    engine_of(rig).set_faults(file, 1, [STUCK_WRITES], 0)
    engine_of(rig).release_stuck(file)
    until(rig, lambda: not rig.engine.statistics(file).queue_depth)
    until(rig, lambda: not rig.plane.busy())


def test_closing_does_not_wait_for_a_silent_device(tmp_path: Path) -> None:
    rig = Rig(
        ["dram:16MiB", file_device(tmp_path, "a", "32MiB")],
        engine=FaultyEngine(64 << 10),
        stalled_s=STALLED_S,
    )
    stored(rig)
    engine_of(rig).break_files(1, [STUCK_READS])
    plan = rig.orchestrator.plan_load(chain(1, 24), rig.orchestrator.begin("load"))
    rig.plane.submit_load(99, plan, np.arange(24, dtype=np.int32))
    until(rig, lambda: not rig.plane.unfinished({99}))
    rig.plane.drain(0.1)
    started_s = time.monotonic()
    rig.plane.close()
    assert time.monotonic() - started_s < WAIT_S
    # For the leak check of others: let the threads go after all.
    engine_of(rig).mend_files()
    rig.engine.close()
    for device in rig.devices:
        device.close()
    rig.memory.close()
