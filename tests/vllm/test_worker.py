"""How vLLM's flat lists of blocks become the blocks of chunks."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvpool.connectors.vllm.plugin import PROCESS_CPUS
from kvpool.connectors.vllm.worker import chunk_blocks, process_cpus
from kvpool.types import Geometry, GroupGeometry, GroupKind

pytestmark = pytest.mark.vllm

FULL = GroupGeometry(GroupKind.FULL, 256, 4096)
WINDOW = GroupGeometry(GroupKind.WINDOW, 256, 4096, window_chunks=2)
GEOMETRY = Geometry((FULL, WINDOW), 4, 4096)


def blocks(
    ids: list[int], sizes: list[int], indices: list[int], groups: list[int], *, whole: bool
) -> list[list[int]]:
    spec = GPULoadStoreSpec(ids, group_sizes=sizes, block_indices=indices)
    flat = chunk_blocks(spec, np.array(groups, np.uint8), GEOMETRY, whole=whole)
    return [[int(block) for block in chunk] for chunk in flat.reshape(-1, 4)]


def test_whole_chunks_of_two_groups() -> None:
    ids = list(range(100, 112))
    assert blocks(ids, [8, 4], [4, 8], [0, 0, 1], whole=True) == [
        [100, 101, 102, 103],
        [104, 105, 106, 107],
        [108, 109, 110, 111],
    ]


def test_a_load_may_begin_and_end_inside_a_chunk() -> None:
    assert blocks([7, 8, 9, 10], [4, 0], [6, 0], [0, 0], whole=False) == [
        [-1, -1, 7, 8],
        [9, 10, -1, -1],
    ]


def test_a_store_with_a_hole_gives_no_blocks_of_that_group() -> None:
    ids = list(range(10))
    assert blocks(ids, [6, 4], [2, 0], [0, 0, 1], whole=True) == [
        [-1] * 4,
        [-1] * 4,
        [6, 7, 8, 9],
    ]


def test_a_load_whose_blocks_do_not_fit_its_chunks_gives_none() -> None:
    assert blocks(list(range(9)), [9, 0], [0, 0], [0, 0], whole=False) == [[-1] * 4] * 2


def test_a_load_without_blocks_wants_nothing() -> None:
    assert blocks([], [0, 0], [0, 0], [], whole=False) == []


def test_threads_of_the_pool_may_use_all_cpus_of_the_process() -> None:
    """vLLM's CPU worker binds the thread that makes the pool."""
    before, one = os.sched_getaffinity(0), {min(PROCESS_CPUS)}
    seen: list[set[int]] = []
    os.sched_setaffinity(0, one)
    try:
        with process_cpus():
            thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
            thread.start()
            thread.join()
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, before)
    assert seen == [PROCESS_CPUS]
