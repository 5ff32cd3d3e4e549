"""SSDs: one rank's lease of a container, in a file or on a block device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvpool.container import Container, Lease
from kvpool.device_config import DeviceConfig
from kvpool.devices.base import (
    NO_WRITES,
    Device,
    HeaderWrites,
    Int32,
    ProbeTarget,
    UInt8,
    UInt32,
    UInt64,
)
from kvpool.errors import ConfigurationError
from kvpool.native import Engine, IoPath
from kvpool.plan import StoredHeaders
from kvpool.types import Key, PageType
from kvpool.units import format_bytes

_IO_PATHS = {"auto": IoPath.AUTO, "uring": IoPath.URING, "threads": IoPath.THREADS}


class FlashDevice(Device):
    """A leased range of a container. Headers survive in it; `survivors` is what was there."""

    def __init__(
        self,
        config: DeviceConfig,
        engine: Engine,
        namespace: bytes,
        rank: int,
        ranks: int,
        owner: str,
        slot_bytes: int,
        replicas: int,
    ) -> None:
        """Open, or create, the container and lease this rank's share of it.

        Raises ConfigurationError where no slot fits, and what Container.open, Container.acquire
        and Engine.add_file_device raise.
        """
        self.name, self.kind, self.slot_bytes = config.name, config.kind, slot_bytes
        sharing = (1 if config.per_rank else ranks) * config.engines * replicas
        size = config.rank_size_bytes(ranks) if config.per_rank else config.size_bytes
        self._engine = engine
        self._container = Container.open(config.rank_path(rank), size)
        try:
            self.slots = self._container.slots_for(sharing, slot_bytes)
            if self.slots < 1:
                allowed = f"one slot of {format_bytes(slot_bytes)} for each of {ranks} ranks"
                key = f"devices: {str(config)!r}: size"
                raise ConfigurationError(key, config.size_bytes, f"room for {allowed}")
            self._lease = self._container.acquire(namespace, rank, owner, self.slots, slot_bytes)
            fresh = self._lease.fresh
            self.survivors = StoredHeaders.none() if fresh else self._lease.read_headers()
            self.damaged_headers = self._lease.damaged_headers
            self.index = add_to_engine(config, engine, self._container)
        except BaseException:
            self._container.close()
            raise
        self._target = probe_target(config, engine, self._container, self.index)
        self.checksums = np.zeros(self.slots, np.uint32)
        self.checksums[self.survivors.slots] = self.survivors.checksums

    @property
    def lease(self) -> Lease:
        """The range of the container that is this rank's."""
        return self._lease

    def offsets(self, slots: Int32) -> UInt64:
        return self._lease.offsets(slots)

    def record(
        self,
        slots: Int32,
        keys: Sequence[Key],
        parents: Sequence[Key],
        positions: Int32,
        groups: UInt8,
        lengths: UInt32,
        checksums: UInt32,
    ) -> HeaderWrites:
        blocks = self._lease.set_headers(
            slots, keys, parents, positions, groups, lengths, checksums, self._lease.epoch
        )
        self.checksums[slots] = checksums
        return self._writes(blocks)

    def forget(self, slots: Int32) -> HeaderWrites:
        return self._writes(self._lease.clear_headers(slots))

    def set_epoch(self, epoch: int) -> None:
        self._lease.advance_epoch(max(epoch, self._lease.epoch + 1))

    def _writes(self, blocks: Iterable[np.int32]) -> HeaderWrites:
        rows = [self._lease.header_block(int(block)) for block in blocks]
        return np.array(rows, np.uint64) if rows else NO_WRITES

    @property
    def probe_target(self) -> ProbeTarget:
        return self._target

    @property
    def page_type(self) -> PageType:
        return self._engine.staging_page_type

    @property
    def io_path(self) -> str:
        return self._engine.io_path(self.index)

    def close(self) -> None:
        self._container.close()


def add_to_engine(config: DeviceConfig, engine: Engine, container: Container) -> int:
    """Have `engine` serve a container; return the device's index. Raises DeviceError."""
    return engine.add_file_device(
        container.fd,
        container.size,
        depth=config.depth,
        threads=config.depth,  # a thread has one transfer in flight
        numa_node=-1 if config.numa is None else config.numa,
        io_path=_IO_PATHS[config.io],
    )


def probe_target(
    config: DeviceConfig, engine: Engine, container: Container, index: int
) -> ProbeTarget:
    """Return what it takes to measure a container that `engine` serves as device `index`."""
    area, path = container.probe_area, engine.io_path(index)
    return ProbeTarget(config.name, index, *area, config.depth, path, container=container)
