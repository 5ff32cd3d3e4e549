"""Measuring: figures of devices whose speed is known, and when a measurement is taken again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvpool import native, probe
from kvpool.container import Container
from kvpool.device_config import parse_devices
from kvpool.devices import Device, open_device
from kvpool.devices.base import ProbeTarget
from kvpool.errors import DeviceError
from kvpool.layout import StoredProfiles
from kvpool.types import Profile

MB, MIB = 10**6, 1 << 20
SLOT = 1 << 20


class Pool:
    """Devices of one rank and the engine that serves them."""

    def __init__(self, devices: list[str], rank: int = 0, ranks: int = 1) -> None:
        self.engine = native.Engine(SLOT)
        self.devices: list[Device] = [
            open_device(
                device,
                self.engine,
                namespace=bytes(32),
                rank=rank,
                ranks=ranks,
                owner=0,
                slot_bytes=SLOT,
            )
            for device in parse_devices(devices)
        ]

    def measure(self, *, anew: bool = False) -> list[Profile]:
        return probe.measure(self.engine, self.devices, anew=anew)

    def container(self, index: int) -> Container:
        container = self.devices[index].probe_target.container
        assert container is not None
        return container

    def close(self) -> None:
        self.engine.close()
        for device in self.devices:
            device.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the figures do not matter, measure for moments only."""
    for name in ("WRITE_S", "READ_S", "TOGETHER_S"):
        monkeypatch.setattr(probe, name, 0.02)


@pytest.fixture
def pools() -> Iterator[list[Pool]]:
    opened: list[Pool] = []
    yield opened
    for pool in opened:
        pool.close()


def make(pools: list[Pool], devices: list[str], rank: int = 0, ranks: int = 1) -> Pool:
    pools.append(Pool(devices, rank, ranks))
    return pools[-1]


def file(folder: Path, name: str = "a") -> str:
    return f"file:{folder}/{name}?size=64MiB"


def measure_shaped(rates: list[float], latency_us: int = 0) -> list[Profile]:
    """Measure devices that read at `rates`, write at half of them, and do nothing else."""
    with native.Engine(SLOT) as engine:
        targets = []
        for index, rate in enumerate(rates):
            shape = native.Shape(
                read_bytes_s=int(rate), write_bytes_s=int(rate / 2), latency_us=latency_us
            )
            device = engine.add_nil_device(64 << 20, **shape)
            targets.append(ProbeTarget(f"nil{index}", device, 0, 64 << 20, 8, ""))
        return probe.measure_targets(engine, targets, SLOT)


@pytest.mark.parametrize(
    "rates", [[400.0 * MB], [50.0 * MIB], [40.0 * MB, 120.0 * MB, 360.0 * MB]], ids=str
)
def test_devices_of_known_speed(rates: list[float]) -> None:
    """Within 10%, alone and together: a link they share would show, they share none.

    A busy machine keeps a device from its rate, nothing makes it faster: the best of three.
    """
    best = np.zeros((3, len(rates)))
    for _ in range(3):
        found = np.array(
            [
                (
                    profile.read_bandwidth_bytes_s / rate,
                    profile.write_bandwidth_bytes_s / rate * 2,
                    profile.together_read_bandwidth_bytes_s / rate,
                )
                for profile, rate in zip(measure_shaped(rates, 2000), rates, strict=True)
            ]
        ).T
        print(found)
        assert (found < 1.1).all()
        best = np.maximum(best, found)
        if (best > 0.9).all():
            break
    assert (best > 0.9).all()


def test_latency() -> None:
    (profile,) = measure_shaped([400.0 * MB], latency_us=5000)
    assert 0.005 <= profile.read_latency_s < 0.05


@pytest.mark.parametrize("io_path", ["uring", "threads"])
def test_the_shape_of_a_file_shows(tmp_path: Path, pools: list[Pool], io_path: str) -> None:
    """Its own disk may be slower, never faster; how much is moved bounds the time it takes."""
    pool = make(pools, [f"{file(tmp_path)}&io={io_path}"])
    index = pool.devices[0].index
    pool.engine.set_shape(index, 50 * MIB, 25 * MIB, 0)
    (profile,) = pool.measure()
    assert 0 < profile.read_bandwidth_bytes_s < 1.1 * (50 * MIB)
    assert 0 < profile.write_bandwidth_bytes_s < 1.1 * (25 * MIB)
    counted = pool.engine.statistics(index)
    assert counted.bytes_read / (50 * MIB) + counted.bytes_written / (25 * MIB) < 2.0, "seconds"


