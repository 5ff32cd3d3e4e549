"""Gates that are passed at start: ranks that agree, names for all that makes bytes comparable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kvpool.config import from_mapping
from kvpool.connectors.vllm import manager
from kvpool.connectors.vllm.manager import KVPoolManager
from kvpool.connectors.vllm.messages import KVPoolHandshake, StoreSpec
from kvpool.errors import ConfigurationError
from kvpool.plan import StoredHeaders
from kvpool.types import (
    DeviceReport,
    Geometry,
    GroupGeometry,
    GroupKind,
    Profile,
    WorkerReport,
)

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


def stored_by(manager_: KVPoolManager, request: str, key: bytes) -> int:
    """Offer a chunk and acknowledge what is stored; return how much that is."""
    context = ReqContext(request)
    manager_.on_new_request(context)
    context.set_offload_key_position(OffloadKey(key), 256)
    output = manager_.prepare_store([OffloadKey(key)], context)
    assert output is not None
    spec = output.store_spec
    written = {int(i): 1 for i in spec.plan.write_id} if isinstance(spec, StoreSpec) else {}
    manager_.acknowledge(WorkerReport(finished_writes=written))
    hit = manager_.lookup(OffloadKey(key), context) is LookupResult.HIT
    manager_.on_request_finished(context)
    return int(hit)


def test_a_request_that_is_kept_out_neither_stores_nor_hits() -> None:
    one = KVPoolManager(from_mapping({"devices": ["dram:64MiB"]}), ranks=1)
    one.attach(handshakes()[:1])
    key = bytes(32) + bytes(4)
    one.keep_out("with an adapter")
    assert stored_by(one, "with an adapter", key) == 0
    assert stored_by(one, "without", key) == 1
    one.keep_out("another with an adapter")
    context = ReqContext("another with an adapter")
    one.on_new_request(context)
    assert one.lookup(OffloadKey(key), context) is LookupResult.MISS
    assert one.lookup(OffloadKey(key), ReqContext("unknown")) is LookupResult.MISS
