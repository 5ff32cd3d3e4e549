"""The file or block device under a container: opened, recognised, created, grown and locked.

Nothing that kvpool did not write is overwritten. A new container is made in this order: a
superblock that says "being created", the room, empty tables, then the superblocks that count; so
after a crash there is nothing, something known to be unfinished, or a container.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvpool import layout
from kvpool.device_config import MIN_FLASH_BYTES
from kvpool.errors import (
    ConfigurationError,
    ContainerError,
    DeviceError,
    ForeignContentError,
    OutOfSpaceError,
    check,
)
from kvpool.host import Host
from kvpool.layout import BLOCK_BYTES, SUPERBLOCKS_BYTES, Superblock
from kvpool.units import format_bytes

FILE_NAME = "container.kvpool"
_EDGE_BYTES = 1 << 20  # what must be empty, at both ends, of a block device that is not ours
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock
_TO_THE_END = 0  # as the length of a lock
# A byte that nothing is stored in. Everyone who has a container open shares a lock on it, so that
# it is not written over even while nobody has a lease.
_OPEN_MARK = layout.METADATA_BYTES


class Medium:
    """An open file or block device. Offsets and lengths are multiples of 4096 bytes.

    Locks are open file description locks: exclusive, and held until unlocked or until the last
    duplicate of `fd` and the last transfer on it are gone. Two locks of one Medium never collide.
    """

    def __init__(self, path: Path, fd: int, shared: bool = False) -> None:
        """Take over `fd`, opened O_DIRECT; `shared`: another process has claimed the device."""
        self.path, self.fd, self.shared = path, fd, shared
        self.is_block_device = stat.S_ISBLK(os.fstat(fd).st_mode)

    @property
    def size(self) -> int:
        return os.lseek(self.fd, 0, os.SEEK_END)

    def read(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes; fewer at the end of a file. Raises DeviceError."""
        buffer = memoryview(mmap.mmap(-1, length))
        return bytes(buffer[: self.read_into(offset, buffer)])

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill page-aligned memory; return the bytes read. Raises DeviceError."""
        done = 0
        while done < len(buffer):
            with _as_device_error(f"{self.path}: read at {offset + done}"):
                count = os.preadv(self.fd, [buffer[done:]], offset + done)
            done += count
            if count == 0 or count % BLOCK_BYTES:
                break
        return done

    def write(self, offset: int, data: bytes) -> None:
        """Write all of `data`; not durable before `sync`. Raises DeviceError."""
        buffer = mmap.mmap(-1, len(data))
        buffer[:] = data
        self._write_from(offset, memoryview(buffer))

    def write_zeros(self, offset: int, length: int) -> None:
        """Write zeros over a range. Raises DeviceError."""
        zeros = memoryview(mmap.mmap(-1, min(length, 1 << 20)))
        for at in range(0, length, len(zeros)):
            self._write_from(offset + at, zeros[: length - at])

    def _write_from(self, offset: int, buffer: memoryview) -> None:
        with _as_device_error(f"{self.path}: write at {offset}"):
            if os.pwritev(self.fd, [buffer], offset) != len(buffer):
                raise OSError(errno.EIO, "short write")

    def sync(self) -> None:
        """Make what was written durable. Raises DeviceError."""
        with _as_device_error(f"{self.path}: sync"):
            os.fdatasync(self.fd)

    @contextlib.contextmanager
    def locked(self, start: int, length: int) -> Iterator[None]:
        """Hold a lock on a range, waiting for it."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLKW, _flock(fcntl.F_WRLCK, start, length))
        try:
            yield
        finally:
            self.unlock(start, length)

    def try_lock(self, start: int, length: int) -> bool:
        """Lock a range; False where somebody else has locked some of it."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, start, length))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def mark_open(self) -> None:
        """Keep `overwrite` away, until closed, with a lock that is shared with others."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, _OPEN_MARK, 1))
        except (BlockingIOError, PermissionError):
            raise ContainerError(f"{self.path}: in use by `kvpool format`") from None

    def unlock(self, start: int, length: int) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, start, length))

    def locked_by_others(self, start: int, length: int) -> tuple[int, int] | None:
        """Return (start, end) of a lock that somebody else has on some of a range, else None."""
        answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, start, length))
        kind, _, first, count, _ = _FLOCK.unpack(answer)
        if kind == fcntl.F_UNLCK:
            return None
        return first, first + count if count else 1 << 62

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def attach(path: Path, size: int | None, create: bool) -> tuple[Medium, Superblock]:
    """Open, and create or grow, a container; see Container.open."""
    if size is not None:
        size = _usable_size(size)
    while True:
        with contextlib.ExitStack() as undo:
            medium = _open(path, create, undo)
            undo.callback(medium.close)
            with medium.locked(0, SUPERBLOCKS_BYTES):
                if not _is_in_place(medium):
                    continue  # its creation failed in another process while this one waited
                superblock = recognise(medium)
                if superblock is not None:
                    superblock = _resize(medium, superblock, size)
                elif create:
                    _refuse_claimed(medium)
                    superblock = _create(medium, size)
                else:
                    what = "its creation was never finished" if medium.size else "it is empty"
                    what = "there is no container" if medium.is_block_device else what
                    raise ContainerError(f"{medium.path}: {what}; {advice(medium, False)}")
                medium.mark_open()
            undo.pop_all()
            return medium, superblock


