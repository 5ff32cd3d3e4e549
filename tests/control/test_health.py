"""Health and speed: what reports of the workers change."""

from __future__ import annotations

import errno

import pytest

from kvpool.health import DeviceHealth
from kvpool.orchestrator import Orchestrator
from kvpool.types import DeviceCounters, DeviceState, WorkerReport
from tests.control.rig import (
    SIZE,
    check_table,
    counters,
    device,
    devices_of,
    hits,
    load,
    make,
    offer,
    pool_of,
    store,
    write_report,
)

OK, READ_ONLY, FAILED = DeviceState.OK, DeviceState.READ_ONLY, DeviceState.FAILED
GOOD = counters(bytes_read=SIZE)
BAD_READ, BAD_WRITE = counters(read_failures=1), counters(write_failures=1)


def health(*history: DeviceCounters, rank: int = 0) -> DeviceHealth:
    result = DeviceHealth(device("file", 8, 1.0))
    for item in history:
        result.observe(rank, item)
    return result


def saturated(rate_gb_s: float, seconds: float) -> DeviceCounters:
    return counters(saturated_read_bytes=int(rate_gb_s * 1e9 * seconds), saturated_read_s=seconds)


@pytest.mark.parametrize(
    ("history", "state"),
    [
        ([BAD_READ] * 2, OK),
        ([BAD_READ] * 3, FAILED),
        ([BAD_WRITE, BAD_READ, BAD_WRITE], OK),
        ([BAD_WRITE, BAD_READ, BAD_WRITE, BAD_WRITE], READ_ONLY),
        ([counters(write_failures=3)], READ_ONLY),
        ([counters(write_failures=3), GOOD, counters(read_failures=3)], FAILED),
        ([counters(read_failures=3), counters(write_failures=3)], FAILED),
        ([counters(stalls=1, queue_depth=4)], FAILED),
        ([BAD_READ, BAD_READ, GOOD, BAD_READ, BAD_READ], OK),
        ([BAD_READ, BAD_READ, counters(), BAD_READ], FAILED),
        ([counters(checksum_failures=9)], OK),
        ([BAD_READ, GOOD] * 9, OK),
        ([BAD_READ, GOOD] * 10, FAILED),
        ([BAD_READ, *[GOOD] * 12] * 12, OK),
    ],
)
def test_failures(history: list[DeviceCounters], state: DeviceState) -> None:
    assert health(*history).state is state


def test_failing_is_told_once() -> None:
    broken = DeviceHealth(device("file", 8, 1.0))
    told = [broken.observe(0, BAD_WRITE) for _ in range(6)]
    assert told == [False, False, True, False, False, False]


def test_what_is_told_names_the_error() -> None:
    full = health(*[counters(write_failures=1, error=errno.ENOSPC)] * 3)
    assert full.reason == "writes fail (ENOSPC)"
    assert health(counters(stalls=1)).reason == "does not answer"


def test_far_too_slow_for_long() -> None:
    assert health(*[saturated(0.01, 0.5)] * 3).state is OK
    assert health(*[saturated(0.01, 0.5)] * 4).state is FAILED
    assert health(*[saturated(0.01, 0.5), saturated(0.5, 0.5)] * 9).state is OK
    assert health(*[saturated(0.03, 0.5)] * 99).state is OK


def test_a_trial_on_every_rank_brings_it_back() -> None:
    broken = health(counters(stalls=1), saturated(0.2, 1.0))
    assert not broken.passed_trial(0, True, ranks=2) and broken.state is FAILED
    assert not broken.passed_trial(1, False, ranks=2), "one rank's success does not last"
    assert not broken.passed_trial(1, True, ranks=2)
    assert broken.passed_trial(0, True, ranks=2)
    assert broken.state is OK and broken.reason == ""
    assert broken.read_bandwidth_bytes_s == 1e9, "as it was measured"
    assert broken.observe(0, counters(read_failures=3)), "and it can fail again"


def test_one_ranks_success_does_not_excuse_another() -> None:
    broken = DeviceHealth(device("file", 8, 1.0))
    for _ in range(3):
        broken.observe(0, GOOD)
        broken.observe(1, BAD_READ)
    assert broken.state is FAILED


def test_history_is_bounded() -> None:
    busy = health(counters(bytes_read=SIZE * 10**6), *[GOOD] * 1000)
    assert all(len(rank.reads.failed) <= 100 for rank in busy._ranks.values())


def test_a_rate_that_halves_is_learned_within_half_a_second() -> None:
    halved = health(*[saturated(0.5, 0.01)] * 50)
    assert halved.read_bandwidth_bytes_s == pytest.approx(0.5e9, rel=0.05)
    assert health(saturated(0.5, 0.5)).read_bandwidth_bytes_s == pytest.approx(0.5e9, rel=0.05)


