"""Tiny models made on the spot, one a shape of KV cache: no hub, no download.

Their weights are random but real: large enough that the tokens depend on the KV, so a wrong block
shows in the answer. (Dummy weights are so small that most wrong blocks go unseen.)
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

WEIGHTS_SEED = 5
WEIGHTS_STD = 0.1
# A tied embedding is the output layer too: at WEIGHTS_STD it repeats the last token whatever the
# KV holds, and every comparison of tokens would pass.
TIED_EMBEDDING_STD = 0.01
# Goes into the cache key: raise it where the same fields shall give another model.
BUILDER_REVISION = 1

BENCH_HEAD_DIM = 256
BENCH_LAYERS = 2
FLOAT32_BYTES = 4


class ModelHints(TypedDict):
    """How to run a model with vLLM on a CPU, and what a test of it may conclude.

    `block_tokens` is vLLM's block after its own rounding (block_size=64 was asked for) and
    `page_bytes` the bytes of one block in one KV tensor. `tokens_are_a_test`: equal tokens mean
    equal KV; where False, compare bytes. None leaves vLLM's default (`max_num_batched_tokens`,
    `enable_prefix_caching`).
    """

    dtype: str
    block_tokens: int
    page_bytes: int
    max_num_batched_tokens: int | None
    enable_prefix_caching: bool | None
    kv_groups: int
    kv_tensors: int
    tokens_are_a_test: bool


@dataclass(frozen=True, slots=True)
class _Shape:
    """A model family: names in transformers, fields beyond `_BASE_FIELDS`, hints."""

    config_class: str
    model_class: str
    hints: ModelHints
    fields: Mapping[str, Any] = field(default_factory=dict)


def _hints(
    groups: int,
    tensors: int,
    *,
    block_tokens: int = 64,
    page_bytes: int = 49152,
    max_num_batched_tokens: int | None = None,
    enable_prefix_caching: bool | None = None,
    tokens_are_a_test: bool = True,
) -> ModelHints:
    return ModelHints(
        dtype="float32",
        block_tokens=block_tokens,
        page_bytes=page_bytes,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        kv_groups=groups,
        kv_tensors=tensors,
        tokens_are_a_test=tokens_are_a_test,
    )


_BASE_FIELDS: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 65536,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": WEIGHTS_STD,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 3
_TWO_OF_THREE = ["sliding_attention", "sliding_attention", "full_attention"] * 2

_SHAPES: dict[str, _Shape] = {
    "llama": _Shape("LlamaConfig", "LlamaForCausalLM", _hints(1, 6)),
    "qwen2": _Shape("Qwen2Config", "Qwen2ForCausalLM", _hints(1, 6), {"use_sliding_window": False}),
    "mistral_window": _Shape(
        "MistralConfig",
        "MistralForCausalLM",
        _hints(1, 6),
        {"head_dim": 32, "sliding_window": 512},
    ),
    "mistral_hybrid": _Shape(
        "MistralConfig",
        "MistralForCausalLM",
        _hints(2, 3),
        {"head_dim": 32, "sliding_window": 512, "layer_types": _ALTERNATING},
    ),
    "gemma3": _Shape(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _hints(3, 2),
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 512,
            "layer_types": _TWO_OF_THREE,
        },
    ),
    "gptoss": _Shape(
        "GptOssConfig",
        "GptOssForCausalLM",
        _hints(2, 3),
        {
            "head_dim": 32,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
            "layer_types": _ALTERNATING,
        },
    ),
    "olmo3": _Shape(
        "Olmo3Config",
        "Olmo3ForCausalLM",
        _hints(3, 2),
        {"sliding_window": 512, "layer_types": _TWO_OF_THREE, "pad_token_id": 0},
    ),
    # A step that crosses a state's block fails in vLLM's CPU kernel: one block a step.
    "falcon_h1": _Shape(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        _hints(2, 3, block_tokens=128, page_bytes=98304, max_num_batched_tokens=128),
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "mamba_n_heads": 12,
            "mamba_d_head": 32,
            "mamba_d_ssm": 384,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_expand": 2,
            "mamba_d_conv": 4,
        },
    ),
    # vLLM caches no prefixes of purely recurrent models unless asked to; its block is then 64 here.
    "mamba2": _Shape(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        _hints(1, 3, page_bytes=54528, max_num_batched_tokens=64, enable_prefix_caching=True),
        {
            "num_hidden_layers": 3,
            "num_heads": 12,
            "head_dim": 32,
            "expand": 2,
            "state_size": 32,
            "n_groups": 1,
        },
    ),
    # Without AMX vLLM's own decode and prefill disagree here: only bytes can be compared.
    "deepseek_v2": _Shape(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        _hints(1, 6, block_tokens=16, page_bytes=36864, tokens_are_a_test=False),
        {
            "first_k_dense_replace": 6,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "num_key_value_heads": 6,
        },
    ),
    "bench_llama": _Shape(
        "LlamaConfig",
        "LlamaForCausalLM",
        _hints(1, BENCH_LAYERS, page_bytes=64 * 4096, max_num_batched_tokens=8192),
        {
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": BENCH_LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": BENCH_HEAD_DIM,
            "max_position_embeddings": 131072,
        },
    ),
}

MODEL_NAMES: tuple[str, ...] = tuple(_SHAPES)
MODEL_HINTS: dict[str, ModelHints] = {name: shape.hints for name, shape in _SHAPES.items()}


def build_model(name: str, folder: Path, *, tokenizer: bool = False, **overrides: Any) -> Path:
    """Return the folder of model `name` under `folder`, made now unless it is there already.

    `overrides` replace fields of its config.json; `tokenizer` adds a byte-level BPE tokenizer,
    which `vllm serve` wants. Equal arguments give equal weights and the same path; a build that
    is interrupted leaves nothing under that path. Raises ValueError for an unknown name.
    """
    if name not in _SHAPES:
        raise ValueError(f"model {name!r}: allowed are {', '.join(MODEL_NAMES)}")
    fields = {**_BASE_FIELDS, **_SHAPES[name].fields, **overrides}
    target = Path(folder) / f"{name}-{_digest(name, fields, tokenizer)}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _save_model(_SHAPES[name], fields, workshop)
        if tokenizer:
            _save_tokenizer(fields["vocab_size"], workshop)
        _publish(workshop, target)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return target


def bench_llama(
    folder: Path,
    *,
    max_position_embeddings: int = 131072,
    kv_bytes_per_token: int = 8192,
    tokenizer: bool = False,
) -> Path:
    """Return the folder of a Llama that reads `kv_bytes_per_token` (float32) and computes little.

    What is left of its prefill is attention, whose multiplications follow from the KV bytes; wide
    heads, one query head a KV head, keep the rest (softmax, gathers) small. Two layers, so that
    the KV of a token depends on those before it. Float32: bfloat16 is slower on most CPUs.
    Raises ValueError unless `kv_bytes_per_token` is a positive multiple of 4096.
    """
    bytes_per_head = 2 * BENCH_LAYERS * BENCH_HEAD_DIM * FLOAT32_BYTES  # keys and values
    heads, rest = divmod(kv_bytes_per_token, bytes_per_head)
    if heads < 1 or rest:
        raise ValueError(
            f"kv_bytes_per_token={kv_bytes_per_token}: allowed are multiples of {bytes_per_head}"
        )
    return build_model(
        "bench_llama",
        folder,
        tokenizer=tokenizer,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_position_embeddings,
    )


def kv_bytes_per_token(folder: Path) -> int:
    """Return the float32 KV bytes a token of a built model whose layers all attend in full."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * head_dim * FLOAT32_BYTES)


def _digest(name: str, fields: Mapping[str, Any], tokenizer: bool) -> str:
    everything = [BUILDER_REVISION, name, WEIGHTS_SEED, WEIGHTS_STD, tokenizer, fields]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:12]


def _save_model(shape: _Shape, fields: Mapping[str, Any], folder: Path) -> None:
    # Here and not above: they take seconds to import, and callers that only want hints need none.
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(WEIGHTS_SEED)
    config = getattr(transformers, shape.config_class)(**fields)
    model = getattr(transformers, shape.model_class)(config)
    tied = model.get_input_embeddings().weight if config.tie_word_embeddings else None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=TIED_EMBEDDING_STD if parameter is tied else WEIGHTS_STD)
    model.save_pretrained(folder)


def _save_tokenizer(vocab_size: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]  # ids 0, 1, 2, as in the models' configs
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *letters]
    filler = [f"<unused{index}>" for index in range(vocab_size - len(words))]
    vocabulary = {word: index for index, word in enumerate([*words, *filler])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def _publish(workshop: Path, target: Path) -> None:
    try:
        os.rename(workshop, target)
    except OSError:
        if not target.is_dir():  # another process may have built the same model meanwhile
            raise
