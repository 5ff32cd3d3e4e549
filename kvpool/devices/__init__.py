"""The members of the pool: host memory, files and block devices."""

from __future__ import annotations

from kvpool.device_config import DeviceConfig
from kvpool.devices.base import Device
from kvpool.devices.dram import DramDevice
from kvpool.devices.flash import FlashDevice
from kvpool.native import Engine

__all__ = ["Device", "open_device"]


def open_device(
    config: DeviceConfig,
    engine: Engine,
    *,
    namespace: bytes,
    rank: int,
    ranks: int,
    owner: int | str,
    slot_bytes: int,
    replicas: int = 1,
) -> Device:
    """Open this rank's part of a device and have `engine` serve it.

    `namespace` (32 bytes) stands for all that makes bytes comparable, `owner` for the
    data-parallel rank, of which this host has `replicas`; `slot_bytes` is a multiple of 4096.
    Raises ConfigurationError, ForeignContentError, ContainerError and DeviceError.
    """
    if config.kind == "dram":
        return DramDevice(config, engine, ranks * replicas, slot_bytes)
    return FlashDevice(config, engine, namespace, rank, ranks, str(owner), slot_bytes, replicas)
