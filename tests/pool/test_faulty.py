"""Files on the faulty engine: the contract without faults, and what a crash leaves."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from kvpool.faults import FaultKind
from tests.faulty_engine import FaultyEngine
from tests.pool.device_contract import DeviceContract, keys, noise
from tests.pool.rank import Rank


@pytest.fixture(autouse=True)
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks use a faulty engine."""
    monkeypatch.setattr(Rank, "engine_type", FaultyEngine)


class TestFaultyFile(DeviceContract):
    kind = "file"

    @pytest.fixture
    def device(self, tmp_path: Path) -> str:
        return f"file:{tmp_path}/pool?size={self.SIZE}"

    def test_the_device_is_a_faulty_one(self, device: str) -> None:
        with Rank(device) as rank:
            assert isinstance(rank.engine, FaultyEngine)
            assert rank.engine.faulty == (rank.device.index,)


@pytest.mark.parametrize("seed", range(8))
def test_after_a_crash_nothing_wrong_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Headers may have landed without their payloads and the other way round."""
    monkeypatch.setattr(FaultyEngine, "volatile_bytes", 64 << 20)
    monkeypatch.setattr(FaultyEngine, "seed", seed)
    device = f"file:{tmp_path}/pool?size=24MiB"
    names = keys(40)
    with Rank(device) as rank:
        engine = rank.engine
        assert isinstance(engine, FaultyEngine)
        content = noise(rank, seed)[:40]
        rank.store(range(10), names[:10])
        engine.sync(rank.device.index)
        rank.pages[:30] = content[10:]
        rank.store(range(10, 40), names[10:])
        engine.crash(rank.device.index)
        assert engine.faults()[FaultKind.LOST] > 5
    with Rank(device) as rank:
        found = rank.device.survivors
        slots = found.slots.tolist()
        assert {*names[:10]} <= {*found.keys} and slots[:10] == [*range(10)]
        results = rank.load(slots)
        good = np.array(slots)[np.array(results) == 0]
        assert {*range(10)} <= {*good.tolist()}, "what was synced is there"
        for position, (slot, result) in enumerate(zip(slots, results, strict=True)):
            assert result in (0, -errno.EBADMSG) and names[slot] == found.keys[position]
            expected = content[slot] if result == 0 else 0
            assert (rank.pages[position] == expected).all()
