"""The TTFT benchmark: refusals, arithmetic, and one real run at toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import ttft
from bench.ceilings import map_buffer
from bench.serve import CHUNK_BYTES, CONTAINER_MARGIN_BYTES, Answer, Traffic, stored_bytes
from kvpool.device_config import parse_devices
from kvpool.medium import FILE_NAME

ROOT = Path(__file__).parents[2]


def samples_of(pool_s: list[float], ceiling_s: list[float]) -> ttft.Samples:
    return ttft.Samples(
        computed=[Answer((1,), (-0.5,), 9.0, 9.0)],
        ttft_s=pool_s,
        in_engine_ttft_s=[0.1] * len(pool_s),
        pool_s=pool_s,
        in_engine_s=[0.1] * len(pool_s),
        ceiling_s=ceiling_s,
        traffic=[Traffic("dram", 100, 0.1), Traffic("file:/p", 50, 0.1)],
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--context", "2047"],
        ["--context", "131073"],
        ["--context", "8192", "--devices", "tape:1GiB"],
        ["--context", "8192", "--devices", "dram:8MiB"],
        ["--context", "8192", "--concurrency", "1,9"],
        ["--context", "8192", "--concurrency", "0"],
        ["--context", "8192", "--repeat", "0"],
        ["--context", "8192", "--emulate", "fast"],
        ["--context", "8192", "--emulate", "100,0"],
        ["--context", "8192", "--devices", "file:/no/such/folder/pool?size=1GiB"],
    ],
)
def test_bad_input_is_refused_with_one_line(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = ttft.main(words)
    except SystemExit as error:  # argparse
        code = int(error.code or 0)
    refusal = capsys.readouterr().err
    assert code == 2
    assert refusal.startswith(("ttft: ", "bench.ttft: "))
    assert refusal.count("\n") == 1


def test_overhead_is_paired_and_relative_to_the_devices_own_time() -> None:
    samples = samples_of([0.3, 0.5], [0.1, 0.2])
    assert samples.overhead_ratios == pytest.approx([2.0, 2.0])
    assert samples.bytes == 150


def test_rows_have_the_documented_keys() -> None:
    results = {
        "pool": samples_of([0.3, 0.5, 0.4], [0.1] * 3),
        "dram alone": samples_of([0.2], [0.1]),
        "pool, 4 at once": samples_of([0.2], [0.1]),
    }
    rows = {row["name"]: row for row in ttft.describe(results)}
    assert set(rows) == {
        "computed",
        "in-engine",
        "pool",
        "dram alone",
        "computed, 4 at once",
        "in-engine, 4 at once",
        "pool, 4 at once",
    }
    for row in rows.values():
        assert {"name", "ttft_s_median", "min", "max", "n", "bytes"} <= set(row)
    pool = rows["pool"]
    assert (pool["min"], pool["ttft_s_median"], pool["max"]) == (0.3, 0.4, 0.5)
    assert (pool["n"], pool["bytes"], rows["computed"]["bytes"]) == (3, 150, 0)


def test_a_device_alone_holds_the_whole_context() -> None:
    dram, block = parse_devices(["dram:64MiB", "block:/dev/nvme0n1"])
    assert ttft.alone(dram, 1 << 30).size_bytes == (1 << 30) + CONTAINER_MARGIN_BYTES
    assert ttft.alone(replace(dram, size_bytes=4 << 30), 1 << 30).size_bytes == 4 << 30
    assert ttft.alone(block, 1 << 30) == block


def test_private_files_are_apart_and_go_away(tmp_path: Path) -> None:
    given = ttft.short_names(parse_devices([f"file:{tmp_path}?size=64MiB", "dram:64MiB"]))
    with ttft.private_devices(given) as placed:
        folder = Path(placed["file"].path)
        assert folder.parent == tmp_path
        assert placed["dram"] == given["dram"]
        (folder / "container").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_ceiling_reads_what_each_device_delivered(tmp_path: Path) -> None:
    (file,) = parse_devices([f"file:{tmp_path}?size=64MiB"])
    (dram,) = parse_devices(["dram:64MiB"])
    room = map_buffer(ttft.READ_OFFSET_BYTES + 2 * CHUNK_BYTES)
    room.memory.tofile(tmp_path / FILE_NAME)
    devices = ttft.Devices({"dram": dram, "file": file})
    traffic = [Traffic("dram", CHUNK_BYTES, 0.0), Traffic("file", 2 * CHUNK_BYTES, 0.0)]
    assert devices.ceiling_s(traffic) > 0
    with pytest.raises(OSError, match="bytes at offset"):  # beyond its end: it really reads
        devices.ceiling_s([Traffic("file", 8 * CHUNK_BYTES, 0.0)])


def test_short_names_tell_devices_apart() -> None:
    strings = ["dram:64MiB", "block:/dev/loop0?size=1GiB", "block:/dev/loop1?size=1GiB"]
    assert list(ttft.short_names(parse_devices(strings))) == ["dram", "block loop0", "block loop1"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ttft_runs(tmp_path: Path) -> None:
    result, picture, pool = tmp_path / "ttft.json", tmp_path / "ttft.png", tmp_path / "pool"
    devices = f"dram:32MiB,file:{pool}?size=160MiB"
    words = ["--context", "2048", "--repeat", "2", "--concurrency", "2", "--devices", devices]
    done = subprocess.run(
        [sys.executable, "-m", "bench.ttft", *words, "--json", result, "--chart", picture],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(result.read_text())
    rows = {row["name"]: row for row in content["rows"]}
    assert {"computed", "in-engine", "pool", "dram alone", "file alone"} <= set(rows)
    assert rows["pool"]["n"] == rows["in-engine"]["n"] == 2
    assert rows["pool, 2 at once"]["n"] == 4
    for name in ("pool", "dram alone", "file alone", "pool, 2 at once"):
        assert rows[name]["bytes"] == stored_bytes(2048), name
    assert rows["pool"]["device_bytes"].keys() <= {"dram", "file"}
    assert content["tokens_equal"] and content["control_differs"]
    assert content["bytes_over_ceiling_s"] > 0
    assert isinstance(content["overhead_ratio"], float)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(pool.glob("ttft-*"))
