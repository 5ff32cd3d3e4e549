"""Kills a pool again and again, and power with it: nothing that comes back may be a lie.

    python -m bench.crash --kills 100
    python -m bench.crash --engine vllm --kills 20

A child restores the pool of the one before it, checks all that is a hit, and goes on storing until
it is killed with SIGKILL at a random moment. In a part of the rounds the power fails too: of what
was written shortly before, each run of sectors lands, vanishes or tears. Exit code: 0, 1 for a lie,
a pool that did not open or a run in which nothing came back, 2 for options that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.crash_writer import FILE_DEVICES, LEDGER_NAME
from bench.demo import check_output
from bench.figures import Figure, table, write_json
from bench.serve import BUILD_FOLDER, OneLineParser, make_console
from kvpool.errors import ConfigurationError
from kvpool.layout import PROBE_OFFSET
from kvpool.medium import FILE_NAME

SECTOR_BYTES = 512  # the least that a device writes whole
# Of the kills: while the pool opens, restores and is checked; the same where there are no files.
OPENING_SHARE, MAKING_SHARE = 0.25, 0.6
POWER_CUT_SHARE = 0.4  # of the other kills
FRESH_SHARE = 0.1  # of the rounds: begin with no files, so that their making is killed too
CHECK_TIMEOUT_S = 300.0
# How long a child works at most before it is killed, by engine.
WORK_S = {"plane": 0.8, "vllm": 4.0}
LOG_TAIL_LINES = 15
LIES_SHOWN, NAME_LETTERS = 10, 16


class ChildEndedError(RuntimeError):
    """The child ended, or said nothing for too long, before it was killed."""


@dataclass(slots=True)
class Tally:
    """What was seen in all rounds. `opens_failed` and `lies` say it with words."""

    kills: int = 0
    kills_while_opening: int = 0
    power_cuts: int = 0
    sectors_changed: int = 0
    fresh_starts: int = 0
    hits: int = 0
    loaded: int = 0
    missed: int = 0
    damaged_headers: int = 0
    wrong: int = 0
    phantom: int = 0
    opens_failed: list[str] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)
    restored: list[float] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)

    def take(self, number: int, word: str, facts: dict[str, Any]) -> None:
        """Add up a report of the child of round `number`."""
        if word == "checked":
            self.hits += facts["hits"]
            self.damaged_headers += facts.get("damaged_headers", 0)  # vLLM's pool only logs it
            self.restored.append(facts["restored"])
            self.restart_s.append(facts["restart_s"])
        self.loaded += facts.get("loaded", 0)
        self.missed += facts.get("missed", 0)
        for lie in ("wrong", "phantom"):
            found = facts.get(lie, [])
            setattr(self, lie, getattr(self, lie) + len(found))
            if found:
                names = ", ".join(name[:NAME_LETTERS] for name in found[:4])
                self.lies.append(f"round {number}, {word}: {len(found)} {lie}: {names} ...")

    def verdict(self) -> str:
        """Return what is wrong in one line; "" where nothing is."""
        if self.opens_failed:
            first, *_, last = self.opens_failed[0].splitlines() * 2
            return f"the pool did not open {len(self.opens_failed)} times: {first}: {last}"
        if self.wrong or self.phantom:
            return f"{self.wrong} wrong, {self.phantom} phantom: {self.lies[0]}"
        return "" if self.hits else "nothing ever came back: this run proves nothing"


class Child:
    """A process of `bench.crash_writer` with a session of its own, and its reports."""

    def __init__(self, engine: str, folder: Path, *options: str) -> None:
        """Start it; its output goes to a log in `folder`."""
        self.log = folder / "child.log"
        self._reports, writing = os.pipe()
        words = [engine, "--folder", str(folder), "--report-fd", str(writing), *options]
        with open(self.log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.crash_writer", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                start_new_session=True,
            )
        os.close(writing)
        self._unread, self.ended = b"", False
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def wait_for(self, word: str) -> dict[str, Any]:
        """Return the first report called `word`; raise ChildEndedError where none comes."""
        deadline_s = time.monotonic() + CHECK_TIMEOUT_S
        while True:
            for heard, facts in self.heard:
                if heard == word:
                    return facts
            left_s = deadline_s - time.monotonic()
            if self.ended or left_s <= 0:
                raise ChildEndedError(self._failure(f"no {word!r}"))
            self._read(left_s)

    def listen(self, seconds: float) -> None:
        """Take in reports for so long; raise ChildEndedError where it ends by itself."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            if self.ended:
                raise ChildEndedError(self._failure("it ended"))
            self._read(left_s)

    def _read(self, timeout_s: float) -> None:
        if not select.select([self._reports], [], [], timeout_s)[0]:
            return
        data = os.read(self._reports, 1 << 16)
        self.ended = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            word, _, facts = line.decode().partition(" ")
            self.heard.append((word, json.loads(facts)))

    def wait(self) -> int:
        """Wait for its own end; return its exit code."""
        return self._process.wait(CHECK_TIMEOUT_S)

    def kill(self) -> None:
        """Kill it, unless it has ended, and take in what it still said."""
        if self._reports < 0:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        while not self.ended:
            self._read(CHECK_TIMEOUT_S)
        os.close(self._reports)
        self._reports = -1

    def _failure(self, what: str) -> str:
        tail = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"{what}, exit code {self._process.poll()}", *tail])


