"""Shaped devices: no faster than told, and hardly slower. Times are the engine's own.

That a device is not faster is exact. That it is not slower depends on the machine being free at
the moment, so the best of a few tries counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvpool.native import EVENT_DONE, KIND_LOAD, KIND_STORE
from tests.native.rig import KINDS, MIB, Rig

RATE = 100 * MIB
LATENCY_US = 20_000
TRIES = 5
LARGE: dict[str, Any] = dict(
    slot_bytes=MIB, lengths=(32768,) * 8, blocks=4, blocks_per_chunk=4, slots=4
)

parametrise = pytest.mark.parametrize("kind", ["nil", *KINDS])


def _seconds(rig: Rig, kind: int, count: int) -> float:
    """From submission to the last event, of `count` chunks of 1 MiB."""
    done = rig.run([rig.op(kind, tag, tag % 4) for tag in range(count)])
    assert {int(event["result"]) for event in done} == {0}
    return max(float(event["nanoseconds"]) for event in done) / 1e9


def _best(measure: Callable[[], float], floor: float, enough: float) -> float:
    """The first measurement that is no more than `enough`, else the smallest; none is < `floor`."""
    best = float("inf")
    for _ in range(TRIES):
        measured = measure()
        assert measured >= floor, "faster than its shape"
        best = min(best, measured)
        if best <= enough:
            break
    return best


def _check(measure: Callable[[], float], expected: float, tolerance: float) -> None:
    enough = expected * (1 + tolerance)
    assert _best(measure, expected * 0.999, enough) <= enough


@parametrise
@pytest.mark.parametrize("operation", [KIND_LOAD, KIND_STORE])
def test_rate(kind: str, operation: int, tmp_path: Path) -> None:
    name = "read_bytes_s" if operation == KIND_LOAD else "write_bytes_s"
    with Rig(kind, tmp_path, **{**LARGE, name: RATE}) as rig:
        count = 50  # half a second
        expected = count * MIB / RATE
        _check(lambda: _seconds(rig, operation, count), expected, 0.03)


@parametrise
def test_latency(kind: str, tmp_path: Path) -> None:
    with Rig(kind, tmp_path, **LARGE, latency_us=LATENCY_US) as rig:
        for operation in (KIND_STORE, KIND_LOAD):
            _check(partial(_seconds, rig, operation, 1), LATENCY_US / 1e6, 0.05)


@parametrise
def test_latency_is_added_to_the_rate_not_to_each_chunk(kind: str, tmp_path: Path) -> None:
    with Rig(kind, tmp_path, **LARGE, read_bytes_s=RATE, latency_us=LATENCY_US) as rig:
        expected = 30 * MIB / RATE + LATENCY_US / 1e6
        _check(lambda: _seconds(rig, KIND_LOAD, 30), expected, 0.03)


@parametrise
def test_reads_and_writes_have_shapes_of_their_own(kind: str, tmp_path: Path) -> None:
    """Slow writes in flight do not slow reads down."""
    with Rig(kind, tmp_path, **LARGE, write_bytes_s=10 * MIB) as rig:
        rig.submit([rig.op(KIND_STORE, 100 + tag, tag % 2) for tag in range(5)])
        rig.submit([rig.op(KIND_LOAD, tag, 2) for tag in range(20)])
        done = [int(e["tag"]) for e in rig.drain(25) if e["kind"] == EVENT_DONE]
        assert max(done.index(tag) for tag in range(20)) <= 21, "at most two stores before"


@parametrise
def test_a_shape_changes_while_running(kind: str, tmp_path: Path) -> None:
    with Rig(kind, tmp_path, **LARGE, read_bytes_s=1000) as rig:  # a chunk in 17 minutes
        rig.submit([rig.op(KIND_LOAD, tag) for tag in range(10)])
        assert rig.engine.statistics(rig.device).queue_depth == 10
        rig.engine.set_shape(rig.device, 0, 0, 0)
        rig.drain(10)
        rig.engine.set_shape(rig.device, RATE, 0, 0)
        assert _seconds(rig, KIND_LOAD, 10) >= 10 * MIB / RATE * 0.999


def test_the_rate_shows_in_the_statistics(tmp_path: Path) -> None:
    """What a device under load reports is the rate it is shaped to."""
    with Rig("nil", tmp_path, **LARGE, read_bytes_s=RATE) as rig:

        def deviation() -> float:
            before = rig.engine.statistics(rig.device)
            _seconds(rig, KIND_LOAD, 50)
            after = rig.engine.statistics(rig.device)
            moved = after.saturated_read_bytes - before.saturated_read_bytes
            passed = after.saturated_read_ns - before.saturated_read_ns
            assert moved >= 40 * MIB
            return abs(moved / passed * 1e9 / RATE - 1)

        assert _best(deviation, 0.0, 0.03) <= 0.03
