"""The command `kvpool`: measure devices, make and look into containers, check a configuration.

Exit status: 0 done, 1 refused or failed (one line on stderr says why), 2 wrong usage. `inspect` and
`verify`: 0 all right, 1 `verify` found damage, 2 not a container, or it cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from rich.table import Table

from kvpool import config, environment, native, probe
from kvpool.container import Container
from kvpool.device_config import MIN_DRAM_BYTES, DeviceConfig, parse_device, parse_devices
from kvpool.devices.base import ProbeTarget
from kvpool.devices.dram import DramDevice
from kvpool.devices.flash import add_to_engine, probe_target
from kvpool.errors import ConfigurationError, KVPoolError
from kvpool.host import Host
from kvpool.inspection import ContainerView, Inspection, LeaseView, Report
from kvpool.medium import FILE_NAME, existing_parent
from kvpool.types import Profile
from kvpool.units import format_bytes

_PROBE_BYTES = 1 << 30  # of a container or module that is made only to be measured
_PROFILE_COLUMNS = ("read GB/s", "together GB/s", "write GB/s", "latency us")
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
    if device.kind == "block" or os.path.lexists(path / FILE_NAME):
        return Container.open(path, create=False)
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
    for name in (*_PROFILE_COLUMNS, "share %"):
        table.add_column(name, justify="right")
    for row in rows:
        profile = Profile(**{name: row[name] for name in Profile.__dataclass_fields__})
        table.add_row(
            escape(row["device"]),
            row["pages"],
            row["io_path"],
            *_profile_cells(profile),
            f"{row['share'] * 100:.1f}",
        )
    return table


def _profile_cells(profile: Profile) -> tuple[str, ...]:
    """Return the cells of _PROFILE_COLUMNS."""
    return (
        f"{profile.read_bandwidth_bytes_s / 1e9:.2f}",
        f"{profile.together_read_bandwidth_bytes_s / 1e9:.2f}",
        f"{profile.write_bandwidth_bytes_s / 1e9:.2f}",
        f"{profile.read_latency_s * 1e6:.0f}",
    )


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


# ---- inspect, verify ------------------------------------------------------------------------


@contextlib.contextmanager
def _looking_into(what: str) -> Iterator[Inspection]:
    """Open a container to look at it; ends with status 2 where that cannot be done."""
    try:
        with Inspection(what) as opened:
            yield opened
    except (KVPoolError, OSError) as error:
        click.echo(f"kvpool: {' '.join(str(error).split())}", err=True)
        click.get_current_context().exit(2)


@main.command("inspect")
@click.argument("path", metavar="PATH|DEVICE")
@click.option("--json", "as_json", is_flag=True, help="Write what is there as JSON.")
def inspect_command(path: str, as_json: bool) -> None:
    """Show what a container holds: leases, chunks, and what its devices were measured to do.

    PATH is a folder, a container's file or a block device, DEVICE file:FOLDER or block:DEVICE. It
    is only read, and may be in use.
    """
    with _looking_into(path) as opened:
        view = opened.view()
    if as_json:
        click.echo(json.dumps(_view_as_dict(view), indent=2))
        return
    console = _console()
    size, probe = format_bytes(view.size), format_bytes(view.probe_bytes)
    console.print(f"[bold]{escape(str(view.path))}[/]: {size}, format {view.format_version}")
    console.print(f"uuid {view.uuid}, made {_when(view.created_ns)}")
    console.print(f"probe area of {probe} at {format_bytes(view.probe_offset)}")
    for part in view.damaged:
        console.print(f"damaged: {part}")
    if view.leases:
        console.print(_lease_table(view.leases))
    else:
        console.print("no leases")
    if view.profiles is not None:
        console.print(f"measured {_when(view.profiles.measured_ns)}, by device of that pool")
        console.print(_stored_profile_table(view.profiles.profiles))


def _view_as_dict(view: ContainerView) -> dict[str, Any]:
    leases = []
    for lease in view.leases:
        entry = asdict(lease.entry) | {"namespace": lease.entry.namespace.hex()}
        del entry["tag"]
        counts = {name: getattr(lease, name) for name in ("chunks", "fill", "in_use")}
        counts |= {"stale_headers": lease.stale_headers, "damaged_headers": lease.damaged_headers}
        leases.append(entry | counts | {"unused_s": _age_s(lease.entry.used_ns)})
    profiles = None
    if view.profiles is not None:
        signature = view.profiles.signature.hex()
        profiles = asdict(view.profiles) | {"signature": signature}
    named = {name: getattr(view, name) for name in ContainerView.__dataclass_fields__}
    return named | {"path": str(view.path), "leases": leases, "profiles": profiles}


def _lease_table(leases: Sequence[LeaseView]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("namespace", "rank", "owner", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("slots", "of", "chunks by KV group", "full %", "stale", "damaged", "epoch"):
        table.add_column(name, justify="right")
    table.add_column("made", no_wrap=True)
    table.add_column("last used", no_wrap=True)
    for lease in leases:
        entry = lease.entry
        table.add_row(
            entry.namespace.hex()[:12],
            str(entry.rank),
            escape(entry.owner if entry.owner.isprintable() else repr(entry.owner)),
            f"in use, pid {entry.pid}" if lease.in_use else "idle",
            str(entry.slots),
            format_bytes(entry.slot_bytes),
            ", ".join(f"{group}: {count}" for group, count in lease.chunks.items()) or "none",
            f"{lease.fill * 100:.1f}",
            str(lease.stale_headers),
            str(lease.damaged_headers),
            str(entry.epoch),
            _when(entry.created_ns),
            _when(entry.used_ns),
        )
    return table


def _stored_profile_table(profiles: Sequence[Profile]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("device", *_PROFILE_COLUMNS):
        table.add_column(name, justify="right")
    for index, profile in enumerate(profiles):
        table.add_row(str(index), *_profile_cells(profile))
    return table


@main.command("verify")
@click.argument("path", metavar="PATH|DEVICE")
@click.option("--json", "as_json", is_flag=True, help="Write what was found as JSON.")
def verify_command(path: str, as_json: bool) -> None:
    """Read all chunks of a container and compare each with its checksum.

    PATH and DEVICE as for `kvpool inspect`. It is only read, and may be in use: chunks that are
    replaced meanwhile are counted apart. Status 1 where something is damaged.
    """
    with _looking_into(path) as opened, _progress_bar() as bar:
        task = bar.add_task("reading", total=None)
        report = opened.verify(lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        click.echo(json.dumps(_report_as_dict(report), indent=2))
    else:
        _print_report(report)
    click.get_current_context().exit(0 if report.all_right else 1)


def _progress_bar() -> Progress:
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


_COUNTS = ("good", "damaged", "damaged_headers", "stale", "in_use")


def _report_as_dict(report: Report) -> dict[str, Any]:
    leases = [
        {
            "namespace": lease.entry.namespace.hex(),
            "rank": lease.entry.rank,
            "owner": lease.entry.owner,
            **{name: getattr(lease, name) for name in (*_COUNTS, "damaged_slots")},
        }
        for lease in report.leases
    ]
    facts = {"path": str(report.path), "all_right": report.all_right, "damaged": report.damaged}
    return facts | {"leases": leases}


def _print_report(report: Report) -> None:
    console = _console()
    table = Table(box=None, pad_edge=False)
    for name in ("namespace", "rank", "owner"):
        table.add_column(name, no_wrap=True)
    for name in _COUNTS:
        table.add_column(name.replace("_", " "), justify="right")
    for lease in report.leases:
        owner = lease.entry.owner
        table.add_row(
            lease.entry.namespace.hex()[:12],
            str(lease.entry.rank),
            escape(owner if owner.isprintable() else repr(owner)),
            *(str(getattr(lease, name)) for name in _COUNTS),
        )
    for part in report.damaged:
        console.print(f"damaged: {part}")
    console.print(table if report.leases else "no leases")
    console.print(f"{escape(str(report.path))}: {'all right' if report.all_right else 'damaged'}")


def _age_s(time_ns: int) -> float:
    return max(0.0, (time.time_ns() - time_ns) / 1e9)


def _when(time_ns: int) -> str:
    """Return a point in time and how long ago that is."""
    try:
        stamp = time.strftime("%Y-%m-%d %H:%M", time.localtime(time_ns / 1e9))
    except (OverflowError, OSError, ValueError):
        return "at no known time"
    age_s = _age_s(time_ns)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= seconds:
            return f"{stamp} ({age_s // seconds:.0f} {unit} ago)"
    return f"{stamp} (now)"


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
    lines.append(f"backup = {json.dumps(pool.backup)}")
    lines.append(f"cost_model = {json.dumps(pool.cost_model)}")
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
