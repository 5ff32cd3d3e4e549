"""What files and block devices owe beyond the contract, on io_uring and on threads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import DeviceError, QueueFullError
from kvpool.native import (
    EVENT_DONE,
    EVENT_STAGED,
    KIND_LOAD,
    KIND_READ,
    KIND_STORE,
    KIND_WRITE,
    Arena,
    Engine,
    IoPath,
)
from tests.native.rig import FILES, MIB, Rig

MakeRig = Callable[..., Rig]


@pytest.fixture(params=FILES)
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(request.param, tmp_path, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_says_its_io_path(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.engine.io_path(rig.device) == rig.kind
    assert rig.engine.io_path(rig.module) == ""


LARGE = dict(slot_bytes=5 * MIB, slots=3, lengths=(65536,) * 4, blocks=20, blocks_per_chunk=18)


@pytest.mark.parametrize("cut", [0, 1, 4096, 2 * MIB, 2 * MIB + 4096, 4 * MIB])
def test_a_truncated_file_fails_the_load(make_rig: MakeRig, cut: int) -> None:
    rig = make_rig(**LARGE)
    stored = rig.run([rig.op(KIND_STORE, tag, tag) for tag in range(2)], range(18))
    os.truncate(rig.path, rig.slot_bytes + cut)
    loads = [rig.load(tag, tag, int(stored[0]["crc"])) for tag in range(2)]
    whole, torn = rig.run(loads, range(18))
    assert whole["result"] == 0
    assert torn["result"] == -errno.EIO
    statistics = rig.engine.statistics(rig.device)
    assert (statistics.read_failures, statistics.checksum_failures) == (1, 0)


@pytest.mark.parametrize("missing", [1, 96])
def test_padding_may_be_missing_at_the_end(make_rig: MakeRig, missing: int) -> None:
    """The payload ends 96 bytes into its last page: the file may end there, no earlier."""
    rig = make_rig(lengths=(8192 + 24,), slots=2)
    assert rig.chunk_bytes % 4096 == 96
    (stored,) = rig.run([rig.op(KIND_STORE, slot=1)])
    os.truncate(rig.path, rig.slot_bytes + rig.chunk_bytes)
    assert rig.run([rig.load(0, 1, int(stored["crc"]))])[0]["result"] == 0
    os.truncate(rig.path, rig.slot_bytes + rig.chunk_bytes - missing)
    assert rig.run([rig.load(0, 1, int(stored["crc"]))])[0]["result"] == -errno.EIO


def test_padding_is_zero(make_rig: MakeRig) -> None:
    """A slot shows nothing of what its staging held before."""
    rig = make_rig(lengths=(8192 + 24,), store_buffers=1)
    rig.run([rig.op(KIND_STORE, tag, tag) for tag in range(2)])
    assert rig.media(1, rig.chunk_bytes + 4000)[rig.chunk_bytes :] == bytes(4000)


def test_a_write_that_the_file_refuses(tmp_path: Path) -> None:
    for path in (IoPath.URING, IoPath.THREADS):
        file = tmp_path / path.name
        file.write_bytes(bytes(MIB))
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        with Engine(MIB) as engine:
            rig = Rig("memory", tmp_path)
            device = engine.add_file_device(fd, MIB, io_path=path)
            arena = Arena(MIB)
            op = rig.op(KIND_WRITE, buffer=arena.address, length=MIB, device=device)
            engine.submit(op, rig.random.integers(0, 1, 0, "int32"))
            assert engine.wait(60)
            (event,) = engine.poll()
            assert event["result"] == -errno.EBADF
            assert engine.statistics(device).write_failures == 1
            rig.close()
        os.close(fd)


def test_loads_go_on_while_stores_wait_for_staging(make_rig: MakeRig) -> None:
    rig = make_rig(store_buffers=1)
    crc = int(rig.run([rig.op(KIND_STORE)])[0]["crc"])
    rig.engine.set_shape(rig.device, 0, 1000, 0)
    rig.submit([rig.op(KIND_STORE, 100 + tag, 1 + tag) for tag in range(6)])
    rig.wait_staged(2)  # the second keeps the slot: its write is admitted in seconds
    loaded = rig.run([rig.load(tag, 0, crc) for tag in range(20)])
    assert [e["result"] for e in loaded if e["tag"] < 100] == [0] * 20
    assert rig.engine.cancel_stores(100, 105) == 4
    rig.engine.set_shape(rig.device, 0, 0, 0)
    rig.drain(6)


def test_devices_share_staging(make_rig: MakeRig) -> None:
    """A slot that one device frees goes to another one that waits for it."""
    rig = make_rig(store_buffers=1)
    path = IoPath.URING if rig.kind == "uring" else IoPath.THREADS
    devices = [rig.device] + [
        rig.engine.add_file_device(rig.fd, rig.slots * rig.slot_bytes, io_path=path)
        for _ in range(3)
    ]
    ops = [rig.op(KIND_STORE, tag, tag % 16, device=devices[tag % 4]) for tag in range(64)]
    done = rig.run(ops)
    assert [event["result"] for event in done] == [0] * 64


def test_no_staging_at_all(make_rig: MakeRig) -> None:
    rig = make_rig(store_buffers=0)
    with pytest.raises(QueueFullError) as caught:
        rig.submit([rig.op(KIND_LOAD), rig.op(KIND_STORE)])
    assert caught.value.errno == errno.ENOBUFS
    assert rig.engine.statistics(rig.device).queue_depth == 0
    (stored,) = rig.run([rig.op(KIND_STORE, device=rig.module)])
    assert stored["result"] == 0, "a module needs no staging"


def test_large_chunks_at_depth_one(make_rig: MakeRig) -> None:
    rig = make_rig(**{**LARGE, "depth": 1, "threads": 1, "store_buffers": 1})
    stored = rig.run([rig.op(KIND_STORE, tag, tag) for tag in range(3)], range(18))
    payload = rig.payload(range(18))
    rig.poison()
    loaded = rig.run([rig.load(t, t, int(stored[t]["crc"])) for t in range(3)], range(18))
    assert [event["result"] for event in loaded] == [0, 0, 0]
    assert rig.payload(range(18)) == payload


def test_many_small_writes_at_once(make_rig: MakeRig) -> None:
    """Headers: many small writes, which no loads disturb, read back as one."""
    rig = make_rig(depth=8)
    arena = Arena(2 * MIB)
    arena.array[:MIB] = memoryview(rig.random.bytes(MIB))
    writes = [
        rig.op(KIND_WRITE, i, length=4096, offset=4096 * i, buffer=arena.address + 4096 * i)
        for i in range(256)
    ]
    assert {int(event["result"]) for event in rig.run(writes)} == {0}
    rig.run([rig.op(KIND_READ, buffer=arena.address + MIB, length=MIB)])
    assert (arena.array[:MIB] == arena.array[MIB:]).all()
    arena.close()


@pytest.mark.parametrize(
    ("values", "number"),
    [
        (dict(fd=999), errno.EBADF),
        (dict(depth=0), errno.EINVAL),
        (dict(depth=1 << 20), errno.EINVAL),
        (dict(threads=0), errno.EINVAL),
        (dict(length=0), errno.EINVAL),
        (dict(numa_node=4000), errno.EINVAL),
    ],
)
def test_bad_devices(make_rig: MakeRig, values: dict[str, int], number: int) -> None:
    rig = make_rig()
    options: dict[str, Any] = dict(fd=rig.fd, length=MIB) | values
    with pytest.raises(DeviceError) as caught:
        rig.engine.add_file_device(**options)
    assert caught.value.errno == number


# ---- what the kernel may refuse; in a process of its own ----
RUN_AS_ASKED = """
import sys
from pathlib import Path
from tests.native.rig import KIND_LOAD, Rig
from kvpool.native import KIND_STORE, IoPath
{prepare}
rig = Rig("uring" if {auto} is None else {auto}, Path(sys.argv[1]))
device = rig.engine.add_file_device(rig.fd, rig.slots * rig.slot_bytes, io_path=IoPath.AUTO)
stored = rig.run([rig.op(KIND_STORE, tag, tag, device=device) for tag in range(8)])
payload = rig.payload(range(4))
rig.poison()
loads = [rig.load(tag, tag, int(stored[tag]["crc"]), device=device) for tag in range(8)]
assert [int(event["result"]) for event in rig.run(loads)] == [0] * 8
assert rig.payload(range(4)) == payload
print(rig.engine.io_path(device))
rig.close()
"""
NO_URING = """
import ctypes, struct
# seccomp: io_uring_setup (425 on every architecture) fails with EPERM, as in many containers
code = struct.pack("HBBI" * 2, 0x20, 0, 0, 0, 0x15, 0, 1, 425)
code += struct.pack("HBBI" * 2, 6, 0, 0, 0x50001, 6, 0, 0, 0x7FFF0000)
buffer = ctypes.create_string_buffer(code, len(code))
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0
"""
LITTLE_MEMLOCK = """
import os, resource
import numpy.random
from kvpool.native import crc32c
crc32c(b"")  # all is loaded while its folders can surely be read
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.getuid() == 0:
    os.chmod(sys.argv[1], 0o777)
    os.setgid(65534)
    os.setuid(65534)