def overwrite(path: Path, size: int | None, force: bool) -> None:
    """Write an empty container; see Container.format."""
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as closing:
        medium = _open(path, True, undo)
        closing.callback(medium.close)
        _refuse_claimed(medium)
        if not medium.try_lock(0, _TO_THE_END):
            raise ContainerError(f"{path}: in use by another process")
        old = None
        try:
            old = recognise(medium)
        except (ForeignContentError, ContainerError):
            if not force:
                raise
        if size is None and old is not None and not medium.is_block_device:
            size = old.size
        size = size if size is None else _usable_size(size)
        if not medium.is_block_device and medium.size:
            _check_room(medium, size)  # before what is there is thrown away
            os.ftruncate(medium.fd, 0)
        _create(medium, size)
        undo.pop_all()


def recognise(medium: Medium) -> Superblock | None:
    """Return the superblock that counts; None where nothing is there, or unfinished creation.

    Raises ContainerError (ours, but damaged or of an unknown version) and ForeignContentError.
    """
    blocks = [medium.read(offset, BLOCK_BYTES) for offset in layout.SUPERBLOCK_OFFSETS]
    path = medium.path
    for version in map(layout.unknown_version, blocks):
        if version is not None:
            raise ContainerError(
                f"{path}: format version {version}, this kvpool knows"
                f" {layout.FORMAT_VERSION}; it is left as it is"
            )
    valid = [block for block in map(layout.decode_superblock, blocks) if block is not None]
    if valid:
        newest = max(valid, key=lambda block: block.generation)
        return newest if newest.state == layout.READY else None
    if any(map(layout.has_magic, blocks)):
        raise ContainerError(f"{path}: both superblocks are damaged; {advice(medium, True)}")
    if not _is_empty(medium):
        raise ForeignContentError(
            f"{path}: holds something that kvpool did not write; it is left untouched."
            f" {advice(medium, True)}"
        )
    return None


