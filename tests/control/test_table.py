"""The table's state machine: what is allowed, what is refused, when slots come back."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.errors import ConfigurationError
from kvpool.table import DOOMED, FREE, READABLE, WRITING, Table, TransitionError
from kvpool.types import NO_DEVICE

DRAM, SSD = 0, 1


def make(dram: int = 4, ssd: int = 8) -> Table:
    return Table([dram, ssd], [True, False])


def name(i: int) -> bytes:
    return bytes([i])


def readable(table: Table, i: int, parent: int = -1, device: int = DRAM, stamp: int = 1) -> int:
    entry = table.add(name(i), parent, 0, 16 * (i + 1), device, stamp)
    table.end_write(entry, True)
    return entry


def chain(table: Table, devices: list[int], stamp: int = 1, first: int = 0) -> list[int]:
    entries = [-1]
    for i, device in enumerate(devices):
        entries.append(readable(table, first + i, entries[-1], device, stamp))
    return entries[1:]


def pins(*entries: int) -> np.ndarray:
    return np.array(entries, np.int64)


def test_life_of_an_entry() -> None:
    table = make()
    entry = table.add(name(0), -1, 0, 16, DRAM, 1)
    assert table.state[entry] == WRITING and table.index == {name(0): entry}
    table.end_write(entry, True)
    assert table.state[entry] == READABLE
    assert table.drop(entry) == 1
    assert table.state[entry] == FREE and table.index == {}
    assert [len(slots.free) for slots in table.slots] == [4, 8]


def test_a_failed_write_leaves_nothing() -> None:
    table = make()
    entry = table.add(name(0), -1, 0, 16, DRAM, 1)
    table.end_write(entry, False)
    assert table.state[entry] == FREE and table.index == {} and len(table.slots[DRAM].free) == 4


def test_fresh_chunks_get_neighbouring_slots() -> None:
    table = make()
    assert [table.slot0[e] for e in chain(table, [SSD] * 4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("end", ["write", "pin"])
def test_a_dropped_entry_keeps_its_slot_while_it_is_used(end: str) -> None:
    table = make(dram=1)
    entry = table.add(name(0), -1, 0, 16, DRAM, 1)
    if end == "pin":
        table.end_write(entry, True)
        table.pin(pins(entry))
    table.drop(entry)
    assert table.state[entry] == DOOMED and table.index == {}
    assert table.slots[DRAM].doomed == 1 and not table.slots[DRAM].free
    if end == "pin":
        table.unpin(pins(entry))
    else:
        table.end_write(entry, True)
    assert table.state[entry] == FREE
    assert table.slots[DRAM].doomed == 0 and len(table.slots[DRAM].free) == 1


def test_a_doomed_entry_waits_for_pins_and_write() -> None:
    table = make()
    entry = readable(table, 0)
    table.begin_copy(entry, SSD)
    table.pin(pins(entry))
    table.pin(pins(entry))
    table.drop(entry)
    table.unpin(pins(entry))
    table.end_write(entry, True)
    assert table.state[entry] == DOOMED
    table.unpin(pins(entry))
    assert table.state[entry] == FREE
    assert [len(slots.free) for slots in table.slots] == [4, 8]


def test_drop_takes_all_below_and_nothing_else() -> None:
    table = make()
    a, b, c = chain(table, [SSD] * 3)
    beside = readable(table, 9, a, SSD)
    assert table.drop(b) == 2
    assert not table.resident(b) and not table.resident(c)
    assert table.resident(a) and table.resident(beside)
    assert table.children[a] == 1 and table.first_child[a] == beside


def test_a_generation_names_a_chunk_for_ever() -> None:
    table = make(dram=1, ssd=0)
    entry = readable(table, 0)
    before = table.generation[entry]
    table.drop(entry)
    assert readable(table, 1) == entry
    assert table.generation[entry] != before


@pytest.mark.parametrize("pinned", [False, True])
def test_a_spill_swaps_places(pinned: bool) -> None:
    """The memory slot comes free at once, or stays as a copy while somebody reads it."""
    table = make()
    entry = readable(table, 0)
    slot = table.begin_copy(entry, SSD)
    assert table.device0[entry] == DRAM and table.state[entry] == READABLE
    if pinned:
        table.pin(pins(entry))
    table.end_write(entry, True)
    assert (table.device0[entry], table.slot0[entry]) == (SSD, slot)
    assert table.device1[entry] == (DRAM if pinned else NO_DEVICE)
    assert len(table.slots[DRAM].free) == (3 if pinned else 4)


def test_a_kept_copy_is_added() -> None:
    table = make()
    entry = readable(table, 0, device=SSD)
    slot = table.begin_copy(entry, DRAM)
    assert not table.has_copy(entry)
    table.end_write(entry, True)
    assert table.has_copy(entry)
    assert (table.device1[entry], table.slot1[entry]) == (DRAM, slot)
    table.drop_memory_copy(entry)
    assert table.device1[entry] == NO_DEVICE and len(table.slots[DRAM].free) == 4


@pytest.mark.parametrize("device", [DRAM, SSD])
def test_a_failed_copy_changes_nothing(device: int) -> None:
    table = make()
    entry = readable(table, 0, device=device)
    other = SSD if device == DRAM else DRAM
    table.begin_copy(entry, other)
    table.end_write(entry, False)
    assert (table.device0[entry], table.device1[entry]) == (device, NO_DEVICE)
    assert len(table.slots[other].free) == table.slots[other].capacity


def test_retired_slots_never_come_back() -> None:
    table = make()
    entry = readable(table, 0, device=SSD)
    table.begin_copy(entry, DRAM)
    table.end_write(entry, True)
    table.pin(pins(entry))
    table.retire(entry, DRAM, table.slot1[entry])
    bad = table.slot1[entry]
    assert not table.resident(entry)
    assert table.slots[DRAM].retired == 0, "it is still being read"
    table.unpin(pins(entry))
    assert (table.slots[DRAM].retired, table.slots[SSD].retired) == (1, 0)
    assert bad not in table.slots[DRAM].free and len(table.slots[SSD].free) == 8


def test_a_slot_is_retired_though_a_spill_from_it_ends_later() -> None:
    table = make()
    entry = readable(table, 0)
    table.begin_copy(entry, SSD)
    table.pin(pins(entry))
    table.retire(entry, DRAM, table.slot0[entry])
    table.end_write(entry, True)
    table.unpin(pins(entry))
    assert (table.slots[DRAM].retired, table.slots[SSD].retired) == (1, 0)


def test_a_place_that_is_no_longer_the_chunks_is_not_retired() -> None:
    table = make()
    entry = readable(table, 0)
    table.retire(entry, SSD, 3)
    assert not table.resident(entry)
    assert [slots.retired for slots in table.slots] == [0, 0]


def test_clear_frees_what_is_idle_and_dooms_the_rest() -> None:
    table = make()
    idle, pinned = readable(table, 0), readable(table, 1)
    writing = table.add(name(2), pinned, 0, 48, SSD, 1)
    twice = readable(table, 3, device=SSD)
    table.begin_copy(twice, DRAM)
    table.end_write(twice, True)
    table.pin(pins(pinned))
    before = [table.generation[e] for e in (idle, pinned, writing, twice)]
    table.clear()
    after = [table.generation[e] for e in (idle, pinned, writing, twice)]
    assert all(new != old for new, old in zip(after, before, strict=True))
    assert table.index == {} and not len(table.leaves) and not len(table.spillable)
    states = [table.state[e] for e in (idle, pinned, writing, twice)]
    assert states == [FREE, DOOMED, DOOMED, FREE]
    assert [len(slots.free) for slots in table.slots] == [3, 7]
    again = table.add(name(1), -1, 0, 16, DRAM, 2)
    table.end_write(writing, True)
    table.unpin(pins(pinned))
    assert [len(slots.free) for slots in table.slots] == [3, 8]
    assert table.index == {name(1): again}


def test_a_lost_device_takes_its_chunks_but_not_their_copies() -> None:
    table = make()
    a, b, c = chain(table, [DRAM, SSD, DRAM])
    alone = readable(table, 8, device=SSD)
    twice = readable(table, 9, device=SSD)
    table.begin_copy(twice, DRAM)
    table.end_write(twice, True)
    assert table.lose_device(SSD) == 3, "b, c below it, and the one alone"
    assert [table.resident(e) for e in (a, b, c, alone, twice)] == [
        True,
        False,
        False,
        False,
        True,
    ]
    assert (table.device0[twice], table.device1[twice]) == (DRAM, NO_DEVICE)


def test_a_lost_memory_device_takes_only_the_copy() -> None:
    table = make()
    twice = readable(table, 9, device=SSD)
    table.begin_copy(twice, DRAM)
    table.end_write(twice, True)
    assert table.lose_device(DRAM) == 0
    assert (table.device0[twice], table.device1[twice]) == (SSD, NO_DEVICE)


def test_eviction_takes_leaves_of_the_coldest_prefix() -> None:
    table = make()
    cold = chain(table, [DRAM, SSD, SSD], stamp=1)
    warm = chain(table, [DRAM, SSD], stamp=2, first=4)
    assert table.evict_for([SSD, DRAM], limit=9) == (SSD, 1)
    assert table.evict_for([DRAM, SSD], limit=9) == (DRAM, 2), "two more to reach memory"
    assert not any(table.resident(e) for e in cold) and all(table.resident(e) for e in warm)


def test_eviction_is_all_or_nothing() -> None:
    table = make()
    cold = chain(table, [SSD] * 3)
    assert table.evict_for([DRAM], limit=9) is None
    assert all(table.resident(e) for e in cold)
    assert table.evict_for([SSD], limit=9) == (SSD, 1), "the queue is as it was"


def test_eviction_falls_back_to_the_next_device() -> None:
    table = make()
    cold = chain(table, [SSD] * 3)
    assert table.evict_for([DRAM, SSD], limit=9) == (SSD, 1)
    assert [table.resident(e) for e in cold] == [True, True, False]


def test_eviction_spares_warm_pinned_and_busy_chunks() -> None:
    table = make()
    pinned = chain(table, [DRAM, DRAM])
    table.pin(pins(pinned[1]))
    copied = readable(table, 5)
    table.begin_copy(copied, SSD)
    readable(table, 6, stamp=9)
    assert table.evict_for([DRAM], limit=9) is None
    table.unpin(pins(pinned[1]))
    assert table.evict_for([DRAM], limit=9) == (DRAM, 1)
    assert not table.resident(pinned[1])
    table.end_write(copied, False)
    assert table.evict_for([DRAM], limit=9) is not None


def test_a_parent_with_one_child_left_is_no_victim() -> None:
    table = make()
    root = readable(table, 0)
    first, second = readable(table, 1, root, SSD), readable(table, 2, root, SSD)
    table.pin(pins(second))
    assert table.evict_for([DRAM], limit=9) is None
    assert table.resident(first) and table.resident(root)


def test_touching_a_chain_saves_it() -> None:
    table = make()
    first, second = chain(table, [SSD] * 2, stamp=1), chain(table, [SSD] * 2, stamp=2, first=4)
    table.touch(pins(*first), 3)
    table.evict_for([SSD], limit=9)
    assert all(table.resident(e) for e in first) and not table.resident(second[1])


def test_touching_ancestors_stops_where_it_is_known() -> None:
    table = make()
    entries = chain(table, [SSD] * 4)
    table.touch_ancestors(entries[3], 7)
    assert [table.stamp[e] for e in entries] == [7, 7, 7, 1]


ILLEGAL = {
    "key twice": lambda t, w, r: t.add(name(0), -1, 0, 16, DRAM, 1),
    "parent gone": lambda t, w, r: t.add(name(7), 3, 0, 16, DRAM, 1),
    "pin while writing": lambda t, w, r: t.pin(pins(w)),
    "unpin unpinned": lambda t, w, r: t.unpin(pins(r)),
    "no write": lambda t, w, r: t.end_write(r, True),
    "copy while writing": lambda t, w, r: t.begin_copy(w, SSD),
    "no copy": lambda t, w, r: t.drop_memory_copy(r),
    "drop free": lambda t, w, r: t.drop(3),
}


@pytest.mark.parametrize("what", sorted(ILLEGAL))
def test_illegal_steps_raise_and_change_nothing(what: str) -> None:
    table = make()
    writing = table.add(name(0), -1, 0, 16, DRAM, 1)
    ready = readable(table, 1)
    free = [len(slots.free) for slots in table.slots]
    with pytest.raises(TransitionError):
        ILLEGAL[what](table, writing, ready)
    assert table.state[writing] == WRITING and table.state[ready] == READABLE
    assert not table.pins[ready] and [len(slots.free) for slots in table.slots] == free


def test_two_copies_are_the_limit() -> None:
    table = make()
    entry = readable(table, 0, device=SSD)
    table.begin_copy(entry, DRAM)
    with pytest.raises(TransitionError, match="cannot be copied now"):
        table.begin_copy(entry, DRAM)
    table.end_write(entry, True)
    with pytest.raises(TransitionError, match="has two copies"):
        table.begin_copy(entry, DRAM)


def test_more_slots_than_can_be_numbered_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="slots"):
        Table([1 << 28], [True])
