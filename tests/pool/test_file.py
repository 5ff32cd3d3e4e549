"""Files against the contract, and what only files do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pool.device_contract import DeviceContract, keys
from tests.pool.rank import Rank


class TestFile(DeviceContract):
    kind = "file"

    @pytest.fixture
    def device(self, tmp_path: Path) -> str:
        return f"file:{tmp_path}/pool?size={self.SIZE}"

    def test_the_size_is_never_passed(self, device: str, tmp_path: Path) -> None:
        with Rank(device, slot_bytes=1 << 20) as rank:
            rank.store(list(range(rank.device.slots)), keys(rank.device.slots))
            facts = os.stat(tmp_path / "pool" / "container.kvpool")
            assert facts.st_size <= self.SIZE
            assert facts.st_blocks * 512 <= self.SIZE + 65536, "the file system's own blocks apart"


class TestFileThreads(TestFile):
    @pytest.fixture
    def device(self, tmp_path: Path) -> str:
        return f"file:{tmp_path}/pool?size={self.SIZE}&io=threads&depth=3"

    def test_the_io_path_is_the_one_asked_for(self, device: str) -> None:
        with Rank(device) as rank:
            assert rank.device.io_path == "threads"


class TestFilePerRank(DeviceContract):
    kind = "file"

    @pytest.fixture
    def device(self, tmp_path: Path) -> str:
        return f"file:{tmp_path}/pool{{rank}}?size={self.SIZE}"

    def test_each_rank_has_its_own_file(self, device: str, tmp_path: Path) -> None:
        with Rank(device, rank=0, ranks=2) as one, Rank(device, rank=1, ranks=2) as two:
            assert one.device.name == two.device.name == f"file:{tmp_path}/pool{{rank}}"
        sizes = [os.stat(tmp_path / f"pool{r}" / "container.kvpool").st_size for r in range(2)]
        assert sizes == [self.SIZE // 2] * 2

    def test_another_namespace_or_owner_starts_empty(self, device: str) -> None:
        """A quarter of the size is too little for a file of its own; two ranks do."""
        with Rank(device, ranks=2, slot_bytes=1 << 20) as rank:
            rank.store([1], keys(1))
        with Rank(device, ranks=2, slot_bytes=1 << 20, owner=1) as rank:
            assert rank.device.survivors.slots.size == 0
