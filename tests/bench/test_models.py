"""Tiny models: built once, the same each time, never left half-made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import models

pytest.importorskip("transformers")


def _weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_model_is_built_once(tmp_path: Path) -> None:
    first = models.build_model("llama", tmp_path)
    made_at = (first / "config.json").stat().st_mtime_ns
    assert models.build_model("llama", tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == made_at
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_equal_fields_give_equal_weights_and_other_fields_another_model(tmp_path: Path) -> None:
    here = models.build_model("qwen2", tmp_path / "a")
    there = models.build_model("qwen2", tmp_path / "b")
    assert here.name == there.name
    assert _weights(here) == _weights(there)
    other = models.build_model("qwen2", tmp_path / "a", num_hidden_layers=2)
    assert other != here
    assert json.loads((other / "config.json").read_text())["num_hidden_layers"] == 2


def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(models, "_publish", die)
        with pytest.raises(KeyboardInterrupt):
            models.build_model("llama", tmp_path)
    assert not list(tmp_path.iterdir())
    assert models.build_model("llama", tmp_path).is_dir()


def test_tied_embeddings_are_small_so_that_they_do_not_drown_the_kv(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tied = load_file(models.build_model("gemma3", tmp_path) / "model.safetensors")
    untied = load_file(models.build_model("llama", tmp_path) / "model.safetensors")
    assert tied["model.embed_tokens.weight"].std() == pytest.approx(0.01, rel=0.05)
    assert tied["model.layers.0.self_attn.q_proj.weight"].std() == pytest.approx(0.1, rel=0.05)
    assert untied["model.embed_tokens.weight"].std() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("size", [4096, 8192, 16384])
def test_the_bench_model_has_the_kv_that_was_asked_for(tmp_path: Path, size: int) -> None:
    folder = models.bench_llama(tmp_path, kv_bytes_per_token=size, max_position_embeddings=4096)
    assert models.kv_bytes_per_token(folder) == size
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 4096


@pytest.mark.parametrize("size", [0, -4096, 4095, 6144])
def test_other_sizes_are_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ValueError, match=f"kv_bytes_per_token={size}: allowed are multiples"):
        models.bench_llama(tmp_path, kv_bytes_per_token=size)


def test_an_unknown_name_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'lama': allowed are llama, qwen2"):
        models.build_model("lama", tmp_path)


def test_the_tokenizer_keeps_every_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = models.build_model("llama", tmp_path, tokenizer=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "A long context, größer als zuvor: \n\t{}"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < 600 and tokenizer.eos_token_id == 2
