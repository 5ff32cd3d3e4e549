"""What a look-up and the plan of a load cost in the control plane, by how many chunks are held.

The way vLLM's scheduler goes: one look-up a key of a prefix, then the plan of its load and the
load's end. Pools of all sizes are built first and measured in turns, since a machine's speed
drifts. Falsified by a median of 10 ms or more, by a time at the largest size of more than 1.5
times that at the smallest, or by more than 300 bytes a chunk.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import resource
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpool.orchestrator import Orchestrator, RequestState
from kvpool.types import (
    DeviceReport,
    Geometry,
    GroupGeometry,
    GroupKind,
    Key,
    Outcome,
    Profile,
    WorkerReport,
)

CHUNK_TOKENS = 256
CHUNK_BYTES = 4 << 20
BANDWIDTHS_BYTES_S = (20e9, 7e9, 7e9)
OFFERED_A_STEP = 256
TARGET_S, TARGET_RATIO, TARGET_BYTES = 0.010, 1.5, 300


@dataclass(slots=True)
class HeldPool:
    """A pool that holds `held` chunks in chains of at most `prefix` chunks."""

    held: int
    prefix: int
    orchestrator: Orchestrator
    traced_bytes_a_chunk: float = 0.0
    resident_bytes_a_chunk: float = 0.0


def chunk_key(chain: int, i: int) -> Key:
    """Return a new key object: 32 bytes of hash, then the KV group's index."""
    return hashlib.sha256(b"%d/%d" % (chain, i)).digest() + bytes(4)


def make_orchestrator(slots: int) -> Orchestrator:
    """Return an empty pool of DRAM and two SSDs with `slots` slots in all."""
    group = GroupGeometry(GroupKind.FULL, CHUNK_TOKENS, CHUNK_BYTES)
    orchestrator = Orchestrator(Geometry((group,), 16, CHUNK_BYTES), ranks=1, backup=False)
    total = sum(BANDWIDTHS_BYTES_S)
    counts = [int(slots * bandwidth / total) for bandwidth in BANDWIDTHS_BYTES_S]
    counts[0] += slots - sum(counts)
    orchestrator.attach(
        [
            DeviceReport(
                name=f"device{i}",
                kind="file" if i else "dram",
                slots=count,
                slot_bytes=CHUNK_BYTES,
                profile=Profile(bandwidth, bandwidth, 1e-4, bandwidth),
            )
            for i, (bandwidth, count) in enumerate(zip(BANDWIDTHS_BYTES_S, counts, strict=True))
        ]
    )
    return orchestrator


def store_chain(orchestrator: Orchestrator, chain: int, length: int) -> None:
    """Store a chain as a request does: a few chunks a step, acknowledged after it."""
    request = orchestrator.begin(f"store-{chain}")
    for start in range(0, length, OFFERED_A_STEP):
        steps = range(start, min(start + OFFERED_A_STEP, length))
        keys = [chunk_key(chain, i) for i in steps]
        plan = orchestrator.reserve(keys, [(i + 1) * CHUNK_TOKENS for i in steps], request)
        written = dict.fromkeys(plan.write_id.tolist(), 1)
        orchestrator.acknowledge(WorkerReport(finished_writes=written))
    orchestrator.finish(request)