"""


def _run_alone(directory: Path, prepare: str, auto: str | None) -> str:
    script = RUN_AS_ASKED.format(prepare=prepare, auto=repr(auto))
    root = Path(__file__).parents[2]
    finished = subprocess.run(
        [sys.executable, "-c", script, str(directory)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_falls_back_to_threads_where_io_uring_is_forbidden(tmp_path: Path) -> None:
    assert _run_alone(tmp_path, NO_URING, "threads") == "threads"


def test_io_uring_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Operation not permitted"):
        _run_alone(tmp_path, NO_URING, "uring")


def test_works_without_registered_buffers(tmp_path: Path) -> None:
    """An ordinary user may lock 64 KiB: less than the staging slots."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent != Path("/tmp") and os.access(parent, os.W_OK) and "pytest" in parent.name:
            parent.chmod(0o755)
    tmp_path.chmod(0o777)
    assert _run_alone(tmp_path, LITTLE_MEMLOCK, None) == "uring"


def test_events_of_a_failed_store_after_staging(make_rig: MakeRig) -> None:
    """Staged, then refused by the medium: one STAGED, one DONE with the error."""
    rig = make_rig()
    os.ftruncate(rig.fd, 0)
    rig.engine.close()
    read_only = os.open(rig.path, os.O_RDONLY | os.O_DIRECT)
    with Engine(rig.slot_bytes) as engine:
        path = IoPath.URING if rig.kind == "uring" else IoPath.THREADS
        rig.engine = engine
        rig.device = engine.add_file_device(read_only, MIB, io_path=path)
        rig.group = rig.add_group(rig.blocks_per_chunk)
        rig.submit(rig.op(KIND_STORE))
        events = rig.drain(1)
        assert [event["kind"] for event in events] == [EVENT_STAGED, EVENT_DONE]
        assert [event["result"] for event in events] == [0, -errno.EBADF]
        # The staging slot came back: as many again as there are slots, and more.
        rig.run([rig.op(KIND_STORE, tag) for tag in range(40)])
    os.close(read_only)
