"""How fast a stored prefix comes back, beside what its devices can do at most.

    python -m bench.retrieval --emulate 200,150,100,50
    python -m bench.retrieval --devices 'file:/mnt/nvme0/kvpool?size=4GiB' --dram 2GiB

A prefix is stored through the real orchestrator, data plane and engine out of paged KV memory and
is loaded back, in a pool that has served one load before. Ceilings (`bench.ceilings`) move the
same bytes, from the same places, before and after each retrieval. Pages are poisoned before each
load and compared after it; in the end chunks are corrupted, which must be reported. What would
prove a figure wrong stands beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench import ceilings, figures
from bench.emulate import MIB, emulated_ssds
from bench.geometry import MODEL_NAMES, model_geometry
from bench.rig import BenchmarkError, Rig, Stretch, make_stretches, store
from kvpool import native
from kvpool.device_config import DeviceConfig, parse_devices
from kvpool.plan import LoadPlan, StorePlan
from kvpool.units import parse_bytes

DEFAULT_MODEL = "llama-3.1-8b"
COPY_BUFFER_BYTES = 2 << 30  # at most; a stretch is no longer, so no page is copied twice

Places = LoadPlan | StorePlan
"""`group`, `device` and `slot` of the chunks of a stretch, in its order."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure; sizes in bytes. `model` None: `prefix_bytes` of DEFAULT_MODEL's KV."""

    devices: tuple[DeviceConfig, ...]
    prefix_bytes: int
    model: str | None = None
    block_tokens: int = 16
    repeat: int = 5
    cold: bool = False
    fio: bool = False


@dataclass(slots=True)
class Pass:
    """One retrieval of the whole prefix; lists by device. Seconds are sums over stretches."""

    bytes: list[int]
    seconds: list[float]  # until the device's last chunk was in its pages
    kib_per_request: list[float | None] = field(default_factory=list)
    whole_s: float = 0.0  # planning, then all devices
    cpu_s: float = 0.0
    failed: set[tuple[int, int]] = field(default_factory=set)  # (group, chunk)
    wrong_blocks: int = 0
    places: list[LoadPlan] = field(default_factory=list)  # by stretch


# ---- one retrieval, one ceiling -------------------------------------------------------------


def retrieve(rig: Rig, stretches: Sequence[Stretch]) -> Pass:
    """Load the prefix once, in stretches; pages are poisoned before and compared after each."""
    count = len(rig.devices)
    one = Pass(bytes=[0] * count, seconds=[0.0] * count)
    disks = [ceilings.disk_of(path) if (path := rig.path(i)) else "" for i in range(count)]
    requests, moved = [0] * count, [0] * count
    for number, stretch in enumerate(stretches):
        rig.memory.poison()
        before = [ceilings.disk_counters(disk) for disk in disks]
        _load(rig, stretch, number, one)
        for i, disk in enumerate(disks):
            now = ceilings.disk_counters(disk)
            requests[i] += now.requests - before[i].requests
            moved[i] += now.bytes - before[i].bytes
        _compare(rig, stretch, one)
    one.kib_per_request = [
        bytes_ / 1024 / n if n else None for bytes_, n in zip(moved, requests, strict=True)
    ]
    return one


def _load(rig: Rig, stretch: Stretch, job_id: int, one: Pass) -> None:
    blocks, request = rig.blocks(stretch), rig.orchestrator.begin("load")
    cpu_s, start_s = ceilings.cpu_seconds(), time.perf_counter()
    plan = rig.orchestrator.plan_load(stretch.keys, request)
    rig.plane.submit_load(job_id, plan, blocks)
    job = rig.finish(job_id)
    planned_s = rig.engine.submitted_s - start_s
    one.whole_s += planned_s + max(rig.engine.finished_s.values(), default=0.0)
    one.cpu_s += ceilings.cpu_seconds() - cpu_s
    rig.orchestrator.complete_load(request)
    one.places.append(plan)
    one.failed |= {(stretch.group, stretch.first + position) for position in job.failed}
    size = rig.model.geometry.groups[stretch.group].chunk_bytes
    for i, device in enumerate(rig.devices):
        one.bytes[i] += size * int((plan.device == i).sum())
        one.seconds[i] += rig.engine.finished_s.get(device.index, 0.0)
    rig.settle()


