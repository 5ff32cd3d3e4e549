"""Loop devices for tests that need a block device, always taken down again."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_loop_devices = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("losetup") is None or not os.path.exists("/dev/loop-control"),
    reason="making loop devices takes root, losetup and /dev/loop-control",
)


@contextlib.contextmanager
def loop_device(file: Path, size: int, *, tail: bytes = b"") -> Iterator[Path]:
    """Lend a loop device over a new file of `size` zeros, the last of which are `tail`."""
    with open(file, "xb") as backing:
        os.posix_fallocate(backing.fileno(), 0, size)
        os.pwrite(backing.fileno(), tail, size - len(tail))
    command = ["losetup", "--direct-io=on", "-f", "--show", str(file)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    device = answer.stdout.strip()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)
