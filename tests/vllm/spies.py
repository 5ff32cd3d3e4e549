"""Looks into, or misleads, the data plane of an engine in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import CanonicalKVCaches

from kvpool import cost, native
from kvpool.connectors.vllm import worker
from kvpool.dataplane import DataPlane
from kvpool.jobs import FinishedJob
from kvpool.plan import Int32, LoadPlan, MovePlan, StorePlan
from kvpool.types import NO_DEVICE


@contextmanager
def misdirected_loads(group: int) -> Iterator[None]:
    """Make each load read one chunk of `group` from a slot that holds another one of its chunks.

    The checksum is the other chunk's, so nothing but the tokens can tell.
    """
    submit_load = DataPlane.submit_load
    seen: list[tuple[int, int]] = []

    def misdirected(plane: DataPlane, job_id: int, plan: LoadPlan, *rest: Any, **more: Any) -> None:
        chunks = [i for i in range(plan.group.size) if plan.group[i] == group]
        slot, device = plan.slot.copy(), plan.device.copy()
        if chunks:
            last = chunks[-1]
            here = (int(device[last]), int(slot[last]))
            others = [(int(device[i]), int(slot[i])) for i in chunks[:-1]] + seen
            for other in others:
                if other != here:
                    device[last], slot[last] = other
                    break
            seen.append(here)
        submit_load(plane, job_id, replace(plan, slot=slot, device=device), *rest, **more)

    DataPlane.submit_load = misdirected  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataPlane.submit_load = submit_load  # type: ignore[method-assign]


@contextmanager
def slow_modules(read_bytes_s: int) -> Iterator[None]:
    """Make modules of engines that are started inside, and probes of them, read no faster."""
    add_memory_device = native.Engine.add_memory_device

    def add(engine: native.Engine, *arguments: Any, **options: Any) -> int:
        return add_memory_device(engine, *arguments, read_bytes_s=read_bytes_s, **options)

    native.Engine.add_memory_device = add  # type: ignore[method-assign]
    try:
        yield
    finally:
        native.Engine.add_memory_device = add_memory_device  # type: ignore[method-assign]


@contextmanager
def hits_in_part(divisor: int) -> Iterator[None]:
    """Take of each hit at most a part, one `divisor`th, cut where it may be cut."""
    decide = cost.decide

    def in_part(
        prefill: Any, start: int, total: int, ends: cost.Int64, load_s: Any, slack: float = 0.0
    ) -> int:
        most = (int(ends[-1]) - start) // divisor
        if len(ends) == 2 and ends[0] > start and ends[0] - start <= most:
            return int(ends[0]) - start  # what vLLM went back to
        return max((int(end) - start for end in ends if end - start <= most), default=0)

    cost.decide = in_part
    surely_whole, cost.surely_whole = cost.surely_whole, lambda *_: False
    estimate = cost.PrefillModel.estimate
    cost.PrefillModel.estimate = (  # type: ignore[method-assign]
        lambda model, context: cost.Prefill(1.0, 0.0)
    )
    try:
        yield
    finally:
        cost.decide, cost.surely_whole = decide, surely_whole
        cost.PrefillModel.estimate = estimate  # type: ignore[method-assign]


@dataclass
class PageSpy:
    """Compares the pages that a load filled with the pages that were stored from."""

    stored: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    equal: int = 0
    different: int = 0
    _loads: dict[int, tuple[LoadPlan, Int32]] = field(default_factory=dict)
    _caches: CanonicalKVCaches | None = None

    @staticmethod
    @contextmanager
    def installed() -> Iterator[PageSpy]:
        """Spy on engines that are started inside the context."""
        spy = PageSpy()
        build_plane = worker.build_plane
        originals = (
            DataPlane.submit_load,
            DataPlane.submit_store,
            DataPlane.take_finished,
            DataPlane.submit_moves,
        )

        def build(*arguments: Any) -> Any:
            spy._caches = arguments[-1]
            return build_plane(*arguments)

        def load(plane: DataPlane, job: int, plan: LoadPlan, blocks: Int32, **more: Any) -> None:
            spy._loads[job] = (plan, blocks)
            originals[0](plane, job, plan, blocks, **more)

        def store(plane: DataPlane, job: int, plan: StorePlan, blocks: Int32) -> None:
            spy._note_store(plan, blocks)
            originals[1](plane, job, plan, blocks)

        def move(plane: DataPlane, plan: MovePlan) -> None:
            for i in range(plan.slot.size):
                source = (int(plan.source_device[i]), int(plan.source_slot[i]))
                spy.stored[int(plan.device[i]), int(plan.slot[i])] = spy.stored[source]
            originals[3](plane, plan)

        def finished(plane: DataPlane) -> list[FinishedJob]:
            jobs = originals[2](plane)
            for job in jobs:
                if job.is_load:
                    spy._check_load(*spy._loads.pop(job.job_id))
            return jobs

        worker.build_plane = build
        DataPlane.submit_load, DataPlane.submit_store = load, store  # type: ignore[method-assign]
        DataPlane.take_finished = finished  # type: ignore[method-assign]
        DataPlane.submit_moves = move  # type: ignore[method-assign]
        try:
            yield spy
        finally:
            worker.build_plane = build_plane
            DataPlane.submit_load = originals[0]  # type: ignore[method-assign]
            DataPlane.submit_store = originals[1]  # type: ignore[method-assign]
            DataPlane.take_finished = originals[2]  # type: ignore[method-assign]
            DataPlane.submit_moves = originals[3]  # type: ignore[method-assign]

    def _digests(self, group: int, blocks: Int32) -> list[str]:
        """Return a digest of each block's pages in all tensors of the group; "" for no block."""
        assert self._caches is not None
        digests = []
        for block in blocks:
            digest = hashlib.sha256()
            for reference in self._caches.group_data_refs[group]:
                tensor = self._caches.tensors[reference.tensor_idx].tensor
                digest.update(tensor[int(block), : reference.page_size_bytes].numpy().tobytes())
            digests.append(digest.hexdigest() if block >= 0 else "")
        return digests

    def _note_store(self, plan: StorePlan, blocks: Int32) -> None:
        for i, chunk in enumerate(blocks.reshape(plan.slot.size, -1)):
            place = (int(plan.device[i]), int(plan.slot[i]))
            self.stored[place] = self._digests(int(plan.group[i]), chunk)

    def _check_load(self, plan: LoadPlan, blocks: Int32) -> None:
        for i, chunk in enumerate(blocks.reshape(plan.slot.size, -1)):
            stored = self.stored[int(plan.device[i]), int(plan.slot[i])]
            if plan.keep_device[i] != NO_DEVICE:
                self.stored[int(plan.keep_device[i]), int(plan.keep_slot[i])] = stored
            loaded = self._digests(int(plan.group[i]), chunk)
            wanted = np.flatnonzero(chunk >= 0)
            same = [stored[j] == loaded[j] for j in wanted]
            self.equal += sum(same)
            self.different += len(same) - sum(same)
