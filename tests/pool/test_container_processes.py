"""Several processes on one container: real processes, real locks, real kills."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool.container import Container
from kvpool.errors import ContainerError, DeviceError

SIZE, SLOT, SLOTS = 16 << 20, 64 << 10, 20
NAMESPACE = bytes(32)

HOLDER = f"""
import sys
from kvpool.container import Container
folder, rank, slots = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
container = Container.open(folder, {SIZE})
lease = container.acquire(bytes(32), rank, "0", slots, {SLOT})
print(lease.start, int(lease.fresh), flush=True)
sys.stdin.readline()
container.close()
print("closed", flush=True)
"""


class Holder:
    """A process that opens the container and holds a lease until told to close it."""

    def __init__(self, folder: Path, rank: int, slots: int = SLOTS) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder), str(rank), str(slots)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def started(self) -> tuple[int, bool]:
        """Wait for the lease; return its start and whether it is a fresh one."""
        assert self.process.stdout is not None
        start, fresh = self.process.stdout.readline().split()
        return int(start), fresh == "1"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        output, _ = self.process.communicate("\n")
        assert output == "closed\n" and self.process.returncode == 0


@pytest.fixture
def holders() -> Iterator[ExitStack]:
    """Kills, at the end, the processes that are still there."""
    with ExitStack() as stack:
        yield stack


def hold(holders: ExitStack, folder: Path, rank: int, slots: int = SLOTS) -> Holder:
    holder = Holder(folder, rank, slots)
    holders.callback(holder.kill)
    return holder


def test_ranks_that_start_together_create_one_container(tmp_path: Path, holders: ExitStack) -> None:
    started = [hold(holders, tmp_path / "pool", rank) for rank in range(4)]
    leases = sorted(holder.started()[0] for holder in started)
    length = leases[1] - leases[0]
    assert length >= SLOTS * SLOT
    assert leases == [leases[0] + index * length for index in range(4)]
    container = Container.open(tmp_path / "pool")
    assert [in_use for _, in_use in container.leases()] == [True] * 4
    for holder in started:
        holder.close()
    assert [in_use for _, in_use in container.leases()] == [False] * 4
    container.close()


def test_a_lease_in_use_elsewhere_is_not_given_out(tmp_path: Path, holders: ExitStack) -> None:
    holder = hold(holders, tmp_path / "pool", 0)
    start, fresh = holder.started()
    assert fresh
    container = Container.open(tmp_path / "pool")
    lease = container.acquire(NAMESPACE, 0, "0", SLOTS, SLOT, grace_s=0)
    assert lease.fresh and lease.start != start
    lease.release()
    with pytest.raises(ContainerError, match=f"pid {holder.process.pid} holds .* \\(in use\\)"):
        container.acquire(NAMESPACE, 1, "0", container.slots_for(1, SLOT), SLOT)
    container.close()


def test_a_killed_holder_frees_its_lease(tmp_path: Path, holders: ExitStack) -> None:
    holder = hold(holders, tmp_path / "pool", 0)
    start, _ = holder.started()
    container = Container.open(tmp_path / "pool")
    assert [in_use for _, in_use in container.leases()] == [True]
    holder.kill()
    assert [in_use for _, in_use in container.leases()] == [False]
    lease = container.acquire(NAMESPACE, 0, "0", SLOTS, SLOT)
    assert lease.start == start and not lease.fresh
    container.close()


CREATOR = """
import resource, signal, sys
from kvpool.container import Container
from kvpool.errors import DeviceError
signal.signal(signal.SIGXFSZ, getattr(signal, sys.argv[3]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    Container.open(sys.argv[1], 16 << 20)
except DeviceError as error:
    print(error)
"""


def create_with_limit(folder: Path, limit: int, on_excess: str) -> subprocess.CompletedProcess[str]:
    """Create a container where the kernel lets no file pass `limit` bytes."""
    command = [sys.executable, "-c", CREATOR, str(folder), str(limit), on_excess]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("limit", [0, 8192])
def test_a_creator_that_is_killed_leaves_what_is_made_anew(tmp_path: Path, limit: int) -> None:
    """Killed by the kernel at its first write, or when it reserves the room after the marker."""
    folder = tmp_path / "pool"
    assert create_with_limit(folder, limit, "SIG_DFL").returncode == -signal.SIGXFSZ
    assert (folder / "container.kvpool").stat().st_size == limit
    container = Container.open(folder, SIZE)
    assert container.acquire(NAMESPACE, 0, "0", SLOTS, SLOT).read_headers().keys == []
    container.close()


@pytest.mark.parametrize("limit", [0, 4096, 8192, 1 << 20])
def test_a_failed_creation_removes_what_it_made(tmp_path: Path, limit: int) -> None:
    assert create_with_limit(tmp_path / "pool", limit, "SIG_IGN").stdout.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_growth_leaves_the_size_as_it_was(tmp_path: Path) -> None:
    Container.open(tmp_path, SIZE).close()
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE + (1 << 20), previous[1]))
    try:
        with pytest.raises(DeviceError, match="File too large"):
            Container.open(tmp_path, 2 * SIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "container.kvpool").stat().st_size == SIZE
    container = Container.open(tmp_path, SIZE)
    assert container.size == SIZE
    container.close()
