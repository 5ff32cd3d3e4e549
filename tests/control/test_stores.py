"""Stores: what is written, what it hangs on, what is refused, who has to go for it."""

from __future__ import annotations

import pytest

from kvpool.orchestrator import Orchestrator
from kvpool.types import GroupGeometry, GroupKind, Outcome, WorkerReport
from tests.control.rig import (
    FULL,
    SIZE,
    STATE,
    TOKENS,
    WIDE_FULL,
    WINDOW,
    check_table,
    device,
    ends,
    geometry,
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

HIT, MISS, PENDING = Outcome.HIT, Outcome.MISS, Outcome.PENDING
SSD = [device("file", 8, 1.0)]


def test_before_attach_everything_misses_and_nothing_is_stored() -> None:
    orchestrator = Orchestrator(geometry(), 1)
    request = orchestrator.begin("r")
    assert orchestrator.lookup(key("a", 0, TOKENS), request) is MISS
    assert orchestrator.location_kind(key("a", 0, TOKENS)) is None
    assert len(offer(orchestrator, request, "a", 0, 4 * TOKENS).keys) == 0
    assert orchestrator.take_moves() is None and not orchestrator.pending_work()
    assert orchestrator.snapshot().devices == ()
    orchestrator.acknowledge(write_report([1]))
    orchestrator.attach(SSD)
    offer(orchestrator, request, "a", 0, 2 * TOKENS)
    assert held(orchestrator, "a", 2) == [PENDING, PENDING]


def test_devices_are_attached_once() -> None:
    with pytest.raises(RuntimeError, match="once"):
        make(SSD).attach(SSD)


def test_a_pool_without_slots_stores_nothing() -> None:
    orchestrator = make([device("dram", 0, 1.0), device("file", 0, 1.0)])
    assert len(store(orchestrator, "a", 3).keys) == 0
    assert orchestrator.take_moves() is None
    plan, request = load(orchestrator, "a", 2)
    assert plan.slot.tolist() == [-1, -1]
    orchestrator.complete_load(request)
    orchestrator.reset()


def test_plan_names_parents_positions_and_slots() -> None:
    orchestrator = make(SSD)
    plan = store(orchestrator, "a", 3)
    assert plan.keys == [key("a", 0, TOKENS * i) for i in (1, 2, 3)]
    assert plan.parents == [b"", *plan.keys[:2]]
    assert plan.positions.tolist() == [16, 32, 48]
    assert plan.slot.tolist() == [0, 1, 2]
    assert len(set(plan.write_id.tolist())) == 3
    assert plan.group.tolist() == plan.device.tolist() == [0, 0, 0]


def test_a_chunk_is_a_hit_once_all_ranks_have_written_it() -> None:
    orchestrator = make(SSD, ranks=2)
    plan = offer(orchestrator, orchestrator.begin("r"), "a", 0, TOKENS)
    assert held(orchestrator, "a", 1) == [PENDING] and orchestrator.pending_work()
    orchestrator.acknowledge(write_report(plan.write_id))
    assert held(orchestrator, "a", 1) == [PENDING] and orchestrator.pending_work()
    orchestrator.acknowledge(write_report(plan.write_id))
    assert held(orchestrator, "a", 1) == [HIT] and not orchestrator.pending_work()


@pytest.mark.parametrize("failing_first", [True, False])
def test_one_failing_rank_fails_a_write(failing_first: bool) -> None:
    """The chunk misses at once; its slot comes back when the other rank is done with it."""
    orchestrator = make([device("file", 1, 1.0)], ranks=2)
    plan = offer(orchestrator, orchestrator.begin("r"), "a", 0, TOKENS)
    reports = [write_report(plan.write_id, ok=False), write_report(plan.write_id)]
    orchestrator.acknowledge(reports[0 if failing_first else 1])
    assert held(orchestrator, "a", 1) == [MISS if failing_first else PENDING]
    assert len(store(orchestrator, "b", 1).keys) == 0, "the slot may still be written"
    orchestrator.acknowledge(reports[1 if failing_first else 0])
    assert held(orchestrator, "a", 1) == [MISS]
    assert len(store(orchestrator, "b", 1).keys) == 1


def test_a_failed_write_takes_what_hangs_on_it() -> None:
    orchestrator = make(SSD)
    plan = offer(orchestrator, orchestrator.begin("r"), "a", 0, 4 * TOKENS)
    orchestrator.acknowledge(write_report(plan.write_id[:1]))
    orchestrator.acknowledge(write_report(plan.write_id[1:2], ok=False))
    assert held(orchestrator, "a", 4) == [HIT, MISS, MISS, MISS]
    orchestrator.acknowledge(write_report(plan.write_id[2:]))
    assert held(orchestrator, "a", 4) == [HIT, MISS, MISS, MISS]
    check_table(orchestrator)
    assert orchestrator.snapshot().devices[0].slots_used == 1


def test_unknown_and_repeated_acknowledgements_are_ignored() -> None:
    orchestrator = make(SSD)
    plan = store(orchestrator, "a", 2)
    orchestrator.acknowledge(write_report([*plan.write_id, 999], ok=False))
    orchestrator.acknowledge(WorkerReport(failed_loads={7: {0}}, finished_loads={7: 1}))
    assert held(orchestrator, "a", 2) == [HIT, HIT]


def test_present_chunks_are_skipped_and_touched() -> None:
    orchestrator = make([device("file", 4, 1.0)])
    store(orchestrator, "a", 2)
    store(orchestrator, "b", 2)
    assert len(store(orchestrator, "a", 2).keys) == 0
    store(orchestrator, "c", 2)
    assert hits(orchestrator, "a", 2) == 2 and hits(orchestrator, "b", 2) == 0


def test_chunks_being_written_by_another_request_are_skipped() -> None:
    orchestrator = make(SSD)
    first = offer(orchestrator, orchestrator.begin("1"), "a", 0, 2 * TOKENS)
    second = offer(orchestrator, orchestrator.begin("2"), "a", 0, 3 * TOKENS)
    assert len(first.keys) == 2 and second.keys == [key("a", 0, 3 * TOKENS)]
    assert second.parents == [first.keys[1]]


def test_a_chunk_without_its_parent_is_refused() -> None:
    orchestrator = make(SSD)
    request = orchestrator.begin("r")
    assert len(offer(orchestrator, request, "a", TOKENS, 3 * TOKENS).keys) == 0
    assert orchestrator.snapshot().dropped_store_chunks == 2
    assert orchestrator.reserve([key("a", 0, 0)], [0], request).keys == []


def test_after_a_drop_the_rest_of_the_prefix_is_refused_until_it_is_offered_again() -> None:
    orchestrator = make([device("file", 3, 1.0)])
    blocker = orchestrator.begin("blocker")
    offer(orchestrator, blocker, "b", 0, TOKENS)  # being written: cannot be evicted
    request = orchestrator.begin("r")
    assert len(offer(orchestrator, request, "a", 0, 4 * TOKENS).keys) == 2
    assert len(offer(orchestrator, request, "a", 4 * TOKENS, 5 * TOKENS).keys) == 0
    assert orchestrator.snapshot().dropped_store_chunks == 3
    orchestrator.acknowledge(write_report([1]))
    assert len(offer(orchestrator, request, "a", 5 * TOKENS, 6 * TOKENS).keys) == 0
    again = offer(orchestrator, request, "a", 0, 6 * TOKENS)
    assert again.keys == [key("a", 0, 3 * TOKENS)], "b was evicted for it"
    check_table(orchestrator)


def test_evicted_under_a_running_request_its_next_chunks_are_refused() -> None:
    orchestrator = make([device("file", 4, 1.0)])
    request = orchestrator.begin("r")
    plan = offer(orchestrator, request, "a", 0, 2 * TOKENS)
    orchestrator.acknowledge(write_report(plan.write_id))
    store(orchestrator, "b", 4)
    assert hits(orchestrator, "a", 2) == 0
    assert len(offer(orchestrator, request, "a", 2 * TOKENS, 3 * TOKENS).keys) == 0


def test_a_prefix_never_evicts_itself() -> None:
    orchestrator = make([device("file", 4, 1.0)])
    request = orchestrator.begin("r")
    for end in range(1, 9):
        plan = offer(orchestrator, request, "a", (end - 1) * TOKENS, end * TOKENS)
        orchestrator.acknowledge(write_report(plan.write_id))
    assert held(orchestrator, "a", 8) == [HIT] * 4 + [MISS] * 4
    assert orchestrator.snapshot().evicted_chunks == 0


def test_the_coldest_prefix_goes_first_from_its_end() -> None:
    orchestrator = make([device("file", 6, 1.0)])
    for document in "abc":
        store(orchestrator, document, 2)
    plan, request = load(orchestrator, "a", 2)
    orchestrator.complete_load(request)
    store(orchestrator, "d", 1)
    assert [hits(orchestrator, document, 2) for document in "abc"] == [2, 1, 2]
    store(orchestrator, "e", 2)
    assert [hits(orchestrator, document, 2) for document in "abc"] == [2, 0, 1]
    assert len(plan.slot) == 2


def test_pinned_chunks_stay() -> None:
    orchestrator = make([device("file", 2, 1.0)])
    store(orchestrator, "a", 2)
    _, request = load(orchestrator, "a", 2)
    assert len(store(orchestrator, "b", 2).keys) == 0
    assert hits(orchestrator, "a", 2) == 2
    orchestrator.complete_load(request)
    assert len(store(orchestrator, "b", 2).keys) == 2
    assert hits(orchestrator, "a", 2) == 0


def test_shared_beginnings_outlive_their_branches() -> None:
    orchestrator = make([device("file", 6, 1.0)])
    store(orchestrator, "ab", 3)
    store(orchestrator, "ac", 3)
    store(orchestrator, "d", 5)
    assert hits(orchestrator, "ab", 3) == 1
    check_table(orchestrator)


def test_window_and_state_chunks_hang_on_the_spine() -> None:
    """Whatever the groups' numbers: the spine is placed first, the plan keeps the order offered."""
    orchestrator = make([device("file", 40, 1.0)], groups=(WINDOW, WIDE_FULL, STATE))
    plan = offer(orchestrator, orchestrator.begin("r"), "a", 0, 5 * TOKENS)
    assert plan.group.tolist() == [0] * 5 + [1] * 2 + [2] * 5
    parent = dict(zip(plan.keys, plan.parents, strict=True))
    spine = [key("a", 1, 2 * TOKENS), key("a", 1, 4 * TOKENS)]
    for group in (0, 2):
        hung = [parent[key("a", group, end * TOKENS)] for end in range(1, 6)]
        assert hung == [b"", spine[0], spine[0], spine[1], spine[1]]
    assert [parent[k] for k in spine] == [b"", spine[0]]


def test_full_groups_form_one_spine() -> None:
    orchestrator = make([device("file", 40, 1.0)], groups=(WIDE_FULL, FULL))
    plan = offer(orchestrator, orchestrator.begin("r"), "a", 0, 4 * TOKENS)
    parent = dict(zip(plan.keys, plan.parents, strict=True))
    order = [(1, 1), (0, 2), (1, 2), (1, 3), (0, 4), (1, 4)]
    chain = [key("a", group, end * TOKENS) for group, end in order]
    assert [parent[k] for k in chain] == [b"", *chain[:-1]]


def test_without_full_groups_each_chunk_hangs_on_the_one_before() -> None:
    orchestrator = make([device("file", 40, 1.0)], groups=(WINDOW, STATE))
    request = orchestrator.begin("r")
    plan = offer(orchestrator, request, "a", 0, 2 * TOKENS)
    later = offer(orchestrator, request, "a", 4 * TOKENS, 5 * TOKENS)  # the window skips some
    assert plan.parents == [b"", plan.keys[0], b"", plan.keys[2]]
    assert later.parents == [plan.keys[1], plan.keys[3]]


def test_tails_of_prompts_hang_beside_the_next_whole_chunk() -> None:
    """A tail ends between chunks; its state hangs on it, and the prompt goes on without it."""
    orchestrator = make([device("file", 40, 1.0)], groups=(FULL, STATE))
    request = orchestrator.begin("r")
    offer(orchestrator, request, "a", 0, 2 * TOKENS)
    tail = [key("a", 0, 40), key("a", 1, 40)]
    plan = orchestrator.reserve(tail, [40, 40], request)
    assert plan.keys == tail and plan.parents == [key("a", 0, 32), tail[0]]
    after = offer(orchestrator, request, "a", 2 * TOKENS, 3 * TOKENS)
    assert after.parents == [key("a", 0, 32), key("a", 0, 48)]


def test_hung_chunks_are_refused_with_their_place_on_the_spine() -> None:
    orchestrator = make([device("file", 3, 1.0)], groups=(WINDOW, FULL))
    plan = offer(orchestrator, orchestrator.begin("r"), "a", 0, 5 * TOKENS)
    assert plan.keys == [key("a", 1, end * TOKENS) for end in (1, 2, 3)]
    assert orchestrator.snapshot().dropped_store_chunks == 7


def test_early_window_chunks_go_before_the_spine() -> None:
    """A load reads a window's last chunks only: the early ones get cold and go first."""
    orchestrator = make([device("file", 12, 1.0)], groups=(FULL, WINDOW))
    store(orchestrator, "a", 6)
    request = orchestrator.begin("load")
    keys = [key("a", 0, end) for end in ends(FULL, 0, 6 * TOKENS)]
    keys += [key("a", 1, end) for end in ends(WINDOW, 3 * TOKENS, 6 * TOKENS)]
    orchestrator.plan_load(keys, request)
    orchestrator.complete_load(request)
    store(orchestrator, "b", 1)
    assert hits(orchestrator, "a", 6) == 6
    assert held(orchestrator, "a", 6, group=1) == [HIT, MISS, MISS, HIT, HIT, HIT]


def test_backfills_find_their_place() -> None:
    """Window chunks may be offered after later ones."""
    orchestrator = make([device("file", 40, 1.0)], groups=(FULL, WINDOW))
    request = orchestrator.begin("r")
    spine = [key("a", 0, end) for end in ends(FULL, 0, 4 * TOKENS)]
    orchestrator.reserve([*spine, key("a", 1, 64)], [16, 32, 48, 64, 64], request)
    plan = orchestrator.reserve([key("a", 1, 32), key("a", 1, 48)], [32, 48], request)
    assert plan.parents == [spine[1], spine[2]]
    check_table(orchestrator)


def test_a_key_offered_twice_in_a_step_is_stored_once() -> None:
    orchestrator = make(SSD)
    twice = [key("a", 0, TOKENS)] * 2
    plan = orchestrator.reserve(twice, [TOKENS] * 2, orchestrator.begin("r"))
    assert plan.keys == twice[:1]
    check_table(orchestrator)


def test_misses_are_what_was_offered_and_not_there() -> None:
    state = GroupGeometry(GroupKind.STATE, 2 * TOKENS, SIZE, 1)
    orchestrator = make([device("file", 3, 1.0)], groups=(FULL, state))
    store(orchestrator, "a", 2)
    store(orchestrator, "a", 3)
    now = orchestrator.snapshot()
    assert (now.miss_chunks, now.miss_tokens) == (4, 3 * TOKENS + 2 * TOKENS)
    assert (now.stored_chunks, now.dropped_store_chunks) == (3, 1)


def test_finished_requests_keep_their_writes() -> None:
    orchestrator = make(SSD)
    request = orchestrator.begin("r")
    plan = offer(orchestrator, request, "a", 0, TOKENS)
    orchestrator.finish(request)
    orchestrator.acknowledge(write_report(plan.write_id))
    assert held(orchestrator, "a", 1) == [HIT]


def test_slots_of_every_device_are_bounded() -> None:
    orchestrator = make([device("dram", 3, 9.0), device("file", 5, 1.0)])
    for document in "abcdefgh":
        store(orchestrator, document, 5)
        for row, slots in zip(orchestrator.snapshot().devices, (3, 5), strict=True):
            assert row.slots == slots and row.chunks <= slots
    assert len(pool_of(orchestrator).table.index) == 8
