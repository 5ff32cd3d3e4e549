"""A whole pool without vLLM: orchestrator, data plane, real devices, and memory in KV's place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvpool import native
from kvpool.config import PoolConfig, from_mapping
from kvpool.dataplane import DataPlane
from kvpool.devices import open_device
from kvpool.jobs import FinishedJob
from kvpool.orchestrator import Orchestrator, RequestState
from kvpool.plan import merge_reports
from kvpool.stalls import STALLED_S
from kvpool.types import Geometry, GroupGeometry, GroupKind, Key, Outcome, Profile, WorkerReport

CHUNK_TOKENS = 256
NAMESPACE = bytes(32)


def one_group(slot_bytes: int) -> Geometry:
    """Return the geometry of one full-attention group with a block a chunk."""
    return Geometry((GroupGeometry(GroupKind.FULL, CHUNK_TOKENS, slot_bytes),), 1, slot_bytes)


def chain(name: int, length: int) -> list[Key]:
    """Return the keys of a prefix of `length` chunks."""
    return [
        name.to_bytes(16, "big") + index.to_bytes(16, "big") + bytes(4) for index in range(length)
    ]


class Rig:
    """Pages for `pages` chunks, and a pool over `devices`."""

    def __init__(
        self,
        devices: Sequence[str],
        *,
        slot_bytes: int = 64 << 10,
        pages: int = 256,
        profiles: Sequence[Profile] | None = None,
        shapes: Sequence[int] | None = None,
        backup: bool = False,
        engine: native.Engine | None = None,
        stalled_s: float = STALLED_S,
        namespace: bytes = NAMESPACE,
    ) -> None:
        config: PoolConfig = from_mapping({"devices": list(devices)})
        self.geometry = one_group(slot_bytes)
        self.engine = engine or native.Engine(slot_bytes)
        self.memory = native.Arena(pages * slot_bytes)
        self.pages = self.memory.array[: pages * slot_bytes].reshape(pages, slot_bytes)
        self.engine.add_group([self.memory.address], [slot_bytes], [slot_bytes], 1)
        self.devices = [
            open_device(
                device,
                self.engine,
                namespace=namespace,
                rank=0,
                ranks=1,
                owner=0,
                slot_bytes=slot_bytes,
            )
            for device in config.devices
        ]
        for device, rate in zip(self.devices, shapes or [], strict=False):
            self.engine.set_shape(device.index, rate, rate, 0)
        self.plane = DataPlane(self.engine, self.devices, self.geometry, stalled_s=stalled_s)
        self.orchestrator = Orchestrator(self.geometry, ranks=1, backup=backup)
        default = Profile(1e9, 1e9, 1e-4, 1e9)
        chosen = profiles or [default] * len(self.devices)
        self.restored = self.orchestrator.attach(
            [device.report(profile) for device, profile in zip(self.devices, chosen, strict=True)],
            [[device.survivors for device in self.devices]],
        )
        self._job = 0

    def fill(self, seed: int, count: int) -> None:
        """Put random bytes into the first `count` pages."""
        random = np.random.default_rng(seed)
        self.pages[:count] = random.integers(0, 256, self.pages[:count].shape, dtype=np.uint8)

    def store(self, keys: Sequence[Key], request: RequestState | None = None) -> int:
        """Store chunk i from page i, wait until it is written; return how many were accepted."""
        request = request or self.orchestrator.begin("store")
        positions = [(index + 1) * CHUNK_TOKENS for index in range(len(keys))]
        plan = self.orchestrator.reserve(list(keys), positions, request)
        page = {key: index for index, key in enumerate(keys)}
        blocks = np.array([page[key] for key in plan.keys], dtype=np.int32)
        self.plane.submit_store(self._next_job(), plan, blocks)
        self.settle()
        self.orchestrator.finish(request)
        return len(plan.keys)

    def held(self, keys: Sequence[Key]) -> int:
        """Return how many of the first keys are readable."""
        request = self.orchestrator.begin("look")
        count = 0
        for key in keys:
            if self.orchestrator.lookup(key, request) is not Outcome.HIT:
                break
            count += 1
        self.orchestrator.finish(request)
        return count

    def load(self, keys: Sequence[Key]) -> FinishedJob:
        """Load chunk i into page i; all keys must be held."""
        request = self.orchestrator.begin("load")
        for key in keys:
            assert self.orchestrator.lookup(key, request) is Outcome.HIT
        plan = self.orchestrator.plan_load(list(keys), request)
        self.plane.submit_load(self._next_job(), plan, np.arange(len(keys), dtype=np.int32))
        (finished,) = self.settle()
        self.orchestrator.complete_load(request)
        self.orchestrator.finish(request)
        return finished

    def settle(self) -> list[FinishedJob]:
        """Run until nothing is under way, spills included; return the jobs that ended.

        `last_report` says what happened meanwhile.
        """
        self.last_report = WorkerReport()
        finished: list[FinishedJob] = []
        while True:
            moves = self.orchestrator.take_moves()
            if moves is not None:
                self.plane.submit_moves(moves)
            self.plane.poll()
            finished += self.plane.take_finished()
            report = self.plane.take_report()
            self.last_report = merge_reports(self.last_report, report)
            self.orchestrator.acknowledge(report)
            if moves is None and not self.plane.busy():
                return finished
            self.plane.wait(0.1)

    def _next_job(self) -> int:
        self._job += 1
        return self._job

    def close(self) -> None:
        """Close the pool and free its memory."""
        self.plane.close()
        self.memory.close()


def file_device(folder: Path, name: str, size: str) -> str:
    """Return a device string for a pool file in a folder of its own."""
    return f"file:{folder / name}?size={size}"
