"""Several engines in one container at once: each has its share, and reads nobody else's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import ContainerError
from tests.dataplane.rig import Rig, chain, file_device

pytestmark = pytest.mark.usefixtures("no_leaks")

MODELS = (b"one" + bytes(29), b"two" + bytes(29))


def engines(folder: Path) -> list[Rig]:
    device = f"{file_device(folder, 'a', '16MiB')}&engines=2"
    return [Rig([device], namespace=model) for model in MODELS]


def test_two_engines_store_at_once_and_restart(tmp_path: Path) -> None:
    rigs = engines(tmp_path)
    # The same keys, other bytes; and more than a share holds, so that both evict.
    for name in range(12):
        for index, rig in enumerate(rigs):
            rig.fill(2 * name + index, 24)
            assert rig.store(chain(name, 24)) == 24
    contents = [rig.pages[:24].copy() for rig in rigs]
    assert not np.array_equal(*contents)
    for rig in rigs:
        used = rig.orchestrator.snapshot().devices[0]
        assert used.chunks <= used.slots <= (16 << 20) // 2 // (64 << 10)
    for rig in rigs:
        rig.close()
    assert (tmp_path / "a" / "container.kvpool").stat().st_size == 16 << 20
    rigs = engines(tmp_path)
    for rig, content in zip(rigs, contents, strict=True):
        assert rig.restored[0] > 24 and rig.held(chain(11, 24)) == 24
        rig.pages[:] = 0
        assert rig.load(chain(11, 24)).failed == []
        assert np.array_equal(rig.pages[:24], content)
        rig.close()


def test_an_engine_too_many_is_refused_and_says_who_is_there(tmp_path: Path) -> None:
    rigs = engines(tmp_path)
    device = f"{file_device(tmp_path, 'a', '16MiB')}&engines=2"
    with pytest.raises(ContainerError, match=r"no room.*in use"):
        Rig([device], namespace=b"three" + bytes(27))
    for rig in rigs:
        assert rig.store(chain(1, 4)) == 4
        rig.close()
