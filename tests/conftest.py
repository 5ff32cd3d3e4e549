"""What all tests share: vLLM's environment, leak checks, seeds that are told on failure."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

# Set before anything imports vLLM, which reads some of them at import. A forward pass that spins at
# barriers beside another busy process takes minutes on two cores: one thread, and it sleeps.
VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
for _name, _value in VLLM_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

SEED_VARIABLE = "KVPOOL_TEST_SEED"
RELEASE_TIMEOUT_S = 5.0

# No deadline: an example that takes long on a busy machine is no fault. A failure prints the line
# that reproduces it.
hypothesis.settings.register_profile("kvpool", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvpool")

_seed_key = pytest.StashKey[int]()


# ---- seeds ----


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh random seed, or the one in KVPOOL_TEST_SEED; told where the test fails."""
    given = os.environ.get(SEED_VARIABLE)
    value = int(given) if given else random.SystemRandom().getrandbits(32)
    request.node.stash[_seed_key] = value
    return value


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A random generator that starts from `seed`."""
    return random.Random(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the seed of a failed test to its report."""
    report = yield
    if report.failed and _seed_key in item.stash:
        value = item.stash[_seed_key]
        report.sections.append(("random seed", f"run it again with {SEED_VARIABLE}={value}"))
    return report


# ---- leaks ----


@dataclass(frozen=True)
class Resources:
    """What this process and the machine hold, each named so that it can be recognised."""

    files: frozenset[str]  # open file descriptors
    threads: frozenset[str]  # of Python and of C
    loop_devices: frozenset[str]

    def beyond(self, before: Resources) -> list[str]:
        """Return what is held now and was not held before."""
        return sorted(
            (self.files - before.files)
            | (self.threads - before.threads)
            | (self.loop_devices - before.loop_devices)
        )


def _open_files() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            yield f"file descriptor {entry.name} ({os.readlink(entry)})"
        except FileNotFoundError:  # the listing's own descriptor
            continue


def _threads() -> Iterator[str]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for entry in Path("/proc/self/task").iterdir():
        try:
            name = (entry / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        yield f"thread {entry.name} ({names.get(int(entry.name), name)})"


def _loop_devices() -> Iterator[str]:
    # What `losetup -a` reads; it needs neither the command nor root.
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            yield f"loop device {entry.parts[3]} ({entry.read_text().strip()})"
        except OSError:  # it has just gone
            continue


def _snapshot() -> Resources:
    return Resources(frozenset(_open_files()), frozenset(_threads()), frozenset(_loop_devices()))


@pytest.fixture
def snapshot_resources() -> Callable[[], Resources]:
    """The function that lists what is held now: files, threads, loop devices."""
    return _snapshot


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a file descriptor, a thread or a loop device behind.

    A suite takes it with `pytestmark = pytest.mark.usefixtures("no_leaks")`.
    """
    before = _snapshot()
    yield
    gc.collect()
    deadline_s = time.monotonic() + RELEASE_TIMEOUT_S
    # The kernel drops a thread's entry, or a loop device, a moment after its end.
    while (left := _snapshot().beyond(before)) and time.monotonic() < deadline_s:
        os.sched_yield()
    assert not left, "left behind: " + ", ".join(left)
