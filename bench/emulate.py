"""Unequal SSDs on one machine: loop devices whose rates the block-I/O controller limits.

Linux and root only. A guardian process makes everything and takes everything away again, also when
this process is killed: it waits for our end, which no signal sent to us can hide. It runs this
file alone with nothing but the standard library.

Limits are exact for requests that the loop device takes whole. Linux 6.18 charges what it has to
cut (requests above max_sectors_kb, or of many small pages) twice: such a reader gets down to half.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
CLEAN_UP_TIMEOUT_S = 10.0


class EmulationError(RuntimeError):
    """The machine cannot emulate SSDs, or something could not be taken away again."""


@dataclass(frozen=True, slots=True)
class Controller:
    """The block-I/O controller: version 1 (`blkio.throttle`) or 2 (`io.max`), and its root."""

    version: int
    root: Path

    def writes(self, device: Path, mib_s: float) -> list[tuple[str, str]]:
        """Return (control file, text) pairs that limit reads and writes of `device`."""
        number = os.stat(device).st_rdev
        name = f"{os.major(number)}:{os.minor(number)}"
        bytes_s = int(mib_s * MIB)
        if self.version == 2:
            return [("io.max", f"{name} rbps={bytes_s} wbps={bytes_s}")]
        files = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")
        return [(file, f"{name} {bytes_s}") for file in files]

    def origin_of(self, pid: int) -> Path:
        """Return the folder of the cgroup that `pid` is in."""
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if ("blkio" in names.split(",")) if self.version == 1 else not names:
                folder = self.root / path.lstrip("/")
                return folder if folder.is_dir() else self.root
        return self.root


@dataclass(frozen=True, slots=True)
class Stay:
    """Every name that an emulation uses, fixed before any of it exists."""

    folder: str  # of the backing files
    cgroup: str
    origin: str  # the cgroup that processes go back to
    version: int
    owner: int  # process id
    limits_mib_s: tuple[float, ...]
    size_bytes: int

    @property
    def controller(self) -> Controller:
        """The controller that the cgroup belongs to."""
        return Controller(self.version, Path(self.cgroup).parent)


@dataclass(frozen=True, slots=True)
class EmulatedSsds:
    """Loop devices in the order of the limits that were asked for."""

    devices: tuple[Path, ...]
    stay: Stay
    guardian_pid: int

    def set_limit(self, index: int, mib_s: float) -> None:
        """Limit reads and writes of device `index` to `mib_s` MiB/s from now on.

        Raises EmulationError where the limit is not positive or there is no such device.
        """
        if not 0 <= index < len(self.devices):
            raise EmulationError(f"device {index}: allowed are 0 to {len(self.devices) - 1}")
        _check_limits([mib_s])
        _limit(self.stay, self.devices[index], mib_s)


def find_controller(mounts: Path = Path("/proc/mounts")) -> Controller:
    """Return the machine's block-I/O controller, version 1 where both are mounted.

    Raises EmulationError where there is none.
    """
    found: dict[int, Controller] = {}
    for line in mounts.read_text().splitlines():
        _, point, kind, options = line.split(" ")[:4]
        root = Path(point)
        if kind == "cgroup" and "blkio" in options.split(","):
            found[1] = Controller(1, root)
        elif kind == "cgroup2" and "io" in _words(root / "cgroup.controllers"):
            found[2] = Controller(2, root)
    if not found:
        raise EmulationError(
            "no block-I/O controller: mount the v1 blkio controller, or cgroup v2 with `io`"
        )
    return found[min(found)]


@contextmanager
def emulated_ssds(
    limits_mib_s: Sequence[float], size_bytes: int, folder: Path | str
) -> Iterator[EmulatedSsds]:
    """Yield one loop device of `size_bytes` a limit (MiB/s, for reads and for writes).

    Limits hold for this process and its future children, which are in a cgroup of their own until
    the end. Backing files lie under `folder`, which must allow O_DIRECT. Close what you opened
    before the end: a loop device that is still open goes away when it is closed.
    Raises EmulationError, with nothing left behind, where the machine cannot do it.
    """
    stay = _plan_stay(limits_mib_s, size_bytes, Path(folder))
    guardian, answer = _start_guardian(stay)
    try:
        if "error" in answer:
            raise EmulationError(str(answer["error"]))
        devices = tuple(Path(device) for device in answer["devices"])
        yield EmulatedSsds(devices, stay, guardian.pid)
    finally:
        _end_guardian(guardian)
        left = clean_up(stay)  # again, ours: the guardian may have been killed
        if left:
            raise EmulationError("could not be taken away: " + ", ".join(left))


def clean_up(stay: Stay) -> list[str]:
    """Take away loop devices, cgroup and files; return what could not be. Idempotent."""
    deadline = time.monotonic() + CLEAN_UP_TIMEOUT_S
    while True:
        left = [*_detach(stay), *_dissolve(stay)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)  # processes still exit, transfers still end
    shutil.rmtree(stay.folder, ignore_errors=True)
    return left + [stay.folder] * Path(stay.folder).exists()


def attached_devices(folder: Path | str) -> list[Path]:
    """Return the loop devices whose backing files lie in `folder`."""
    devices = []
    for entry in sorted(Path("/sys/block").glob("loop*/loop/backing_file")):
        with suppress(OSError):
            if entry.read_text().startswith(f"{folder}/"):
                devices.append(Path("/dev") / entry.parts[3])
    return devices


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _check_limits(limits_mib_s: Sequence[float]) -> None:
    for limit in limits_mib_s:
        if not limit > 0:
            raise EmulationError(f"limit {limit} MiB/s: allowed are positive rates")
    if not limits_mib_s:
        raise EmulationError("no limits: give one rate in MiB/s a device")


def _plan_stay(limits_mib_s: Sequence[float], size_bytes: int, folder: Path) -> Stay:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise EmulationError("emulated SSDs need Linux and root (loop devices, cgroups)")
    if shutil.which("losetup") is None:
        raise EmulationError("emulated SSDs need losetup (util-linux)")
    _check_limits(limits_mib_s)
    if size_bytes <= 0 or size_bytes % MIB:
        raise EmulationError(f"size {size_bytes} bytes: allowed are multiples of 1 MiB")
    controller = find_controller()
    name = f"kvpool-emulate-{os.getpid()}-{os.urandom(4).hex()}"
    return Stay(
        folder=str(folder.resolve() / name),
        cgroup=str(controller.root / name),
        origin=str(controller.origin_of(os.getpid())),
        version=controller.version,
        owner=os.getpid(),
        limits_mib_s=tuple(limits_mib_s),
        size_bytes=size_bytes,
    )


# ---- the parent's side of the guardian ----


def _start_guardian(stay: Stay) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    own_end = os.pidfd_open(os.getpid())
    try:
        guardian = subprocess.Popen(
            [sys.executable, "-I", __file__, str(own_end), json.dumps(asdict(stay))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(own_end,),
        )
    finally:
        os.close(own_end)
    assert guardian.stdout is not None
    line = guardian.stdout.readline()
    return guardian, json.loads(line) if line else {"error": "the guardian ended at its start"}


def _end_guardian(guardian: subprocess.Popen[bytes]) -> None:
    # A word rather than end of file: a forked child may hold the pipe open.
    with suppress(BrokenPipeError, subprocess.TimeoutExpired):
        guardian.communicate(b"end\n", timeout=3 * CLEAN_UP_TIMEOUT_S)


# ---- the guardian ----


def _guard(owner_end: int, stay: Stay) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    answer: dict[str, Any]
    try:
        answer = {"devices": _set_up(stay)}
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or b""
        answer = {"error": f"{error} {detail.decode(errors='replace')}".strip()}
    with suppress(BrokenPipeError):
        print(json.dumps(answer), flush=True)
        if "error" not in answer:
            select.select([owner_end, sys.stdin], [], [])  # a word, end of file, or its end
    clean_up(stay)


def _set_up(stay: Stay) -> list[str]:
    Path(stay.folder).mkdir(parents=True)
    _make_cgroup(stay)
    devices = []
    for index, limit in enumerate(stay.limits_mib_s):
        device = _attach(Path(stay.folder) / f"ssd{index}", stay.size_bytes)
        _limit(stay, device, limit)
        devices.append(str(device))
    (Path(stay.cgroup) / "cgroup.procs").write_text(str(stay.owner))
    return devices


def _make_cgroup(stay: Stay) -> None:
    parent = Path(stay.cgroup).parent
    if stay.version == 2 and "io" not in _words(parent / "cgroup.subtree_control"):
        (parent / "cgroup.subtree_control").write_text("+io")
    Path(stay.cgroup).mkdir()


def _attach(file: Path, size_bytes: int) -> Path:
    with open(file, "xb") as backing:
        os.posix_fallocate(backing.fileno(), 0, size_bytes)  # a full disk shows now
    command = ["losetup", "--direct-io=on", "-f", "--show", str(file)]
    return Path(subprocess.run(command, check=True, capture_output=True).stdout.decode().strip())


def _limit(stay: Stay, device: Path, mib_s: float) -> None:
    for file, text in stay.controller.writes(device, mib_s):
        (Path(stay.cgroup) / file).write_text(text)


def _detach(stay: Stay) -> list[str]:
    left = attached_devices(stay.folder)
    for device in left:
        if stat.S_ISBLK(os.stat(device).st_mode):
            subprocess.run(["losetup", "-d", str(device)], check=False, capture_output=True)
    return [str(device) for device in attached_devices(stay.folder)]


def _dissolve(stay: Stay) -> list[str]:
    cgroup = Path(stay.cgroup)
    for pid in _words(cgroup / "cgroup.procs"):
        with suppress(OSError):  # it has just ended
            (Path(stay.origin) / "cgroup.procs").write_text(pid)
    with suppress(OSError):  # busy: a process was forked meanwhile
        cgroup.rmdir()
    return [str(cgroup)] if cgroup.exists() else []


if __name__ == "__main__":
    _guard(int(sys.argv[1]), Stay(**json.loads(sys.argv[2])))
