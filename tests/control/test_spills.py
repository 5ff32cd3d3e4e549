"""Spills: memory keeps free slots by moving its coldest chunks to slower devices."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpool.orchestrator import Orchestrator
from kvpool.plan import MovePlan
from kvpool.types import DeviceReport
from tests.control.rig import (
    TOKENS,
    check_table,
    device,
    devices_of,
    hits,
    key,
    load,
    make,
    pool_of,
    store,
    write_report,
)


def filled(slots: int, *slower: DeviceReport, documents: str = "ab") -> Orchestrator:
    """DRAM full of equally long documents, the first the coldest; all else empty."""
    orchestrator = make([device("dram", slots, 4.0), *slower], placement="serial")
    for document in documents:
        store(orchestrator, document, slots // len(documents))
    return orchestrator


def moves(orchestrator: Orchestrator) -> MovePlan:
    plan = orchestrator.take_moves()
    assert plan is not None
    return plan


def free(orchestrator: Orchestrator, index: int = 0) -> int:
    return len(pool_of(orchestrator).table.slots[index].free)


def kind(orchestrator: Orchestrator, document: str, chunk: int) -> str | None:
    return orchestrator.location_kind(key(document, 0, chunk * TOKENS))


def test_nothing_moves_above_the_low_water_mark() -> None:
    orchestrator = filled(32, device("file", 32, 1.0))
    pool = pool_of(orchestrator)
    pool.table.drop(pool.table.index[key("b", 0, 15 * TOKENS)])
    assert free(orchestrator) == 2, "a sixteenth"
    assert orchestrator.take_moves() is None


@pytest.mark.parametrize(("slots", "expected"), [(4, 1), (32, 2), (80, 5)])
def test_the_coldest_chunks_move_from_the_end_of_their_prefix(slots: int, expected: int) -> None:
    orchestrator = filled(slots, device("file", 99, 1.0))
    plan = moves(orchestrator)
    last = slots // 2
    assert plan.keys == [key("a", 0, (last - i) * TOKENS) for i in range(expected)]
    assert plan.positions.tolist() == [(last - i) * TOKENS for i in range(expected)]
    assert plan.parents[0] == key("a", 0, (last - 1) * TOKENS)
    assert set(plan.source_device.tolist()) == {0} and devices_of(plan) == [1] * expected
    assert len(set(plan.slot.tolist())) == len(set(plan.source_slot.tolist())) == expected
    assert orchestrator.take_moves() is None, "they are on their way"


def test_without_a_slower_device_nothing_moves() -> None:
    orchestrator = make([device("dram", 4, 1.0)])
    store(orchestrator, "a", 4)
    assert orchestrator.take_moves() is None


def test_chunks_stay_readable_from_memory_until_all_ranks_have_moved_them() -> None:
    devices = [device("dram", 4, 4.0), device("file", 9, 1.0)]
    orchestrator = make(devices, ranks=2, placement="serial")
    store(orchestrator, "a", 4)
    plan = moves(orchestrator)
    assert kind(orchestrator, "a", 4) == "dram"
    orchestrator.acknowledge(write_report(plan.write_id))
    assert kind(orchestrator, "a", 4) == "dram" and free(orchestrator) == 0
    orchestrator.acknowledge(write_report(plan.write_id))
    assert kind(orchestrator, "a", 4) == "file" and free(orchestrator) == 1
    assert orchestrator.snapshot().spilled_chunks == 1
    assert hits(orchestrator, "a", 4) == 4


def test_a_failed_spill_changes_nothing() -> None:
    orchestrator = filled(4, device("file", 9, 1.0))
    plan = moves(orchestrator)
    orchestrator.acknowledge(write_report(plan.write_id, ok=False))
    assert kind(orchestrator, "a", 2) == "dram"
    assert (free(orchestrator, 0), free(orchestrator, 1)) == (0, 9)
    assert orchestrator.snapshot().spilled_chunks == 0
    assert moves(orchestrator).keys == plan.keys, "tried again"
    check_table(orchestrator)


def test_pinned_chunks_do_not_move() -> None:
    orchestrator = filled(4, device("file", 9, 1.0))
    _, request = load(orchestrator, "a", 2)
    plan = moves(orchestrator)
    assert plan.keys == [key("b", 0, 2 * TOKENS)]
    orchestrator.complete_load(request)


def test_a_load_that_begins_during_a_spill_keeps_the_memory_slot() -> None:
    orchestrator = filled(4, device("file", 9, 1.0))
    plan = moves(orchestrator)
    load_plan, request = load(orchestrator, "a", 2)
    assert devices_of(load_plan) == [0, 0]
    orchestrator.acknowledge(write_report(plan.write_id))
    assert free(orchestrator) == 0, "it is being read"
    orchestrator.complete_load(request)
    pool = pool_of(orchestrator)
    assert pool.table.has_copy(pool.table.index[plan.keys[0]])
    check_table(orchestrator)


def test_a_chunk_that_lies_elsewhere_too_only_loses_its_copy() -> None:
    orchestrator = filled(4, device("file", 9, 1.0), documents="a")
    plan = moves(orchestrator)
    load_plan, request = load(orchestrator, "a", 4)
    orchestrator.acknowledge(write_report(plan.write_id))
    orchestrator.complete_load(request)
    assert devices_of(load_plan) == [0] * 4 and free(orchestrator) == 0
    assert orchestrator.take_moves() is None
    assert free(orchestrator) == 1 and kind(orchestrator, "a", 4) == "file"
    assert hits(orchestrator, "a", 4) == 4


def test_at_most_sixteen_are_in_flight() -> None:
    orchestrator = filled(640, device("file", 640, 1.0))
    first = moves(orchestrator)
    assert len(first.keys) == 16
    assert orchestrator.take_moves() is None
    orchestrator.acknowledge(write_report(first.write_id[:5]))
    assert len(moves(orchestrator).keys) == 5
    check_table(orchestrator)


def test_a_prefix_spreads_over_the_slower_devices_by_bandwidth() -> None:
    """Each goes where its own prefix then finishes soonest."""
    orchestrator = filled(256, device("file0", 200, 3.0), device("file1", 200, 1.0))
    plan = moves(orchestrator)
    assert Counter(devices_of(plan)) == {1: 12, 2: 4}
    assert set(devices_of(plan)[:5]) == {1, 2}, "mixed, not one after the other"


def test_a_spill_makes_up_for_where_its_prefix_lies_already() -> None:
    devices = [device("dram", 8, 4.0), device("file0", 99, 1.0), device("file1", 99, 1.0)]
    orchestrator = make(devices)
    count = Counter(devices_of(store(orchestrator, "a", 14)))
    plan = orchestrator.take_moves()
    while plan is not None:
        orchestrator.acknowledge(write_report(plan.write_id))
        count.update(devices_of(plan))
        plan = orchestrator.take_moves()
    assert abs(count[1] - count[2]) <= 1


def test_colder_chunks_make_room_on_a_full_device() -> None:
    orchestrator = make([device("dram", 4, 4.0), device("file", 2, 1.0)], placement="serial")
    store(orchestrator, "b", 4)
    store(orchestrator, "a", 2)  # on the file
    _, request = load(orchestrator, "b", 4)
    orchestrator.complete_load(request)
    plan = moves(orchestrator)
    # One for the mark, one that placement wanted for "a" and did not find.
    assert plan.keys == [key("b", 0, 4 * TOKENS), key("b", 0, 3 * TOKENS)]
    assert hits(orchestrator, "a", 2) == 0
    assert orchestrator.snapshot().evicted_chunks == 2
    check_table(orchestrator)


def test_a_chunk_colder_than_all_there_stays() -> None:
    orchestrator = filled(4, device("file", 2, 1.0), documents="a")
    store(orchestrator, "b", 2)  # on the file, and newer
    assert orchestrator.take_moves() is None
    assert orchestrator.snapshot().evicted_chunks == 0
    check_table(orchestrator)
    store(orchestrator, "c", 1)
    assert hits(orchestrator, "a", 4) == 3, "real pressure evicts it"


def test_a_prefix_is_not_shortened_to_move_its_own_chunks() -> None:
    """Something colder is there, but pinned: the prefix's own end on the file is no way out."""
    orchestrator = make([device("dram", 4, 4.0), device("file", 2, 1.0)], placement="serial")
    store(orchestrator, "z", 1)
    _, request = load(orchestrator, "z", 1)
    store(orchestrator, "a", 5)
    assert orchestrator.take_moves() is None
    assert hits(orchestrator, "a", 5) == 5
    orchestrator.complete_load(request)


