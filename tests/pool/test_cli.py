"""The command `kvpool`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvpool import config, layout, probe
from kvpool.cli import main
from kvpool.container import Container
from kvpool.layout import CREATING, Superblock
from tests.pool.loop import loop_device, needs_loop_devices

SIZE = 16 << 20


def kvpool(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(result: Result, text: str) -> None:
    """Status 1 and one line on stderr that holds `text`."""
    assert result.exit_code == 1
    assert result.stderr.startswith("kvpool: ") and text in result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WRITE_S", "READ_S", "TOGETHER_S"):
        monkeypatch.setattr(probe, name, 0.02)


def test_wrong_usage() -> None:
    assert kvpool("probe").exit_code == 2
    assert kvpool("format").exit_code == 2
    assert kvpool("prob").exit_code == 2
    assert kvpool("format", "--forse", "file:/a?size=1GiB").exit_code == 2


# ---- probe ----------------------------------------------------------------------------------


def test_probe_measures_and_leaves_nothing_behind(tmp_path: Path, quick: None) -> None:
    devices = ["dram:8MiB", f"file:{tmp_path}/a?size=16MiB", f"file:{tmp_path}?size=16MiB"]
    result = kvpool("probe", *devices)
    assert result.exit_code == 0, result.output
    for text in ("read GB/s", "together", "latency us", "share %", "dram", f"file:{tmp_path}/a"):
        assert text in result.stdout
    assert len(result.stdout.splitlines()) == 1 + len(devices)
    assert list(tmp_path.iterdir()) == []


def test_probe_as_json(tmp_path: Path, quick: None) -> None:
    result = kvpool("probe", "--json", "dram:8MiB", f"file:{tmp_path}/a?size=16MiB&io=threads")
    module, medium = json.loads(result.stdout)
    assert (module["device"], module["io_path"]) == ("dram", "copy")
    assert (medium["device"], medium["io_path"]) == (f"file:{tmp_path}/a", "threads")
    assert module["share"] + medium["share"] == pytest.approx(1)
    expected = module["read_bandwidth_bytes_s"] / medium["read_bandwidth_bytes_s"]
    assert module["share"] / medium["share"] == pytest.approx(expected)


def test_probe_of_a_container_keeps_what_it_holds(tmp_path: Path, quick: None) -> None:
    container = Container.open(tmp_path / "a", SIZE)
    container.acquire(bytes(32), 0, "0", 10, 4096)
    for _ in range(2):  # in use, then idle
        result = kvpool("probe", f"file:{tmp_path}/a?size=16MiB")
        assert result.exit_code == 0, result.output
        container.close()
        container = Container.open(tmp_path / "a", create=False)
        assert len(container.leases()) == 1 and container.read_profiles() is not None
    container.close()


def test_probe_refuses(tmp_path: Path) -> None:
    refused(kvpool("probe", "dram"), "devices='dram'")
    refused(kvpool("probe", f"file:{tmp_path}/none/a?size=16MiB"), "must exist")
    refused(kvpool("probe", f"file:{tmp_path}/a?size=1PiB"), "free on its file system")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [0, 4096, SIZE - 4096])
def test_probe_of_a_container_that_is_not_whole_says_how_to_go_on(
    tmp_path: Path, left: int
) -> None:
    device = f"file:{tmp_path}/a?size=16MiB"
    assert kvpool("format", device).exit_code == 0
    if left == 4096:  # its creation was cut short
        marker = Superblock(CREATING, 0, bytes(16), SIZE, layout.probe_bytes(SIZE), 0)
        (tmp_path / "a/container.kvpool").write_bytes(layout.encode_superblock(marker))
    os.truncate(tmp_path / "a/container.kvpool", left)
    refused(kvpool("probe", device), f"`kvpool format file:{tmp_path}/a")


def test_probe_of_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "container.kvpool")
    refused(kvpool("probe", f"file:{tmp_path}?size=16MiB"), "is a FIFO")
    (tmp_path / "container.kvpool").unlink()
    (tmp_path / "container.kvpool").mkdir()
    refused(kvpool("probe", f"file:{tmp_path}?size=16MiB"), "is a folder")


@needs_loop_devices
def test_probe_of_a_block_device_needs_a_container(tmp_path: Path, quick: None) -> None:
    with loop_device(tmp_path / "disk", SIZE) as device:
        refused(kvpool("probe", f"block:{device}"), f"`kvpool format block:{device}`")
        assert not any((tmp_path / "disk").read_bytes())
        assert kvpool("format", f"block:{device}").exit_code == 0
        assert kvpool("probe", f"block:{device}").exit_code == 0


# ---- format ---------------------------------------------------------------------------------


def test_format_makes_an_empty_container(tmp_path: Path) -> None:
    device = f"file:{tmp_path}/a?size=16MiB"
    result = kvpool("format", device)
    assert result.exit_code == 0 and "16MiB" in result.stdout
    container = Container.open(tmp_path / "a")
    container.acquire(bytes(32), 0, "0", 10, 4096)
    refused(kvpool("format", "--force", device), "in use")
    container.close()
    assert kvpool("format", device).exit_code == 0
    container = Container.open(tmp_path / "a")
    assert container.leases() == []
    container.close()


def test_format_refuses_what_is_not_ours(tmp_path: Path) -> None:
    file = tmp_path / "container.kvpool"
    file.write_bytes(b"precious")
    device = f"file:{tmp_path}?size=16MiB"
    refused(kvpool("format", device), "did not write")
    assert file.read_bytes() == b"precious"
    assert kvpool("format", "--force", device).exit_code == 0


@pytest.mark.parametrize("device", ["dram:1GiB", "file:/tmp/{rank}?size=1GiB", "block:/dev/null"])
def test_format_refuses_what_it_cannot_format(device: str) -> None:
    refused(kvpool("format", device), repr(device))


@needs_loop_devices
def test_format_never_touches_a_mounted_device(tmp_path: Path) -> None:
    with loop_device(tmp_path / "disk", SIZE) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        refused(kvpool("format", f"block:{device}"), "--force")
        (tmp_path / "mnt").mkdir()
        subprocess.run(["mount", device, tmp_path / "mnt"], check=True)
        try:
            refused(kvpool("format", "--force", f"block:{device}"), "mounted at")
        finally:
            subprocess.run(["umount", tmp_path / "mnt"], check=True)
        assert kvpool("format", "--force", f"block:{device}").exit_code == 0


# ---- check ----------------------------------------------------------------------------------


def test_check_shows_a_configuration_that_can_be_read_back(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text(f'devices = ["dram:4MiB", "file:{tmp_path}/a?size=16MiB&depth=4"]\n')
    result = kvpool("check", file)
    assert result.exit_code == 0, result.output
    shown = tmp_path / "shown.toml"
    shown.write_text(result.stdout)
    assert config.from_file(shown) == config.from_file(file)
    assert not (tmp_path / "a").exists()


def test_check_of_devices_and_of_the_defaults(tmp_path: Path) -> None:
    assert kvpool("check", "dram:4MiB", f"file:{tmp_path}/a?size=16MiB").exit_code == 0
    assert "dram:" in kvpool("check").stdout


def test_check_refuses(tmp_path: Path) -> None:
    refused(kvpool("check", tmp_path / "none.toml"), "a readable file")
    (tmp_path / "a.toml").write_text("device = 1\n")
    refused(kvpool("check", tmp_path / "a.toml"), "did you mean devices?")
    result = kvpool("check", "dram:4PiB", "file:/none/a?size=16MiB")
    refused(result, "(and 1 more)")
    assert "4PiB" in result.stdout


def test_as_a_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvpool.cli", "check", "dram:4PiB"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr and answer.stderr.count("\n") == 1


def test_probe_takes_the_smallest_modules(quick: None) -> None:
    for size in ("2MiB", "3MiB"):
        (module,) = json.loads(kvpool("probe", f"dram:{size}", "--json").stdout)
        assert module["read_bandwidth_bytes_s"] > 0
