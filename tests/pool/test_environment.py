"""The check against the machine: each refusal names key, value and what is allowed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvpool.config import check_environment, from_mapping
from kvpool.container import Container
from kvpool.environment import problems
from kvpool.errors import ConfigurationError
from kvpool.host import Host
from tests.pool.loop import loop_device, needs_loop_devices
from tests.pool.machine import Machine

GIB = 1 << 30


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of everything below a folder."""
    found = [folder, *sorted(folder.rglob("*"))]
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in found}


def refused(device: str, allowed: str, host: Host | None = None, ranks: int = 1) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_environment(from_mapping({"devices": [device]}), host, ranks)
    assert caught.value.key == "devices"
    assert caught.value.value == device and device in str(caught.value)
    assert allowed in caught.value.allowed
    assert "\n" not in str(caught.value)


def test_a_usable_pool_passes_and_nothing_changes(tmp_path: Path) -> None:
    Container.open(tmp_path / "old", 16 << 20).close()
    before = snapshot(tmp_path)
    devices = [
        "dram:4MiB",
        f"file:{tmp_path}/old?size=32MiB",
        f"file:{tmp_path}/new?size=32MiB",
        f"file:{tmp_path}/rank{{rank}}?size=32MiB",
    ]
    check_environment(from_mapping({"devices": devices}), ranks=2)
    assert snapshot(tmp_path) == before


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(f"file:{tmp_path}/none/below?size=8MiB", f"{tmp_path}/none must exist")
    refused(f"file:{tmp_path}/file?size=8MiB", "a folder, not a file")
    refused(f"block:{tmp_path}/none", "an existing block device")
    refused(f"block:{tmp_path}/file", "must be a block device")
    refused("block:/dev/null", "must be a block device")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_must_be_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    refused(f"file:{tmp_path}/a?size=8MiB", "must be writable")


def test_one_folder_by_two_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    devices = [f"file:{tmp_path}/{name}?size=8MiB" for name in "ab"]
    (problem,) = problems(from_mapping({"devices": devices}).devices, Host(), 1)
    assert problem.value == devices[1] and "the same device" in problem.allowed


def test_a_file_must_fit(tmp_path: Path) -> None:
    refused(f"file:{tmp_path}/a?size=1PiB", "free on its file system")


def test_files_on_one_file_system_must_fit_together(tmp_path: Path) -> None:
    facts = os.statvfs(tmp_path)
    two_thirds = facts.f_bavail * facts.f_frsize // 3 * 2
    devices = [f"file:{tmp_path}/{name}?size={two_thirds}" for name in "ab"]
    (problem,) = problems(from_mapping({"devices": devices}).devices, Host(), 1)
    assert problem.value == devices[1] and "all together" in problem.allowed
    per_rank = from_mapping({"devices": [f"file:{tmp_path}/{{rank}}?size={two_thirds}"]})
    assert not list(problems(per_rank.devices, Host(), ranks=2)), "a size counts for all ranks"


def test_an_existing_container_counts_as_free(tmp_path: Path) -> None:
    Container.open(tmp_path / "a", 64 << 20).close()
    facts = os.statvfs(tmp_path)
    everything = (facts.f_bavail * facts.f_frsize + (60 << 20)) // 4096 * 4096
    check_environment(from_mapping({"devices": [f"file:{tmp_path}/a?size={everything}"]}))


def test_a_container_does_not_shrink(tmp_path: Path) -> None:
    Container.open(tmp_path, 16 << 20).close()
    refused(f"file:{tmp_path}?size=8MiB", f"at least {16 << 20} bytes")


def test_foreign_content(tmp_path: Path) -> None:
    (tmp_path / "container.kvpool").write_bytes(b"precious")
    refused(f"file:{tmp_path}?size=8MiB", "did not write")
    (tmp_path / "container.kvpool").unlink()
    (tmp_path / "container.kvpool").symlink_to("/etc/passwd")
    refused(f"file:{tmp_path}?size=8MiB", "is a symbolic link")


# ---- memory ---------------------------------------------------------------------------------


def test_memory_must_suffice(tmp_path: Path) -> None:
    host = Machine(tmp_path, available_bytes=4 * GIB).host
    check_environment(from_mapping({"devices": ["dram:4GiB"]}), host)
    refused("dram:5GiB", f"at most {4 * GIB} bytes (4GiB)", host)


def test_memory_must_suffice_for_all_devices(tmp_path: Path) -> None:
    host = Machine(tmp_path, available_bytes=4 * GIB, nodes=2).host
    devices = ["dram:2GiB?numa=0", "dram:2GiB?numa=1", "dram:1GiB"]
    (problem,) = problems(from_mapping({"devices": devices}).devices, host, 1)
    assert all(device in str(problem.value) for device in devices)


