"""A machine made of files: what `Host` reads of /proc and /sys, as a test wants it."""

from __future__ import annotations

from pathlib import Path

from kvpool.host import Host

KIB = 1024


class Machine:
    """`nodes` NUMA nodes that share `memory_bytes`, of which `available_bytes` are available."""

    def __init__(
        self,
        folder: Path,
        *,
        memory_bytes: int = 64 << 30,
        available_bytes: int | None = None,
        nodes: int = 1,
    ) -> None:
        self.proc, self.sys = folder / "proc", folder / "sys"
        self.host = Host(self.proc, self.sys)
        available = memory_bytes // 2 if available_bytes is None else available_bytes
        self.write(
            self.proc / "meminfo",
            f"MemTotal: {memory_bytes // KIB} kB\nMemAvailable: {available // KIB} kB\n"
            "HugePages_Free:  0\nHugepagesize:  2048 kB\n",
        )
        node = self.sys / "devices/system/node"
        self.write(node / "has_memory", "0" if nodes == 1 else f"0-{nodes - 1}")
        for index in range(nodes):
            free = available // nodes // KIB
            self.write(
                node / f"node{index}/meminfo",
                f"Node {index} MemFree: {free} kB\nNode {index} HugePages_Free: 0\n",
            )
            self.write(node / f"node{index}/cpulist", f"{index * 4}-{index * 4 + 3}\n")

    def limit_memory(self, limit: int, used: int) -> None:
        """Put the process into a control group (version 2)."""
        self.write(self.proc / "self/cgroup", "0::/pod\n")
        self.write(self.sys / "fs/cgroup/pod/memory.max", f"{limit}\n")
        self.write(self.sys / "fs/cgroup/pod/memory.current", f"{used}\n")

    def reserve_huge_pages(self, count: int) -> None:
        """Set aside free huge pages of 2 MiB."""
        text = (self.proc / "meminfo").read_text()
        text = text.replace("HugePages_Free:  0", f"HugePages_Free:  {count}")
        self.write(self.proc / "meminfo", text)

    @staticmethod
    def write(path: Path, text: str) -> None:
        """Write one file of the machine."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
