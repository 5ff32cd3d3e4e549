"""A bad pool configuration ends vLLM's start with one clear line, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.process import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# Configuration -> what the one line has to say.
CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"device": "dram:1GiB"}, ["device", "devices"]),
    ({"devices": ["dram:lots"]}, ["devices", "lots", "GiB"]),
    ({"devices": ["file:/no/such/folder/kvpool?size=64MiB"]}, ["/no/such/folder"]),
    ({"devices": ["dram:900TiB"]}, ["900TiB", "at most"]),
    ({"devices": ["dram:64MiB"], "blocks_per_chunk": 0}, ["blocks_per_chunk", "0"]),
    ({"devices": ["dram:64MiB"], "placement": "fast"}, ["placement", "fast", "proportional"]),
]


def test_bad_configurations(models_folder: Path) -> None:
    configurations = json.dumps([configuration for configuration, _ in CASES])
    answer = run_scenario("refused", **{"models": models_folder, "extra-configs": configurations})
    for (configuration, words), message in zip(CASES, answer["messages"], strict=True):
        assert len(message.splitlines()) == 1, message
        for word in words:
            assert word in message, configuration