def open_read_only(path: Path) -> Medium:
    """Open a container's file, or a block device, to look at it: no lock, nothing is changed.

    Raises OSError, and ForeignContentError where `path` is something else.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    if not is_block_device(path):
        _refuse_other_than_files(path)
        flags |= os.O_NOFOLLOW
    try:
        return Medium(path, os.open(path, flags | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return Medium(path, os.open(path, flags))


def is_block_device(path: Path) -> bool:
    """Whether `path` is (or leads to) a block device."""
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except OSError:
        return False


def existing_parent(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def free_bytes(folder: Path) -> int:
    """Return what a container in `folder`, which need not exist, may have.

    That is the free space of its file system, and the room that its present file takes.
    """
    facts = os.statvfs(existing_parent(folder))
    file = folder / FILE_NAME
    present = os.lstat(file).st_blocks * 512 if file.is_file() and not file.is_symlink() else 0
    return facts.f_bavail * facts.f_frsize + present


# ---- opening --------------------------------------------------------------------------------


def _open(path: Path, create: bool, undo: contextlib.ExitStack) -> Medium:
    return _open_device(path) if is_block_device(path) else _open_file(path, create, undo)


def _open_device(path: Path) -> Medium:
    users = Host().block_device_users(os.stat(path).st_rdev)
    if users:
        raise ContainerError(f"{path}: in use: {', '.join(users)}")
    try:
        # The claim keeps others from mounting it; one process has it, its fellow ranks do not.
        return Medium(path, os.open(path, _FLAGS | os.O_EXCL))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise ConfigurationError("path", str(path), _why(error, "a usable device")) from None
    return Medium(path, os.open(path, _FLAGS), shared=True)


def _open_file(folder: Path, create: bool, undo: contextlib.ExitStack) -> Medium:
    if create:
        _make_folder(folder, undo)
    file = folder / FILE_NAME
    _refuse_other_than_files(file)
    existed = os.path.lexists(file)
    try:
        flags = _FLAGS | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        medium = Medium(file, os.open(file, flags, 0o600))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ForeignContentError(f"{file}: is a symbolic link; it is not followed") from None
        if error.errno == errno.ENOENT and not create:
            raise ContainerError(f"{folder}: there is no container") from None
        if error.errno == errno.EINVAL:  # the file was made before O_DIRECT was refused
            if not existed:
                file.unlink(missing_ok=True)
            allowed = "a folder on a file system that can do direct I/O"
            raise ConfigurationError("path", str(folder), allowed) from None
        raise ConfigurationError("path", str(folder), _why(error, "a writable folder")) from None
    facts = os.fstat(medium.fd)
    if not stat.S_ISREG(facts.st_mode) or (os.geteuid() and facts.st_uid != os.geteuid()):
        medium.close()
        raise ForeignContentError(f"{file}: is not a regular file of this user")
    return medium


def _refuse_other_than_files(file: Path) -> None:
    """Raise ForeignContentError, before it is opened, where `file` is there but not a file."""
    try:
        mode = os.lstat(file).st_mode
    except OSError:
        return  # opening it says why
    if stat.S_ISLNK(mode):
        raise ForeignContentError(f"{file}: is a symbolic link; it is not followed")
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise ForeignContentError(f"{file}: is {kind}, not a container's file")


def _make_folder(folder: Path, undo: contextlib.ExitStack) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise ConfigurationError("path", str(folder), "a folder, not a file") from None
    except OSError as error:
        allowed = _why(error, "a folder in an existing, writable one")
        raise ConfigurationError("path", str(folder), allowed) from None
    else:
        undo.callback(_remove_folder, folder)


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else has begun to use it
        folder.rmdir()


def _is_in_place(medium: Medium) -> bool:
    """Whether the path still leads to what is open."""
    try:
        return os.path.samestat(os.stat(medium.path), os.fstat(medium.fd))
    except FileNotFoundError:
        return False


def _refuse_claimed(medium: Medium) -> None:
    if medium.shared:
        raise ContainerError(f"{medium.path}: in use by another process")


def _is_empty(medium: Medium) -> bool:
    """Whether nothing is lost where the medium is overwritten."""
    size = medium.size
    if not medium.is_block_device:
        return size == 0
    # Through the page cache: the last sectors, where a partition table has its copy, need not
    # be aligned.
    with open(f"/proc/self/fd/{medium.fd}", "rb") as device:
        first = device.read(_EDGE_BYTES)
        device.seek(max(0, size - _EDGE_BYTES))
        return not any(first) and not any(device.read(_EDGE_BYTES))


# ---- creating and growing -------------------------------------------------------------------


def _create(medium: Medium, size: int | None) -> Superblock:
    try:
        return _write_container(medium, size)
    except BaseException:
        if not medium.is_block_device:
            medium.path.unlink(missing_ok=True)
        raise


def _write_container(medium: Medium, size: int | None) -> Superblock:
    size = _check_room(medium, size)
    marker = Superblock(
        layout.CREATING, 0, uuid.uuid4().bytes, size, layout.probe_bytes(size), time.time_ns()
    )
    medium.write(0, layout.encode_superblock(marker).ljust(SUPERBLOCKS_BYTES, b"\0"))
    medium.sync()
    _reserve(medium, 0, size)
    medium.write_zeros(SUPERBLOCKS_BYTES, layout.METADATA_BYTES - SUPERBLOCKS_BYTES)
    medium.sync()
    for generation in (1, 2):
        superblock = replace(marker, state=layout.READY, generation=generation)
        _write_superblock(medium, superblock)
    if not medium.is_block_device:
        _sync_folder(medium.path.parent)
    return superblock


def _resize(medium: Medium, superblock: Superblock, size: int | None) -> Superblock:
    actual = medium.size
    if actual < superblock.size:
        raise ContainerError(
            f"{medium.path}: has {actual} bytes, its superblock says {superblock.size};"
            f" {advice(medium, False)}"
        )
    if size is None:
        size = _usable_size(actual) if medium.is_block_device else superblock.size
    if size < superblock.size:
        allowed = f"at least {superblock.size}: the container at {medium.path} has that many bytes"
        raise ConfigurationError("size", size, f"{allowed}; {advice(medium, False)} to shrink it")
    if size == superblock.size:
        return superblock
    _check_room(medium, size)
    try:
        _reserve(medium, superblock.size, size - superblock.size)
    except BaseException:
        os.ftruncate(medium.fd, superblock.size)
        raise
    grown = replace(superblock, size=size, generation=superblock.generation + 1)
    _write_superblock(medium, grown)
    return grown


def _check_room(medium: Medium, size: int | None) -> int:
    """Return the size a container is to have, known to fit; None is all of a block device."""
    if medium.is_block_device:
        room = _usable_size(medium.size)
        if size is not None and size > room:
            raise ConfigurationError("size", size, f"at most {room}: {medium.path} has no more")
        return room if size is None else size
    if size is None:
        raise ConfigurationError("size", size, f"a size: there is no container at {medium.path}")
    if size > free_bytes(medium.path.parent):
        raise OutOfSpaceError(f"{medium.path}: {format_bytes(size)}", errno.ENOSPC)
    return size


def _reserve(medium: Medium, offset: int, length: int) -> None:
    if not medium.is_block_device:
        with _as_device_error(f"{medium.path}: {format_bytes(length)}"):
            os.posix_fallocate(medium.fd, offset, length)


def _write_superblock(medium: Medium, superblock: Superblock) -> None:
    offset = layout.SUPERBLOCK_OFFSETS[superblock.generation % 2]
    medium.write(offset, layout.encode_superblock(superblock))
    with _as_device_error(f"{medium.path}: sync"):
        os.fsync(medium.fd)


def _usable_size(size: int) -> int:
    if size < MIN_FLASH_BYTES:
        raise ConfigurationError("size", size, f"at least {format_bytes(MIN_FLASH_BYTES)}")
    return size // BLOCK_BYTES * BLOCK_BYTES


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def advice(medium: Medium, force: bool) -> str:
    """Return the sentence that says how to write an empty container there."""
    device = (
        f"block:{medium.path}" if medium.is_block_device else f"file:{medium.path.parent}?size=SIZE"
    )
    return f"`kvpool format {device}{' --force' if force else ''}` writes an empty container"


def _why(error: OSError, allowed: str) -> str:
    return f"{allowed} ({os.strerror(error.errno or errno.EIO)})"


@contextlib.contextmanager
def _as_device_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        check(-(error.errno or errno.EIO), what)
        raise DeviceError(what, errno.EIO) from error


def _flock(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
