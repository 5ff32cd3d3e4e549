"""KV geometry of real models at long contexts, from the models' published configurations; and
memory that is laid out like their KV, with content that can be checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from kvpool.native import ALIGN, Arena, Engine
from kvpool.types import Geometry, GroupGeometry, GroupKind

CONTEXT_TOKENS = 128 * 1024
TARGET_SLOT_BYTES = 4 << 20
POISON = 0
_NOISE_WORDS = 1 << 21  # a power of two, so that an odd factor maps words one to one
_SCATTER = 2654435761

UInt8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind. `window_tokens`: of sliding-window attention, None for full."""

    layers: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    dtype_bytes: int = 2

    @property
    def page_bytes_per_token(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What a benchmark needs to lay a model's KV out: `groups[i]` describes geometry.groups[i]."""

    name: str
    block_tokens: int
    groups: tuple[LayerGroup, ...]
    geometry: Geometry

    def chunks(self, group: int, context_tokens: int = CONTEXT_TOKENS) -> int:
        """Return how many chunks of `group` a load of that many tokens reads."""
        shape = self.geometry.groups[group]
        full = context_tokens // shape.chunk_tokens
        return full if shape.window_chunks is None else min(full, shape.window_chunks)

    def page_bytes(self, group: int) -> int:
        """Return the bytes of one block in one layer's tensor."""
        return self.groups[group].page_bytes_per_token * self.block_tokens


def _llama_3_1_8b() -> tuple[LayerGroup, ...]:
    """config.json of meta-llama/Llama-3.1-8B: num_hidden_layers 32, num_attention_heads 32,
    num_key_value_heads 8, hidden_size 4096 (head_dim 4096/32 = 128), torch_dtype bfloat16,
    max_position_embeddings 131072. 128 KiB a token.
    """
    return (LayerGroup(layers=32, kv_heads=8, head_dim=128),)


def _gpt_oss_20b() -> tuple[LayerGroup, ...]:
    """config.json of openai/gpt-oss-20b: num_hidden_layers 24, layer_types alternate
    sliding_attention and full_attention, sliding_window 128, num_key_value_heads 8, head_dim 64,
    bfloat16 KV, max_position_embeddings 131072. 24 KiB a token in full layers.
    """
    full = LayerGroup(layers=12, kv_heads=8, head_dim=64)
    return full, LayerGroup(layers=12, kv_heads=8, head_dim=64, window_tokens=128)


def _qwen3_30b_a3b() -> tuple[LayerGroup, ...]:
    """config.json of Qwen/Qwen3-30B-A3B: num_hidden_layers 48, num_key_value_heads 4, head_dim
    128, torch_dtype bfloat16; 128K by its model card's YaRN setting. 96 KiB a token.
    """
    return (LayerGroup(layers=48, kv_heads=4, head_dim=128),)


_MODELS = {
    "llama-3.1-8b": _llama_3_1_8b,
    "gpt-oss-20b": _gpt_oss_20b,
    "qwen3-30b-a3b": _qwen3_30b_a3b,
}
MODEL_NAMES = tuple(_MODELS)


def model_geometry(name: str, block_tokens: int = 16) -> ModelGeometry:
    """Return the geometry of a model of MODEL_NAMES, its slots as near to 4 MiB as blocks allow.

    `block_tokens` is the engine's block size. Raises ValueError for an unknown name.
    """
    if name not in _MODELS:
        raise ValueError(f"model {name!r}: allowed are {', '.join(MODEL_NAMES)}")
    return lay_out(name, _MODELS[name](), block_tokens)


def lay_out(name: str, groups: tuple[LayerGroup, ...], block_tokens: int) -> ModelGeometry:
    """Return the geometry of layers in blocks of `block_tokens` tokens."""
    block_bytes = [g.layers * g.page_bytes_per_token * block_tokens for g in groups]
    blocks = max(1, round(TARGET_SLOT_BYTES / max(block_bytes)))
    chunk_tokens = blocks * block_tokens
    shapes = tuple(
        GroupGeometry(
            kind=GroupKind.FULL if group.window_tokens is None else GroupKind.WINDOW,
            chunk_tokens=chunk_tokens,
            chunk_bytes=blocks * size,
            # The next token sees itself and window - 1 tokens before it.
            window_chunks=group.window_tokens and -(-(group.window_tokens - 1) // chunk_tokens),
        )
        for group, size in zip(groups, block_bytes, strict=True)
    )
    largest = max(shape.chunk_bytes for shape in shapes)
    slot_bytes = -(-largest // ALIGN) * ALIGN
    return ModelGeometry(name, block_tokens, groups, Geometry(shapes, blocks, slot_bytes))


class PagedMemory:
    """KV memory as an engine has it: for each layer a tensor of shape (blocks, page bytes).

    Each KV group has `blocks` blocks of its own. `tensors[group][layer]` are views of one arena.
    """

    def __init__(self, model: ModelGeometry, blocks: int) -> None:
        """Map and fault in the memory. Raises OutOfSpaceError."""
        self.model, self.blocks = model, blocks
        sizes = [g.layers * blocks * model.page_bytes(i) for i, g in enumerate(model.groups)]
        self.arena = Arena(sum(sizes))
        self.tensors: list[list[UInt8]] = []
        start = 0
        for index, (group, size) in enumerate(zip(model.groups, sizes, strict=True)):
            part = self.arena.array[start : start + size]
            shape = (group.layers, blocks, model.page_bytes(index))
            self.tensors.append(list(part.reshape(shape)))
            start += size

    def register(self, engine: Engine) -> None:
        """Tell the engine where the pages lie, one KV group after the other."""
        for index, tensors in enumerate(self.tensors):
            page = self.model.page_bytes(index)
            engine.add_group(
                bases=[tensor.ctypes.data for tensor in tensors],
                strides=[page] * len(tensors),
                lengths=[page] * len(tensors),
                blocks_per_chunk=self.model.geometry.blocks_per_chunk,
            )

    def fill(self, group: int, block: int, number: int) -> None:
        """Write the content of block `number` of a prefix into `block`, in all layers."""
        for layer, tensor in enumerate(self.tensors[group]):
            tensor[block] = self._content(group, layer, number)

    def holds(self, group: int, block: int, number: int) -> bool:
        """Whether `block` holds the content of block `number` of a prefix, in all layers."""
        return all(
            np.array_equal(tensor[block], self._content(group, layer, number))
            for layer, tensor in enumerate(self.tensors[group])
        )

    def poison(self) -> None:
        """Overwrite everything with what no content is."""
        self.arena.array[:] = POISON

    def close(self) -> None:
        """Give the memory back; the engine must be closed before."""
        self.tensors.clear()
        self.arena.close()

    def _content(self, group: int, layer: int, number: int) -> UInt8:
        """Return a page that differs from every other page of the prefix."""
        page = (number * self.model.groups[group].layers + layer) * len(self.model.groups) + group
        start = page * _SCATTER % _NOISE_WORDS * 8
        return _noise()[start : start + self.model.page_bytes(group)]


@cache
def _noise() -> UInt8:
    """Random bytes; pages are pieces of it that begin at different words."""
    return np.random.default_rng(20).integers(1, 256, _NOISE_WORDS * 8 + (1 << 20), np.uint8)
