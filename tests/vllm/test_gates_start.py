"""Gates that are passed at start: ranks that agree, names for all that makes bytes comparable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.config import from_mapping
from kvpool.connectors.vllm import manager
from kvpool.connectors.vllm.manager import KVPoolManager
from kvpool.connectors.vllm.messages import KVPoolHandshake
from kvpool.errors import ConfigurationError
from kvpool.plan import StoredHeaders
from kvpool.types import DeviceReport, Geometry, GroupGeometry, GroupKind, Profile

pytestmark = pytest.mark.vllm

GEOMETRY = Geometry((GroupGeometry(GroupKind.FULL, 256, 4096),), 4, 4096)
DEVICE = DeviceReport("file:a", "file", 8, 4096, Profile(1e9, 1e9, 1e-4, 1e9))


def handshakes() -> list[KVPoolHandshake]:
    return [
        KVPoolHandshake(rank, GEOMETRY, [DEVICE], [StoredHeaders.none()], b"n" * 32)
        for rank in (0, 1)
    ]


def pool() -> KVPoolManager:
    return KVPoolManager(from_mapping({"devices": ["dram:64MiB"]}), ranks=2)


def check_ranks() -> None:
    pool().attach(handshakes())
    first, second = handshakes()
    with pytest.raises(ConfigurationError, match=r"namespace of rank 1.*6d6d.*the same on all"):
        pool().attach([first, replace(second, namespace=b"m" * 32)])
    other = replace(GEOMETRY, blocks_per_chunk=2)
    with pytest.raises(ConfigurationError, match="geometry of rank 1"):
        pool().attach([first, replace(second, geometry=other)])


def test_gate_08_ranks_that_name_bytes_differently_are_refused() -> None:
    check_ranks()


def test_gate_08_without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "require_agreement", lambda _: None)
    with pytest.raises(pytest.fail.Exception):
        check_ranks()
