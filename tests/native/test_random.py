"""Random operations on all devices of an engine, against a dictionary of what each slot holds."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.native import (
    FLAG_VERIFY,
    KIND_LOAD,
    KIND_MOVE,
    KIND_STORE,
    crc32c,
)
from tests.native.rig import KINDS, Rig

SLOTS = 6
BATCH = 8
CHUNK_BLOCKS = 4


@dataclass(frozen=True)
class Step:
    """`kind` on slot `slot`; `other` is the slot on the module of a move or a kept copy."""

    kind: int
    on_module: bool
    slot: int
    other: int
    keep: bool
    wrong: bool
    skip: int


steps = st.builds(
    Step,
    kind=st.sampled_from([KIND_LOAD, KIND_STORE, KIND_MOVE]),
    on_module=st.booleans(),
    slot=st.integers(0, SLOTS - 1),
    other=st.integers(0, SLOTS - 1),
    keep=st.booleans(),
    wrong=st.sampled_from([False, False, False, True]),
    skip=st.integers(0, CHUNK_BLOCKS),
)
Slot = tuple[int, int]  # device, slot


class Model:
    """Plans batches in which no slot is used twice, and says what has to come of them."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.holds: dict[Slot, bytes] = {}

    def run(self, batch: list[Step]) -> None:
        used: set[Slot] = set()
        planned = [(step, op) for step in batch if (op := self._plan(step, used)) is not None]
        if not planned:
            return
        blocks = np.arange(CHUNK_BLOCKS * BATCH, dtype=np.int32)
        for index, (step, op) in enumerate(planned):
            op["tag"], op["first_block"] = index, index * CHUNK_BLOCKS
            if step.kind == KIND_LOAD:
                blocks[index * CHUNK_BLOCKS : index * CHUNK_BLOCKS + step.skip] = -1
        before = [self.rig.payload(self._blocks(i)) for i in range(len(planned))]
        done = self.rig.run([op for _, op in planned], [*blocks])
        for index, (step, op) in enumerate(planned):
            self._check(step, op[0], done[index], before[index], self._blocks(index))

    def _blocks(self, index: int) -> range:
        return range(index * CHUNK_BLOCKS, (index + 1) * CHUNK_BLOCKS)

    def _plan(self, step: Step, used: set[Slot]) -> Any:
        rig = self.rig
        device = rig.module if step.on_module else rig.device
        place, other = (device, step.slot), (rig.module, step.other)
        takes_other = step.kind == KIND_MOVE or (step.kind == KIND_LOAD and step.keep)
        needed = {place, other} if takes_other else {place}
        source = other if step.kind == KIND_MOVE else place
        if needed & used or (takes_other and place == other):
            return None
        if step.kind != KIND_STORE and source not in self.holds:
            return None
        used |= needed
        op = rig.op(step.kind, slot=step.slot, device=device, flags=FLAG_VERIFY)
        if step.kind != KIND_STORE:
            op["crc"] = crc32c(self.holds[source]) ^ step.wrong
        else:
            op["flags"] = 0
        if takes_other:
            op["keep"], op["keep_offset"] = rig.module, step.other * rig.slot_bytes
        return op

    def _check(self, step: Step, op: Any, event: Any, before: bytes, blocks: range) -> None:
        place = (int(op["device"]), step.slot)
        if step.kind == KIND_STORE:
            assert (event["result"], event["crc"]) == (0, crc32c(before))
            self.holds[place] = before
            return
        assert event["result"] == (-errno.EBADMSG if step.wrong else 0)
        if step.kind == KIND_MOVE:
            moved = self.holds[self.rig.module, step.other]
            if not step.wrong:
                self.holds[place] = moved
            elif step.on_module or self.rig.kind == "memory":
                self.holds.pop(place, None)  # a module copies while it checks
            return
        payload, chunk = self.holds[place], len(before)
        skipped = step.skip * chunk // CHUNK_BLOCKS
        # Bytes that do not verify must not stay in pages.
        loaded = bytes(chunk - skipped) if step.wrong else payload[skipped:]
        assert self.rig.payload(blocks) == before[:skipped] + loaded
        assert event["crc"] == crc32c(payload)
        assert event["kept"] == (step.keep and not step.wrong)
        if event["kept"]:
            self.holds[self.rig.module, step.other] = payload


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=3),
    depth=st.integers(1, 4),
    store_buffers=st.integers(1, 3),
    batches=st.lists(st.lists(steps, min_size=1, max_size=BATCH), min_size=1, max_size=12),
)
def test_random_operations(
    kind: str,
    tmp_path: Path,
    seed: int,
    lengths: list[int],
    depth: int,
    store_buffers: int,
    batches: list[list[Step]],
) -> None:
    with Rig(
        kind,
        tmp_path,
        lengths=lengths,
        blocks=CHUNK_BLOCKS * BATCH,
        blocks_per_chunk=CHUNK_BLOCKS,
        slot_bytes=128 << 10,
        slots=SLOTS,
        depth=depth,
        threads=depth,
        store_buffers=store_buffers,
        seed=seed,
    ) as rig:
        model = Model(rig)
        for batch in batches:
            model.run(batch)
        assert rig.engine.poll().size == 0
        for (device, slot), payload in model.holds.items():
            (event,) = rig.run([rig.load(0, slot, crc32c(payload), device=device)])
            assert event["result"] == 0
