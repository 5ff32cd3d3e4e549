"""Prompt lengths at which such systems go wrong. Needs no vLLM."""

from __future__ import annotations


def prompt_lengths(block: int, chunk: int) -> list[int]:
    """Return the lengths at which off-by-one faults live, and some that windows slide over."""
    edges = {size + off for size in (block, chunk, 2 * chunk) for off in (-1, 0, 1)}
    return sorted(edges | {1000, 1793})
