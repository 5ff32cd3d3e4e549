"""An engine whose files fail as a script says, for tests that open devices in the ordinary way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Unpack

from kvpool.faults import FaultEngine, FaultKind, FaultRule
from kvpool.native import IoPath, Shape


class FaultyEngine(FaultEngine):
    """Every file device is a faulty one, at first without any rules: see `set_faults`.

    Each of them may lose `volatile_bytes` at a crash; `seed` says which.
    """

    volatile_bytes = 0
    seed = 0
    faulty: tuple[int, ...] = ()

    def add_file_device(
        self,
        fd: int,
        length: int,
        depth: int = 8,
        threads: int = 4,
        numa_node: int = -1,
        io_path: IoPath = IoPath.AUTO,
        **shape: Unpack[Shape],
    ) -> int:
        device = self.add_faulty_device(
            fd,
            length,
            seed=self.seed,
            volatile_bytes=self.volatile_bytes,
            depth=depth,
            threads=threads,
            numa_node=numa_node,
        )
        read_bytes_s, write_bytes_s = shape.get("read_bytes_s", 0), shape.get("write_bytes_s", 0)
        self.set_shape(device, read_bytes_s, write_bytes_s, shape.get("latency_us", 0))
        self.faulty = (*self.faulty, device)
        return device

    def break_files(self, seed: int, rules: Sequence[FaultRule]) -> None:
        """Give all files the same rules; each has its own luck."""
        for index, device in enumerate(self.faulty):
            self.set_faults(device, seed * 64 + index, rules, self.volatile_bytes)

    def mend_files(self) -> None:
        """End all faults, and what is stuck. What is not flushed stays so."""
        for device in self.faulty:
            self.set_faults(device, self.seed, [], self.volatile_bytes)
            self.release_stuck(device)

    def faults(self) -> Counter[FaultKind]:
        """Return how many faults of each kind there were, on all files."""
        total: Counter[FaultKind] = Counter()
        for device in self.faulty:
            total.update(self.fault_counts(device))
        return +total
