"""Containers: creating, opening, growing, formatting, and what is refused."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from kvpool import layout
from kvpool.container import Container
from kvpool.errors import (
    ConfigurationError,
    ContainerError,
    ForeignContentError,
    OutOfSpaceError,
)
from kvpool.layout import CREATING, READY, Superblock
from kvpool.medium import Medium
from kvpool.native import crc32c
from tests.pool.containers import MIB, OTHER, SIZE, SLOT, THIRD, poke, record, take
from tests.pool.loop import loop_device, needs_loop_devices

# ---- creating -------------------------------------------------------------------------------


def test_a_container_is_created_whole_and_private(folder: Path) -> None:
    previous = os.umask(0)
    try:
        with_size = Container.open(folder, SIZE + 123)
    finally:
        os.umask(previous)
    facts = os.stat(with_size.path)
    assert stat.S_IMODE(facts.st_mode) == 0o600
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert facts.st_size == SIZE == with_size.size
    assert facts.st_blocks * 512 >= SIZE, "its room is reserved"
    assert with_size.leases() == []
    with_size.close()


def test_it_is_not_created_unasked(folder: Path) -> None:
    with pytest.raises(ContainerError, match="there is no container"):
        Container.open(folder, SIZE, create=False)
    assert not folder.exists()


def test_a_new_one_needs_a_size(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="size=None"):
        Container.open(folder)
    assert not folder.exists()


def test_a_size_below_the_least_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least 8MiB"):
        Container.open(folder, 4 * MIB)
    assert not folder.exists()


def test_the_parent_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="existing"):
        Container.open(tmp_path / "a" / "b", SIZE)


def test_a_file_in_the_folders_place_is_refused(folder: Path) -> None:
    folder.write_text("precious")
    with pytest.raises(ConfigurationError, match="not a file"):
        Container.open(folder, SIZE)
    assert folder.read_text() == "precious"


def test_no_room_leaves_nothing_behind(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(OutOfSpaceError, match="No space left"):
        Container.open(folder, 1 << 50)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "stage", ["empty", "marked", "reserved", "marked-torn-b", "first-superblock"]
)
def test_a_creation_that_was_cut_short_is_done_again(folder: Path, stage: str) -> None:
    """The file as each step of a creation leaves it."""
    folder.mkdir()
    marker = Superblock(CREATING, 0, bytes(16), SIZE, layout.probe_bytes(SIZE), 0)
    ready = Superblock(READY, 1, bytes(16), SIZE, layout.probe_bytes(SIZE), 0)
    content = {
        "empty": b"",
        "marked": layout.encode_superblock(marker).ljust(8192, b"\0"),
        "reserved": layout.encode_superblock(marker).ljust(SIZE, b"\0"),
        "marked-torn-b": layout.encode_superblock(marker) + layout.encode_superblock(ready)[:512],
        "first-superblock": (
            layout.encode_superblock(marker) + layout.encode_superblock(ready)
        ).ljust(SIZE, b"\0"),
    }[stage]
    (folder / "container.kvpool").write_bytes(content)
    opened = Container.open(folder, SIZE)
    assert opened.size == SIZE and opened.leases() == []
    take(opened)
    opened.close()


def test_one_who_waited_for_a_creation_that_failed_begins_anew(folder: Path) -> None:
    """The file that it waited for is gone by then; what it makes must be found by others."""
    folder.mkdir()
    file = folder / "container.kvpool"
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    creator = Medium(file, fd)
    inode = f":{os.fstat(fd).st_ino} "
    opened: list[Container] = []
    waiter = threading.Thread(target=lambda: opened.append(Container.open(folder, SIZE)))
    with creator.locked(0, 8192):
        waiter.start()
        while not any("->" in line and inode in line for line in open_locks()):
            waiter.join(0.01)
        file.unlink()
    waiter.join()
    creator.close()
    assert os.path.samestat(os.stat(file), os.fstat(opened[0].fd))
    opened[0].close()


def open_locks() -> list[str]:
    """Return the kernel's list of locks; those who wait are marked with an arrow."""
    return Path("/proc/locks").read_text().splitlines()


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"x", b"\0" * 8192, b"\0" * SIZE, os.urandom(9000)])
def test_foreign_content_is_left_untouched(folder: Path, content: bytes) -> None:
    folder.mkdir()
    file = folder / "container.kvpool"
    file.write_bytes(content)
    with pytest.raises(ForeignContentError, match="kvpool format"):
        Container.open(folder, SIZE)
    with pytest.raises(ForeignContentError):
        Container.format(folder, SIZE)
    assert file.read_bytes() == content
    Container.format(folder, SIZE, force=True)
    assert Container.open(folder).size == SIZE


