"""Chunk geometry of a vLLM engine: blocks a chunk, and what a load reads of each KV group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    get_sliding_window_size_in_chunks,
)
from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs

from kvpool.types import Geometry, GroupGeometry, GroupKind

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.kv_offload.base import CanonicalKVCaches
    from vllm.v1.kv_offload.config import OffloadingConfig

SLOT_TARGET_BYTES = 4 << 20
# A chunk is all or nothing: small models would lose most of a prompt's tail to 4 MiB chunks.
CHUNK_TOKENS_LIMIT = 1024
SLOT_ALIGNMENT_BYTES = 4096


def _block_bytes(group: KVCacheGroupSpec) -> int:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return int(spec.page_size_bytes)
    return int(spec.page_size_bytes) * len(group.layer_names)


def default_blocks_per_chunk(kv_cache_config: KVCacheConfig) -> int:
    """Return the power of two that makes the largest group's chunk about 4 MiB.

    1 where a recurrent group is among them: its state is stored at hand-off boundaries only, and
    larger chunks would lose half of the hits.
    """
    groups = [kv_cache_config.kv_cache_groups[i] for i in get_offloading_group_ids(kv_cache_config)]
    if any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups):
        return 1
    largest = max(_block_bytes(group) for group in groups)
    tokens = max(int(group.kv_cache_spec.block_size) for group in groups)
    blocks = 1
    while 2 * blocks * largest <= SLOT_TARGET_BYTES and 2 * blocks * tokens <= CHUNK_TOKENS_LIMIT:
        blocks *= 2
    return blocks


def group_kind(spec: object, window_chunks: int | None) -> GroupKind:
    """Return what a load reads back of a group with this vLLM spec."""
    if isinstance(spec, MambaSpec):
        return GroupKind.STATE
    return GroupKind.FULL if window_chunks is None else GroupKind.WINDOW


def build_geometry(
    config: OffloadingConfig, kv_cache_config: KVCacheConfig, kv_caches: CanonicalKVCaches
) -> Geometry:
    """Return the geometry of one rank, from its canonical KV tensors."""
    blocks_per_chunk = config.cache.blocks_per_chunk
    groups = []
    for group, references in zip(config.groups, kv_caches.group_data_refs, strict=True):
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        chunk_tokens = group.tokens_per_block * blocks_per_chunk
        window = get_sliding_window_size_in_chunks(spec, chunk_tokens)
        chunk_bytes = blocks_per_chunk * sum(ref.page_size_bytes for ref in references)
        groups.append(GroupGeometry(group_kind(spec, window), chunk_tokens, chunk_bytes, window))
    return Geometry(tuple(groups), blocks_per_chunk, slot_bytes(g.chunk_bytes for g in groups))


def slot_bytes(chunk_bytes: Iterable[int]) -> int:
    """Return the slot that holds any of these chunks: the largest, rounded up to 4 KiB."""
    return -(-max(chunk_bytes) // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
