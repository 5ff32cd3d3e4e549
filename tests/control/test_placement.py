"""Placement: what each policy prefers, and that shares of every prefix are proportional."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import placement
from kvpool.errors import ConfigurationError
from kvpool.orchestrator import Orchestrator
from tests.control.rig import (
    FULL,
    STATE,
    TOKENS,
    WINDOW,
    device,
    devices_of,
    geometry,
    make,
    offer,
    store,
)

bandwidths = st.lists(st.floats(0.1, 60.0), min_size=1, max_size=6)


def fill(chunks: int, bandwidth: list[float]) -> list[int]:
    load, order = [0.0] * len(bandwidth), []
    for _ in range(chunks):
        best = placement.rank_proportional(load, 1.0, bandwidth, range(len(bandwidth)))[0]
        load[best] += 1.0
        order.append(best)
    return order


@given(bandwidths)
def test_every_prefix_is_within_one_chunk_of_proportional(bandwidth: list[float]) -> None:
    count: Counter[int] = Counter()
    for n, chosen in enumerate(fill(200, bandwidth), start=1):
        count[chosen] += 1
        for d, speed in enumerate(bandwidth):
            fair = n * speed / sum(bandwidth)
            assert abs(count[d] - fair) < 1 + 1e-6, f"{n=} {d=} {count=} {fair=}"


@given(bandwidths)
def test_whole_pool_finishes_together(bandwidth: list[float]) -> None:
    """No device is more than a chunk of its own behind the ideal time."""
    count = Counter(fill(200, bandwidth))
    ideal = 200 / sum(bandwidth)
    for d, speed in enumerate(bandwidth):
        assert count[d] / speed <= ideal + 1 / speed + 1e-6


@pytest.mark.parametrize("steps", [[200], [1] * 200, [7, 50, 3, 140]])
def test_shares_through_the_orchestrator(steps: list[int]) -> None:
    """The same holds for what is stored, whatever steps a prefix is offered in."""
    speeds = [20.0, 7.0, 3.5]
    orchestrator = make([device(f"file{i}", 400, speed) for i, speed in enumerate(speeds)])
    request, tokens, chosen = orchestrator.begin("r"), 0, []
    for chunks in steps:
        plan = offer(orchestrator, request, "a", tokens, tokens + chunks * TOKENS)
        chosen += devices_of(plan)
        tokens += chunks * TOKENS
    for n in range(20, 201):
        count = Counter(chosen[:n])
        assert all(abs(count[d] - n * s / sum(speeds)) <= 1 for d, s in enumerate(speeds)), n


def test_branches_are_balanced_on_their_own_path() -> None:
    """What a branch adds makes up for where its own prefix lies, not for the pool's average."""
    orchestrator = make([device("file0", 99, 1.0), device("file1", 99, 1.0)])
    trunk = devices_of(store(orchestrator, "ab", 5))
    for other in "cde":
        branch = devices_of(store(orchestrator, "a" + other, 5))
        assert len(branch) == 4
        count = Counter(trunk[:1] + branch)
        assert abs(count[0] - count[1]) <= 1


def test_equal_bandwidths_go_to_the_lower_index() -> None:
    assert placement.rank_proportional([0.0, 0.0, 0.0], 1, [2.0, 2.0, 2.0], [0, 1, 2]) == [0, 1, 2]
    assert fill(6, [2.0, 2.0, 2.0]) == [0, 1, 2, 0, 1, 2]


def test_a_full_device_is_passed_over() -> None:
    orchestrator = make([device("dram", 2, 10.0), device("file", 50, 10.0)])
    assert devices_of(store(orchestrator, "a", 8)) == [0, 1, 0, 1, 1, 1, 1, 1]


def test_link_aware_saves_memory() -> None:
    """DRAM 10, SSDs 4 and 2, but 8 GB/s together: the link is the limit from the start.

    A chunk fits a device if (its chunks + 1) / bandwidth <= (all chunks + 1) / 8.
    """
    devices = [device("dram", 99, 10.0, 4.0), device("file0", 99, 4.0, 2.5)]
    devices.append(device("file1", 99, 2.0, 1.5))
    orchestrator = make(devices, placement="link_aware")
    chosen = devices_of(store(orchestrator, "a", 12))
    assert chosen == [0, 1, 0, 2, 1, 1, 0, 2, 1, 1, 0, 2]
    proportional = devices_of(store(make(devices), "a", 12))
    assert proportional.count(0) > chosen.count(0)