def test_a_symbolic_link_is_not_followed(tmp_path: Path, folder: Path) -> None:
    folder.mkdir()
    target = tmp_path / "elsewhere"
    target.write_bytes(b"")
    (folder / "container.kvpool").symlink_to(target)
    for create in (True, False):
        with pytest.raises(ForeignContentError, match="symbolic link"):
            Container.open(folder, SIZE, create=create)
    with pytest.raises(ForeignContentError, match="symbolic link"):
        Container.format(folder, SIZE, force=True)
    assert target.read_bytes() == b""


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a device"])
def test_what_is_no_regular_file_is_refused(folder: Path, kind: str) -> None:
    folder.mkdir()
    file = folder / "container.kvpool"
    if kind == "a folder":
        file.mkdir()
    else:
        number = os.makedev(1, 3)
        os.mknod(file, stat.S_IFIFO if kind == "a FIFO" else stat.S_IFCHR, number)
    for attempt in (Container.open, lambda f, s: Container.format(f, s, force=True)):
        with pytest.raises(ForeignContentError, match=f"is {kind}, not a container's file"):
            attempt(folder, SIZE)
    assert file.exists()


@pytest.mark.parametrize("content", [b"", b"marked"])
def test_what_was_never_finished_says_how_to_go_on(folder: Path, content: bytes) -> None:
    folder.mkdir()
    marker = Superblock(CREATING, 0, bytes(16), SIZE, layout.probe_bytes(SIZE), 0)
    marked = layout.encode_superblock(marker).ljust(8192, b"\0")
    (folder / "container.kvpool").write_bytes(marked if content else b"")
    with pytest.raises(ContainerError, match=f"kvpool format file:{folder}"):
        Container.open(folder, create=False)


def test_an_unknown_version_is_refused_and_kept(container: Container, folder: Path) -> None:
    container.close()
    file = folder / "container.kvpool"
    block = bytearray(file.read_bytes()[:4096])
    block[8:12] = (99).to_bytes(4, "little")
    block[-4:] = crc32c(block[:-4]).to_bytes(4, "little")
    poke(file, 4096, bytes(block))
    before = file.read_bytes()
    for attempt in (Container.open, Container.format):
        with pytest.raises(ContainerError, match="format version 99"):
            attempt(folder, SIZE)
    assert file.read_bytes() == before


def test_one_torn_superblock_does_no_harm(container: Container, folder: Path) -> None:
    take(container)
    container.close()
    for offset in (0, 4096):
        poke(folder / "container.kvpool", offset + 512, os.urandom(64))
        opened = Container.open(folder, SIZE, create=False)
        assert len(opened.leases()) == 1
        opened.close()
        poke(folder / "container.kvpool", offset + 512, bytes(64))


def test_two_torn_superblocks_are_refused(container: Container, folder: Path) -> None:
    container.close()
    for offset in (0, 4096):
        poke(folder / "container.kvpool", offset + 512, b"x")
    with pytest.raises(ContainerError, match="damaged"):
        Container.open(folder, SIZE)


def test_a_file_that_was_cut_off_is_refused(container: Container, folder: Path) -> None:
    container.close()
    os.truncate(folder / "container.kvpool", SIZE - 4096)
    with pytest.raises(ContainerError, match=str(SIZE)):
        Container.open(folder, SIZE)


# ---- growing --------------------------------------------------------------------------------


def test_it_grows_and_keeps_what_it_holds(container: Container, folder: Path) -> None:
    lease = take(container)
    record(container, lease, [2])
    container.close()
    grown = Container.open(folder, 2 * SIZE)
    assert grown.size == os.stat(grown.path).st_size == 2 * SIZE
    again = take(grown)
    assert again.start == lease.start and again.read_headers().keys == [b"key-2"]
    grown.close()
    same = Container.open(folder)
    assert same.size == 2 * SIZE
    same.close()


def test_it_grows_while_another_engine_uses_it(container: Container, folder: Path) -> None:
    lease = take(container)
    grown = Container.open(folder, 2 * SIZE)
    far = grown.acquire(OTHER, 0, "0", grown.slots_for(1, SLOT) - 10, SLOT)
    assert far.start >= lease.start + lease.length
    with pytest.raises(ContainerError, match="in use"):
        take(container, THIRD, slots=20)
    grown.close()


