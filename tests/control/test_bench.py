"""The benchmark runs; its figures are not looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import control


def test_the_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "control.json"
    sizes = ["--held", "40,160", "--prefix", "32", "--repeat", "3"]
    control.main([*sizes, "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["held"], row["prefix"], row["n"]) for row in rows] == [(40, 32, 3), (160, 32, 3)]
    for row in rows:
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["bytes_a_chunk"] > 0
    assert "160" in capsys.readouterr().out