def test_short_times_say_nothing_alone() -> None:
    assert health(saturated(0.1, 0.04)).read_bandwidth_bytes_s == 1e9
    assert health(*[saturated(0.1, 0.03)] * 2).read_bandwidth_bytes_s < 0.6e9


def test_unsaturated_reads_say_nothing() -> None:
    idle = health(*[counters(bytes_read=SIZE, read_busy_s=1.0)] * 9)
    assert idle.read_bandwidth_bytes_s == 1e9


def test_ranks_add_up_as_in_the_profile() -> None:
    """The profile is what one rank gets: a rank that is slower counts for its part only."""
    two = DeviceHealth(device("file", 8, 1.0))
    two.observe(0, saturated(1.0, 1.0))
    two.observe(1, saturated(0.5, 1.0))
    assert two.read_bandwidth_bytes_s == pytest.approx(0.75e9, rel=0.01)


def test_a_device_at_a_standstill_is_still_finite() -> None:
    assert health(*[saturated(0.0, 1.0)] * 9).read_bandwidth_bytes_s > 0


def test_new_chunks_follow_the_corrected_bandwidth() -> None:
    orchestrator = make([device("file0", 400, 2.0), device("file1", 400, 2.0)])
    assert [row.share_weight for row in orchestrator.snapshot().devices] == [0.5, 0.5]
    for _ in range(50):
        orchestrator.acknowledge(WorkerReport(counters={(1, 0): saturated(1.0, 0.01)}))
    rows = orchestrator.snapshot().devices
    assert rows[1].share_weight == pytest.approx(1 / 3, rel=0.1)
    assert rows[1].read_bandwidth_bytes_s == pytest.approx(1e9, rel=0.1)
    chosen = devices_of(store(orchestrator, "a", 60))
    assert 18 <= chosen.count(1) <= 22


def break_device(orchestrator: Orchestrator, index: int) -> None:
    orchestrator.acknowledge(WorkerReport(counters={(index, 0): counters(read_failures=3)}))


def test_a_failed_device_is_dropped_and_gets_nothing_new() -> None:
    orchestrator = make([device("dram", 20, 1.0), device("file", 20, 1.0)])
    assert devices_of(store(orchestrator, "a", 4)) == [0, 1, 0, 1]
    break_device(orchestrator, 1)
    assert hits(orchestrator, "a", 4) == 1
    row = orchestrator.snapshot().devices[1]
    assert (row.state, row.chunks, row.share_weight) == (FAILED, 0, 0.0)
    announcements = orchestrator.take_announcements()
    assert len(announcements) == 1 and announcements[0].startswith("file: reads fail: left")
    assert orchestrator.take_announcements() == []
    assert devices_of(store(orchestrator, "b", 4)) == [0] * 4
    assert orchestrator.take_moves() is None
    check_table(orchestrator)


def test_serving_goes_on_when_all_devices_have_failed() -> None:
    orchestrator = make([device("file", 20, 1.0)])
    plan = offer(orchestrator, orchestrator.begin("w"), "b", 0, 32)
    store(orchestrator, "a", 4)
    _, request = load(orchestrator, "a", 4)
    break_device(orchestrator, 0)
    assert hits(orchestrator, "a", 4) == 0
    orchestrator.acknowledge(write_report(plan.write_id))
    orchestrator.complete_load(request)
    assert hits(orchestrator, "b", 2) == 0
    assert len(store(orchestrator, "c", 2).keys) == 0
    assert not orchestrator.pending_work()
    check_table(orchestrator)


def test_a_spill_to_a_device_that_fails_meanwhile_did_not_happen() -> None:
    orchestrator = make([device("dram", 4, 1.0), device("file", 20, 1.0)], placement="serial")
    store(orchestrator, "a", 4)
    plan = orchestrator.take_moves()
    assert plan is not None
    break_device(orchestrator, 1)
    orchestrator.acknowledge(write_report(plan.write_id))
    assert hits(orchestrator, "a", 4) == 4 and orchestrator.snapshot().spilled_chunks == 0
    assert {pool_of(orchestrator).table.device0[e] for e in range(4)} == {0}
    check_table(orchestrator)


def test_stores_dropped_for_want_of_staging_break_no_device() -> None:
    """Such writes fail without reaching the device: its own counters do not show them."""
    orchestrator = make([device("file", 40, 1.0)])
    plan = offer(orchestrator, orchestrator.begin("r"), "a", 0, 20 * 16)
    orchestrator.acknowledge(write_report(plan.write_id, ok=False))
    assert orchestrator.snapshot().devices[0].state is OK
    assert len(store(orchestrator, "a", 20).keys) == 20