def test_it_does_not_shrink(container: Container, folder: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Container.open(folder, SIZE // 2)
    assert str(SIZE) in str(caught.value) and str(SIZE // 2) in str(caught.value)


def test_growth_without_room_leaves_it_as_it_was(container: Container, folder: Path) -> None:
    with pytest.raises(OutOfSpaceError):
        Container.open(folder, 1 << 50)
    assert os.stat(container.path).st_size == SIZE
    Container.open(folder, SIZE).close()


def test_a_growth_that_was_cut_short(container: Container, folder: Path) -> None:
    container.close()
    os.truncate(folder / "container.kvpool", 2 * SIZE)
    opened = Container.open(folder, SIZE)
    assert opened.size == SIZE
    opened.close()


# ---- formatting -----------------------------------------------------------------------------


def test_what_others_have_open_is_not_formatted(container: Container, folder: Path) -> None:
    """Even without a lease: a fellow that opens it shares the mark, and keeps it after others."""
    fellow = Container.open(folder)
    for opened in (container, fellow):
        with pytest.raises(ContainerError, match="in use by another process"):
            Container.format(folder, force=True)
        opened.close()
    Container.format(folder)


@needs_loop_devices
def test_a_block_device_that_others_have_open_is_not_formatted(tmp_path: Path) -> None:
    """The one that has the kernel's claim may be gone."""
    with loop_device(tmp_path / "disk", SIZE) as device:
        first = Container.open(device)
        fellow = Container.open(device)
        first.close()
        with pytest.raises(ContainerError, match="in use by another process"):
            Container.format(device, force=True)
        fellow.close()
        Container.format(device)


def test_format_empties_and_may_shrink(container: Container, folder: Path) -> None:
    take(container)
    with pytest.raises(ContainerError, match="in use"):
        Container.format(folder, force=True)
    container.close()
    Container.format(folder)
    opened = Container.open(folder)
    assert opened.size == SIZE and opened.leases() == []
    opened.close()
    Container.format(folder, 8 * MIB)
    assert os.stat(folder / "container.kvpool").st_size == 8 * MIB


def test_format_without_room_keeps_what_is_there(container: Container, folder: Path) -> None:
    take(container)
    container.close()
    with pytest.raises(OutOfSpaceError):
        Container.format(folder, 1 << 50)
    assert len(Container.open(folder).leases()) == 1


# ---- block devices --------------------------------------------------------------------------


@needs_loop_devices
def test_a_block_device(tmp_path: Path) -> None:
    with loop_device(tmp_path / "disk", SIZE) as device:
        with pytest.raises(ConfigurationError, match="has no more"):
            Container.open(device, 2 * SIZE)
        opened = Container.open(device)
        assert opened.size == SIZE and opened.path == device
        take(opened)
        fellow = Container.open(device)  # another rank: the claim is taken, the content is ours
        take(fellow, rank=1)
        with pytest.raises(ContainerError, match="in use"):
            Container.format(device, force=True)
        fellow.close()
        opened.close()
        again = Container.open(device, create=False)
        assert len(again.leases()) == 2
        again.close()


@needs_loop_devices
def test_a_block_device_that_another_program_has_claimed(tmp_path: Path) -> None:
    with loop_device(tmp_path / "disk", SIZE) as device:
        claim = os.open(device, os.O_RDONLY | os.O_EXCL)
        for attempt in (Container.open, Container.format):
            with pytest.raises(ContainerError, match="in use by another process"):
                attempt(device)
        os.close(claim)
        assert not any((tmp_path / "disk").read_bytes())
        Container.open(device).close()


@needs_loop_devices
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_block_device_with_foreign_content(tmp_path: Path, where: str) -> None:
    size = SIZE + 512  # a copy of a partition table lies in the last, unaligned sector
    with loop_device(tmp_path / "disk", size, tail=b"EFI" if where == "last" else b"") as device:
        if where == "first":
            poke(device, MIB - 1, b"x")
        with pytest.raises(ForeignContentError, match=f"kvpool format block:{device} --force"):
            Container.open(device)
        with pytest.raises(ForeignContentError):
            Container.format(device)
        Container.format(device, force=True)
        opened = Container.open(device)
        assert opened.size == SIZE
        opened.close()


@needs_loop_devices
def test_a_mounted_block_device_is_refused_always(tmp_path: Path) -> None:
    with loop_device(tmp_path / "disk", SIZE) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        mountpoint = tmp_path / "mnt"
        mountpoint.mkdir()
        subprocess.run(["mount", device, mountpoint], check=True)
        try:
            for attempt in (Container.open, lambda d: Container.format(d, force=True)):
                with pytest.raises(ContainerError, match=f"mounted at {mountpoint}"):
                    attempt(device)
        finally:
            subprocess.run(["umount", mountpoint], check=True)
