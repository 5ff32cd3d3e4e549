"""One rank without a data plane: an engine, one device, and pages in KV memory's place."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvpool import native
from kvpool.device_config import parse_device
from kvpool.devices import Device, open_device

NAMESPACE = b"n" * 32
PAGES = 64
WAIT_S = 30.0


class Rank:
    """Opens `device` for one rank; chunk i of a store or load lies in page i."""

    engine_type: type[native.Engine] = native.Engine

    def __init__(
        self,
        device: str,
        *,
        rank: int = 0,
        ranks: int = 1,
        owner: int = 0,
        slot_bytes: int = 64 << 10,
        namespace: bytes = NAMESPACE,
        pages: int = PAGES,
    ) -> None:
        self.slot_bytes = slot_bytes
        self.engine = self.engine_type(slot_bytes)
        try:
            self.memory = native.Arena(pages * slot_bytes)
            self.pages = self.memory.array[: pages * slot_bytes].reshape(pages, slot_bytes)
            self.engine.add_group([self.memory.address], [slot_bytes], [slot_bytes], 1)
            self.device: Device = open_device(
                parse_device(device),
                self.engine,
                namespace=namespace,
                rank=rank,
                ranks=ranks,
                owner=owner,
                slot_bytes=slot_bytes,
            )
        except BaseException:
            self.engine.close()
            raise

    def run(self, ops: npt.NDArray[np.void], blocks: npt.NDArray[np.int32]) -> dict[int, int]:
        """Run operations to their end; return tag -> result, and remember checksums."""
        self.engine.submit(ops, blocks)
        results: dict[int, int] = {}
        self.checksums: dict[int, int] = {}
        while len(results) < ops.size:
            assert self.engine.wait(WAIT_S)
            for event in self.engine.poll():
                if event["kind"] == native.EVENT_DONE:
                    results[int(event["tag"])] = int(event["result"])
                    self.checksums[int(event["tag"])] = int(event["crc"])
        return results

    def _ops(self, kind: int, offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        ops = np.zeros(len(offsets), native.OP_DTYPE)
        ops["tag"], ops["offset"], ops["kind"] = np.arange(len(offsets)), offsets, kind
        ops["device"], ops["keep"] = self.device.index, native.NO_DEVICE
        ops["length"], ops["first_block"] = self.slot_bytes, np.arange(len(offsets))
        return ops

    def store(self, slots: Sequence[int], keys: Sequence[bytes], *, headers: bool = True) -> None:
        """Write page i to slots[i], then the headers that name keys[i]."""
        chosen = np.array(slots, np.int32)
        pages = np.arange(len(slots), dtype=np.int32)
        ops = self._ops(native.KIND_STORE, self.device.offsets(chosen))
        assert set(self.run(ops, pages).values()) == {0}
        crc = np.array([self.checksums[i] for i in range(len(slots))], np.uint32)
        writes = self.device.record(
            chosen,
            keys,
            [b"parent of " + key for key in keys],
            (pages + 1) * 16,
            np.zeros(len(slots), np.uint8),
            np.full(len(slots), self.slot_bytes, np.uint32),
            crc,
        )
        if headers:
            self.write(writes)

    def write(self, writes: npt.NDArray[np.uint64]) -> None:
        """Submit header writes and wait for them."""
        if writes.size:
            ops = self._ops(native.KIND_WRITE, writes[:, 0])
            ops["buffer"], ops["length"] = writes[:, 1], writes[:, 2]
            assert set(self.run(ops, np.empty(0, np.int32)).values()) == {0}

    def load(self, slots: Sequence[int]) -> list[int]:
        """Read slots[i] into page i, verified; return the results."""
        chosen = np.array(slots, np.int32)
        ops = self._ops(native.KIND_LOAD, self.device.offsets(chosen))
        ops["flags"], ops["crc"] = native.FLAG_VERIFY, self.device.checksums[chosen]
        results = self.run(ops, np.arange(len(slots), dtype=np.int32))
        return [results[i] for i in range(len(slots))]

    def close(self) -> None:
        self.engine.close()
        self.device.close()
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
