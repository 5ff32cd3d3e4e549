"""The lazy heap: right order although stamps grow behind its back, one record an entry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpool.recency import LazyHeap

BIT = 4


class Columns:
    def __init__(self, count: int) -> None:
        self.stamp = [0] * count
        self.position = [0] * count
        self.flags = bytearray(count)
        self.heap = LazyHeap(self.stamp, self.position, self.flags, BIT)


def drain(columns: Columns, limit: int = 1 << 40) -> list[int]:
    entries = []
    while (entry := columns.heap.pop_below(limit)) >= 0:
        entries.append(entry)
    return entries


def test_coldest_first_then_deepest() -> None:
    columns = Columns(4)
    columns.stamp[:] = [5, 3, 5, 9]
    columns.position[:] = [16, 16, 32, 16]
    columns.heap.push_all(range(4))
    assert drain(columns) == [1, 2, 0, 3]


def test_a_touch_after_the_push_counts() -> None:
    columns = Columns(3)
    columns.stamp[:] = [1, 2, 3]
    columns.heap.push_all(range(3))
    columns.stamp[0] = 4
    assert drain(columns) == [1, 2, 0]


def test_limit_is_exclusive_and_looks_at_current_stamps() -> None:
    columns = Columns(2)
    columns.stamp[:] = [1, 5]
    columns.heap.push_all(range(2))
    columns.stamp[0] = 5
    assert not columns.heap.any_below(5)
    assert columns.heap.pop_below(5) == -1
    assert columns.heap.any_below(6)
    assert columns.heap.pop_below(6) == 0


def test_other_flags_survive() -> None:
    columns = Columns(1)
    columns.flags[0] = 0xFF ^ BIT
    columns.heap.push(0)
    assert columns.flags[0] == 0xFF
    columns.heap.pop_below(1)
    assert columns.flags[0] == 0xFF ^ BIT


steps = st.lists(
    st.tuples(st.sampled_from(["push", "touch", "pop"]), st.integers(0, 7)), max_size=60
)


@given(steps)
def test_matches_a_sorted_set(history: list[tuple[str, int]]) -> None:
    columns, queued = Columns(8), set[int]()
    columns.position[:] = [16 * (entry % 3 + 1) for entry in range(8)]
    for clock, (what, entry) in enumerate(history, start=1):
        if what == "push":
            columns.heap.push(entry)
            queued.add(entry)
        elif what == "touch":
            columns.stamp[entry] = clock
        else:
            expected = min(
                queued,
                key=lambda e: (columns.stamp[e], -columns.position[e], e),
                default=-1,
            )
            assert columns.heap.pop_below(clock + 1) == expected
            queued.discard(expected)
        assert len(columns.heap) == len(queued), "records pile up"
