"""Figures beside their ceilings: summary, table, chart and file, shared by all benchmarks."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Summary:
    """n, smallest, median and largest of some samples."""

    n: int
    min: float
    median: float
    max: float


@dataclass(frozen=True, slots=True)
class Figure:
    """Samples of one quantity, and the ceiling that was measured beside each of them.

    `ceilings` is empty or as long as `samples`. `falsified_by` says what would prove it wrong.
    """

    name: str
    unit: str
    samples: Sequence[float]
    ceilings: Sequence[float] = ()
    falsified_by: str = ""

    @property
    def ratios(self) -> list[float]:
        """Sample over its own ceiling, pair by pair."""
        return [s / c for s, c in zip(self.samples, self.ceilings, strict=True)] * bool(
            self.ceilings
        )

    def row(self) -> dict[str, Any]:
        """Return the figure as JSON keys: name, unit, n, min, median, max, ceiling, ratio."""
        row: dict[str, Any] = {"name": self.name, "unit": self.unit, **as_dict(self.samples)}
        row["ceiling"] = as_dict(self.ceilings) if self.ceilings else None
        row["ratio"] = as_dict(self.ratios) if self.ceilings else None
        row["falsified_by"] = self.falsified_by
        return row


def summarize(samples: Sequence[float]) -> Summary:
    """Return the summary of at least one sample."""
    return Summary(len(samples), min(samples), statistics.median(samples), max(samples))


def as_dict(samples: Sequence[float]) -> dict[str, float]:
    """Return the summary of at least one sample as JSON keys."""
    summary = summarize(samples)
    return {"n": summary.n, "min": summary.min, "median": summary.median, "max": summary.max}


def table(title: str, figures: Sequence[Figure]) -> Table:
    """Return a table for a terminal, one figure a row."""
    view = Table(title=title)
    for column in ("figure", "unit", "n", "min", "median", "max", "ceiling", "ratio (min..max)"):
        view.add_column(column, justify="left" if column in ("figure", "unit") else "right")
    for figure in figures:
        summary = summarize(figure.samples)
        ceiling = ratio = ""
        if figure.ceilings:
            ceiling = _short(summarize(figure.ceilings).median)
            of = summarize(figure.ratios)
            ratio = f"{of.median:.3f} ({of.min:.3f}..{of.max:.3f})"
        numbers = [_short(value) for value in (summary.min, summary.median, summary.max)]
        view.add_row(figure.name, figure.unit, str(summary.n), *numbers, ceiling, ratio)
    return view


def chart(path: Path, title: str, figures: Sequence[Figure]) -> None:
    """Write a PNG: median of each figure as a bar beside its ceiling, lines from min to max.

    All figures have one unit.
    """
    drawing, axes = plt.subplots(figsize=(1.6 * len(figures) + 3, 4.5), layout="constrained")
    for shift, label, of in ((-0.2, "ceiling", "ceilings"), (0.2, "measured", "samples")):
        shown = [(n, getattr(f, of)) for n, f in enumerate(figures) if getattr(f, of)]
        parts = [summarize(samples) for _, samples in shown]
        spread = [
            [part.median - part.min for part in parts],
            [part.max - part.median for part in parts],
        ]
        places, heights = [n + shift for n, _ in shown], [part.median for part in parts]
        axes.bar(places, heights, 0.4, yerr=spread, capsize=3, label=label)
    axes.set_xticks(range(len(figures)), [figure.name for figure in figures], rotation=20)
    axes.set_ylabel(figures[0].unit)
    axes.set_title(title)
    axes.legend()
    drawing.savefig(path, dpi=120)
    plt.close(drawing)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` with a description of this host under "host"; never half a file."""
    text = json.dumps({**content, "host": describe_host()}, indent=2) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def describe_host() -> dict[str, Any]:
    """Return what a figure depends on: processor, cores, memory, kernel, pages, load."""
    cpu = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = dict(line.split(":", 1) for line in _lines("/proc/meminfo"))
    huge = " ".join(_lines("/sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "cpu": cpu[0].split(":", 1)[1].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory.get("MemTotal", "0 kB").split()[0]) * 1024,
        "kernel": platform.release(),
        "reserved_huge_pages": int(memory.get("HugePages_Total", "0")),
        "transparent_huge_pages": huge,
        "load_average_1_minute": os.getloadavg()[0],
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
