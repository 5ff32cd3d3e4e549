"""Modules of host memory against the contract."""

from __future__ import annotations

import pytest

from kvpool.devices.dram import DramDevice, default_threads
from kvpool.errors import ConfigurationError, DeviceError
from tests.pool.device_contract import DeviceContract
from tests.pool.rank import Rank


class TestDram(DeviceContract):
    kind = "dram"
    durable = False

    @pytest.fixture
    def device(self) -> str:
        return f"dram:{self.SIZE >> 20}MiB"


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (4, 2), (7, 3), (8, 4), (64, 4)])
def test_copying_threads(cpus: int, threads: int) -> None:
    assert default_threads(cpus) == threads


def test_the_memory_is_within_the_size() -> None:
    """Memory is mapped in huge pages of 2 MiB; a share is rounded down to them."""
    with Rank("dram:15MiB", ranks=2, slot_bytes=12 << 10) as rank:
        assert isinstance(rank.device, DramDevice)
        memory = rank.device.probe_target.memory
        assert memory is not None and 2 * memory.length <= 15 << 20
        assert rank.device.slots * rank.slot_bytes <= memory.length


def test_a_share_below_a_huge_page_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 8MiB"):
        Rank("dram:6MiB", ranks=4)


def test_a_node_that_does_not_exist() -> None:
    with pytest.raises(DeviceError):
        Rank("dram:4MiB?numa=1023")
