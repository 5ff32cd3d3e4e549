"""CRC32C against a table implementation and the published check values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.native import copy_crc32c, crc32c


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


TABLE = _table()


def reference(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),  # RFC 3720, appendix B.4, and the usual check string
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected == reference(data)


@given(st.integers(0, 20000), st.integers(0, 63), st.integers(0, 63), st.integers(0, 2**32 - 1))
def test_any_length_alignment_and_start(length: int, skip: int, shift: int, crc: int) -> None:
    source = np.random.default_rng(length).integers(0, 256, skip + length, dtype=np.uint8)[skip:]
    expected = reference(source.tobytes(), crc)
    assert crc32c(source, crc) == expected
    room = np.zeros(shift + length + 64, np.uint8)
    assert copy_crc32c(room[shift : shift + length], source) == reference(source.tobytes())
    assert np.array_equal(room[shift : shift + length], source)
    assert not room[:shift].any() and not room[shift + length :].any()


@pytest.mark.parametrize("length", [256 << 10, (256 << 10) + 4097, 3 << 20])
@pytest.mark.parametrize("shift", [0, 1, 32])
def test_copies_that_bypass_the_caches(length: int, shift: int) -> None:
    source = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    room = np.zeros(shift + length + 64, np.uint8)
    assert copy_crc32c(room[shift : shift + length], source) == crc32c(source)
    assert np.array_equal(room[shift : shift + length], source)
    assert not room[:shift].any() and not room[shift + length :].any()


@given(st.binary(max_size=3000), st.integers(0, 3000))
def test_runs_on(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


def test_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="cannot copy 8 bytes to 9"):
        copy_crc32c(np.zeros(9, np.uint8), np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match="not contiguous"):
        crc32c(np.zeros((4, 4), np.uint8)[:, 1])
