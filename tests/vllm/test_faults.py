"""Faults that would show in other requests' answers, or end the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.process import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_bytes_that_do_not_verify_spoil_nobody(models_folder: Path, tmp_path: Path) -> None:
    answers = run_scenario(
        "corrupted",
        **{
            "models": models_folder,
            "devices": f"file:{tmp_path}/kvpool?size=64MiB",
            "broken-file": tmp_path / "kvpool" / "container.kvpool",
            "failure-policy": "fail",
        },
    )
    assert answers["failed"] != answers["before"], "nothing failed: the test has shown nothing"
    assert answers["after"] == answers["before"]


def test_a_reset_of_running_requests(models_folder: Path) -> None:
    answers = run_scenario("reset_running", models=models_folder, devices="dram:64MiB")
    assert answers["hits"] > 0
    assert answers["after"] == answers["before"]
