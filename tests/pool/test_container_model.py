"""Random sequences of leases, crashes and damage: leases never overlap, never exceed the size, and
nobody's data is touched by another. Hypothesis prints the sequence of a failure.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool import layout
from kvpool.container import Container, Lease
from kvpool.errors import ContainerError

SIZE = 8 << 20
SLOT = 16 << 10
HANDLES = 3
Identity = tuple[int, int, int]  # namespace, rank, slots


@dataclass
class Held:
    """A lease and the random bytes that fill it, headers included."""

    lease: Lease
    identity: Identity
    content: bytes


@dataclass
class Handle:
    container: Container
    held: dict[int, Held] = field(default_factory=dict)  # by start


class ContainerMachine(RuleBasedStateMachine):
    """Several processes' handles on one file; a crash closes one without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvpool-model-"))
        self.handles: list[Handle] = []
        self.idle: dict[int, Held] = {}  # what was written to leases that nobody has now

    @initialize()
    def create(self) -> None:
        Container.open(self.folder / "pool", SIZE).close()
        self.open()

    @precondition(lambda self: len(self.handles) < HANDLES)
    @rule()
    def open(self) -> None:
        self.handles.append(Handle(Container.open(self.folder / "pool", SIZE)))

    @precondition(lambda self: self.handles)
    @rule(
        data=st.data(),
        namespace=st.integers(0, 3),
        rank=st.integers(0, 1),
        slots=st.integers(1, 160),
    )
    def acquire(self, data: st.DataObject, namespace: int, rank: int, slots: int) -> None:
        handle = data.draw(st.sampled_from(self.handles))
        name = bytes([namespace]) * 32
        try:
            lease = handle.container.acquire(name, rank, "0", slots, SLOT, grace_s=0)
        except ContainerError:
            return
        identity = (namespace, rank, slots)
        before = self.idle.pop(lease.start, None)
        if not lease.fresh:
            assert before is not None and before.identity == identity
            assert self.read(lease) == before.content, "what it stored is still there"
        else:
            headers = self.read(lease)[: layout.header_table_bytes(slots)]
            assert not any(headers), "no header of a predecessor is left"
        for start, held in list(self.idle.items()):  # dropped for this one
            if start < lease.start + lease.length and lease.start < start + held.lease.length:
                del self.idle[start]
        content = random.Random(data.draw(st.integers(0, 1 << 32))).randbytes(lease.length)
        self.write(lease, content)
        handle.held[lease.start] = Held(lease, identity, content)

    @precondition(lambda self: any(handle.held for handle in self.handles))
    @rule(data=st.data(), give_back=st.booleans())
    def let_go(self, data: st.DataObject, give_back: bool) -> None:
        handle = data.draw(st.sampled_from([handle for handle in self.handles if handle.held]))
        held = handle.held.pop(data.draw(st.sampled_from(sorted(handle.held))))
        if give_back:
            held.lease.release()
        else:
            held.lease.close()
            self.idle[held.lease.start] = held

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), crash=st.booleans())
    def close(self, data: st.DataObject, crash: bool) -> None:
        handle = data.draw(st.sampled_from(self.handles))
        self.handles.remove(handle)
        self.idle.update(handle.held)
        if crash:
            os.close(handle.container.fd)  # all that is left of a killed process: locks end
        else:
            handle.container.close()

    @rule(entry=st.integers(0, 7), byte=st.integers(0, layout.LEASE_BYTES - 1))
    def damage_the_table(self, entry: int, byte: int) -> None:
        at = layout.TABLE_OFFSET + entry * layout.LEASE_BYTES + byte
        with open(self.file, "r+b") as file:
            file.seek(at)
            value = file.read(1)[0]
            file.seek(at)
            file.write(bytes([value ^ 0x10]))
            file.flush()
            os.fsync(file.fileno())

    @invariant()
    def nobody_is_touched(self) -> None:
        live = [held for handle in self.handles for held in handle.held.values()]
        ranges = sorted((h.lease.start, h.lease.start + h.lease.length) for h in live)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), "overlap"
        for held in live:
            assert held.lease.start + held.lease.length <= SIZE
            assert self.read(held.lease) == held.content, "somebody wrote here"
        if self.handles:
            facts = os.stat(self.file)
            assert facts.st_size == SIZE and facts.st_blocks * 512 <= SIZE + (64 << 10)

    @property
    def file(self) -> Path:
        return self.folder / "pool" / "container.kvpool"

    def read(self, lease: Lease) -> bytes:
        with open(self.file, "rb") as file:
            file.seek(lease.start)
            return file.read(lease.length)

    def write(self, lease: Lease, content: bytes) -> None:
        """Fill all that the lease may write to, through the offsets that it gives out."""
        table = layout.header_table_bytes(lease.slots)
        with open(self.file, "r+b") as file:
            file.seek(lease.start)
            file.write(content[:table])
            offsets = lease.offsets(np.arange(lease.slots, dtype=np.int32))
            for slot, offset in enumerate(offsets):
                file.seek(int(offset))
                file.write(content[table + slot * SLOT : table + (slot + 1) * SLOT])
            file.flush()
            os.fsync(file.fileno())

    def teardown(self) -> None:
        for handle in self.handles:
            os.close(handle.container.fd)
        shutil.rmtree(self.folder)


ContainerMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestContainerMachine = ContainerMachine.TestCase
