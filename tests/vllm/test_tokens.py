"""Tokens with the pool equal tokens without it, for every kind of KV group; a wrong block shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.models import MODEL_HINTS
from tests.vllm.lengths import prompt_lengths
from tests.vllm.process import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# model, blocks_per_chunk, tensor parallel size
CASES = [
    ("llama", 4, 1),
    ("mistral_hybrid", 4, 1),
    ("olmo3", 2, 1),
    ("falcon_h1", 1, 1),
    ("llama", 2, 2),
    ("olmo3", 4, 2),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-tp{case[2]}")
def answers(
    request: pytest.FixtureRequest, models_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one model answers without and with the pool, in DRAM and in a file."""
    model, blocks_per_chunk, tensor_parallel_size = request.param
    folder = tmp_path_factory.mktemp("pool")
    options = {
        "model": model,
        "models": models_folder,
        "blocks-per-chunk": blocks_per_chunk,
        "tensor-parallel-size": tensor_parallel_size,
    }
    pool = run_scenario("pool", devices=f"dram:192MiB,file:{folder}/kvpool?size=256MiB", **options)
    return {"plain": run_scenario("plain", **options), "pool": pool, "case": request.param}


def test_first_answers_are_vllms_own(answers: dict[str, Any]) -> None:
    assert answers["pool"]["first"]["alone"] == answers["plain"]["alone"]


def test_gate_01_answers_from_the_pool_are_equal_at_every_length(answers: dict[str, Any]) -> None:
    assert answers["pool"]["alone"] == answers["plain"]["alone"]
    assert answers["pool"]["checksum_failures"] == 0


def test_answers_of_several_prompts_at_once_are_equal(answers: dict[str, Any]) -> None:
    assert answers["pool"]["together"] == answers["plain"]["together"]
    assert answers["pool"]["together_hits"] > 0


def test_every_prompt_beyond_a_chunk_is_hit(answers: dict[str, Any]) -> None:
    model, blocks_per_chunk, _ = answers["case"]
    block = MODEL_HINTS[model]["block_tokens"]
    chunk = block * blocks_per_chunk
    for length, hits in zip(prompt_lengths(block, chunk), answers["pool"]["hits"], strict=True):
        # A prompt of exactly one chunk: with a window its last token's chunk has to be computed.
        if length != chunk:
            assert (hits > 0) == (length > chunk), length


def test_a_chat_is_equal_and_its_own_answers_are_hit(answers: dict[str, Any]) -> None:
    assert answers["pool"]["first"]["chat"] == answers["plain"]["chat"]
    hits = answers["pool"]["chat_hits"]
    assert hits[0] == 0
    assert 0 < hits[1] <= hits[2]
    # With windows vLLM offers the chunks of an answer at fixed boundaries only.
    if MODEL_HINTS[answers["case"][0]]["kv_groups"] == 1:
        assert hits[1] < hits[2]


def test_gate_01_one_wrong_block_changes_the_answer_in_every_group(answers: dict[str, Any]) -> None:
    if answers["case"][2] > 1:
        pytest.skip("the control reaches into the worker, which is another process under TP")
    for group, wrong in enumerate(answers["pool"]["wrong_block"]):
        assert wrong != answers["plain"]["alone"], f"group {group}: a wrong block went unseen"
