"""Runs a scenario in a process of its own and returns its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600


def run_scenario(name: str, module: str = "scenario", **options: Any) -> dict[str, Any]:
    """Run `tests.vllm.MODULE NAME --option value ...`; fail with its output's tail."""
    command = [sys.executable, "-m", f"tests.vllm.{module}", name]
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    ranks = int(options.get("tensor-parallel-size", 1))
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(ranks)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
        raise AssertionError(f"scenario {name} {options} ended with {done.returncode}:\n{tail}")
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers
