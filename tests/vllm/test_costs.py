"""A hit that is not worth its load is declined, or taken in part, and the tokens stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.process import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def slow(models_folder: Path) -> dict[str, dict[str, Any]]:
    """The scenario's answers by what the cost model is: on, off, or without a pool."""
    return {
        choice: run_scenario(
            "slow", **{"models": models_folder, "devices": "dram:128MiB", "cost-model": choice}
        )
        for choice in ("on", "off", "without")
    }


def test_gate_12_a_slow_hit_is_declined(slow: dict[str, dict[str, Any]]) -> None:
    found = slow["on"]
    assert found["decisions"] == {"whole": 0, "part": 0, "declined": 1}
    assert found["declined_tokens"] > 0
    assert found["hit_tokens"] == 0


def test_gate_12_without_the_guard_it_is_taken(slow: dict[str, dict[str, Any]]) -> None:
    found = slow["off"]
    assert found["hit_tokens"] == slow["on"]["declined_tokens"]
    assert set(found["decisions"].values()) == {0}


def test_the_tokens_are_those_without_the_pool(slow: dict[str, dict[str, Any]]) -> None:
    expected = slow["without"]["first"]
    for found in slow.values():
        assert (found["first"], found["again"]) == (expected, expected)


@pytest.mark.parametrize("model", ["llama", "mistral_hybrid", "gemma3", "falcon_h1"])
def test_a_hit_in_part(model: str, models_folder: Path) -> None:
    options: dict[str, Any] = {"model": model, "models": models_folder, "devices": "dram:256MiB"}
    if model == "falcon_h1":
        options["blocks-per-chunk"] = 1
    found = run_scenario("part", **options)
    for answers in found["alone"]:
        assert answers == found["before"]
    half, nothing = found["hit_tokens"]
    assert nothing == 0
    assert found[f"decisions_{1 << 20}"]["declined"] > 0
    assert half > 0
    assert found["decisions_2"]["part"] > 0
    assert any(answers != found["before"] for answers in found["wrong_block"]), (
        "the pages that were loaded did not matter"
    )
