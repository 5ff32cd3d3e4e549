"""Reset: everything misses at once, slots come back when nobody touches them any more."""

from __future__ import annotations

from kvpool.plan import merge_reports
from kvpool.types import Outcome, WorkerReport
from tests.control.rig import (
    TOKENS,
    check_table,
    device,
    held,
    hits,
    load,
    make,
    offer,
    pool_of,
    store,
    write_report,
)


def ended(load_id: int) -> WorkerReport:
    return WorkerReport(finished_loads={load_id: 1})


def test_everything_misses_and_the_epoch_advances() -> None:
    orchestrator = make([device("file", 4, 1.0)])
    store(orchestrator, "a", 4)
    assert orchestrator.epoch == 0
    orchestrator.reset()
    orchestrator.reset()
    assert orchestrator.epoch == 2 and hits(orchestrator, "a", 4) == 0
    assert orchestrator.snapshot().devices[0].slots_used == 0
    assert len(store(orchestrator, "a", 4).keys) == 4


def test_before_attach_only_the_epoch_advances() -> None:
    orchestrator = make([])
    orchestrator.reset()
    assert orchestrator.epoch == 1


def test_slots_being_written_come_back_with_all_acknowledgements() -> None:
    orchestrator = make([device("file", 2, 1.0)], ranks=2)
    old = offer(orchestrator, orchestrator.begin("r"), "a", 0, 2 * TOKENS)
    orchestrator.acknowledge(write_report(old.write_id))
    orchestrator.reset()
    assert orchestrator.pending_work()
    assert len(store(orchestrator, "a", 2).keys) == 0
    orchestrator.acknowledge(write_report(old.write_id))
    assert held(orchestrator, "a", 2) == [Outcome.MISS] * 2, "weights may have been swapped"
    assert len(store(orchestrator, "a", 2).keys) == 2
    check_table(orchestrator)


def test_slots_being_read_come_back_when_all_ranks_have_ended_the_load() -> None:
    orchestrator = make([device("file", 2, 1.0)], ranks=2)
    store(orchestrator, "a", 2)
    plan, request = load(orchestrator, "a", 2)
    orchestrator.acknowledge(ended(plan.load_id))
    orchestrator.reset()
    assert len(store(orchestrator, "b", 2).keys) == 0
    orchestrator.complete_load(request)  # a late call changes nothing
    assert len(store(orchestrator, "b", 2).keys) == 0
    check_table(orchestrator)
    orchestrator.acknowledge(ended(plan.load_id))
    assert len(store(orchestrator, "b", 2).keys) == 2
    check_table(orchestrator)


def test_what_a_forgotten_load_says_does_not_touch_new_chunks() -> None:
    orchestrator = make([device("file", 4, 1.0)])
    store(orchestrator, "a", 2)
    plan, _ = load(orchestrator, "a", 2)
    orchestrator.reset()
    store(orchestrator, "a", 2)
    failure = WorkerReport(failed_loads={plan.load_id: {0, 1}})
    orchestrator.acknowledge(merge_reports(failure, ended(plan.load_id)))
    assert hits(orchestrator, "a", 2) == 2
    assert orchestrator.snapshot().devices[0].retired_slots == 2, "but their slots are bad"
    check_table(orchestrator)


def test_a_request_that_lives_on_starts_over() -> None:
    orchestrator = make([device("file", 8, 1.0)])
    request = orchestrator.begin("r")
    plan = offer(orchestrator, request, "a", 0, 2 * TOKENS)
    orchestrator.acknowledge(write_report(plan.write_id))
    orchestrator.reset()
    assert len(offer(orchestrator, request, "a", 2 * TOKENS, 3 * TOKENS).keys) == 0
    plan = offer(orchestrator, request, "a", 0, 3 * TOKENS)
    assert len(plan.keys) == 3
    orchestrator.acknowledge(write_report(plan.write_id))
    names = list(plan.keys)
    again = orchestrator.plan_load(names, request)
    assert again.slot.tolist() == plan.slot.tolist()
    assert pool_of(orchestrator).table.pins_view.sum() == 3
    orchestrator.complete_load(request)
    assert pool_of(orchestrator).table.pins_view.sum() == 0
    check_table(orchestrator)
