"""The namespace: everything that makes the bytes of two chunks comparable, hashed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import vllm

from kvpool.layout import FORMAT_VERSION
from kvpool.types import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def model_identity(vllm_config: VllmConfig) -> dict[str, object]:
    """Return what identifies model and weights: name, revision, and the files where local."""
    model = vllm_config.model_config
    folder = Path(model.model)
    files = []
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.suffix in (".safetensors", ".bin", ".pt", ".gguf", ".json"):
                status = path.stat()
                files.append([path.name, status.st_size, status.st_mtime_ns])
    return {"model": model.model, "revision": model.revision, "files": files}


def namespace_digest(vllm_config: VllmConfig, geometry: Geometry) -> bytes:
    """Return the 32-byte namespace digest. Rank and data-parallel rank are not part of it."""
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    parts = {
        "format": FORMAT_VERSION,
        "vllm": vllm.__version__,
        "identity": model_identity(vllm_config),
        "dtype": str(vllm_config.model_config.dtype),
        "quantization": str(vllm_config.model_config.quantization),
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
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).digest()
