"""Loaded pages hold the bytes that were stored, also where tokens cannot tell (MLA on a CPU)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.process import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("model", ["deepseek_v2", "gptoss"])
def test_loaded_pages_equal_stored_pages(model: str, models_folder: Path, tmp_path: Path) -> None:
    found = run_scenario(
        "page_bytes",
        model=model,
        models=models_folder,
        devices=f"dram:32MiB,file:{tmp_path}/kvpool?size=128MiB",
    )
    assert found["stored"] > 10
    assert found["equal"] > 10
    assert found["different"] == 0
