"""The namespace as vLLM's own configuration gives it: content counts, paths do not."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub._revision import ResolvedRevision
from vllm.engine.arg_utils import EngineArgs

from bench.models import build_model
from kvpool.connectors.vllm.namespace import _commit, namespace_digest
from kvpool.errors import ConfigurationError
from kvpool.types import Geometry, GroupGeometry, GroupKind

pytestmark = pytest.mark.vllm

GEOMETRY = Geometry((GroupGeometry(GroupKind.FULL, 256, 4096),), 4, 4096)


@pytest.fixture
def model(models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a tiny model that a test may change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(build_model("llama", models_folder), tmp_path / "model"))


def configuration(model: Path, **options: Any) -> Any:
    arguments = {"dtype": "float32", "max_model_len": 4096, "skip_tokenizer_init": True} | options
    return EngineArgs(str(model), **arguments).create_engine_config()


def namespace(model: Path, **options: Any) -> bytes:
    return namespace_digest(configuration(model, **options), GEOMETRY)


def test_gate_09_a_copied_model_has_the_same_namespace(model: Path) -> None:
    copy = shutil.copytree(model, model.parent / "deeper" / "copy")
    assert namespace(model) == namespace(copy)


def test_gate_09_weights_swapped_in_place_have_another(model: Path) -> None:
    before = namespace(model)
    (file,) = model.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert namespace(model) != before


def check_what_counts(model: Path) -> None:
    plain = namespace(model)
    for options in (
        {"hf_overrides": {"rope_theta": 5e5}},
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"tensor_parallel_size": 2},
    ):
        assert namespace(model, **options) != plain, options


def test_gate_09_without_the_guard(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.connectors.vllm.namespace.json.dumps", lambda *_, **__: "")
    with pytest.raises(AssertionError):
        check_what_counts(model)


def test_gate_09_all_that_makes_bytes_comparable_counts(model: Path) -> None:
    check_what_counts(model)
    assert namespace(model) == namespace(model, max_model_len=2048)


def test_weights_that_nothing_tells_apart_are_never_found_again(
    model: Path,
) -> None:
    for file in model.glob("*.safetensors"):
        file.unlink()
    assert namespace(model) != namespace(model)
    one = configuration(model)
    ranks = [namespace_digest(pickle.loads(pickle.dumps(one)), GEOMETRY) for _ in range(2)]
    assert ranks[0] == ranks[1], "the ranks of one engine agree"
    assert namespace(model, load_format="dummy") == namespace(model, load_format="dummy")


def test_a_file_that_vanished_is_named(model: Path) -> None:
    (file,) = model.glob("*.safetensors")
    file.unlink()
    file.symlink_to(model / "nowhere")
    with pytest.raises(ConfigurationError, match=f"{file.name}.*can be read"):
        namespace(model)


def test_a_model_of_the_hub_is_known_by_its_commit() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"

    def model(revision: str | None, of_config: str | None, config_path: str | None = None) -> Any:
        config = SimpleNamespace(_commit_hash=of_config)
        return SimpleNamespace(revision=revision, hf_config=config, hf_config_path=config_path)

    resolved = ResolvedRevision(commit, "main")
    assert _commit(model(resolved, None)) == _commit(model(commit, None)) == commit
    assert _commit(model("main", commit)) == _commit(model(None, commit)) == commit
    assert _commit(model(None, commit, "another/repository")) is None
    assert _commit(model("main", None)) is None
