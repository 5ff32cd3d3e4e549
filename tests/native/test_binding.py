"""The binding: layout, what is raised, and a library that is missing or stale."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import native
from kvpool.errors import DeviceError, KVPoolError
from kvpool.native import OP_DTYPE, Arena, Engine, NativeLibraryError
from tests.native.rig import Rig


def test_layout_is_the_library_s() -> None:
    assert native._library().kvio_abi() == native._ABI
    assert OP_DTYPE.itemsize == 64 and native.EVENT_DTYPE.itemsize == 32


def test_only_kvio_is_exported() -> None:
    library = next(Path(folder) / "libkvio.so" for folder in kvpool.__path__)
    handle = ctypes.CDLL(str(library))
    for name in native._PROTOTYPES:
        assert hasattr(handle, name)
    for name in ("op_finish", "queue_take", "crc_kernel", "uring_backend", "staging_acquire"):
        assert not hasattr(handle, name)


def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(
        NativeLibraryError, match=r"libkvio.so is not in .*cmake -S native"
    ) as caught:
        native._open([str(tmp_path)])
    assert isinstance(caught.value, KVPoolError)


class _Stale:
    """A library of other sources: it has all functions, with another layout."""

    def __init__(self, *lacks: str) -> None:
        self.lacks = lacks

    def __getattr__(self, name: str) -> Any:
        if name in self.lacks:
            raise AttributeError(name)

        def function() -> int:
            return 0

        return function


def test_a_stale_library_is_refused() -> None:
    with pytest.raises(NativeLibraryError, match="layout 0x0"):
        native._declare(_Stale())  # type: ignore[arg-type]
    with pytest.raises(NativeLibraryError, match="lacks a function"):
        native._declare(_Stale("kvio_submit"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        dict(slot_bytes=0),
        dict(slot_bytes=4097),
        dict(slot_bytes=2 << 30),
        dict(slot_bytes=4096, queue_entries=0),
        dict(slot_bytes=4096, store_buffers=1 << 20),
        dict(slot_bytes=4096, staging_numa_node=4000),
    ],
)
def test_bad_engines(config: dict[str, int]) -> None:
    with pytest.raises(DeviceError) as caught:
        Engine(**config)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize(
    ("lengths", "blocks_per_chunk"),
    [((), 4), ((4096,), 0), ((0, 4096), 4), ((65536,), 2), ((2**32 - 1,) * 3, 2**31)],
)
def test_bad_groups(tmp_path: Path, lengths: tuple[int, ...], blocks_per_chunk: int) -> None:
    with Rig("nil", tmp_path) as rig, pytest.raises(DeviceError) as caught:
        rig.engine.add_group(lengths, lengths, lengths, blocks_per_chunk)
    assert caught.value.errno == errno.EINVAL


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    with Rig("nil", tmp_path) as rig:
        with pytest.raises(ValueError, match="differ in length"):
            rig.engine.add_group([1], [1, 2], [1], 1)
        with pytest.raises(TypeError, match="int64"):
            rig.engine.submit(np.zeros(1, OP_DTYPE), np.zeros(1, np.int64))
        with pytest.raises(DeviceError):
            rig.engine.statistics(99)
        with pytest.raises(DeviceError):
            rig.engine.set_shape(99, 0, 0, 0)


def test_nothing_to_do_is_fine(tmp_path: Path) -> None:
    with Rig("nil", tmp_path) as rig:
        rig.engine.submit(np.zeros(0, OP_DTYPE), np.zeros(0, np.int32))
        assert rig.engine.cancel_stores(0, 2**64 - 1) == 0


def test_a_closed_engine_refuses(tmp_path: Path) -> None:
    engine = Engine(4096)
    engine.close()
    engine.close()
    for call in (engine.poll, lambda: engine.wait(0), lambda: engine.eventfd):
        with pytest.raises(DeviceError):
            call()


def test_modules_live_as_long_as_the_engine() -> None:
    engine = Engine(4096)
    address = (arena := Arena(1)).address
    engine.add_memory_device(arena)
    del arena
    maps = Path("/proc/self/maps").read_text()
    assert f"{address:x}-" in maps
    engine.close()
