"""The command `kvpool`: measure devices, make containers, check a configuration.

Exit status: 0 done, 1 refused or failed (one line on stderr says why), 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvpool import config, environment, native, probe
from kvpool.container import Container
from kvpool.device_config import MIN_DRAM_BYTES, DeviceConfig, parse_device, parse_devices
from kvpool.devices.base import ProbeTarget
from kvpool.devices.dram import DramDevice
from kvpool.devices.flash import add_to_engine, probe_target
from kvpool.errors import ConfigurationError, ContainerError, KVPoolError
from kvpool.host import Host
from kvpool.medium import FILE_NAME, existing_parent
from kvpool.types import Profile
from kvpool.units import format_bytes

_PROBE_BYTES = 1 << 30  # of a container or module that is made only to be measured
_UNBOUNDED_WIDTH = 1000  # of a table that no terminal bounds


class _Commands(click.Group):
    """Ends with status 1 and one line where a command is refused or fails."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KVPoolError, OSError) as error:
            click.echo(f"kvpool: {' '.join(str(error).split())}", err=True)
            ctx.exit(1)


@click.group(cls=_Commands)
def main() -> None:
    """KV cache offloading to all DRAM modules and SSDs of a host at once."""


# ---- probe ----------------------------------------------------------------------------------


@main.command("probe")
@click.argument("devices", nargs=-1, required=True, metavar="DEVICE...")
@click.option("--json", "as_json", is_flag=True, help="Write the figures as JSON.")
def probe_command(devices: tuple[str, ...], as_json: bool) -> None:
    """Measure devices, alone and all together.

    DEVICE is a device string such as dram:2GiB, file:/mnt/nvme0/kvpool?size=200GiB or
    block:/dev/nvme1n1. A folder without a container is measured in a temporary file; a block
    device needs a container (kvpool format).
    """
    configs = parse_devices(list(devices))
    _refuse_problems(configs)
    rows = _measure(configs)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _console().print(_probe_table(rows))


def _measure(configs: Sequence[DeviceConfig]) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as opened:
        # Devices are closed after the engine, which is entered last of all that is closed.
        engine = native.Engine(probe.MAX_TRANSFER_BYTES, store_buffers=2)
        targets, facts = [], []
        try:
            for device in configs:
                target, pages, io_path = _probe_target(device, engine, opened)
                targets.append(target)
                facts.append({"device": device.name, "pages": pages, "io_path": io_path})
            slot_bytes = min(_slot_bytes(device) for device in configs)
            profiles = probe.measure_targets(engine, targets, slot_bytes, anew=True)
        finally:
            engine.close()
    total = sum(profile.read_bandwidth_bytes_s for profile in profiles)
    return [
        {**fact, **asdict(profile), "share": profile.read_bandwidth_bytes_s / total}
        for fact, profile in zip(facts, profiles, strict=True)
    ]


def _slot_bytes(device: DeviceConfig) -> int:
    """Return the slots that a device is measured with: small modules have small ones."""
    if device.kind != "dram":
        return probe.MAX_TRANSFER_BYTES
    whole_pages = (device.size_bytes or 0) // MIN_DRAM_BYTES * MIN_DRAM_BYTES
    return min(whole_pages, probe.MAX_TRANSFER_BYTES)


