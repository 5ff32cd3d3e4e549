"""Warm restart: whatever the ranks found, what is restored is consistent, common and contiguous."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.orchestrator import Orchestrator
from kvpool.plan import StoredHeaders
from kvpool.types import Key
from tests.control.rig import (
    FULL,
    TOKENS,
    WINDOW,
    check_contiguous,
    check_table,
    device,
    geometry,
    hits,
    key,
    pool_of,
    store,
)

DEVICES = [device("dram", 4, 9.0), device("file0", 24, 3.0), device("file1", 20, 2.0)]
SLOTS = [24, 20]


@dataclass(frozen=True)
class Header:
    slot: int
    key: Key
    parent: Key
    position: int
    group: int = 0


def headers(*found: Header) -> StoredHeaders:
    ordered = sorted(found, key=lambda header: header.slot)
    return StoredHeaders(
        np.array([h.slot for h in ordered], np.int32),
        [h.key for h in ordered],
        [h.parent for h in ordered],
        np.array([h.position for h in ordered], np.int32),
        np.array([h.group for h in ordered], np.uint8),
        np.full(len(ordered), 1 << 20, np.uint32),
        np.zeros(len(ordered), np.uint32),
    )


def document(name: str, chunks: int, first_slot: int = 0) -> list[Header]:
    keys = [key(name, 0, (i + 1) * TOKENS) for i in range(chunks)]
    return [
        Header(first_slot + i, keys[i], keys[i - 1] if i else b"", (i + 1) * TOKENS)
        for i in range(chunks)
    ]


def restored(
    *ranks: tuple[StoredHeaders, StoredHeaders], windows: bool = False
) -> tuple[Orchestrator, list[int]]:
    groups = (FULL, WINDOW) if windows else (FULL,)
    orchestrator = Orchestrator(geometry(*groups), len(ranks))
    counts = orchestrator.attach(DEVICES, [[headers(), *found] for found in ranks])
    check_table(orchestrator)
    return orchestrator, counts


def test_a_prefix_over_two_devices_comes_back() -> None:
    chunks = document("a", 10)
    orchestrator, counts = restored((headers(*chunks[::2]), headers(*chunks[1::2])))
    assert counts == [0, 5, 5] and hits(orchestrator, "a", 10) == 10
    plan = orchestrator.plan_load([h.key for h in chunks], orchestrator.begin("load"))
    assert plan.device.tolist() == [1, 2] * 5
    assert plan.slot.tolist() == list(range(10))


def test_it_ends_where_a_chunk_is_missing() -> None:
    chunks = document("a", 10)
    orchestrator, counts = restored((headers(*chunks[:4], *chunks[5:]), headers()))
    assert counts == [0, 4, 0] and hits(orchestrator, "a", 10) == 4
    assert len(pool_of(orchestrator).table.slots[1].free) == 20


def test_a_chunk_counts_where_every_rank_has_it_in_the_same_slot() -> None:
    chunks = document("a", 10)
    moved = [*chunks[:6], Header(20, chunks[6].key, chunks[6].parent, chunks[6].position)]
    orchestrator, counts = restored((headers(*chunks), headers()), (headers(*moved), headers()))
    assert counts == [0, 6, 0] and hits(orchestrator, "a", 10) == 6


def test_slots_that_not_all_ranks_have_are_unknown() -> None:
    (chunk,) = document("a", 1, first_slot=24)
    _, counts = restored((headers(chunk), headers()))
    assert counts == [0, 0, 0]


def test_the_chunk_that_a_prefix_goes_on_with_is_found_first() -> None:
    spine = document("a", 3)
    window = [Header(10 + h.slot, h.key[:-1] + b"\1", h.key, h.position, 1) for h in spine]
    orchestrator, counts = restored((headers(*spine, *window), headers()), windows=True)
    assert counts == [0, 6, 0]
    table = pool_of(orchestrator).table
    first = table.first_child[table.index[spine[0].key]]
    assert table.keys[first] == spine[1].key


def test_groups_that_the_model_lacks_and_circles_are_forgotten() -> None:
    one, two = key("x", 0, 16), key("y", 0, 16)
    found = headers(
        Header(0, one, two, 16),
        Header(1, two, one, 16),
        Header(2, key("z", 3, 16), b"", 16, 3),
        Header(3, key("w", 0, 16), b"", 16, 1),
    )
    _, counts = restored((found, headers()))
    assert counts == [0, 0, 0]


def test_life_goes_on() -> None:
    orchestrator, _ = restored((headers(*document("a", 20)), headers(*document("b", 18))))
    for name in ("c", "a", "d"):
        store(orchestrator, name, 12)
        check_table(orchestrator)
        check_contiguous(orchestrator, ("a", "b", "c", "d"), 20 * TOKENS)
        assert hits(orchestrator, name, 12) == 12


KEYS = [key(name, 0, (i + 1) * TOKENS) for name in "abc" for i in range(6)]
HEADERS = st.builds(
    Header,
    st.integers(0, 30),
    st.sampled_from(KEYS),
    st.sampled_from([b"", *KEYS]),
    st.integers(1, 100),
    st.integers(0, 2),
)
FOUND = st.lists(HEADERS, max_size=30, unique_by=lambda header: header.slot)


@given(st.lists(st.tuples(FOUND, FOUND), min_size=1, max_size=3))
def test_whatever_was_found(ranks: list[tuple[list[Header], list[Header]]]) -> None:
    found = [(headers(*first), headers(*second)) for first, second in ranks]
    orchestrator, counts = restored(*found)
    table = pool_of(orchestrator).table
    assert sum(counts) == len(table.index)
    for name, entry in table.index.items():
        device_, slot, parent = table.device0[entry], table.slot0[entry], table.parent[entry]
        above = table.keys[parent] if parent >= 0 else b""
        for rank in ranks:
            (here,) = [h for h in rank[device_ - 1] if h.slot == slot]
            assert (here.key, here.parent) == (name, above)