def test_memory_of_a_node_must_suffice(tmp_path: Path) -> None:
    host = Machine(tmp_path, available_bytes=4 * GIB, nodes=2).host
    check_environment(from_mapping({"devices": ["dram:2GiB?numa=1"]}), host)
    refused("dram:3GiB?numa=1", "available on that node", host)


def test_free_huge_pages_count_and_a_control_group_limits(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=4 * GIB)
    machine.reserve_huge_pages(1024)
    check_environment(from_mapping({"devices": ["dram:6GiB"]}), machine.host)
    machine.limit_memory(3 * GIB, used=GIB)
    refused("dram:3GiB", f"at most {2 * GIB} bytes", machine.host)


def test_a_node_must_exist(tmp_path: Path) -> None:
    host = Machine(tmp_path, nodes=2).host
    refused("dram:4MiB?numa=2", "nodes with memory are 0, 1", host)
    refused(f"file:{tmp_path}/a?size=8MiB&numa=7", "nodes with memory are 0, 1", host)


def test_all_problems_are_found(tmp_path: Path) -> None:
    devices = ["dram:4MiB?numa=9", "file:/none/a?size=8MiB", "block:/none/b"]
    found = list(problems(from_mapping({"devices": devices}).devices, Host(), 1))
    assert [problem.value for problem in found] == devices


# ---- block devices --------------------------------------------------------------------------


@needs_loop_devices
def test_block_devices(tmp_path: Path) -> None:
    with loop_device(tmp_path / "disk", 16 << 20) as device:
        check_environment(from_mapping({"devices": [f"block:{device}"]}))
        refused(f"block:{device}?size=32MiB", f"at most {16 << 20} bytes")
        Container.open(device).close()
        check_environment(from_mapping({"devices": [f"block:{device}"]}))
        refused(f"block:{device}?size=8MiB", f"at least {16 << 20} bytes")
    with loop_device(tmp_path / "other", 16 << 20, tail=b"x") as device:
        refused(f"block:{device}", "did not write")


def test_users_of_a_block_device(tmp_path: Path) -> None:
    """Mounts, swap and holders, of the device and of its partitions."""
    machine = Machine(tmp_path)
    disk = machine.sys / "devices/disk"
    machine.write(disk / "dev", "8:0\n")
    machine.write(disk / "part1/partition", "1\n")
    machine.write(disk / "part1/dev", "8:1\n")
    machine.write(disk / "part1/holders/dm-0", "")
    machine.write(disk / "holders/md127", "")
    (machine.sys / "dev/block").mkdir(parents=True)
    (machine.sys / "dev/block/8:0").symlink_to(disk)
    mounts = "1 0 8:1 / /srv rw - ext4 /dev/sda1 rw\n2 0 0:5 / /proc rw - proc proc rw\n"
    machine.write(machine.proc / "self/mountinfo", mounts)
    machine.write(machine.proc / "swaps", "Filename\n")
    users = machine.host.block_device_users(os.makedev(8, 0))
    assert users == ["held by md127", "mounted at /srv", "held by dm-0"]
    assert machine.host.block_device_users(os.makedev(8, 16)) == []


def test_a_container_that_was_cut_off(tmp_path: Path) -> None:
    Container.open(tmp_path / "pool", 64 << 20).close()
    os.truncate(tmp_path / "pool" / "container.kvpool", 32 << 20)
    refused(f"file:{tmp_path}/pool?size=64MiB", "a whole container")


def test_a_name_that_cannot_be_looked_at(tmp_path: Path) -> None:
    refused(f"file:{tmp_path}/{'a' * 300}?size=64MiB", "a path that can be looked at")


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    refused(f"file:{tmp_path}/link?size=64MiB", "a folder, not a file")


@needs_loop_devices
def test_small_read_only_and_twice_named_block_devices(tmp_path: Path) -> None:
    with loop_device(tmp_path / "small", 4 << 20) as device:
        refused(f"block:{device}", "a device of at least 8MiB")
    with loop_device(tmp_path / "large", 64 << 20) as device:
        facts = os.stat(device)
        os.mknod(tmp_path / "node", facts.st_mode, facts.st_rdev)
        pool = from_mapping({"devices": [f"block:{device}", f"block:{tmp_path}/node"]})
        with pytest.raises(ConfigurationError, match="each device once"):
            check_environment(pool)
        subprocess.run(["blockdev", "--setro", str(device)], check=True)
        try:
            refused(f"block:{device}", "must be readable and writable")
        finally:  # the flag would outlive the loop device
            subprocess.run(["blockdev", "--setrw", str(device)], check=True)
