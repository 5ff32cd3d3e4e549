"""Sizes: what is read, what is refused, and that what is written is read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigurationError
from kvpool.units import format_bytes, format_rate, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("1B", 1),
        ("2GiB", 2 << 30),
        ("2 GiB", 2 << 30),
        (" 512MiB ", 512 << 20),
        ("200GB", 200 * 10**9),
        ("1.5TiB", 3 << 39),
        ("1kB", 1000),
        ("2gib", 2 << 30),
        ("0.1KiB", 102),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text, "size") == size


@pytest.mark.parametrize(
    "text",
    ["", "0", "0GiB", "-1GiB", "GiB", "2G", "2 gigabytes", "1.5", "1e9", "2GiBs", "٢GiB", "inf"],
)
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_bytes(text, "devices.size")
    assert caught.value.key == "devices.size"
    assert repr(text) in str(caught.value)
    assert "2GiB" in caught.value.allowed


@pytest.mark.parametrize("value", [True, None, 1.5, ["2GiB"], -4096, 1 << 70])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigurationError):
        parse_bytes(value, "size")  # type: ignore[arg-type]


@given(st.integers(1, 1 << 60))
def test_a_formatted_size_is_read_back_to_three_digits(size: int) -> None:
    assert parse_bytes(format_bytes(size), "size") == pytest.approx(size, rel=0.005)


@given(st.integers(1, 1023), st.sampled_from([1, 1 << 10, 1 << 20, 1 << 30, 1 << 40]))
def test_a_whole_number_of_units_is_exact(count: int, unit: int) -> None:
    assert parse_bytes(format_bytes(count * unit), "size") == count * unit


def test_rates() -> None:
    assert format_rate(3.21e9) == "3.21 GB/s"
    assert format_rate(52.4e6) == "52.4 MB/s"
