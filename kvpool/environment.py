"""Checks devices against the machine, without a model, and changes nothing on disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvpool import medium
from kvpool.device_config import MIN_FLASH_BYTES, DeviceConfig
from kvpool.errors import ConfigurationError, KVPoolError
from kvpool.host import Host
from kvpool.medium import FILE_NAME
from kvpool.units import format_bytes

KEY = "devices"


def problems(
    devices: Sequence[DeviceConfig], host: Host, ranks: int
) -> Iterator[ConfigurationError]:
    """Yield everything that stands in the way of `devices` with `ranks` ranks on this machine."""
    yield from _numa_problems(devices, host)
    yield from _memory_problems([device for device in devices if device.kind == "dram"], host)
    seen: dict[str, DeviceConfig] = {}
    sized: list[tuple[DeviceConfig, Path]] = []
    for device in devices:
        for path in _paths(device, ranks):
            real = _identity(path)
            if real in seen:
                yield _problem(device, f"each device once; {seen[real].name} is the same device")
                continue
            seen[real] = device
            found = list(_path_problems(device, path, host, ranks))
            yield from found
            if device.kind == "file" and not found:
                sized.append((device, path))
    yield from _space_problems(sized, ranks)


def _identity(path: Path) -> str:
    """Return what tells one device from another: a block device has many names."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError):
        return os.path.realpath(path)
    return f"block {facts.st_rdev}" if stat.S_ISBLK(facts.st_mode) else os.path.realpath(path)


def _problem(device: DeviceConfig, allowed: str) -> ConfigurationError:
    return ConfigurationError(KEY, str(device), allowed)


def _paths(device: DeviceConfig, ranks: int) -> list[Path]:
    if device.kind == "dram":
        return []
    return [device.rank_path(rank) for rank in range(ranks if device.per_rank else 1)]


def _size_bytes(device: DeviceConfig, ranks: int) -> int | None:
    """Return the size of one of the device's containers."""
    return device.rank_size_bytes(ranks) if device.per_rank else device.size_bytes


# ---- memory ---------------------------------------------------------------------------------


def _numa_problems(devices: Iterable[DeviceConfig], host: Host) -> Iterator[ConfigurationError]:
    nodes = host.numa_nodes()
    for device in devices:
        if device.numa is not None and device.numa not in nodes:
            yield _problem(device, f"NUMA nodes with memory are {', '.join(map(str, nodes))}")


def _memory_problems(devices: Sequence[DeviceConfig], host: Host) -> Iterator[ConfigurationError]:
    wanted = sum(device.size_bytes or 0 for device in devices)
    available = host.memory_available_bytes()
    if wanted > available:
        text = ", ".join(map(str, devices))
        yield ConfigurationError(KEY, text, f"{_at_most(available)} of memory is available")
        return
    for device in devices:
        if device.numa is None or device.numa not in host.numa_nodes():
            continue
        available = host.memory_available_bytes(device.numa)
        if (device.size_bytes or 0) > available:
            yield _problem(device, f"{_at_most(available)} of memory is available on that node")


def _at_most(size: int) -> str:
    return f"at most {size} bytes ({format_bytes(size)})"


# ---- files and block devices ----------------------------------------------------------------


def _path_problems(
    device: DeviceConfig, path: Path, host: Host, ranks: int
) -> Iterator[ConfigurationError]:
    size = _size_bytes(device, ranks)
    if device.kind == "block":
        yield from _block_device_problems(device, path, size, host)
    else:
        yield from _folder_problems(device, path, size)


def _folder_problems(
    device: DeviceConfig, path: Path, size: int | None
) -> Iterator[ConfigurationError]:
    try:
        os.lstat(path)
        parent = path
    except (FileNotFoundError, NotADirectoryError):
        parent = path.parent
    except (OSError, ValueError) as error:
        yield _problem(device, f"a path that can be looked at ({error})")
        return
    if not parent.is_dir():
        there = parent == path or parent.exists()
        what = "a folder, not a file" if there else f"{parent} must exist"
        yield _problem(device, what)
    elif not os.access(parent, os.W_OK | os.X_OK):
        yield _problem(device, f"{parent} must be writable")
    elif os.path.lexists(path / FILE_NAME):
        yield from _content_problems(device, path / FILE_NAME, size)


def _block_device_problems(
    device: DeviceConfig, path: Path, size: int | None, host: Host
) -> Iterator[ConfigurationError]:
    try:
        facts = os.stat(path)
    except OSError as error:
        yield _problem(device, f"an existing block device ({error.strerror})")
        return
    if not stat.S_ISBLK(facts.st_mode):
        yield _problem(device, f"{path} must be a block device; file:FOLDER takes a folder")
    elif users := host.block_device_users(facts.st_rdev):
        yield _problem(device, f"a device that nothing else uses; it is {', '.join(users)}")
    elif not os.access(path, os.R_OK | os.W_OK) or host.is_read_only(facts.st_rdev):
        yield _problem(device, f"{path} must be readable and writable")
    else:
        yield from _content_problems(device, path, size)


def _content_problems(
    device: DeviceConfig, path: Path, size: int | None
) -> Iterator[ConfigurationError]:
    try:
        opened = medium.open_read_only(path)
    except KVPoolError as error:
        yield _problem(device, str(error))
        return
    except OSError as error:
        yield _problem(device, f"{path} must be a file of this user ({error.strerror})")
        return
    try:
        superblock = medium.recognise(opened)
        if opened.is_block_device and opened.size < MIN_FLASH_BYTES:
            least = format_bytes(MIN_FLASH_BYTES)
            yield _problem(device, f"a device of at least {least}; {path} has {opened.size} bytes")
            return
        if superblock is not None and opened.size < superblock.size:
            cut = f"{path} has {opened.size} bytes of {superblock.size}"
            yield _problem(device, f"a whole container; {cut}; {medium.advice(opened, False)}")
            return
        if opened.is_block_device and size is not None and size > opened.size:
            yield _problem(device, f"{_at_most(opened.size)}: {path} has no more")
        elif superblock is not None and size is not None and size < superblock.size:
            allowed = f"at least {superblock.size} bytes, the size of the container that is there"
            yield _problem(device, f"{allowed}; `kvpool format` writes an empty one")
    except KVPoolError as error:
        yield _problem(device, str(error))
    finally:
        opened.close()


def _space_problems(
    sized: Iterable[tuple[DeviceConfig, Path]], ranks: int
) -> Iterator[ConfigurationError]:
    """Files on one file system must fit together."""
    wanted: dict[int, int] = {}
    present: dict[int, int] = {}
    for device, path in sized:
        folder = medium.existing_parent(path)
        file_system = os.stat(folder).st_dev
        facts = os.statvfs(folder)
        free = facts.f_bavail * facts.f_frsize
        wanted[file_system] = wanted.get(file_system, 0) + (_size_bytes(device, ranks) or 0)
        present[file_system] = present.get(file_system, 0) + medium.free_bytes(path) - free
        available = free + present[file_system]
        if wanted[file_system] > available:
            shared = "" if wanted[file_system] == _size_bytes(device, ranks) else ", all together"
            yield _problem(device, f"{_at_most(available)} free on its file system{shared}")
