"""The namespace: everything that makes the bytes of two chunks comparable, hashed.

The model's path is no part of it. Nor are LoRA adapters: vLLM's block hashes have an adapter's
name and path but not its content, so requests that use one stay out of the pool.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger

from kvpool.layout import FORMAT_VERSION
from kvpool.types import Geometry
from kvpool.weights import content_digest, hub_snapshot

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

# A name below vLLM's: its logging configuration covers nothing else.
logger = init_logger(f"vllm.{__name__}")

_COMMIT = re.compile(r"[0-9a-f]{40}")

# Formats of which all weights come from the model's folder, or from its repository on the hub.
_LOCAL_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral"}
    | {"bitsandbytes", "gguf", "sharded_state", "runai_streamer", "runai_streamer_sharded"}
)


def model_identity(vllm_config: VllmConfig) -> list[dict[str, object]]:
    """Return what identifies the models whose KV is stored: the model, and one that drafts.

    Raises ConfigurationError where weight files are there but cannot be read.
    """
    start = _start(vllm_config)
    identities = [_identity(vllm_config.model_config, vllm_config.load_config, start)]
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        load_config = speculative.draft_load_config or vllm_config.load_config
        identities.append(_identity(speculative.draft_model_config, load_config, start))
    return identities


def _start(vllm_config: VllmConfig) -> str:
    """Return what is the same on all ranks of an engine, and another at each start."""
    transfer = vllm_config.kv_transfer_config
    return f"{vllm_config.instance_id} {transfer.engine_id if transfer else None}"


def _identity(model: ModelConfig, load_config: LoadConfig, start: str) -> dict[str, object]:
    config = _without_paths(model.hf_config.to_dict())
    identity: dict[str, object] = {
        "weights": _weights(model, str(load_config.load_format)) or f"unknown, start {start}",
        "load_format": str(load_config.load_format),
        "config": config,  # as vLLM was told to override it
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
    }
    if "longrope" in json.dumps(config, default=_plain):
        identity["max_model_len"] = model.max_model_len  # chooses between two sets of factors
    return identity


def _weights(model: ModelConfig, load_format: str) -> str | None:
    """Return a commit of the hub, else a digest of the files; None where neither is to be had."""
    folder = Path(model.model)
    weights: str | None = None
    if load_format == "dummy":
        return f"dummy seed {model.seed}"
    if load_format in _LOCAL_FORMATS and not model.model_weights:
        if folder.exists():
            weights = hub_snapshot(folder) or content_digest(folder, _announce)
        elif commit := _commit(model):
            weights = f"{model.model}@{commit}"
    if weights is None:
        logger.warning(
            "kvpool: nothing tells the weights of %s from others: what is stored now is not found"
            " again after a restart",
            model.model,
        )
    return weights


def _commit(model: ModelConfig) -> str | None:
    """Return the commit of the hub that vLLM resolved the model's revision to."""
    found = [getattr(model.revision, "resolved", None), model.revision]
    if not model.hf_config_path:  # else the configuration comes from elsewhere
        found.append(getattr(model.hf_config, "_commit_hash", None))
    return next((commit for commit in found if _COMMIT.fullmatch(str(commit))), None)


def _announce(line: str) -> None:
    logger.info("kvpool: %s", line)


def _without_paths(config: Any) -> Any:
    """Return a model's configuration without what tells where it came from."""
    if isinstance(config, dict):
        origin = ("_name_or_path", "_commit_hash")
        return {str(k): _without_paths(v) for k, v in config.items() if k not in origin}
    if isinstance(config, (list, tuple)):
        return [_without_paths(item) for item in config]
    return config


def _plain(value: object) -> object:
    """Return what JSON takes, the same in every process: a set has an order of its own in each."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def namespace_digest(vllm_config: VllmConfig, geometry: Geometry) -> bytes:
    """Return the 32-byte namespace digest. Rank and data-parallel rank are not part of it."""
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    parts = {
        "format": FORMAT_VERSION,
        "vllm": vllm.__version__,
        "identity": model_identity(vllm_config),
        "cache_dtype": str(cache.cache_dtype),
        "layout": str(cache.kv_cache_layout),
        "block_size": cache.block_size,
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "parallel": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
        ],
        "geometry": repr(geometry),
    }
    text = json.dumps(parts, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).digest()
