"""Facts of the machine, read from /proc and /sys: memory, NUMA nodes, users of block devices."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

_NUMBER = re.compile(r"^(?:Node \d+ )?(\w+(?:\(\w+\))?):\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Host:
    """Reads the machine's state; `proc` and `sys` are elsewhere in tests. Changes nothing."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")

    def numa_nodes(self) -> list[int]:
        """Return the nodes that have memory, ascending; [0] where the kernel knows no NUMA."""
        folder = self.sys / "devices/system/node"
        return _ranges(_text(folder / "has_memory") or _text(folder / "online")) or [0]

    def cpus(self, node: int | None = None) -> int:
        """Return how many CPUs `node` has (None: how many this process may use); at least 1."""
        if node is None:
            return max(1, len(os.sched_getaffinity(0)))
        cpus = _ranges(_text(self.sys / f"devices/system/node/node{node}/cpulist"))
        return max(1, len(cpus))

    def memory_total_bytes(self) -> int:
        """Return the memory of the machine, or of the control group where that has less."""
        total = _numbers(self.proc / "meminfo").get("MemTotal", 0)
        return min([total, *(limit for limit, _ in self._group_limits())])

    def memory_available_bytes(self, node: int | None = None) -> int:
        """Return what can still be allocated, free huge pages included; of one `node` if given."""
        if node is not None:
            return self._node_available_bytes(node)
        facts = _numbers(self.proc / "meminfo")
        huge = facts.get("HugePages_Free", 0) // 1024 * facts.get("Hugepagesize", 0)
        available = facts.get("MemAvailable", 0) + huge
        return min([available, *(limit - used for limit, used in self._group_limits())])

    def _node_available_bytes(self, node: int) -> int:
        facts = _numbers(self.sys / f"devices/system/node/node{node}/meminfo")
        names = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
        hugepage_bytes = _numbers(self.proc / "meminfo").get("Hugepagesize", 0)
        huge = facts.get("HugePages_Free", 0) // 1024 * hugepage_bytes
        return sum(facts.get(name, 0) for name in names) + huge

    def _group_limits(self) -> list[tuple[int, int]]:
        """Return (limit, used) of each memory control group that this process is in."""
        limits = []
        for line in (_text(self.proc / "self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "memory":
                root, names = "fs/cgroup/memory", ("limit_in_bytes", "usage_in_bytes")
            elif not controllers:
                root, names = "fs/cgroup", ("max", "current")
            else:
                continue
            for folder in (self.sys / root / path.strip("/"), self.sys / root):
                values = [_text(folder / f"memory.{name}") or "" for name in names]
                if all(value.strip().isdigit() for value in values):
                    limits.append((int(values[0]), int(values[1])))
        return limits

    def boot_id(self) -> str:
        """Return the id of this boot of the kernel; "" where it is not to be had."""
        return (_text(self.proc / "sys/kernel/random/boot_id") or "").strip()

    def is_read_only(self, device: int) -> bool:
        """Return whether the block device with number `device` (st_rdev) takes no writes."""
        path = self.sys / f"dev/block/{os.major(device)}:{os.minor(device)}/ro"
        return (_text(path) or "").strip() == "1"

    def block_device_users(self, device: int) -> list[str]:
        """Return who uses the block device with number `device` (st_rdev), its partitions too.

        Each entry is a phrase: "mounted at /mnt", "swap", "held by dm-0".
        """
        folder = (self.sys / f"dev/block/{os.major(device)}:{os.minor(device)}").resolve()
        users = self._users_of(device, folder)
        for child in sorted(folder.glob("*/partition")):
            major, minor = (_text(child.parent / "dev") or "0:0").strip().split(":")
            users += self._users_of(os.makedev(int(major), int(minor)), child.parent)
        return users

    def _users_of(self, device: int, folder: Path) -> list[str]:
        numbers = f"{os.major(device)}:{os.minor(device)}"
        users = []
        for line in (_text(self.proc / "self/mountinfo") or "").splitlines():
            fields = line.split()
            source = fields[fields.index("-") + 2]
            if fields[2] == numbers or _device_number(source) == device:
                users.append(f"mounted at {fields[4]}")
        for line in (_text(self.proc / "swaps") or "").splitlines()[1:]:
            if _device_number(line.split()[0]) == device:
                users.append("swap")
        return users + [f"held by {path.name}" for path in sorted(folder.glob("holders/*"))]


def _device_number(path: str) -> int | None:
    if not path.startswith("/"):  # "proc", "none": not a path, whatever lies in this folder
        return None
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_rdev if stat.S_ISBLK(facts.st_mode) else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _numbers(path: Path) -> dict[str, int]:
    """Return the lines "Name: number kB" of a file, numbers in bytes (counts too, as if kB)."""
    return {name: int(number) * 1024 for name, number in _NUMBER.findall(_text(path) or "")}


def _ranges(text: str | None) -> list[int]:
    """Return the numbers in a kernel list such as "0-2,4"."""
    numbers: list[int] = []
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return numbers
