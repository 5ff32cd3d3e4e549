"""Block devices against the contract, on loop devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.errors import ConfigurationError
from tests.pool.device_contract import DeviceContract
from tests.pool.loop import loop_device, needs_loop_devices
from tests.pool.rank import Rank


@needs_loop_devices
class TestBlock(DeviceContract):
    kind = "block"

    @pytest.fixture
    def device(self, tmp_path: Path) -> Iterator[str]:
        with loop_device(tmp_path / "disk", self.SIZE) as path:
            yield f"block:{path}"

    def test_a_size_limits_what_is_used(self, device: str) -> None:
        with pytest.raises(ConfigurationError, match="has no more"):
            Rank(f"{device}?size={self.SIZE * 2}")
        with Rank(f"{device}?size={self.SIZE // 2}") as rank:
            offsets = rank.device.probe_target.container
            assert offsets is not None and offsets.size == self.SIZE // 2
