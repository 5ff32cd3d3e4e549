"""Sizes and rates as people write them: "2GiB", "200GB", "4096"."""

from __future__ import annotations

import re
from fractions import Fraction

from kvpool.errors import ConfigurationError

_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_UNITS = {name.lower(): factor for name, factor in {"B": 1, **_BINARY, **_DECIMAL}.items()}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)[ ]?([A-Za-z]*)", re.ASCII)
_ALLOWED = 'a positive size such as "2GiB", "200GB" or "4096" (bytes)'
_LIMIT_BYTES = 1 << 62


def parse_bytes(text: str | int, key: str) -> int:
    """Return the bytes that `text`, the value of `key`, stands for; at least 1.

    Raises ConfigurationError where it is no size, has an unknown unit or is not positive.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ConfigurationError(key, text, _ALLOWED)
    match = _SIZE.fullmatch(str(text).strip())
    factor = _UNITS.get((match[2] or "B").lower()) if match else None
    if match is None or factor is None:
        raise ConfigurationError(key, text, _ALLOWED)
    value = Fraction(match[1]) * factor
    if value.denominator != 1 and factor == 1:
        raise ConfigurationError(key, text, _ALLOWED)
    if not 1 <= value < _LIMIT_BYTES:
        raise ConfigurationError(key, text, f"{_ALLOWED}, below {format_bytes(_LIMIT_BYTES)}")
    return int(value)


def format_bytes(size: int) -> str:
    """Return `size` as a size that `parse_bytes` reads: exact where short, else to 3 digits."""
    name, factor = "B", 1
    for unit, unit_bytes in _BINARY.items():
        if abs(size) >= unit_bytes:
            name, factor = unit, unit_bytes
    if factor == 1:
        return f"{size}B"
    value = size / factor
    return f"{size // factor}{name}" if size % factor == 0 else f"{value:.2f}{name}"


def format_rate(bytes_s: float) -> str:
    """Return a rate in decimal GB/s, the unit of data sheets; MB/s where it is below 0.1 GB/s."""
    return f"{bytes_s / 1e9:.2f} GB/s" if bytes_s >= 1e8 else f"{bytes_s / 1e6:.1f} MB/s"