def test_demand_frees_more_and_is_bounded() -> None:
    """What placement wanted in memory and did not find is made free, at most a quarter of it."""
    orchestrator = make([device("dram", 16, 9.0), device("file", 400, 1.0)])
    store(orchestrator, "a", 20)
    assert len(moves(orchestrator).keys) == 1 + 3, "the last three were wanted in memory"
    store(orchestrator, "b", 90)
    assert len(moves(orchestrator).keys) == 1 + 4 - 4, "four are on their way"


def test_demand_goes_down_when_it_is_met() -> None:
    orchestrator = make([device("dram", 16, 9.0), device("file", 400, 1.0)])
    store(orchestrator, "a", 30)
    plan = moves(orchestrator)
    orchestrator.acknowledge(write_report(plan.write_id))
    assert free(orchestrator) == 1 + 4
    assert devices_of(store(orchestrator, "b", 4)) == [0] * 4
    assert free(orchestrator) == 1 and orchestrator.take_moves() is None


def test_dropped_while_it_moves() -> None:
    """A reset in between: both slots come back with the acknowledgement."""
    orchestrator = filled(4, device("file", 9, 1.0))
    plan = moves(orchestrator)
    orchestrator.reset()
    assert (free(orchestrator, 0), free(orchestrator, 1)) == (3, 8)
    orchestrator.acknowledge(write_report(plan.write_id))
    assert (free(orchestrator, 0), free(orchestrator, 1)) == (4, 9)
    check_table(orchestrator)


def test_two_memories_each_have_their_mark() -> None:
    devices = [device("dram0", 8, 4.0), device("dram1", 8, 4.0), device("file", 60, 1.0)]
    orchestrator = make(devices, placement="serial")
    store(orchestrator, "a", 8)
    store(orchestrator, "b", 8)
    plan = moves(orchestrator)
    # Placement wanted "b" in the first one: its demand, a quarter at most, comes on top.
    assert sorted(plan.source_device.tolist()) == [0, 0, 0, 1]
