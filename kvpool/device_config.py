"""Device strings: one device of the pool each, typed and frozen.

    dram:2GiB?numa=1                          a module of host memory
    file:/mnt/nvme0/kvpool?size=200GiB        a folder, made by kvpool where its parent exists
    block:/dev/nvme1n1?size=1TiB              a whole block device where size is left out

Sizes are totals of the host, over all ranks. `{rank}` in a path stands for the rank.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

from kvpool.errors import ConfigurationError
from kvpool.units import format_bytes, parse_bytes

IO_PATHS = ("auto", "uring", "threads")
MIN_DRAM_BYTES = 2 << 20  # one huge page
MIN_FLASH_BYTES = 8 << 20  # metadata, the smallest probe area and some room for chunks
DEFAULT_DEPTH = 8
_MAX_DEPTH, _MAX_THREADS, _MAX_NUMA, _MAX_DEVICES = 256, 256, 1023, 64
_MAX_ENGINES = 64
_SYNTAX = "dram:SIZE, file:FOLDER?size=SIZE or block:DEVICE[?size=SIZE], then &option=value"
_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dram": ("numa", "threads"),
        "file": ("size", "engines", "numa", "depth", "io"),
        "block": ("size", "engines", "numa", "depth", "io"),
    }
)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """One device of the pool, as its string says.

    `size_bytes` is the host's total over all ranks and `engines`; None: the whole block device.
    `path` is the folder (file) or the device node (block), absolute, perhaps with `{rank}`.
    """

    kind: str
    size_bytes: int | None
    path: str = ""
    engines: int = 1
    numa: int | None = None
    depth: int = DEFAULT_DEPTH
    io: str = "auto"
    threads: int | None = None

    @property
    def name(self) -> str:
        """The device's label: its kind and address, unique in a pool, the same on all ranks."""
        if self.kind == "dram":
            return "dram" if self.numa is None else f"dram:numa{self.numa}"
        return f"{self.kind}:{self.path}"

    @property
    def per_rank(self) -> bool:
        """Whether each rank has a file or block device of its own."""
        return "{rank}" in self.path

    def rank_path(self, rank: int) -> Path:
        """Return the path of `rank`."""
        return Path(self.path.replace("{rank}", str(rank)))

    def rank_size_bytes(self, ranks: int) -> int | None:
        """Return one rank's share of `size_bytes`."""
        return None if self.size_bytes is None else self.size_bytes // ranks

    def __str__(self) -> str:
        """The device string, with every option that is not its default."""
        size = None if self.size_bytes is None else _exact_size(self.size_bytes)
        address = size if self.kind == "dram" else self.path
        options = [] if self.kind == "dram" or size is None else [f"size={size}"]
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _OPTIONS[self.kind] and item.name != "size" and value != item.default:
                options.append(f"{item.name}={value}")
        return f"{self.kind}:{address}" + ("?" + "&".join(options) if options else "")


def parse_devices(value: object, key: str = "devices") -> tuple[DeviceConfig, ...]:
    """Return the devices of a list of device strings, or of a single one without a comma."""
    allowed = f"a list of device strings, or one string without a comma; each {_SYNTAX}"
    texts = [value] if isinstance(value, str) and "," not in value else value
    if not isinstance(texts, (list, tuple)) or not texts:
        raise ConfigurationError(key, value, allowed)
    if not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(key, value, allowed)
    if len(texts) > _MAX_DEVICES:
        raise ConfigurationError(key, f"{len(texts)} devices", f"at most {_MAX_DEVICES}")
    devices = tuple(parse_device(text, key) for text in texts)
    seen: dict[str, str] = {}
    for device, text in zip(devices, texts, strict=True):
        address = device.path or device.name
        if address in seen:
            first = seen[address]
            raise ConfigurationError(key, text, f"each device once; {first!r} is the same device")
        seen[address] = text
    return devices


def parse_device(text: str, key: str = "devices") -> DeviceConfig:
    """Return the device that one device string describes. Raises ConfigurationError."""
    kind, colon, rest = text.strip().partition(":")
    if not colon or kind not in _OPTIONS:
        hint = did_you_mean(kind, _OPTIONS)
        raise ConfigurationError(key, text, f"{_SYNTAX}{hint}")
    address, _, query = rest.partition("?")
    options = _parse_options(text, kind, query, key)
    if kind == "dram":
        size: int | None = parse_bytes(address, f"{key}: {text!r}: size")
        path = ""
    else:
        path = _parse_path(text, address, key)
        size = parse_bytes(options["size"], f"{key}: {text!r}: size") if "size" in options else None
        if size is None and kind == "file":
            raise ConfigurationError(key, text, f"needs a size, as in file:{address}?size=200GiB")
    least = MIN_DRAM_BYTES if kind == "dram" else MIN_FLASH_BYTES
    if size is not None and size < least:
        raise ConfigurationError(f"{key}: {text!r}: size", size, f"at least {format_bytes(least)}")
    return DeviceConfig(
        kind=kind,
        size_bytes=size,
        path=path,
        engines=_number(text, options, "engines", 1, _MAX_ENGINES, key) or 1,
        numa=_number(text, options, "numa", 0, _MAX_NUMA, key),
        depth=_number(text, options, "depth", 1, _MAX_DEPTH, key) or DEFAULT_DEPTH,
        io=_choice(text, options, "io", IO_PATHS, key),
        threads=_number(text, options, "threads", 1, _MAX_THREADS, key),
    )


def _parse_options(text: str, kind: str, query: str, key: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in query.split("&") if query else []:
        name, equals, value = part.partition("=")
        if name not in _OPTIONS[kind]:
            hint = did_you_mean(name, _OPTIONS[kind])
            allowed = f"options of {kind} are {', '.join(_OPTIONS[kind])}{hint}"
            raise ConfigurationError(f"{key}: {text!r}: {name}", value, allowed)
        if not equals or name in options:
            raise ConfigurationError(key, text, f"each option once, as {name}=value")
        options[name] = value
    return options


def _parse_path(text: str, address: str, key: str) -> str:
    bare = address.replace("{rank}", "")
    if not address.startswith("/") or "{" in bare or "}" in bare or "\0" in bare:
        raise ConfigurationError(key, text, "an absolute path, in which only {rank} is replaced")
    return os.path.normpath(address)


def _number(
    text: str, options: Mapping[str, str], name: str, least: int, most: int, key: str
) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and least <= int(value) <= most):
        allowed = f"an integer from {least} to {most}"
        raise ConfigurationError(f"{key}: {text!r}: {name}", value, allowed)
    return int(value)


def _choice(
    text: str, options: Mapping[str, str], name: str, allowed: tuple[str, ...], key: str
) -> str:
    value = options.get(name, allowed[0])
    if value not in allowed:
        raise ConfigurationError(f"{key}: {text!r}: {name}", value, "one of " + ", ".join(allowed))
    return value


def _exact_size(size: int) -> str:
    text = format_bytes(size)
    return text if parse_bytes(text, "size") == size else str(size)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" where `word` is close to a known one, else ""."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