def resident_bytes() -> int:
    """Return the resident set size of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def fill(held: int, prefix: int) -> Orchestrator:
    """Return a pool that is full with `held` chunks."""
    orchestrator = make_orchestrator(held)
    for chain, start in enumerate(range(0, held, prefix)):
        store_chain(orchestrator, chain, min(prefix, held - start))
    gc.collect()
    return orchestrator


def build(held: int, prefix: int) -> HeldPool:
    """Build a pool and measure by how much the process grows."""
    gc.collect()
    before = resident_bytes()
    pool = HeldPool(held, prefix, fill(held, prefix))
    pool.resident_bytes_a_chunk = (resident_bytes() - before) / held
    return pool


def traced_bytes_a_chunk(held: int, prefix: int) -> float:
    """Return what Python allocates for a chunk, in a pool that is built for this alone."""
    tracemalloc.start()
    orchestrator = fill(held, prefix)
    traced = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del orchestrator
    return traced / held


def load_once(pool: HeldPool, chain: int) -> float:
    """Return the seconds that look-ups and plan of one prefix take, all its chunks being hits."""
    keys = [chunk_key(chain, i) for i in range(pool.prefix)]
    orchestrator = pool.orchestrator
    request = orchestrator.begin("load")
    started_s = time.perf_counter()
    hits = look_up(orchestrator, keys, request)
    orchestrator.plan_load(keys[:hits], request)
    orchestrator.complete_load(request)
    seconds = time.perf_counter() - started_s
    orchestrator.finish(request)
    if hits != pool.prefix:
        raise RuntimeError(f"{hits} hits instead of {pool.prefix}")
    return seconds


def look_up(orchestrator: Orchestrator, keys: list[Key], request: RequestState) -> int:
    """Return how many of the keys are hits, from the first on, as vLLM counts them."""
    hits = 0
    for key in keys:
        if orchestrator.lookup(key, request) is not Outcome.HIT:
            break
        hits += 1
    return hits


def measure(held: list[int], prefix: int, repeat: int) -> list[dict[str, Any]]:
    """Return one row a size: seconds of look-ups and plan, bytes a chunk."""
    pools = [build(size, min(prefix, size)) for size in sorted(held)]
    seconds: list[list[float]] = [[] for _ in pools]
    for turn in range(repeat + 1):
        for pool, samples in zip(pools, seconds, strict=True):
            whole_chains = pool.held // pool.prefix
            samples.append(load_once(pool, turn * 37 % whole_chains))
    for pool in pools:
        pool.traced_bytes_a_chunk = traced_bytes_a_chunk(pool.held, pool.prefix)
    # The first turn warms up.
    return [row(pool, samples[1:]) for pool, samples in zip(pools, seconds, strict=True)]


def row(pool: HeldPool, samples: list[float]) -> dict[str, Any]:
    """Return a size's figures as JSON keys."""
    return {
        "held": pool.held,
        "prefix": pool.prefix,
        "median_s": statistics.median(samples),
        "min_s": min(samples),
        "max_s": max(samples),
        "n": len(samples),
        "bytes_a_chunk": pool.traced_bytes_a_chunk,
        "resident_bytes_a_chunk": pool.resident_bytes_a_chunk,
    }


def view(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table for a terminal, targets in the title."""
    title = (
        f"look-ups and plan of one load (target: under {TARGET_S * 1e3:.0f} ms, largest within"
        f" {TARGET_RATIO} x smallest, at most {TARGET_BYTES} bytes a chunk)"
    )
    table = Table(title=title)
    columns = ("held", "prefix", "n", "min ms", "median ms", "max ms", "x smallest")
    for column in (*columns, "bytes a chunk", "RSS a chunk"):
        table.add_column(column, justify="right")
    for figures in rows:
        table.add_row(
            f"{figures['held']:,}",
            f"{figures['prefix']:,}",
            str(figures["n"]),
            *(f"{figures[name] * 1e3:.2f}" for name in ("min_s", "median_s", "max_s")),
            f"{figures['median_s'] / rows[0]['median_s']:.2f}",
            f"{figures['bytes_a_chunk']:.0f}",
            f"{figures['resident_bytes_a_chunk']:.0f}",
        )
    return table


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held", default="10000,100000,1000000", help="chunks held, by commas")
    parser.add_argument("--prefix", type=int, default=4096, help="chunks of a prefix")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    held = [int(size) for size in options.held.split(",")]
    rows = measure(held, options.prefix, options.repeat)
    Console(width=None if os.isatty(1) else 140).print(view(rows))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