@given(st.lists(st.floats(0.5, 20.0), min_size=2, max_size=5), st.floats(0.2, 0.95))
def test_link_aware_stays_within_the_links_time(bandwidth: list[float], limit: float) -> None:
    """For every prefix each device is done within the link's time, but for a chunk of its own."""
    together, everyone = sum(bandwidth) * limit, range(len(bandwidth))
    load = [0.0] * len(bandwidth)
    for n in range(1, 150):
        best = placement.rank_link_aware(load, 1.0, bandwidth, everyone, together)[0]
        load[best] += 1.0
        for d in everyone:
            assert load[d] / bandwidth[d] <= n / together + 1 / bandwidth[d] + 1e-9


def test_link_aware_without_a_limit_is_proportional() -> None:
    for load in ([0.0, 0.0, 0.0], [3.0, 2.0, 1.0], [5.0, 0.0, 4.0]):
        assert placement.rank_link_aware(
            load, 1, [10, 4, 2], [0, 1, 2], 16.0
        ) == placement.rank_proportional(load, 1, [10, 4, 2], [0, 1, 2])


def test_serial_fills_memory_then_one_device_after_another() -> None:
    devices = [device("file0", 3, 50.0), device("dram", 3, 10.0), device("file1", 4, 99.0)]
    orchestrator = make(devices, placement="serial")
    assert devices_of(store(orchestrator, "a", 10)) == [1, 1, 1, 0, 0, 0, 2, 2, 2, 2]


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"placement='fastest'.*proportional"):
        Orchestrator(geometry(), 1, "fastest")


def test_windows_and_states_make_up_for_the_spine() -> None:
    """A load reads the whole spine but only the ends of the other groups: they fill its gaps."""
    orchestrator = make(
        [device("file0", 300, 3.0), device("file1", 300, 1.0)], groups=(WINDOW, FULL, STATE)
    )
    request = orchestrator.begin("r")
    plan = offer(orchestrator, request, "a", 0, 64 * TOKENS)
    size = [0.5, 1.0, 0.25]
    place = {
        (int(g), int(p)): int(d)
        for g, p, d in zip(plan.group, plan.positions, plan.device, strict=True)
    }
    for n in range(20, 65):
        load = [0.0, 0.0]
        for group, first in ((0, n - 2), (1, 1), (2, n)):
            for chunk in range(first, n + 1):
                load[place[group, chunk * TOKENS]] += size[group]
        fair = sum(load) * 0.75
        assert abs(load[0] - fair) <= 1.0, f"{n}: {load}"


def test_choose_copies_counts_what_has_one_copy_first() -> None:
    # The SSD has 2 chunks that lie nowhere else: all of the free ones go to memory, until that
    # would be later.
    load = [0.0, 2.0]
    take = placement.choose_copies(load, [1.0] * 4, [1] * 4, [0] * 4, [2.0, 1.0])
    assert take == [True] * 4 and load == [4.0, 2.0]
    take = placement.choose_copies(load, [1.0] * 3, [1] * 3, [0] * 3, [2.0, 1.0])
    assert take == [True, False, True] and load == [6.0, 3.0]


def test_returns_follow_the_share_along_the_prefix() -> None:
    nothing = [False] * 12
    assert placement.choose_returns(nothing, [1.0] * 12, 0.5, 99) == [1, 3, 5, 7, 9, 11]
    assert placement.choose_returns(nothing, [1.0] * 12, 0.5, 2) == [1, 3]


def test_returns_stop_at_the_share_of_the_whole_prefix() -> None:
    in_memory = [False] * 6 + [True] * 6
    assert placement.choose_returns(in_memory, [1.0] * 12, 0.5, 99) == []
    assert len(placement.choose_returns(in_memory, [1.0] * 12, 0.75, 99)) == 3
