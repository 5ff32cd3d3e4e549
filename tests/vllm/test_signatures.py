"""What we override still exists in the installed vLLM, with the parameters that we take."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def _pairs() -> list[tuple[type[Any], type[Any]]]:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker

    from kvpool.connectors.vllm.connector import KVPoolConnector
    from kvpool.connectors.vllm.manager import KVPoolManager
    from kvpool.connectors.vllm.messages import KVPoolWorkerMetadata
    from kvpool.connectors.vllm.spec import KVPoolSpec
    from kvpool.connectors.vllm.worker import KVPoolWorker

    return [
        (KVPoolConnector, OffloadingConnector),
        (KVPoolManager, OffloadingManager),
        (KVPoolWorker, OffloadingWorker),
        (KVPoolSpec, OffloadingSpec),
        (KVPoolWorkerMetadata, OffloadingWorkerMetadata),
    ]


def differences(mine: type[Any], base: type[Any]) -> list[str]:
    """Name the methods of `mine` that override one of `base` with other parameters."""
    found = []
    for name, method in vars(mine).items():
        theirs = getattr(base, name, None)
        if (name.startswith("_") and name != "__init__") or not callable(theirs):
            continue
        method = getattr(method, "__func__", method)
        theirs = getattr(theirs, "__func__", theirs)
        if not inspect.isfunction(method) or not inspect.isfunction(theirs):
            continue
        if list(inspect.signature(method).parameters) != list(inspect.signature(theirs).parameters):
            found.append(name)
    return found


def test_overrides_match() -> None:
    for mine, base in _pairs():
        constructor = {"__init__"} if mine.__name__ != "KVPoolConnector" else set()
        assert set(differences(mine, base)) <= constructor, mine.__name__


def test_a_changed_signature_is_found() -> None:
    class Base:
        def lookup(self, key: bytes, context: object) -> None: ...

    class Mine(Base):
        def lookup(self, key: bytes) -> None: ...  # type: ignore[override]

    assert differences(Mine, Base) == ["lookup"]


def test_the_hook_for_early_refusal_is_still_asked() -> None:
    from vllm.config.vllm import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert callable(KVConnectorFactory.supports_hma_config)
    assert "supports_hma_config" in inspect.getsource(VllmConfig)
