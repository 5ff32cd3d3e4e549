"""Emulated SSDs: what they limit, and that nothing is left however the process ends."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import emulate
from bench.ceilings import ReadWork, measure
from bench.emulate import MIB, EmulationError, attached_devices, clean_up, emulated_ssds

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60

# A process that emulates, says where, and then ends as its second argument says.
CHILD = """
import os, signal, subprocess, sys
from bench.emulate import MIB, emulated_ssds
ending = sys.argv[2]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
if ending == "handled SIGTERM":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with emulated_ssds([200, 50], 4 * MIB, sys.argv[1]) as ssds:
    helper = subprocess.Popen(["sleep", "600"], stdout=-3, stderr=-3)
    print(ssds.guardian_pid, helper.pid, ssds.stay.cgroup, ssds.stay.origin, flush=True)
    if ending == "exception":
        raise RuntimeError("on purpose")
    if ending != "normal":
        device = os.open(ssds.devices[0], os.O_RDWR)
        try:
            signal.pause()
        finally:
            os.close(device)
"""
SIGNALS = {
    "SIGTERM": signal.SIGTERM,
    "handled SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "SIGKILL": signal.SIGKILL,
}


def _why_not() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "not root on Linux"
    if shutil.which("losetup") is None or not os.path.exists("/dev/loop-control"):
        return "no loop devices"
    try:
        emulate.find_controller()
    except EmulationError as error:
        return str(error)
    return ""


needs_root = pytest.mark.skipif(bool(_why_not()), reason=f"cannot emulate SSDs: {_why_not()}")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert attached_devices(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@needs_root
@pytest.mark.parametrize("guardian_hit_by", [None, signal.SIGTERM])
@pytest.mark.parametrize("ending", ["normal", "exception", *SIGNALS])
def test_nothing_is_left(folder: Path, ending: str, guardian_hit_by: signal.Signals | None) -> None:
    command = [sys.executable, "-c", CHILD, str(folder), ending]
    with subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        guardian, helper, cgroup, origin = child.stdout.readline().decode().split()
        guardian_end = os.pidfd_open(int(guardian)) if ending in SIGNALS else None
        try:
            if guardian_end is not None:
                assert len(attached_devices(next(folder.iterdir()))) == 2
                if guardian_hit_by is not None:
                    signal.pidfd_send_signal(guardian_end, guardian_hit_by)
                child.send_signal(SIGNALS[ending])
            child.wait(TIMEOUT_S)
            if guardian_end is not None:
                assert select.select([guardian_end], [], [], TIMEOUT_S)[0], "guardian goes on"
            assert not Path(cgroup).exists()
            assert attached_devices(folder) == []
            assert helper in (Path(origin) / "cgroup.procs").read_text().split()
        finally:
            os.kill(int(helper), signal.SIGKILL)
            if guardian_end is not None:
                os.close(guardian_end)


@needs_root
def test_killed_guardian_is_not_needed_at_the_end(folder: Path) -> None:
    with emulated_ssds([100], MIB, folder) as ssds:
        os.kill(ssds.guardian_pid, signal.SIGKILL)
    assert not Path(ssds.stay.cgroup).exists()
    assert clean_up(ssds.stay) == []  # as often as one likes


@needs_root
def test_limits_decide_who_finishes_first(folder: Path) -> None:
    with emulated_ssds([2000, 2000], 16 * MIB, folder) as ssds:
        for device in ssds.devices:
            _fill(device, 16 * MIB)
        works = [
            ReadWork(device, [(at, MIB) for at in range(0, 16 * MIB, MIB)], depth=4)
            for device in ssds.devices
        ]
        for slow in (0, 1):
            ssds.set_limit(slow, 20)
            ssds.set_limit(1 - slow, 2000)
            measured = measure(works)
            assert measured[slow].seconds > measured[1 - slow].seconds
        with pytest.raises(EmulationError, match="allowed are 0 to 1"):
            ssds.set_limit(2, 10)
        with pytest.raises(EmulationError, match="positive"):
            ssds.set_limit(0, 0)


@needs_root
@pytest.mark.parametrize(
    ("limits", "size", "message"),
    [([], MIB, "no limits"), ([-1.0], MIB, "positive"), ([1.0], MIB + 1, "multiples"),
     ([1.0], 1 << 60, "Errno")],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_leaves_nothing(
    folder: Path, limits: list[float], size: int, message: str
) -> None:
    before = set(emulate.find_controller().root.iterdir())
    with pytest.raises(EmulationError, match=message), emulated_ssds(limits, size, folder):
        pass
    assert set(emulate.find_controller().root.iterdir()) == before


@needs_root
def test_other_users_are_told_what_is_missing() -> None:
    code = "from bench.emulate import *\nos.setuid(65534)\nwith emulated_ssds([1], MIB, '/'): pass"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert b"need Linux and root" in child.stderr


def test_controller_is_found_by_what_is_mounted(tmp_path: Path) -> None:
    unified, mounts = tmp_path / "unified", tmp_path / "mounts"
    unified.mkdir()
    (unified / "cgroup.controllers").write_text("cpu memory\n")
    line = f"cgroup2 {unified} cgroup2 rw 0 0\n"
    mounts.write_text(line)
    with pytest.raises(EmulationError, match="no block-I/O controller"):
        emulate.find_controller(mounts)
    (unified / "cgroup.controllers").write_text("cpu io memory\n")
    assert emulate.find_controller(mounts) == emulate.Controller(2, unified)
    mounts.write_text(line + f"cgroup {tmp_path} cgroup rw,blkio 0 0\n")
    assert emulate.find_controller(mounts) == emulate.Controller(1, tmp_path)


def test_each_controller_is_told_in_its_own_words() -> None:
    writes = emulate.Controller(2, Path("/")).writes(Path("/dev/null"), 1.5)
    assert writes == [("io.max", "1:3 rbps=1572864 wbps=1572864")]
    files = [file for file, _ in emulate.Controller(1, Path("/")).writes(Path("/dev/null"), 2)]
    assert files == ["blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device"]


def _fill(device: Path, size_bytes: int) -> None:
    with open(device, "r+b", buffering=0) as file:
        for _ in range(0, size_bytes, MIB):
            file.write(os.urandom(MIB))
        os.fsync(file.fileno())
