"""The eventfd is readable exactly while events wait to be polled."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.native import EVENT_DONE, KIND_LOAD, KIND_STORE
from tests.native.rig import Event, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig("nil", tmp_path, queue_entries=4096) as rig:
        yield rig


def readable(rig: Rig, timeout_ms: int = 0) -> bool:
    poll = select.poll()
    poll.register(rig.engine.eventfd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def test_quiet_without_events(rig: Rig) -> None:
    assert not readable(rig)
    assert not rig.engine.wait(0)
    assert rig.engine.poll().size == 0
    assert rig.engine.poll(0).size == 0


def test_readable_until_the_last_event_is_polled(rig: Rig) -> None:
    rig.submit([rig.op(KIND_STORE, tag) for tag in range(50)])
    polled: list[Event] = []
    while len(polled) < 100:
        assert readable(rig, 60_000), "events are missing"
        assert rig.engine.wait(0)
        polled += list(rig.engine.poll(7))
    assert [int(event["tag"]) for event in polled if event["kind"] == EVENT_DONE] == [*range(50)]
    assert not rig.engine.wait(0) and not readable(rig)


def test_a_poll_of_nothing_keeps_it_readable(rig: Rig) -> None:
    rig.submit(rig.op(KIND_LOAD))
    assert rig.engine.wait(60)
    assert rig.engine.poll(0).size == 0
    assert readable(rig)
    assert rig.engine.poll(1).size == 1
    assert not readable(rig)


def test_no_event_is_lost_between_polls(rig: Rig) -> None:
    """Ends up waiting for ever where a push is overtaken by a poll."""
    for round_ in range(300):
        rig.submit([rig.op(KIND_LOAD, tag) for tag in range(1 + round_ % 5)])
        seen = 0
        while seen < 1 + round_ % 5:
            assert readable(rig, 60_000)
            seen += rig.engine.poll(1 + round_ % 3).size


def test_events_are_copies(rig: Rig) -> None:
    rig.submit(rig.op(KIND_LOAD, 7))
    assert rig.engine.wait(60)
    events = rig.engine.poll()
    assert events.base is None and int(events[0]["tag"]) == 7
