"""Arenas: alignment, what the pages are, NUMA nodes, and memory that is not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvpool.errors import DeviceError, OutOfSpaceError
from kvpool.native import Arena
from kvpool.types import PageType

HUGE = 2 << 20
MAPS = Path("/proc/self/smaps")


def _mapping(address: int) -> dict[str, int]:
    """The figures of the mapping that starts at `address`, in bytes."""
    figures: dict[str, int] = {}
    ours = False
    for line in MAPS.read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split()[0]:
            ours = int(name.split("-")[0], 16) == address
        elif ours and rest.endswith("kB"):
            figures[name] = int(rest.split()[0]) << 10
    return figures


@pytest.mark.parametrize("length", [1, HUGE, HUGE + 1, 24 << 20])
def test_is_aligned_whole_and_faulted_in(length: int) -> None:
    arena = Arena(length)
    figures = _mapping(arena.address)
    assert arena.address % HUGE == 0 and arena.length % HUGE == 0
    assert length <= arena.length < length + HUGE
    assert figures["Size"] == arena.length
    assert figures["Rss"] + figures.get("Private_Hugetlb", 0) == arena.length
    assert not arena.array.any() and arena.array.shape == (arena.length,)
    arena.close()


def test_says_what_the_pages_are() -> None:
    arena = Arena(16 << 20)
    figures = _mapping(arena.address)
    share = figures["AnonHugePages"] / arena.length
    if figures.get("Private_Hugetlb"):
        assert arena.page_type is PageType.RESERVED_HUGE
    else:
        assert arena.page_type is (PageType.TRANSPARENT_HUGE if share >= 0.9 else PageType.PLAIN)
    arena.close()


def test_node_zero_and_a_node_that_is_not_there() -> None:
    if Path("/sys/devices/system/node/node0").exists():
        arena = Arena(HUGE, numa_node=0)
        assert arena.numa_node in (0, -1)  # -1 where the container must not bind memory
        arena.close()
    with pytest.raises(DeviceError, match="NUMA node 4000") as caught:
        Arena(HUGE, numa_node=4000)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("length", [1 << 60, 1 << 46])
def test_more_than_there_is(length: int) -> None:
    with pytest.raises(OutOfSpaceError):
        Arena(length)


def test_no_bytes() -> None:
    with pytest.raises(DeviceError, match="Invalid argument"):
        Arena(0)


def test_close_gives_the_address_range_back() -> None:
    arena = Arena(4 * HUGE)
    before = MAPS.read_text()
    arena.close()
    arena.close()
    assert f"{arena.address:x}-" in before
    assert f"{arena.address:x}-{arena.address + arena.length:x}" not in MAPS.read_text()
    with pytest.raises(ValueError, match="closed"):
        arena.array  # noqa: B018
