"""Loads: pins, failures, where chunks are read from, what comes back to memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvpool.orchestrator import Orchestrator
from kvpool.plan import merge_reports
from kvpool.types import NO_DEVICE, Outcome, WorkerReport
from tests.control.rig import (
    FULL,
    TOKENS,
    WIDE_FULL,
    WINDOW,
    check_table,
    device,
    devices_of,
    ends,
    held,
    hits,
    key,
    load,
    make,
    offer,
    pool_of,
    store,
    write_report,
)

HIT, MISS = Outcome.HIT, Outcome.MISS


def failed(load_id: int, *positions: int) -> WorkerReport:
    return WorkerReport(failed_loads={load_id: set(positions)})


def finished(load_id: int, ranks: int = 1) -> WorkerReport:
    return WorkerReport(finished_loads={load_id: ranks})


def pinned(orchestrator: Orchestrator) -> int:
    return int(pool_of(orchestrator).table.pins_view.sum())


def keep_all(orchestrator: Orchestrator, document: str, chunks: int) -> int:
    """Load, acknowledge what is kept on the way, complete; return how many chunks were kept."""
    plan, request = load(orchestrator, document, chunks)
    kept = plan.keep_write_id[plan.keep_device != NO_DEVICE]
    orchestrator.acknowledge(write_report(kept))
    orchestrator.complete_load(request)
    return len(kept)


def test_plan_says_where_each_chunk_lies() -> None:
    orchestrator = make([device("dram", 9, 2.0), device("file", 9, 1.0)])
    stored = store(orchestrator, "a", 6)
    plan, _ = load(orchestrator, "a", 6)
    assert plan.device.tolist() == stored.device.tolist()
    assert plan.slot.tolist() == stored.slot.tolist()
    assert plan.group.tolist() == [0] * 6
    kept = (plan.keep_device, plan.keep_slot, plan.keep_write_id)
    columns = (plan.group, plan.device, plan.slot, *kept)
    assert [column.dtype.str for column in columns] == ["|u1", "|u1", "<i4", "|u1", "<i4", "<i8"]


def test_loads_pin_until_they_are_complete() -> None:
    orchestrator = make([device("file", 9, 1.0)])
    store(orchestrator, "a", 3)
    _, first = load(orchestrator, "a", 3)
    _, second = load(orchestrator, "a", 2)
    assert pinned(orchestrator) == 5
    for request in (first, first, second):
        orchestrator.complete_load(request)
        check_table(orchestrator)
    assert pinned(orchestrator) == 0


def test_all_ranks_having_ended_completes_a_load_too() -> None:
    """An aborted request may never complete its load."""
    orchestrator = make([device("file", 9, 1.0)], ranks=2)
    store(orchestrator, "a", 3)
    plan, request = load(orchestrator, "a", 3)
    orchestrator.finish(request)
    orchestrator.acknowledge(finished(plan.load_id))
    assert pinned(orchestrator) == 3
    orchestrator.acknowledge(finished(plan.load_id))
    assert pinned(orchestrator) == 0
    orchestrator.complete_load(request)
    assert pinned(orchestrator) == 0


def test_a_chunk_that_vanished_is_planned_as_nowhere() -> None:
    orchestrator = make([device("file", 9, 1.0)])
    store(orchestrator, "a", 2)
    offer(orchestrator, orchestrator.begin("w"), "b", 0, TOKENS)  # being written
    request = orchestrator.begin("r")
    keys = [key("a", 0, 16), key("c", 0, 16), key("b", 0, 16), key("a", 0, 32)]
    plan = orchestrator.plan_load(keys, request)
    assert plan.device.tolist() == [0, NO_DEVICE, NO_DEVICE, 0]
    assert plan.slot.tolist() == [0, -1, -1, 1]
    orchestrator.acknowledge(failed(plan.load_id, 1, 2))
    orchestrator.complete_load(request)
    assert held(orchestrator, "a", 2) == [HIT, HIT] and pinned(orchestrator) == 0
    check_table(orchestrator)


def test_look_ups_find_branches_and_survive_resets() -> None:
    orchestrator = make([device("file", 40, 1.0)])
    store(orchestrator, "aab", 4)
    store(orchestrator, "aac", 4)
    store(orchestrator, "d", 2)
    request = orchestrator.begin("r")

    def found(document: str) -> list[bool]:
        names = [key(document, 0, (i + 1) * TOKENS) for i in range(4)]
        return [orchestrator.lookup(name, request) is HIT for name in names]

    for document in ("aab", "aac", "aab"):
        assert found(document) == [True] * 4
    assert found("d") == [True, True, False, False]
    assert found("aax") == [True, True, False, False]
    orchestrator.reset()
    assert found("aab") == [False] * 4


def test_plans_find_pieces_of_chains_and_what_is_no_chain() -> None:
    orchestrator = make([device("file", 60, 1.0)], groups=(WIDE_FULL, WINDOW, FULL))
    stored = store(orchestrator, "a", 8)
    other = store(orchestrator, "b", 8)
    slot = {
        k: int(s) for plan in (stored, other) for k, s in zip(plan.keys, plan.slot, strict=True)
    }
    wide = [key("a", 0, end) for end in ends(WIDE_FULL, 0, 128)]
    window = [key("a", 1, end) for end in ends(WINDOW, 80, 128)]
    full = [key("a", 2, end) for end in ends(FULL, 0, 128)]
    mixed = [*full[:3], key("b", 2, 64), *full[4:]]
    for names in ([*wide, *window, *full], [*wide[2:], *full[4:]], window, mixed, full[::-1]):
        request = orchestrator.begin("r")
        plan = orchestrator.plan_load(names, request)
        assert plan.slot.tolist() == [slot[name] for name in names]
        orchestrator.complete_load(request)
    gone = [*full[:3], key("zz", 2, 64), *full[4:]]
    plan = orchestrator.plan_load(gone, orchestrator.begin("r"))
    assert plan.slot.tolist() == [slot.get(name, -1) for name in gone]
    assert plan.group.tolist() == [2] * 8


def test_an_empty_load_is_planned() -> None:
    orchestrator = make([device("file", 9, 1.0)])
    plan, request = load(orchestrator, "a", 0)
    assert len(plan.device) == 0
    orchestrator.complete_load(request)


def test_failed_chunks_miss_at_once_with_all_that_hangs_on_them() -> None:
    orchestrator = make([device("file", 9, 1.0)])
    store(orchestrator, "a", 4)
    plan, request = load(orchestrator, "a", 4)
    orchestrator.acknowledge(failed(plan.load_id, 1))
    assert held(orchestrator, "a", 4) == [HIT, MISS, MISS, MISS]
    row = orchestrator.snapshot().devices[0]
    assert (row.chunks, row.slots_used, row.retired_slots) == (1, 4, 0), "still being read"
    orchestrator.complete_load(request)
    row = orchestrator.snapshot().devices[0]
    assert (row.chunks, row.slots_used, row.retired_slots) == (1, 1, 1)
    check_table(orchestrator)


def test_a_failed_chunk_can_be_stored_anew_at_once() -> None:
    orchestrator = make([device("file", 9, 1.0)])
    store(orchestrator, "a", 2)
    plan, request = load(orchestrator, "a", 2)
    orchestrator.acknowledge(failed(plan.load_id, 0, 1))
    again = store(orchestrator, "a", 2)
    assert not set(again.slot.tolist()) & set(plan.slot.tolist())
    orchestrator.acknowledge(failed(plan.load_id, 0))  # another rank, about the old chunk
    orchestrator.complete_load(request)
    assert hits(orchestrator, "a", 2) == 2
    assert orchestrator.snapshot().devices[0].retired_slots == 2


def test_one_failing_rank_is_enough() -> None:
    orchestrator = make([device("file", 9, 1.0)], ranks=2)
    store(orchestrator, "a", 2)
    plan, request = load(orchestrator, "a", 2)
    report = merge_reports(finished(plan.load_id), finished(plan.load_id))
    orchestrator.acknowledge(merge_reports(report, failed(plan.load_id, 1)))
    orchestrator.complete_load(request)
    assert held(orchestrator, "a", 2) == [HIT, MISS]
    assert orchestrator.snapshot().devices[0].retired_slots == 1


def test_only_the_copy_that_failed_is_retired() -> None:
    orchestrator = make([device("dram", 8, 3.0), device("file", 8, 1.0)], placement="serial")
    store(orchestrator, "b", 8)
    store(orchestrator, "a", 2)  # DRAM is full of b: this one goes to the file
    plan, request = load(orchestrator, "b", 8)
    orchestrator.acknowledge(failed(plan.load_id, 0))
    orchestrator.complete_load(request)
    assert [row.retired_slots for row in orchestrator.snapshot().devices] == [1, 0]
    assert keep_all(orchestrator, "a", 2) == 1
    plan, request = load(orchestrator, "a", 2)
    assert plan.device.tolist() == [1, 0]
    orchestrator.acknowledge(failed(plan.load_id, 1))
    orchestrator.complete_load(request)
    assert [row.retired_slots for row in orchestrator.snapshot().devices] == [2, 0]
    check_table(orchestrator)


def test_hits_are_counted_by_the_device_read_from() -> None:
    orchestrator = make([device("dram", 9, 2.0), device("file", 9, 1.0)])
    store(orchestrator, "a", 6)
    load(orchestrator, "a", 6)
    load(orchestrator, "a", 3)
    rows = orchestrator.snapshot().devices
    expected = Counter(devices_of(load(orchestrator, "a", 6)[0]))
    expected.update(devices_of(load(orchestrator, "a", 3)[0]))
    assert [row.hit_chunks for row in rows] == [expected[0], expected[1]] == [6, 3]
    assert [row.hit_tokens for row in rows] == [6 * TOKENS, 3 * TOKENS]


def test_lookups_are_counted() -> None:
    orchestrator = make([device("file", 9, 1.0)])
    store(orchestrator, "a", 1)
    offer(orchestrator, orchestrator.begin("w"), "a", 0, 2 * TOKENS)
    held(orchestrator, "a", 5)
    now = orchestrator.snapshot()
    assert (now.lookup_hits, now.lookup_pendings, now.lookup_misses) == (1, 1, 3)


def test_loading_touches_what_the_accelerator_still_had() -> None:
    orchestrator = make([device("file", 8, 1.0)])
    store(orchestrator, "a", 4)
    store(orchestrator, "b", 4)
    _, request = load(orchestrator, "a", 4, first=3)
    orchestrator.complete_load(request)
    table = pool_of(orchestrator).table
    stamps = {table.stamp[table.index[key("a", 0, (i + 1) * TOKENS)]] for i in range(4)}
    assert len(stamps) == 1
    store(orchestrator, "c", 4)
    assert hits(orchestrator, "a", 4) == 4 and hits(orchestrator, "b", 4) == 0


# ---- return to memory -----------------------------------------------------------------------


def on_slow_device(chunks: int, dram: int = 12, bandwidth: float = 3.0) -> Orchestrator:
    """A pool whose document "a" lies on the SSD alone, with DRAM empty."""
    orchestrator = make(
        [device("dram", dram, bandwidth), device("file", 40, 1.0)], placement="serial"
    )
    store(orchestrator, "z", dram)
    store(orchestrator, "a", chunks)
    plan, request = load(orchestrator, "z", dram)
    orchestrator.acknowledge(write_report(plan.keep_write_id[plan.keep_device != NO_DEVICE]))
    pool = pool_of(orchestrator)
    orchestrator.complete_load(request)
    pool.table.drop(pool.table.index[key("z", 0, TOKENS)])
    assert len(pool.table.slots[0].free) == dram
    return orchestrator


def test_a_load_brings_back_memorys_share() -> None:
    orchestrator = on_slow_device(8)
    plan, _ = load(orchestrator, "a", 8)
    assert devices_of(plan) == [1] * 8
    kept = plan.keep_device != NO_DEVICE
    assert kept.sum() == 6, "three quarters of the bandwidth is memory's"
    assert set(plan.keep_device[kept].tolist()) == {0}
    assert len(set(plan.keep_slot[kept].tolist())) == 6
    assert len(set(plan.keep_write_id[kept].tolist())) == 6
    assert (plan.keep_slot[~kept] == -1).all() and (plan.keep_write_id[~kept] == -1).all()


def test_kept_copies_are_read_once_all_ranks_have_them() -> None:
    orchestrator = on_slow_device(8)
    plan, request = load(orchestrator, "a", 8)
    orchestrator.complete_load(request)
    again, request = load(orchestrator, "a", 8)
    assert devices_of(again) == [1] * 8 and (again.keep_device == NO_DEVICE).all()
    orchestrator.complete_load(request)
    kept = plan.keep_write_id[plan.keep_device != NO_DEVICE]
    orchestrator.acknowledge(write_report(kept))
    assert orchestrator.snapshot().returned_chunks == 6
    last, _ = load(orchestrator, "a", 8)
    assert Counter(devices_of(last)) == {0: 6, 1: 2}
    slots = set(plan.keep_slot[plan.keep_device == 0].tolist())
    assert set(last.slot[last.device == 0].tolist()) == slots
    check_table(orchestrator)


def test_a_copy_that_fails_is_forgotten() -> None:
    orchestrator = on_slow_device(8)
    plan, request = load(orchestrator, "a", 8)
    kept = plan.keep_write_id[plan.keep_device != NO_DEVICE]
    orchestrator.acknowledge(write_report(kept, ok=False))
    orchestrator.complete_load(request)
    now = orchestrator.snapshot()
    assert now.returned_chunks == 0 and now.devices[0].slots_used == 0
    assert hits(orchestrator, "a", 8) == 8
    check_table(orchestrator)


def test_returns_take_free_slots_only() -> None:
    orchestrator = on_slow_device(8)
    store(orchestrator, "b", 10)
    assert keep_all(orchestrator, "a", 8) == 2
    assert hits(orchestrator, "b", 10) == 10
    assert keep_all(orchestrator, "a", 8) == 0


def test_returns_stop_at_the_share() -> None:
    orchestrator = on_slow_device(8)
    assert keep_all(orchestrator, "a", 8) == 6
    assert keep_all(orchestrator, "a", 8) == 0


def test_a_load_that_fails_while_a_copy_is_made_frees_both() -> None:
    orchestrator = on_slow_device(8)
    plan, request = load(orchestrator, "a", 8)
    orchestrator.acknowledge(failed(plan.load_id, *range(8)))
    orchestrator.complete_load(request)
    check_table(orchestrator)
    assert orchestrator.snapshot().devices[0].slots_used == 6, "they may still be written"
    orchestrator.acknowledge(write_report(plan.keep_write_id[plan.keep_device != NO_DEVICE]))
    rows = orchestrator.snapshot().devices
    assert (rows[0].slots_used, rows[1].slots_used, rows[1].retired_slots) == (0, 0, 8)
    check_table(orchestrator)


@pytest.mark.parametrize("bandwidth", [1.0, 2.0, 7.0])
def test_copies_make_a_prefix_finish_together(bandwidth: float) -> None:
    orchestrator = on_slow_device(24, dram=24, bandwidth=bandwidth)
    keep_all(orchestrator, "a", 24)
    for chunks in range(8, 25):
        plan, request = load(orchestrator, "a", chunks)
        orchestrator.complete_load(request)
        count = np.bincount(plan.device, minlength=2)
        fair = chunks * bandwidth / (bandwidth + 1)
        assert abs(count[0] - fair) <= 1.5, f"{chunks}: {count}"


def test_location_kind_is_where_it_would_be_read() -> None:
    orchestrator = on_slow_device(8)
    names = [key("a", 0, (i + 1) * TOKENS) for i in range(8)]
    assert {orchestrator.location_kind(name) for name in names} == {"file"}
    keep_all(orchestrator, "a", 8)
    assert Counter(map(orchestrator.location_kind, names)) == {"dram": 6, "file": 2}
    offer(orchestrator, orchestrator.begin("w"), "q", 0, TOKENS)
    assert orchestrator.location_kind(key("q", 0, TOKENS)) is None
