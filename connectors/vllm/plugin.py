"""vLLM plug-in: makes `KVPoolConnector` known in API server, engine core and workers."""

from __future__ import annotations

import os
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

CONNECTOR_NAME = "KVPoolConnector"

# The CPUs of this process before vLLM's CPU worker binds the calling thread to some of them.
PROCESS_CPUS = os.sched_getaffinity(0)


def register() -> None:
    """Register the connector and its spec by name; vLLM calls this in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    try:
        KVConnectorFactory.register_connector(
            CONNECTOR_NAME, "kvpool.connectors.vllm.connector", "KVPoolConnector"
        )
    except ValueError:
        return  # vLLM may load plug-ins more than once in a process.
    OffloadingSpecFactory.register_spec("KVPoolSpec", "kvpool.connectors.vllm.spec", "KVPoolSpec")
    _check_with_the_configuration(KVConnectorFactory)


def _check_with_the_configuration(factory: Any) -> None:
    """Refuse a bad pool configuration when vLLM builds its own: before a model is loaded.

    vLLM makes connectors after the model, minutes later, and asks them nothing before; it only
    asks the factory whether the connector supports hybrid models. The answer stays its own.
    """
    supports_hma_config = factory.supports_hma_config
    checked: list[dict[str, Any]] = []

    @wraps(supports_hma_config)
    def check_first(kv_transfer_config: KVTransferConfig) -> bool:
        extra_config = kv_transfer_config.kv_connector_extra_config
        # Once: later the pool itself holds the memory and the files that the check asks for.
        if kv_transfer_config.kv_connector == CONNECTOR_NAME and extra_config not in checked:
            from kvpool import config

            checked.append(dict(extra_config))
            config.check_environment(config.from_mapping(extra_config))
        return bool(supports_hma_config(kv_transfer_config))

    factory.supports_hma_config = check_first