def _probe_target(
    device: DeviceConfig, engine: native.Engine, opened: contextlib.ExitStack
) -> tuple[ProbeTarget, str, str]:
    """Return what is measured, its pages and its I/O path."""
    if device.kind == "dram":
        device = replace(device, size_bytes=min(device.size_bytes or 0, _PROBE_BYTES // 2))
        module = DramDevice(device, engine, 1, _slot_bytes(device))
        opened.callback(module.close)
        return module.probe_target, module.page_type.value, module.io_path
    container = _container_to_probe(device)
    opened.callback(container.close)
    index = add_to_engine(device, engine, container)
    target = probe_target(device, engine, container, index)
    return target, engine.staging_page_type.value, engine.io_path(index)


def _container_to_probe(device: DeviceConfig) -> Container:
    """Open the device's container, or one in a file that has no name any more."""
    path = device.rank_path(0)
    if device.kind == "block" or (path / FILE_NAME).exists():
        try:
            return Container.open(path, create=False)
        except ContainerError as error:
            if device.kind == "file":
                raise
            advice = f"`kvpool format {device}` makes one"
            raise ContainerError(f"{error}; {advice}") from None
    folder = Path(tempfile.mkdtemp(prefix=".kvpool-probe-", dir=existing_parent(path)))
    try:
        container = Container.open(folder, min(device.size_bytes or 0, _PROBE_BYTES))
        container.path.unlink()
        return container
    finally:
        shutil.rmtree(folder)


def _probe_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("device", no_wrap=True)
    table.add_column("pages")
    table.add_column("I/O path")
    for name in ("read GB/s", "together GB/s", "write GB/s", "latency us", "share %"):
        table.add_column(name, justify="right")
    for row in rows:
        profile = Profile(**{name: row[name] for name in Profile.__dataclass_fields__})
        table.add_row(
            row["device"],
            row["pages"],
            row["io_path"],
            f"{profile.read_bandwidth_bytes_s / 1e9:.2f}",
            f"{profile.together_read_bandwidth_bytes_s / 1e9:.2f}",
            f"{profile.write_bandwidth_bytes_s / 1e9:.2f}",
            f"{profile.read_latency_s * 1e6:.0f}",
            f"{row['share'] * 100:.1f}",
        )
    return table


# ---- format ---------------------------------------------------------------------------------


@main.command("format")
@click.argument("device", metavar="DEVICE")
@click.option("--force", is_flag=True, help="Overwrite what kvpool did not write, too.")
def format_command(device: str, force: bool) -> None:
    """Write an empty container on a block device or in a folder.

    What a container holds is dropped. A device that is mounted or in use is always refused.
    """
    chosen = parse_device(device, "DEVICE")
    if chosen.kind == "dram" or chosen.per_rank:
        raise ConfigurationError("DEVICE", device, "file: or block:, with a path without {rank}")
    path = chosen.rank_path(0)
    if chosen.kind == "block" and not path.is_block_device():
        raise ConfigurationError("DEVICE", device, "the path of a block device")
    if chosen.kind == "file" and path.is_block_device():
        raise ConfigurationError("DEVICE", device, "the path of a folder")
    Container.format(path, chosen.size_bytes, force=force)
    with contextlib.closing(Container.open(path, create=False)) as container:
        click.echo(f"{chosen.name}: an empty container of {format_bytes(container.size)}")


# ---- check ----------------------------------------------------------------------------------


@main.command("check")
@click.argument("what", nargs=-1, metavar="[CONFIG.toml | DEVICE...]")
def check_command(what: tuple[str, ...]) -> None:
    """Check a configuration against this machine, and show it with its defaults.

    Without arguments the defaults of this machine are checked. Nothing is changed.
    """
    if len(what) == 1 and what[0].endswith(".toml"):
        pool = config.from_file(what[0])
    else:
        pool = config.from_mapping({"devices": list(what)} if what else {})
    click.echo(_as_toml(pool))
    _refuse_problems(pool.devices)


def _as_toml(pool: config.PoolConfig) -> str:
    lines = [f"placement = {json.dumps(pool.placement)}"]
    if pool.blocks_per_chunk is not None:
        lines.append(f"blocks_per_chunk = {pool.blocks_per_chunk}")
    lines.append(f"offload_prompt_only = {json.dumps(pool.offload_prompt_only)}")
    devices = [f"    {json.dumps(str(device))}," for device in pool.devices]
    return "\n".join([*lines, "devices = [", *devices, "]"])


def _refuse_problems(devices: Sequence[DeviceConfig]) -> None:
    found = list(environment.problems(devices, Host(), ranks=1))
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise KVPoolError(f"{found[0]}{more}")


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_UNBOUNDED_WIDTH)


if __name__ == "__main__":
    main()