# ---- power cuts -----------------------------------------------------------------------------


class Snapshot:
    """The containers of a pool some time before the power fails."""

    def __init__(self, folder: Path) -> None:
        """Copy them while they are written to: each sector is of some moment."""
        self._folder = folder
        self._resets = _count_lines(folder, "reset")
        self._old = {
            name: np.fromfile(folder / name / FILE_NAME, np.uint8) for name in FILE_DEVICES
        }

    def cut(self, rng: random.Random) -> int:
        """Undo some of what was written since; return how many sectors changed.

        Leases are synced, so they stay as they are, but for one that was being written.
        """
        ended = _count_lines(self._folder, "reset")
        being_reset = _count_lines(self._folder, "resetting") > ended == self._resets
        first = 0 if being_reset else PROBE_OFFSET // SECTOR_BYTES
        changed = 0
        for name, old in self._old.items():
            path = self._folder / name / FILE_NAME
            new = np.fromfile(path, np.uint8)
            mixed, count = tear(old, new, first, rng)
            changed += count
            with open(path, "r+b") as file:
                file.write(mixed.tobytes())
        return changed


def tear(
    old: np.ndarray[Any, np.dtype[np.uint8]],
    new: np.ndarray[Any, np.dtype[np.uint8]],
    first: int,
    rng: random.Random,
) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], int]:
    """Return `new` with some sectors of `old`, from sector `first` on, and how many.

    Each run of sectors that differ is one write, more or less: it lands, vanishes, ends early,
    comes too late for its beginning, or is a mixture.
    """
    before, after = old.reshape(-1, SECTOR_BYTES), new.reshape(-1, SECTOR_BYTES).copy()
    differing = np.flatnonzero((before != after).any(axis=1))
    differing = differing[differing >= first]
    if not differing.size:
        return new, 0
    changed = 0
    for run in np.split(differing, np.flatnonzero(np.diff(differing) > 1) + 1):
        at = rng.randrange(run.size + 1)
        outcomes = (run[:0], run, run[at:], run[:at], run[_coins(run.size, rng)])
        lost = outcomes[rng.randrange(len(outcomes))]
        after[lost] = before[lost]
        changed += lost.size
    return after.reshape(-1), changed


def _coins(count: int, rng: random.Random) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.array([rng.random() < 0.5 for _ in range(count)], np.bool_)


def _count_lines(folder: Path, word: str) -> int:
    ledger = folder / LEDGER_NAME
    return ledger.read_text().splitlines().count(word) if ledger.exists() else 0


# ---- rounds ---------------------------------------------------------------------------------


class Harness:
    """Kills children of one kind, one after the other, on the files in one folder."""

    def __init__(self, engine: str, folder: Path, seed: int) -> None:
        """For vLLM, compute its answers without the pool. Raises ChildEndedError."""
        self.engine, self.folder, self.tally = engine, folder, Tally()
        self._rng = random.Random(seed)
        self._options: list[str] = []
        if engine == "vllm":
            reference, models = folder / "reference.json", BUILD_FOLDER.absolute() / "models"
            self._options = ["--reference", str(reference), "--models", str(models)]
            with Child("reference", folder, *self._options) as child:
                child.wait_for("checked")

    def kill_one(self) -> None:
        """One round: start, let it work, kill it, and perhaps cut the power."""
        rng, tally = self._rng, self.tally
        number = tally.kills
        fresh = number > 0 and rng.random() < FRESH_SHARE
        if fresh:
            self._remove_pool()
        opening = rng.random() < (MAKING_SHARE if fresh else OPENING_SHARE)
        cut = not opening and rng.random() < POWER_CUT_SHARE
        snapshot: Snapshot | None = None
        with Child(self.engine, self.folder, *self._options, "--seed", self._seed()) as child:
            try:
                child.wait_for("begin" if opening else "checked")
                seconds = rng.random() * (self._opening_s() if opening else WORK_S[self.engine])
                share = rng.random()
                child.listen(seconds * share)
                snapshot = Snapshot(self.folder) if cut else None
                child.listen(seconds * (1 - share))
            except ChildEndedError as error:
                tally.opens_failed.append(f"round {number}: {error}")
        self._take(number, child)
        tally.kills += 1
        tally.kills_while_opening += opening
        if snapshot is not None:
            tally.power_cuts += 1
            tally.sectors_changed += snapshot.cut(rng)

    def check(self) -> None:
        """Start once more, check and close without a kill."""
        with Child(self.engine, self.folder, *self._options, "--once") as child:
            try:
                child.wait_for("checked")
                if code := child.wait():
                    self.tally.opens_failed.append(f"the last one ended with {code}")
            except ChildEndedError as error:
                self.tally.opens_failed.append(f"the last one: {error}")
        self._take(self.tally.kills, child)

    def _take(self, number: int, child: Child) -> None:
        for word, facts in child.heard:
            self.tally.take(number, word, facts)

    def _seed(self) -> str:
        return str(self._rng.getrandbits(32))

    def _opening_s(self) -> float:
        """Return how long opening and checking take, more or less."""
        seen = self.tally.restart_s
        return 2 * statistics.median(seen) if seen else WORK_S[self.engine]

    def _remove_pool(self) -> None:
        for name in FILE_DEVICES:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / LEDGER_NAME).unlink(missing_ok=True)
        self.tally.fresh_starts += 1


