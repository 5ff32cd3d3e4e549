"""Typed, frozen configuration from vLLM's `kv_connector_extra_config` or a TOML file.

Every key is used or refused by name, with what is allowed. `kvpool.device_config` reads device
strings, `kvpool.environment` checks them against the machine.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvpool import environment
from kvpool.device_config import MIN_DRAM_BYTES, DeviceConfig, did_you_mean, parse_devices
from kvpool.errors import ConfigurationError
from kvpool.host import Host
from kvpool.medium import free_bytes

PLACEMENTS = ("proportional", "link_aware", "serial")
# Read by vLLM itself out of the same mapping; the pool carries them along untouched.
VLLM_KEYS = ("spec_name", "spec_module_path", "block_size", "self_describing_kv_events")
_KEYS = (
    "devices",
    "config",
    "blocks_per_chunk",
    "placement",
    "offload_prompt_only",
    "backup",
    "cost_model",
    *VLLM_KEYS,
)

MAX_BLOCKS_PER_CHUNK = 4096
DEFAULT_FILE_BYTES = 8 << 30
DEFAULT_MEMORY_PER_CENT = 10


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """A pool's configuration. `vllm` holds the keys that are vLLM's own, as they were given.

    `backup`: chunks in memory get a copy on a file or block device, so that a restart finds them.
    `cost_model`: a hit that would take longer to load than to compute is taken in part or declined.
    """

    devices: tuple[DeviceConfig, ...]
    blocks_per_chunk: int | None = None
    placement: str = "proportional"
    offload_prompt_only: bool = False
    backup: bool = True
    cost_model: bool = True
    vllm: Mapping[str, object] = field(default_factory=dict)


def from_mapping(extra: Mapping[str, object], host: Host | None = None) -> PoolConfig:
    """Return the configuration that `extra` (kv_connector_extra_config) describes.

    Without devices, defaults that fit `host` are taken. Raises ConfigurationError.
    """
    _refuse_unknown("", extra)
    given = {key: value for key, value in extra.items() if value is not None}
    if "config" in given:
        given = _with_file(given, given.pop("config"))
    if "devices" in given:
        devices = parse_devices(given["devices"])
    else:
        devices = default_devices(host or Host())
    return PoolConfig(
        devices=devices,
        blocks_per_chunk=_blocks_per_chunk(given.get("blocks_per_chunk")),
        placement=_placement(given.get("placement", "proportional")),
        offload_prompt_only=_boolean(given, "offload_prompt_only", False),
        backup=_boolean(given, "backup", True),
        cost_model=_boolean(given, "cost_model", True),
        vllm={key: given[key] for key in VLLM_KEYS if key in given},
    )


def from_file(path: str | Path, host: Host | None = None) -> PoolConfig:
    """Return the configuration in the TOML file at `path`. Raises ConfigurationError."""
    return from_mapping({"config": str(path)}, host)


def check_environment(config: PoolConfig, host: Host | None = None, ranks: int = 1) -> None:
    """Raise ConfigurationError for the first thing that stands in the way of `config` here.

    Changes nothing on disk and allocates nothing; `environment.problems` lists all of them.
    """
    for problem in environment.problems(config.devices, host or Host(), ranks):
        raise problem


def default_devices(host: Host) -> tuple[DeviceConfig, ...]:
    """Return the devices of a pool that names none.

    A tenth of the machine's memory, split over its NUMA nodes, and a file of 8 GiB below the
    user's cache folder where that folder exists and half of its free space stays free.
    """
    nodes = host.numa_nodes()
    share = host.memory_total_bytes() * DEFAULT_MEMORY_PER_CENT // 100 // len(nodes)
    share = max(share // MIN_DRAM_BYTES * MIN_DRAM_BYTES, MIN_DRAM_BYTES)
    devices = [DeviceConfig("dram", share, numa=node if len(nodes) > 1 else None) for node in nodes]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    if cache.is_dir() and free_bytes(cache / "kvpool") >= DEFAULT_FILE_BYTES * 2:
        devices.append(DeviceConfig("file", DEFAULT_FILE_BYTES, path=str(cache / "kvpool")))
    return tuple(devices)


def _with_file(given: dict[str, object], file: object) -> dict[str, object]:
    """Return `given` completed by what the TOML file `file` says; a key
    may be in both with one value only."""
    if not isinstance(file, str):
        raise ConfigurationError("config", file, "the path of a TOML file")
    if "devices" in given:
        raise ConfigurationError("config", file, "either `config` or `devices`, not both")
    try:
        content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError("config", file, f"a readable file: {error.strerror}") from None
    except ValueError as error:  # of TOML or of UTF-8
        raise ConfigurationError("config", file, f"valid TOML: {error}") from None
    _refuse_unknown(f"{file}: ", content)
    for key, value in content.items():
        if key == "config":
            raise ConfigurationError(f"{file}: config", value, "a file names no other file")
        if key in VLLM_KEYS:
            allowed = "in kv_connector_extra_config, where vLLM reads it"
            raise ConfigurationError(f"{file}: {key}", value, allowed)
        if given.get(key, value) != value:
            raise ConfigurationError(key, given[key], f"once; {file} says {value!r}")
    return {**given, **content}


def _blocks_per_chunk(value: object) -> int | None:
    if value is None or (type(value) is int and 1 <= value <= MAX_BLOCKS_PER_CHUNK):
        return value
    raise ConfigurationError(
        "blocks_per_chunk", value, f"an integer from 1 to {MAX_BLOCKS_PER_CHUNK}, or absent"
    )


def _placement(value: object) -> str:
    if isinstance(value, str) and value in PLACEMENTS:
        return value
    raise ConfigurationError("placement", value, "one of " + ", ".join(PLACEMENTS))


def _boolean(given: Mapping[str, object], key: str, default: bool) -> bool:
    value = given.get(key, default)
    if isinstance(value, bool):
        return value
    raise ConfigurationError(key, value, "true or false")


def _refuse_unknown(where: str, given: Mapping[str, object]) -> None:
    for key, value in given.items():
        if key not in _KEYS:
            allowed = f"known keys are {', '.join(_KEYS)}{did_you_mean(key, _KEYS)}"
            raise ConfigurationError(f"{where}{key}", value, allowed)