def _compare(rig: Rig, stretch: Stretch, one: Pass) -> None:
    per_chunk = rig.model.geometry.blocks_per_chunk
    for block in range(len(stretch.keys) * per_chunk):
        if (stretch.group, stretch.first + block // per_chunk) not in one.failed:
            number = stretch.first * per_chunk + block
            one.wrong_blocks += not rig.memory.holds(stretch.group, block, number)


def measure_ceilings(
    rig: Rig, places: Sequence[Places], copies: Sequence[ceilings.Buffer]
) -> list[ceilings.Measured]:
    """Move the bytes of a retrieval without kvpool, all devices at once; one item a device.

    A device that holds none of the prefix moved 0 bytes in 0 s. `copies`: source, destination.
    """
    moved, seconds = [0] * len(rig.devices), [0.0] * len(rig.devices)
    for plan in places:
        works = _works(rig, plan, copies)
        measured = ceilings.measure([work for _, work in works])
        for (device, _), part in zip(works, measured, strict=True):
            moved[device] += part.bytes
            seconds[device] += part.seconds
    return [ceilings.Measured(*pair) for pair in zip(moved, seconds, strict=True)]


def _works(
    rig: Rig, plan: Places, copies: Sequence[ceilings.Buffer]
) -> list[tuple[int, ceilings.ReadWork | ceilings.CopyWork]]:
    works: list[tuple[int, ceilings.ReadWork | ceilings.CopyWork]] = []
    for i, device in enumerate(rig.devices):
        chosen = plan.device == i
        size = rig.model.geometry.groups[int(plan.group[0])].chunk_bytes
        path = rig.path(i)
        if not chosen.any():
            continue
        if path is None:
            source, destination = copies
            total, threads = size * int(chosen.sum()), device.probe_target.parallel
            work = ceilings.CopyWork(source.memory, destination.memory, total, threads)
            works.append((i, work))
        else:
            length = -(-size // native.ALIGN) * native.ALIGN
            offsets = device.offsets(plan.slot[chosen]).tolist()
            pieces = [(offset, length) for offset in offsets]
            works.append((i, ceilings.ReadWork(path, pieces)))
    return works


def corrupt(rig: Rig, stretch: Stretch, places: Places) -> set[tuple[int, int]]:
    """Flip bits of one chunk on each device, past all caches; return (group, chunk) of each."""
    chosen = set()
    for i, device in enumerate(rig.devices):
        found = np.flatnonzero(places.device == i)
        if found.size:
            place = int(found[found.size // 2])
            _flip(rig, i, int(device.offsets(places.slot[place : place + 1])[0]))
            chosen.add((stretch.group, stretch.first + place))
    return chosen


def _flip(rig: Rig, device: int, offset: int) -> None:
    path, module = rig.path(device), rig.devices[device].probe_target.memory
    if module is not None:
        module.array[offset] ^= 0xFF
        return
    assert path is not None
    block = ceilings.map_buffer(native.ALIGN).memory[: native.ALIGN]
    file = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        os.preadv(file, [block.data], offset)
        block[0] ^= 0xFF
        os.pwritev(file, [block.data], offset)
    finally:
        os.close(file)


# ---- the whole measurement ------------------------------------------------------------------


@dataclass(slots=True)
class Results:
    """`ceilings` has one item more than `passes`: they were measured in turn. Lists by device."""

    names: list[str]
    reports: list[dict[str, Any]]
    passes: list[Pass]
    ceilings: list[list[ceilings.Measured]]
    control: dict[str, Any]
    fio_bytes_s: list[float | None]

    @property
    def used(self) -> list[int]:
        """Devices that hold a part of the prefix."""
        return [i for i, size in enumerate(self.passes[0].bytes) if size]

    def rate(self, device: int) -> figures.Figure:
        """Return a device's bandwidth beside its ceiling, in GB/s."""
        samples = [one.bytes[device] / one.seconds[device] / 1e9 for one in self.passes]
        return figures.Figure(
            self.names[device],
            "GB/s",
            samples,
            _between([parts[device].bandwidth_bytes_s / 1e9 for parts in self.ceilings]),
            "fewer bytes in /proc/diskstats, or another O_DIRECT reader that beats the ceiling",
        )

    def pooled(self) -> figures.Figure:
        """Return the prefix's bytes over its whole time beside the sum of ceilings, in GB/s."""
        sums = [sum(p[i].bandwidth_bytes_s for i in self.used) / 1e9 for p in self.ceilings]
        samples = [sum(one.bytes) / one.whole_s / 1e9 for one in self.passes]
        reason = "a longer time from before the plan of a load to its last page"
        return figures.Figure("pooled", "GB/s", samples, _between(sums), reason)

    def cpu(self) -> figures.Figure:
        """Return CPU seconds of this process a GB: planning, transfers, checks and copies."""
        samples = [one.cpu_s / (sum(one.bytes) / 1e9) for one in self.passes]
        return figures.Figure("CPU", "s/GB", samples)

    def spreads(self) -> list[float]:
        """Return how much later than the first device the last one finished, by pass."""
        seconds = [[one.seconds[i] for i in self.used] for one in self.passes]
        return [max(part) / min(part) - 1 for part in seconds]

    def shares(self) -> list[tuple[float, float]]:
        """Return each device's part of the bytes, and of the bandwidth of all ceilings."""
        sizes = self.passes[-1].bytes
        rates = [
            statistics.median(p[i].bandwidth_bytes_s for p in self.ceilings)
            if i in self.used
            else 0.0
            for i in range(len(sizes))
        ]
        return [(b / sum(sizes), r / sum(rates)) for b, r in zip(sizes, rates, strict=True)]


def _between(values: Sequence[float]) -> list[float]:
    """Return the mean of each two neighbours: what held while the pass between them ran."""
    return [(a + b) / 2 for a, b in pairwise(values)]


def measure(options: Options) -> Results:
    """Run the benchmark. Raises BenchmarkError where content is wrong or nothing moves."""
    model = model_geometry(options.model or DEFAULT_MODEL, options.block_tokens)
    stretches = make_stretches(model, None if options.model else options.prefix_bytes)
    rig = Rig(options.devices, model, stretches)
    try:
        if len(rig.devices) > 1 and not options.cold:
            learn(rig, stretches[:1])
        believed = [d.read_bandwidth_bytes_s for d in rig.orchestrator.snapshot().devices]
        places: Sequence[Places] = store(rig, stretches)
        size = min(COPY_BUFFER_BYTES, len(places) * rig.memory.arena.length)
        copies = [ceilings.map_buffer(size) for _ in range(2)]
        passes: list[Pass] = []
        found = [measure_ceilings(rig, places, copies)]
        for _ in range(options.repeat):
            passes.append(retrieve(rig, stretches))
            _require_right(passes[-1])
            places = passes[-1].places
            found.append(measure_ceilings(rig, places, copies))
        fio = [
            _fio(rig, i, passes[-1].bytes[i]) if options.fio else None for i in range(len(found[0]))
        ]
        control = run_control(rig, stretches, places)
        reports = [_describe(rig, i, believed[i]) for i in range(len(rig.devices))]
        names = [device.name for device in rig.devices]
        return Results(names, reports, passes, found, control, fio)
    finally:
        rig.close()


def learn(rig: Rig, stretches: Sequence[Stretch]) -> None:
    """Let the pool see its devices at work once, as it does with the first load that it serves.

    What is stored later is placed by the bandwidths that were learned.
    """
    store(rig, stretches)
    _require_right(retrieve(rig, stretches))
    rig.orchestrator.reset()


def _require_right(one: Pass) -> None:
    if one.failed or one.wrong_blocks:
        raise BenchmarkError(
            f"{len(one.failed)} chunks failed, {one.wrong_blocks} blocks have other content"
        )


def run_control(rig: Rig, stretches: Sequence[Stretch], places: Sequence[Places]) -> dict[str, Any]:
    """Corrupt a chunk on each device and load again. Raises BenchmarkError if that goes unseen.

    One stretch tells: with a chunk, the pool gives up what hangs on it.
    """
    longest = max(range(len(stretches)), key=lambda i: len(stretches[i].keys))
    corrupted = corrupt(rig, stretches[longest], places[longest])
    one = retrieve(rig, [stretches[longest]])
    if one.failed != corrupted or one.wrong_blocks:
        raise BenchmarkError(
            f"corrupted {sorted(corrupted)}, reported {sorted(one.failed)},"
            f" {one.wrong_blocks} blocks wrong and not reported"
        )
    return {"corrupted_chunks": len(corrupted), "reported_chunks": len(one.failed)}


def _fio(rig: Rig, device: int, size: int) -> float | None:
    path = rig.path(device)
    return ceilings.fio_read(path, size // MIB * MIB) if path and size >= MIB else None


def _describe(rig: Rig, device: int, believed_bytes_s: float) -> dict[str, Any]:
    it, profile = rig.devices[device], rig.profiles[device]
    return {
        "device": str(rig.configs[device]),
        "page_type": it.page_type.value,
        "io_path": it.io_path,
        "settings": it.probe_target.settings,
        "probed_bandwidth_bytes_s": profile.read_bandwidth_bytes_s,
        "placed_by_bandwidth_bytes_s": believed_bytes_s,
    }


def as_json(options: Options, results: Results) -> dict[str, Any]:
    """Return the figures as one mapping. Shares are of bytes; `share_error_max` is the largest
    |share / expected_share - 1| of a device, expected from its ceiling; medians over passes."""
    shares, pooled = results.shares(), results.pooled()
    rates = [results.rate(i) for i in results.used]
    devices = []
    for rate, i in zip(rates, results.used, strict=True):
        requests = [one.kib_per_request[i] for one in results.passes]
        known = [kib for kib in requests if kib is not None]
        devices.append(
            {
                "name": results.names[i],
                "bytes": results.passes[-1].bytes[i],
                "seconds": statistics.median(one.seconds[i] for one in results.passes),
                "bandwidth_bytes_s": statistics.median(rate.samples) * 1e9,
                "ceiling_bytes_s": statistics.median(rate.ceilings) * 1e9,
                "ratio": statistics.median(rate.ratios),
                "kib_per_request": statistics.median(known) if known else None,
                "share": shares[i][0],
                "expected_share": shares[i][1],
                "fio_bytes_s": results.fio_bytes_s[i],
                **results.reports[i],
            }
        )
    return {
        "benchmark": "retrieval",
        "model": options.model or DEFAULT_MODEL,
        "bytes": sum(results.passes[-1].bytes),
        "placed_by": "probe" if options.cold else "probe and one load",
        "pooled_over_ceiling": statistics.median(pooled.ratios),
        "finish_spread": statistics.median(results.spreads()),
        "share_error_max": max(abs(shares[i][0] / shares[i][1] - 1) for i in results.used),
        "cpu_seconds_per_gb": statistics.median(results.cpu().samples),
        "control": results.control,
        "devices": devices,
        "rows": [figure.row() for figure in (pooled, *rates, results.cpu())],
    }


# ---- command line ---------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from a command line; 0 where all content was right."""
    given = _parse(arguments)
    with _options(given) as options:
        results = measure(options)
    content = as_json(options, results)
    rates = [results.pooled(), *(results.rate(i) for i in results.used)]
    console = Console()
    console.print(figures.table("retrieval", [*rates, results.cpu()]))
    keys = ("pooled_over_ceiling", "finish_spread", "share_error_max", "control")
    console.print({key: content[key] for key in keys})
    if given.json:
        figures.write_json(given.json, content)
    if given.chart:
        figures.chart(given.chart, "Retrieval beside its ceilings", rates)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.retrieval", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", nargs="+", default=[], metavar="STRING")
    parser.add_argument("--emulate", default="", metavar="MIB_S,...", help="SSDs; needs root")
    parser.add_argument("--dram", metavar="SIZE", help="adds a module of host memory")
    parser.add_argument("--bytes", default="2GiB", help="of the prefix, where no model is given")
    parser.add_argument("--model", choices=MODEL_NAMES, help="its KV of 128K tokens")
    parser.add_argument("--block-tokens", type=int, default=16, choices=(16, 64))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="place by the probe's figures alone")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--fio", action="store_true", help="fio's reading beside ours")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="a PNG")
    given = parser.parse_args(arguments)
    if not (given.devices or given.emulate or given.dram):
        parser.error("no devices: give --devices, --emulate or --dram")
    return given


@contextlib.contextmanager
def _options(given: argparse.Namespace) -> Iterator[Options]:
    """Yield what was asked for, emulated SSDs included, which live as long."""
    size = parse_bytes(given.bytes, "--bytes")
    strings = [f"dram:{given.dram}"] * bool(given.dram) + given.devices
    limits = [float(limit) for limit in given.emulate.split(",") if limit]
    with contextlib.ExitStack() as stack:
        if limits:
            model = model_geometry(given.model or DEFAULT_MODEL, given.block_tokens)
            stretches = make_stretches(model, None if given.model else size)
            total = sum(len(s.keys) for s in stretches) * model.geometry.slot_bytes
            # The largest share, and room for metadata and for uneven pieces.
            room = int(total * max(limits) / sum(limits) * 1.25) // MIB * MIB + 128 * MIB
            ssds = stack.enter_context(emulated_ssds(limits, room, given.folder))
            strings += [f"block:{device}" for device in ssds.devices]
        yield Options(
            devices=parse_devices(strings),
            prefix_bytes=size,
            model=given.model,
            block_tokens=given.block_tokens,
            repeat=given.repeat,
            cold=given.cold,
            fio=given.fio,
        )


if __name__ == "__main__":
    sys.exit(main())