def run(harness: Harness, kills: int, console: Console) -> None:
    """Kill so often, and check once more, with a line of progress."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("killing", total=kills)
        for done in range(1, kills + 1):
            harness.kill_one()
            tally = harness.tally
            words = (
                f"{tally.hits:,} hits, {tally.wrong} wrong, {tally.phantom} phantom,"
                f" {len(tally.opens_failed)} not opened"
            )
            progress.update(task, advance=1, description=words)
            if not console.is_terminal and (done % max(1, kills // 10) == 0):
                console.print(f"{done} of {kills} kills: {words}")
    harness.check()


# ---- results --------------------------------------------------------------------------------


def figures(tally: Tally, unit: str) -> list[Figure]:
    """Return what has a spread."""
    found = [
        Figure("came back after a kill", unit, tally.restored, (), "a hit that is not counted"),
        Figure("restart", "s", tally.restart_s, (), "a pool that takes longer to open"),
    ]
    return [figure for figure in found if figure.samples]


def counts(tally: Tally, unit: str) -> list[tuple[str, int]]:
    """Return what is only counted, as rows."""
    torn = ("headers that were torn: misses", tally.damaged_headers)
    return [
        ("kills", tally.kills),
        ("  of these while it opened", tally.kills_while_opening),
        ("  of these with a power cut", tally.power_cuts),
        ("sectors that a power cut took", tally.sectors_changed),
        ("starts without files", tally.fresh_starts),
        (f"{unit} that were hits after a restart", tally.hits),
        (f"{unit} loaded and compared, while it worked too", tally.loaded),
        ("chunks that did not verify: misses", tally.missed),
        *([torn] if unit == "chunks" else []),
        ("WRONG", tally.wrong),
        ("PHANTOM", tally.phantom),
        ("not opened", len(tally.opens_failed)),
    ]


def show(tally: Tally, unit: str, console: Console) -> None:
    """Print the tables."""
    view = Table(title="killed and restarted", title_justify="left")
    view.add_column("what")
    view.add_column("count", justify="right")
    for name, count in counts(tally, unit):
        view.add_row(name, f"{count:,}")
    console.print(view)
    if found := figures(tally, unit):
        console.print(table("after a restart", found))
    for line in [*tally.opens_failed, *tally.lies[:LIES_SHOWN]]:
        console.print(line, markup=False)


def describe(tally: Tally, unit: str) -> dict[str, Any]:
    """Return the run as JSON keys."""
    names = (
        "kills kills_while_opening power_cuts sectors_changed fresh_starts hits loaded missed"
        " damaged_headers wrong phantom lies"
    )
    facts = {name: getattr(tally, name) for name in names.split()}
    rows = [figure.row() for figure in figures(tally, unit)]
    return {**facts, "opens_failed": tally.opens_failed, "unit": unit, "figures": rows}


@contextmanager
def _working_folder(given: Path | None) -> Iterator[Path]:
    """Yield `given`, which is kept, or a folder that goes away at the end."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        if any(given.iterdir()):
            raise ConfigurationError("folder", str(given), "an empty folder or one to be made")
        yield given.absolute()
        return
    (BUILD_FOLDER / "pool").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="crash-", dir=BUILD_FOLDER / "pool") as folder:
        yield Path(folder).absolute()


def _parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="bench.crash", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, help="of the moments; a new one each time if absent")
    parser.add_argument("--engine", choices=sorted(WORK_S), default="plane")
    parser.add_argument("--folder", type=Path, help="for the pool's files, which stay; empty")
    parser.add_argument("--json", type=Path, default=BUILD_FOLDER / "crash.json", metavar="FILE")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the harness; return the exit code."""
    arguments, console = _parse_arguments(words), make_console()
    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    unit = "tokens" if arguments.engine == "vllm" else "chunks"
    try:
        if arguments.kills < 1:
            raise ConfigurationError("kills", arguments.kills, "1 or more")
        check_output(arguments.json)
        with _working_folder(arguments.folder) as folder:
            console.print(f"{arguments.kills} kills of seed {seed}, engine {arguments.engine}")
            harness = Harness(arguments.engine, folder, seed)
            run(harness, arguments.kills, console)
    except ConfigurationError as error:
        print(f"crash: {error}", file=sys.stderr)
        return 2
    except ChildEndedError as error:
        print(f"crash: {error}", file=sys.stderr)
        return 1
    show(harness.tally, unit, console)
    facts = {"engine": arguments.engine, "seed": seed}
    write_json(arguments.json, {**facts, **describe(harness.tally, unit)})
    if problem := harness.tally.verdict():
        print(f"crash: seed {seed}: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