def test_a_module_is_measured_with_loads(tmp_path: Path, pools: list[Pool], quick: None) -> None:
    pool = make(pools, ["dram:64MiB", file(tmp_path)])
    module, medium = pool.measure()
    assert min(module.read_bandwidth_bytes_s, module.write_bandwidth_bytes_s) > 100 * MB
    assert 0 < module.read_latency_s < medium.read_bandwidth_bytes_s
    assert pool.engine.statistics(pool.devices[0].index).bytes_read == 0, "by an engine of its own"


def test_a_module_of_a_single_slot(pools: list[Pool], quick: None) -> None:
    (profile,) = make(pools, ["dram:2MiB"]).measure()
    assert profile.read_bandwidth_bytes_s > 0


def test_only_what_was_written_is_read(tmp_path: Path, pools: list[Pool], quick: None) -> None:
    """Extents that were reserved and never written do not reach the medium."""
    pool = make(pools, [file(tmp_path)])
    container = pool.container(0)
    offset, length = container.probe_area
    with open(container.path, "rb") as opened:
        opened.seek(offset)
        assert not any(opened.read(length))
        pool.measure()
        opened.seek(offset)
        raw = np.frombuffer(opened.read(length), np.uint8).reshape(-1, 4096)
        assert raw[: SLOT // 4096].any(axis=1).all()
        assert not any(opened.read()), "nothing beyond the probe area"


def test_a_device_that_fails_is_named(tmp_path: Path) -> None:
    path = tmp_path / "read-only"
    path.write_bytes(bytes(8 << 20))
    with native.Engine(SLOT) as engine:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            index = engine.add_file_device(fd, 8 << 20)
            target = ProbeTarget("file:/read-only", index, 0, 8 << 20, 8, "")
            with pytest.raises(DeviceError, match="file:/read-only: write"):
                probe.measure_targets(engine, [target], SLOT)
        finally:
            engine.close()
            os.close(fd)


# ---- what is stored -------------------------------------------------------------------------


def test_a_measurement_is_taken_again_by_the_same_pool(
    tmp_path: Path, pools: list[Pool], quick: None
) -> None:
    devices = ["dram:16MiB", file(tmp_path, "a"), file(tmp_path, "b")]
    first = make(pools, devices)
    profiles = first.measure()
    assert first.measure() == profiles
    assert first.measure(anew=True) != profiles
    profiles = first.measure()
    first.close()
    pools.clear()
    assert make(pools, devices).measure() == profiles


@pytest.mark.parametrize("change", ["old", "in the future", "other boot", "other pool"])
def test_a_measurement_of_other_circumstances_is_not(
    tmp_path: Path, pools: list[Pool], quick: None, change: str
) -> None:
    pool = make(pools, [file(tmp_path)])
    pool.measure()
    stored = pool.container(0).read_profiles()
    assert stored is not None
    mark = (Profile(1.0, 2.0, 3.0, 4.0),)
    day_ns = 86_400 * 10**9
    changed: StoredProfiles = {
        "old": replace(stored, profiles=mark, measured_ns=time.time_ns() - day_ns - 1),
        "in the future": replace(stored, profiles=mark, measured_ns=time.time_ns() + day_ns),
        "other boot": replace(stored, profiles=mark, boot_id="another"),
        "other pool": replace(stored, profiles=mark, signature=bytes(32)),
    }[change]
    pool.container(0).write_profiles(replace(stored, profiles=mark))
    assert tuple(pool.measure()) == mark, "the control: this one counts"
    pool.container(0).write_profiles(changed)
    assert tuple(pool.measure()) != mark


def test_containers_that_disagree_are_measured(
    tmp_path: Path, pools: list[Pool], quick: None
) -> None:
    pool = make(pools, [file(tmp_path, "a"), file(tmp_path, "b")])
    pool.measure()
    stored = pool.container(1).read_profiles()
    assert stored is not None
    mark = (Profile(1.0, 2.0, 3.0, 4.0),) * 2
    pool.container(1).write_profiles(replace(stored, profiles=mark))
    assert tuple(pool.measure()) != mark
    assert pool.container(0).read_profiles() == pool.container(1).read_profiles()


def test_ranks_that_share_a_container_measure_once(
    tmp_path: Path, pools: list[Pool], quick: None
) -> None:
    ranks = [make(pools, [file(tmp_path)], rank, 3) for rank in range(3)]
    found: list[list[Profile]] = []
    threads = [threading.Thread(target=lambda r=rank: found.append(r.measure())) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and found[0] == found[1] == found[2]
    busy = [rank.engine.statistics(rank.devices[0].index).bytes_read > 0 for rank in ranks]
    assert sum(busy) == 1
