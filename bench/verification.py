"""What it costs to check every payload: loads of a DRAM module with checksums and without, in turn.

Content is compared after each pass. Retrieval checks always; this is why it can.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from bench import figures
from bench.geometry import model_geometry
from bench.retrieval import DEFAULT_MODEL, Pass, retrieve
from bench.rig import BenchmarkError, Rig, make_stretches, store
from kvpool import native
from kvpool.device_config import parse_devices
from kvpool.units import parse_bytes

Int32 = npt.NDArray[np.int32]


def measure(device: str, prefix_bytes: int, repeat: int) -> list[figures.Figure]:
    """Return the bandwidth of loads with checksums beside that of loads without, in GB/s.

    Raises BenchmarkError where content is wrong.
    """
    model = model_geometry(DEFAULT_MODEL)
    stretches = make_stretches(model, prefix_bytes)
    rig = Rig(parse_devices([device]), model, stretches)
    submit = rig.engine.submit

    def unchecked(ops: npt.NDArray[np.void], blocks: Int32) -> None:
        ops["flags"][ops["kind"] == native.KIND_LOAD] = native.FLAG_UNCHECKED
        submit(ops, blocks)

    try:
        store(rig, stretches)
        rates: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * repeat + 1):
            checked = turn % 2 == 1
            rig.engine.submit = submit if checked else unchecked  # type: ignore[method-assign]
            rates[checked].append(_rate(retrieve(rig, stretches)))
    finally:
        rig.close()
    without = [(a + b) / 2 for a, b in zip(rates[False], rates[False][1:], strict=False)]
    reason = "a load without checksums that is faster"
    return [figures.Figure("with checksums", "GB/s", rates[True], without, reason)]


def _rate(one: Pass) -> float:
    if one.failed or one.wrong_blocks:
        raise BenchmarkError(f"{len(one.failed)} chunks failed, {one.wrong_blocks} blocks wrong")
    return sum(one.bytes) / one.whole_s / 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from a command line."""
    parser = argparse.ArgumentParser(
        "bench.verification", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--dram", default="2.2GiB", metavar="SIZE")
    parser.add_argument("--bytes", default="2GiB", help="of the prefix")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    found = measure(f"dram:{given.dram}", parse_bytes(given.bytes, "--bytes"), given.repeat)
    Console().print(figures.table("verification", found))
    if given.json:
        rows = [figure.row() for figure in found]
        figures.write_json(given.json, {"benchmark": "verification", "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
