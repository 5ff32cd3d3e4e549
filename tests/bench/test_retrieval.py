"""The retrieval benchmark at toy size: right content, its own control, and what it writes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import ceilings, emulate, figures, retrieval
from bench.emulate import MIB, EmulationError
from bench.geometry import MODEL_NAMES, LayerGroup, PagedMemory, lay_out, model_geometry
from bench.rig import BenchmarkError, Rig, Stretch, make_stretches, store
from kvpool.device_config import parse_devices
from kvpool.types import GroupKind

SLOT_BYTES = 4 * MIB
ROW_KEYS = {"name", "unit", "n", "min", "median", "max", "ceiling", "ratio", "falsified_by"}
TOP_KEYS = {"pooled_over_ceiling", "finish_spread", "share_error_max", "cpu_seconds_per_gb"}
DEVICE_KEYS = {
    "name", "bytes", "seconds", "bandwidth_bytes_s", "ceiling_bytes_s", "ratio",
    "kib_per_request", "share", "expected_share", "page_type", "io_path", "fio_bytes_s",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "probe").write_bytes(b"")
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip(f"{tmp_path}: no O_DIRECT on this file system")
    return tmp_path


@pytest.fixture
def rig(folder: Path) -> Iterator[Rig]:
    model = model_geometry("llama-3.1-8b")
    devices = parse_devices(["dram:16MiB", f"file:{folder / 'pool'}?size=64MiB"])
    made = Rig(devices, model, make_stretches(model, 12 * SLOT_BYTES))
    yield made
    made.close()


def test_corrupted_chunks_are_reported_and_others_compared(rig: Rig) -> None:
    stretches = make_stretches(rig.model, 12 * SLOT_BYTES)
    places = store(rig, stretches)
    assert set(places[0].device.tolist()) == {0, 1}  # both hold some
    one = retrieval.retrieve(rig, stretches)
    assert (one.failed, one.wrong_blocks) == (set(), 0)
    assert sum(one.bytes) == 12 * SLOT_BYTES
    assert all(seconds > 0 for seconds in one.seconds)

    corrupted = retrieval.corrupt(rig, stretches[0], one.places[0])
    assert len(corrupted) == 2
    two = retrieval.retrieve(rig, stretches)
    assert two.failed == corrupted
    assert two.wrong_blocks == 0
    with pytest.raises(BenchmarkError, match="2 chunks failed"):
        retrieval._require_right(two)


def test_control_works_where_later_chunks_hang_on_the_corrupted_one(folder: Path) -> None:
    model = model_geometry("gpt-oss-20b")
    stretches = make_stretches(model, 6 * model.geometry.slot_bytes)
    assert [stretch.group for stretch in stretches] == [0, 1]
    rig = Rig(parse_devices([f"file:{folder / 'pool'}?size=64MiB"]), model, stretches)
    try:
        control = retrieval.run_control(rig, stretches, store(rig, stretches))
        assert control == {"corrupted_chunks": 1, "reported_chunks": 1}
        assert len(retrieval.retrieve(rig, stretches).failed) > 1  # given up: a plain miss
    finally:
        rig.close()


def test_other_content_than_was_stored_is_noticed(rig: Rig) -> None:
    stretches = make_stretches(rig.model, 12 * SLOT_BYTES)
    store(rig, stretches)
    first = stretches[0]
    elsewhere = [Stretch(first.group, first.first + 1, first.keys, first.positions)]
    one = retrieval.retrieve(rig, elsewhere)
    assert one.wrong_blocks == 12 * rig.model.geometry.blocks_per_chunk
    with pytest.raises(BenchmarkError, match="24 blocks have other content"):
        retrieval._require_right(one)


def test_what_finds_no_room_is_refused(rig: Rig) -> None:
    all_ = make_stretches(rig.model, 24 * SLOT_BYTES)[0]
    second = Stretch(0, 12, all_.keys[12:], all_.positions[12:])
    with pytest.raises(BenchmarkError, match="no room for"):
        store(rig, [Stretch(0, 0, all_.keys[:12], all_.positions[:12]), second])


def test_command_line_writes_figures_and_chart(folder: Path) -> None:
    arguments = ["--dram", "16MiB", "--devices", f"file:{folder / 'pool'}?size=64MiB"]
    arguments += ["--bytes", "40MiB", "--repeat", "2"]
    arguments += ["--json", str(folder / "out.json"), "--chart", str(folder / "out.png")]
    assert retrieval.main(arguments) == 0
    content = json.loads((folder / "out.json").read_text())
    assert content.keys() >= TOP_KEYS
    assert content["control"] == {"corrupted_chunks": 2, "reported_chunks": 2}
    assert [device["name"] for device in content["devices"]] == ["dram", f"file:{folder}/pool"]
    for device in content["devices"]:
        assert device.keys() >= DEVICE_KEYS
    for key in ("share", "expected_share"):
        assert sum(device[key] for device in content["devices"]) == pytest.approx(1)
    assert content["rows"][0]["name"] == "pooled"
    for row in content["rows"]:
        assert row.keys() == ROW_KEYS
        assert row["n"] == 2
        assert row["min"] <= row["median"] <= row["max"]
    assert content["host"]["cores"] >= 1
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")


def _why_not_emulate() -> str:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("losetup") is None:
        return "not root on Linux with losetup"
    try:
        emulate.find_controller()
    except EmulationError as error:
        return str(error)
    return "" if os.path.exists("/dev/loop-control") else "no loop devices"


@pytest.mark.skipif(bool(_why_not_emulate()), reason=f"no emulated SSDs: {_why_not_emulate()}")
def test_emulated_ssds_are_pooled(folder: Path) -> None:
    arguments = ["--emulate", "400,200", "--folder", str(folder), "--bytes", "48MiB"]
    assert retrieval.main([*arguments, "--repeat", "1", "--json", str(folder / "out.json")]) == 0
    content = json.loads((folder / "out.json").read_text())
    assert [d["name"].startswith("block:/dev/loop") for d in content["devices"]] == [True] * 2
    assert all(device["kib_per_request"] > 64 for device in content["devices"])
    assert emulate.attached_devices(folder) == []


def test_no_device_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        retrieval.main([])
    assert "no devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [("llama-3.1-8b", 128 << 10), ("qwen3-30b-a3b", 96 << 10), ("gpt-oss-20b", 24 << 10)],
)
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_models_at_128k_have_their_true_size(
    name: str, bytes_per_token: int, block_tokens: int
) -> None:
    model = model_geometry(name, block_tokens)
    stretches = make_stretches(model, None)
    shape = model.geometry.groups[0]
    full = [stretch for stretch in stretches if stretch.group == 0]
    positions = [position for stretch in full for position in stretch.positions]
    assert positions == list(range(shape.chunk_tokens, 128 * 1024 + 1, shape.chunk_tokens))
    assert shape.chunk_bytes == shape.chunk_tokens * bytes_per_token
    assert 3 * MIB <= model.geometry.slot_bytes <= 8 * MIB
    keys = [key for stretch in stretches for key in stretch.keys]
    assert len(set(keys)) == len(keys)
    assert all(len(s.keys) * shape.chunk_bytes <= 2 << 30 for s in stretches)


def test_sliding_windows_are_read_from_their_end() -> None:
    model = model_geometry("gpt-oss-20b", 16)
    window = model.geometry.groups[1]
    assert window.kind is GroupKind.WINDOW
    last = make_stretches(model, None)[-1]
    assert (last.group, len(last.keys)) == (1, 1)  # 127 tokens lie in one chunk of 176
    assert last.positions[0] + window.chunk_tokens > 128 * 1024
    small = lay_out("small", (LayerGroup(1, 1, 8), LayerGroup(1, 1, 8, window_tokens=1000)), 16)
    assert small.geometry.groups[1].window_chunks == 1


def test_unknown_models_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=f"'gpt-5'.*{MODEL_NAMES[0]}"):
        model_geometry("gpt-5")


def test_pages_tell_every_mix_up() -> None:
    model = model_geometry("gpt-oss-20b", 16)
    memory = PagedMemory(model, blocks=3)
    try:
        memory.fill(0, 1, 7)
        assert memory.holds(0, 1, 7)
        assert not memory.holds(0, 1, 8)
        memory.tensors[1][0][2] = memory.tensors[0][0][1]
        assert not memory.holds(1, 2, 7)
        memory.tensors[0][11][1][-1] ^= 1
        assert not memory.holds(0, 1, 7)
        memory.fill(0, 1, 7)
        memory.poison()
        assert not memory.holds(0, 1, 7)
    finally:
        memory.close()


def test_ceilings_move_all_bytes(folder: Path) -> None:
    content = np.random.default_rng(3).integers(0, 256, 3 * MIB, np.uint8)
    (folder / "file").write_bytes(content.tobytes())
    source, destination = ceilings.map_buffer(2 * MIB), ceilings.map_buffer(2 * MIB)
    assert source.address % (2 * MIB) == 0
    source.memory[:] = content[: 2 * MIB]
    pieces = [(offset, MIB) for offset in range(0, 3 * MIB, MIB)]
    works: list[ceilings.ReadWork | ceilings.CopyWork] = [
        ceilings.ReadWork(folder / "file", pieces, depth=2),
        ceilings.CopyWork(source.memory, destination.memory, 5 * MIB + 4096, threads=2),
    ]
    read, copied = ceilings.measure(works)
    assert (read.bytes, copied.bytes) == (3 * MIB, 5 * MIB + 4096)
    assert np.array_equal(destination.memory, source.memory)
    beyond = ceilings.ReadWork(folder / "file", [(2 * MIB, 2 * MIB)])
    with pytest.raises(OSError, match="of 2097152 bytes at offset 2097152"):
        ceilings.measure([beyond])


def test_figures_pair_each_sample_with_its_ceiling(tmp_path: Path) -> None:
    figure = figures.Figure("pooled", "GB/s", [1.0, 3.0, 2.0], [2.0, 3.0, 8.0])
    row = figure.row()
    assert (row["n"], row["min"], row["median"], row["max"]) == (3, 1.0, 2.0, 3.0)
    assert row["ratio"] == {"n": 3, "min": 0.25, "median": 0.5, "max": 1.0}
    assert figures.Figure("CPU", "s", [1.0]).row()["ratio"] is None
    figures.write_json(tmp_path / "out.json", {"rows": [row]})
    with pytest.raises(TypeError):
        figures.write_json(tmp_path / "out.json", {"rows": object()})
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == [row]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
