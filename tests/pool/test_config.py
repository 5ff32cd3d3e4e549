"""Configuration: every key is used, or refused with its name, its value and what is allowed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from kvpool.config import PLACEMENTS, VLLM_KEYS, default_devices, from_file, from_mapping
from kvpool.device_config import DeviceConfig, parse_device, parse_devices
from kvpool.errors import ConfigurationError
from tests.pool.machine import Machine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("dram:2GiB", DeviceConfig("dram", 2 * GIB)),
        ("dram:2GiB?numa=1", DeviceConfig("dram", 2 * GIB, numa=1)),
        ("dram:4MiB?threads=3&numa=0", DeviceConfig("dram", 4 << 20, numa=0, threads=3)),
        ("file:/mnt/a?size=200GB", DeviceConfig("file", 200 * 10**9, path="/mnt/a")),
        ("file:/mnt/a/?size=1GiB&depth=32", DeviceConfig("file", GIB, path="/mnt/a", depth=32)),
        (
            "file:/m/{rank}?size=1GiB&io=uring",
            DeviceConfig("file", GIB, path="/m/{rank}", io="uring"),
        ),
        ("block:/dev/nvme1n1", DeviceConfig("block", None, path="/dev/nvme1n1")),
        ("block:/dev/x?size=1TiB&numa=2", DeviceConfig("block", 1 << 40, path="/dev/x", numa=2)),
    ],
)
def test_device_strings(text: str, device: DeviceConfig) -> None:
    assert parse_device(text) == device
    assert parse_device(str(device)) == device


def test_names_are_labels() -> None:
    devices = ["dram:1GiB", "dram:1GiB?numa=1", "file:/mnt/{rank}?size=1GiB", "block:/dev/nvme1n1"]
    names = [device.name for device in parse_devices(devices)]
    assert names == ["dram", "dram:numa1", "file:/mnt/{rank}", "block:/dev/nvme1n1"]


def test_a_rank_has_its_own_path_and_share() -> None:
    device = parse_device("file:/mnt/nvme{rank}/kvpool?size=1GiB")
    assert device.per_rank and not parse_device("file:/mnt/a?size=1GiB").per_rank
    assert device.rank_path(3) == Path("/mnt/nvme3/kvpool")
    assert device.rank_size_bytes(4) == GIB // 4


REFUSED_DEVICES = [
    ("", "dram:SIZE"),
    ("dram", "dram:SIZE"),
    ("nvme:/dev/nvme0n1", "block:DEVICE"),
    ("drma:1GiB", "did you mean dram?"),
    ("dram:", "positive size"),
    ("dram:0", "positive size"),
    ("dram:-1GiB", "positive size"),
    ("dram:1MiB", "at least 2MiB"),
    ("dram:1GiB?size=1GiB", "options of dram are numa, threads"),
    ("dram:1GiB?threads=0", "an integer from 1 to"),
    ("dram:1GiB?numa=-1", "an integer from 0 to"),
    ("dram:1GiB?numa=x", "an integer from 0 to"),
    ("dram:1GiB?numa", "numa=value"),
    ("dram:1GiB?numa=0&numa=0", "each option once"),
    ("file:/mnt/a", "needs a size"),
    ("file:/mnt/a?size=0", "positive size"),
    ("file:/mnt/a?size=-1GiB", "positive size"),
    ("file:/mnt/a?size=1MiB", "at least 8MiB"),
    ("file:mnt/a?size=1GiB", "an absolute path"),
    ("file:?size=1GiB", "an absolute path"),
    ("file:/mnt/{host}?size=1GiB", "only {rank}"),
    ("file:/mnt/a?size=1GiB&dept=3", "did you mean depth?"),
    ("file:/mnt/a?size=1GiB&threads=3", "options of file are size, engines, numa, depth, io"),
    ("file:/mnt/a?size=1GiB&depth=0", "an integer from 1 to"),
    ("file:/mnt/a?size=1GiB&io=aio", "one of auto, uring, threads"),
    ("block:nvme1n1", "an absolute path"),
]


@pytest.mark.parametrize(("text", "allowed"), REFUSED_DEVICES)
def test_a_wrong_device_is_refused(text: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_mapping({"devices": [text]})
    assert caught.value.key.startswith("devices")
    assert repr(text) in str(caught.value)
    assert allowed in caught.value.allowed


@pytest.mark.parametrize(
    "devices",
    [
        ["dram:1GiB", "dram:2GiB"],
        ["dram:1GiB?numa=1", "dram:2GiB?numa=1"],
        ["file:/mnt/a?size=1GiB", "file:/mnt/a/?size=2GiB"],
        ["file:/mnt/a?size=1GiB", "file:/mnt/b/../a?size=2GiB"],
        ["file:/dev/x?size=1GiB", "block:/dev/x"],
    ],
)
def test_a_device_that_comes_twice_is_refused(devices: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_mapping({"devices": devices})
    assert repr(devices[1]) in str(caught.value)
    assert "each device once" in caught.value.allowed


REFUSED_KEYS: list[tuple[dict[str, Any], str, object, str]] = [
    ({"device": "dram:1GiB"}, "device", "dram:1GiB", "did you mean devices?"),
    ({"cpu_bytes_to_use": 1}, "cpu_bytes_to_use", 1, "known keys are devices"),
    ({"devices": []}, "devices", [], "a list of device strings"),
    ({"devices": "dram:1GiB,file:/a?size=1GiB"}, "devices", "dram:1GiB,", "without a comma"),
    ({"devices": [1]}, "devices", [1], "a list of device strings"),
    ({"devices": {"dram": "1GiB"}}, "devices", "1GiB", "a list of device strings"),
    ({"placement": "serail"}, "placement", "serail", "one of " + ", ".join(PLACEMENTS)),
    ({"placement": 1}, "placement", 1, "one of "),
    ({"blocks_per_chunk": 0}, "blocks_per_chunk", 0, "an integer from 1 to 4096"),
    ({"blocks_per_chunk": "8"}, "blocks_per_chunk", "8", "an integer from 1 to 4096"),
    ({"blocks_per_chunk": True}, "blocks_per_chunk", True, "an integer from 1 to 4096"),
    ({"offload_prompt_only": "yes"}, "offload_prompt_only", "yes", "true or false"),
    ({"cost_model": 1}, "cost_model", 1, "true or false"),
    ({"cost_mode": True}, "cost_mode", True, "did you mean cost_model?"),
    ({"config": 3}, "config", 3, "the path of a TOML file"),
    ({"config": "/nowhere.toml"}, "config", "/nowhere.toml", "a readable file"),
    ({"config": "x", "devices": ["dram:1GiB"]}, "config", "x", "not both"),
]


@pytest.mark.parametrize(("extra", "key", "value", "allowed"), REFUSED_KEYS)
def test_a_wrong_key_is_refused(
    extra: dict[str, Any], key: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_mapping(extra)
    assert caught.value.key == key
    assert repr(value).strip("'") in str(caught.value)
    assert allowed in caught.value.allowed
    assert "\n" not in str(caught.value)


def test_every_key_is_used() -> None:
    vllm: dict[str, object] = {
        "spec_name": "KVPoolSpec",
        "spec_module_path": "kvpool.spec",
        "block_size": 64,
        "self_describing_kv_events": True,
    }
    assert tuple(vllm) == VLLM_KEYS
    pool = from_mapping(
        {
            "devices": "dram:1GiB",
            "blocks_per_chunk": 4,
            "placement": "link_aware",
            "offload_prompt_only": True,
            "cost_model": False,
            **vllm,
        }
    )
    assert pool.devices == (DeviceConfig("dram", GIB),)
    assert (pool.blocks_per_chunk, pool.placement) == (4, "link_aware")
    assert pool.offload_prompt_only is True
    assert pool.cost_model is False
    assert pool.vllm == vllm
    assert pickle.loads(pickle.dumps(pool)) == pool


def test_defaults() -> None:
    pool = from_mapping({"devices": "dram:1GiB", "blocks_per_chunk": None})
    assert (pool.blocks_per_chunk, pool.placement) == (None, "proportional")
    assert pool.offload_prompt_only is False
    assert pool.cost_model is True
    assert not pool.vllm


# ---- TOML -----------------------------------------------------------------------------------


def write(folder: Path, text: str) -> str:
    path = folder / "kvpool.toml"
    path.write_text(text)
    return str(path)


def test_a_file_has_the_same_keys(tmp_path: Path) -> None:
    path = write(tmp_path, 'devices = ["dram:1GiB"]\nplacement = "serial"\nblocks_per_chunk = 2\n')
    pool = from_mapping({"config": path, "spec_name": "x", "offload_prompt_only": True})
    assert pool.devices == (DeviceConfig("dram", GIB),)
    assert (pool.placement, pool.blocks_per_chunk) == ("serial", 2)
    assert pool.offload_prompt_only is True
    assert pool.vllm == {"spec_name": "x"}
    assert from_file(path).placement == "serial"


@pytest.mark.parametrize(
    ("text", "key", "allowed"),
    [
        ("device = 1", "device", "did you mean devices?"),
        ("devices = ", "config", "valid TOML"),
        ('config = "b.toml"', "config", "no other file"),
        ('spec_name = "x"', "spec_name", "where vLLM reads it"),
        ('placement = "serial"', "placement", "once"),
        ("blocks_per_chunk = 0", "blocks_per_chunk", "an integer from 1 to 4096"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, key: str, allowed: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        from_mapping({"config": path, "placement": "proportional"})
    assert caught.value.key.endswith(key)
    assert allowed in caught.value.allowed
    assert "\n" not in str(caught.value)


def test_one_value_in_both_places_is_no_conflict(tmp_path: Path) -> None:
    path = write(tmp_path, 'devices = ["dram:1GiB"]\nblocks_per_chunk = 2\n')
    assert from_mapping({"config": path, "blocks_per_chunk": 2}).blocks_per_chunk == 2


# ---- defaults of a machine ------------------------------------------------------------------


def test_a_tenth_of_memory_is_split_over_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    host = Machine(tmp_path, memory_bytes=80 * GIB, nodes=2).host
    assert default_devices(host) == (
        DeviceConfig("dram", 4 * GIB, numa=0),
        DeviceConfig("dram", 4 * GIB, numa=1),
    )
    assert from_mapping({}, host).devices == default_devices(host)


def test_one_node_needs_no_binding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    host = Machine(tmp_path, memory_bytes=80 * GIB).host
    assert default_devices(host) == (DeviceConfig("dram", 8 * GIB),)


def test_a_control_group_limits_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    machine = Machine(tmp_path, memory_bytes=80 * GIB)
    machine.limit_memory(20 * GIB, used=GIB)
    assert default_devices(machine.host) == (DeviceConfig("dram", 2 * GIB),)


def test_the_cache_folder_gets_a_file_where_half_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    facts = os.statvfs(cache)
    fits = facts.f_bavail * facts.f_frsize >= 17 * GIB
    expected = [DeviceConfig("file", 8 * GIB, path=str(cache / "kvpool"))] if fits else []
    host = Machine(tmp_path, memory_bytes=80 * GIB).host
    assert list(default_devices(host)[1:]) == expected
