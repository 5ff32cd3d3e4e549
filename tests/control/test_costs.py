"""What look-ups and loads cost does not grow with what is held; what is held is small.

Costs are counted, not timed: how often Python calls something.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from bench.control import (
    CHUNK_TOKENS,
    HeldPool,
    chunk_key,
    load_once,
    look_up,
    make_orchestrator,
    store_chain,
)
from kvpool.orchestrator import Orchestrator
from kvpool.recency import LazyHeap
from kvpool.types import Key
from tests.control.rig import (
    FULL,
    TOKENS,
    WINDOW,
    device,
    key,
    make,
    pool_of,
    store,
    write_report,
)

PREFIX = 64


def calls(work: Callable[[], object]) -> int:
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def holding(held: int, slots: int | None = None) -> Orchestrator:
    orchestrator = make_orchestrator(slots or held)
    for chain in range(held // PREFIX):
        store_chain(orchestrator, chain, PREFIX)
    return orchestrator


@pytest.fixture(scope="module")
def pools() -> list[Orchestrator]:
    return [holding(held) for held in (2 * PREFIX, 60 * PREFIX)]


def test_a_look_up_is_one_call_however_much_is_held(pools: list[Orchestrator]) -> None:
    keys = [chunk_key(1, i) for i in range(PREFIX)]
    costs = []
    for orchestrator in pools:
        request = orchestrator.begin("r")
        costs.append(calls(lambda: look_up(orchestrator, keys, request)))  # noqa: B023
    assert costs[0] == costs[1] <= PREFIX + 4


class CountingIndex(dict[Key, int]):
    """An index that knows how often it is asked."""

    asked = 0

    def get(self, key: Key, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


def counting_index(orchestrator: Orchestrator) -> CountingIndex:
    table = pool_of(orchestrator).table
    table.index = index = CountingIndex(table.index)
    orchestrator._find = index.get
    return index


def test_the_index_is_asked_once_a_chain() -> None:
    """Its memory is visited in no order: that is what makes look-ups dear where much is held."""
    orchestrator = make([device("file", 400, 1.0)], groups=(WINDOW, FULL))
    store(orchestrator, "a", PREFIX)
    keys = [key("a", 1, (i + 1) * TOKENS) for i in range(PREFIX)]
    index, request = counting_index(orchestrator), orchestrator.begin("r")
    assert look_up(orchestrator, keys, request) == PREFIX
    assert index.asked == 1
    orchestrator.plan_load(keys, request)
    assert index.asked == 2


def test_plans_ask_the_index_once_a_full_group() -> None:
    orchestrator = make([device("file", 400, 1.0)], groups=(FULL, FULL))
    store(orchestrator, "a", PREFIX)
    keys = [key("a", group, (i + 1) * TOKENS) for group in (0, 1) for i in range(PREFIX)]
    index = counting_index(orchestrator)
    orchestrator.plan_load(keys, orchestrator.begin("r"))
    assert index.asked == 2


def test_planning_a_load_costs_the_same_however_much_is_held(pools: list[Orchestrator]) -> None:
    costs = []
    for orchestrator in pools:
        pool = HeldPool(0, PREFIX, orchestrator)
        load_once(pool, 1)
        costs.append(calls(lambda: load_once(pool, 1)))  # noqa: B023
    assert costs[0] == costs[1]


def test_planning_a_load_calls_little_a_chunk(pools: list[Orchestrator]) -> None:
    def plan(chunks: int) -> int:
        keys = [chunk_key(1, i) for i in range(chunks)]
        request = pools[1].begin("r")
        cost = calls(lambda: pools[1].plan_load(keys, request))
        pools[1].complete_load(request)
        return cost

    assert plan(PREFIX) - plan(PREFIX // 2) <= 3 * PREFIX // 2


@pytest.mark.parametrize("full", [False, True])
def test_storing_costs_the_same_however_much_is_held(full: bool) -> None:
    """Also where each chunk needs a victim."""
    costs = []
    for held in (20 * PREFIX, 100 * PREFIX):
        orchestrator = holding(held, held if full else held + 4 * PREFIX)
        store_chain(orchestrator, 1000, PREFIX)
        costs.append(calls(lambda: store_chain(orchestrator, 1001, PREFIX)))  # noqa: B023
    assert costs[1] <= 1.2 * costs[0]


def test_a_snapshot_costs_the_same_however_much_is_held(pools: list[Orchestrator]) -> None:
    assert calls(pools[0].snapshot) == calls(pools[1].snapshot)


def test_a_chunk_costs_at_most_300_bytes() -> None:
    held = 16_384
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        orchestrator = make_orchestrator(held)
        for chain in range(held // 1024):
            store_chain(orchestrator, chain, 1024)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(pool_of(orchestrator).table.index) == held
    assert used / held <= 300


def test_nothing_grows_in_a_full_pool() -> None:
    """Memory after many prefixes have come and gone is what it was after few."""
    orchestrator = make_orchestrator(16 * PREFIX)
    sizes = []
    tracemalloc.start()
    try:
        for chain in range(120):
            store_chain(orchestrator, chain, PREFIX)
            load_once(HeldPool(0, PREFIX, orchestrator), chain)
            moves = orchestrator.take_moves()
            if moves is not None:
                orchestrator.acknowledge(write_report(moves.write_id))
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(sizes[60:]) <= 1.1 * max(sizes[30:60])
    pool = pool_of(orchestrator)
    heaps: list[LazyHeap] = [pool.table.leaves, pool.table.spillable]
    assert all(len(heap) <= pool.table.capacity for heap in heaps)
    assert not pool.writes


def test_positions_of_the_bench_are_those_of_its_geometry() -> None:
    orchestrator = make_orchestrator(PREFIX)
    store_chain(orchestrator, 0, PREFIX)
    table = pool_of(orchestrator).table
    last = table.index[chunk_key(0, PREFIX - 1)]
    assert table.position[last] == PREFIX * CHUNK_TOKENS
