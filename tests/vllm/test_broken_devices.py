"""The engine goes on serving, with right tokens, when a device breaks while it runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.process import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def check(answers: dict[str, Any]) -> None:
    assert answers["failures"] > 0, "nothing broke: the test has shown nothing"
    for answered in answers["rounds"]:
        assert answered == answers["before"]


@pytest.mark.parametrize("model", ["llama", "olmo3"])
def test_a_truncated_device_file(model: str, models_folder: Path, tmp_path: Path) -> None:
    check(
        run_scenario(
            "broken",
            **{
                "model": model,
                "models": models_folder,
                "devices": f"dram:8MiB,file:{tmp_path}/kvpool?size=256MiB",
                "broken-file": tmp_path / "kvpool" / "container.kvpool",
            },
        )
    )


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A block device over a file."""
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    backing = tmp_path / "backing"
    with backing.open("wb") as file:
        file.truncate(256 << 20)
    command = ["losetup", "--direct-io=on", "-f", "--show", str(backing)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no loop device to be had: {made.stderr.strip()}")
    device = made.stdout.strip()
    yield device, backing
    subprocess.run(["losetup", "-d", device], check=True)


def test_a_loop_device_that_loses_its_backing(
    loop_device: tuple[str, Path], models_folder: Path
) -> None:
    device, backing = loop_device
    check(
        run_scenario(
            "broken",
            **{
                "models": models_folder,
                "devices": f"dram:8MiB,block:{device}",
                "broken-file": backing,
            },
        )
    )
