"""What every device owes, on io_uring, on threads and in memory."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.errors import DeviceError, QueueFullError
from kvpool.native import (
    ALIGN,
    EVENT_DONE,
    EVENT_STAGED,
    FLAG_VERIFY,
    KIND_LOAD,
    KIND_MOVE,
    KIND_READ,
    KIND_STORE,
    KIND_WRITE,
    Arena,
)
from tests.native.rig import KINDS, MIB, Rig

MakeRig = Callable[..., Rig]


@pytest.fixture(params=KINDS)
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(request.param, tmp_path, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


GEOMETRIES = [  # tensor lengths, blocks a chunk, slot bytes
    ((1536,), 1, 4096),
    ((1536, 1536), 16, 64 << 10),
    ((4096,), 16, 64 << 10),
    ((2304, 1152, 7), 5, 32 << 10),
    ((16384,) * 8, 4, 512 << 10),
    ((49152, 24576), 3, 256 << 10),
    ((270336,), 16, 4 * MIB + (128 << 10)),
    ((270336, 135168), 12, 5 * MIB),
]


@pytest.mark.parametrize(("lengths", "blocks_per_chunk", "slot_bytes"), GEOMETRIES)
def test_what_is_stored_is_loaded(
    make_rig: MakeRig, lengths: tuple[int, ...], blocks_per_chunk: int, slot_bytes: int
) -> None:
    rig = make_rig(
        lengths=lengths,
        blocks=6 * blocks_per_chunk,
        blocks_per_chunk=blocks_per_chunk,
        slot_bytes=slot_bytes,
        slots=8,
    )
    chunks = rig.random.permutation(6 * blocks_per_chunk).reshape(6, -1).tolist()
    first = [dict(first_block=i * blocks_per_chunk) for i in range(6)]
    stored = rig.run([rig.op(KIND_STORE, i, i, **first[i]) for i in range(6)], [*chain(*chunks)])
    payloads = [rig.payload(chunk) for chunk in chunks]
    assert [event["result"] for event in stored] == [0] * 6
    assert [event["crc"] for event in stored] == [rig.crc(chunk) for chunk in chunks]
    assert [rig.media(i, rig.chunk_bytes) for i in range(6)] == payloads
    rig.poison()
    others = [array.copy() for array in rig.pages]
    targets = rig.random.permutation(6 * blocks_per_chunk).reshape(6, -1).tolist()
    loads = [rig.load(i, i, int(stored[i]["crc"]), **first[i]) for i in range(6)]
    loaded = rig.run(loads, [*chain(*targets)])
    assert [event["result"] for event in loaded] == [0] * 6
    assert [event["crc"] for event in loaded] == [event["crc"] for event in stored]
    assert [rig.payload(target) for target in targets] == payloads
    for array, before, length in zip(rig.pages, others, lengths, strict=True):
        assert np.array_equal(array[:, length:], before[:, length:]), "bytes between the pages"


def test_pages_that_touch_are_one_run(make_rig: MakeRig) -> None:
    """All layers of a block in one piece: the whole chunk is contiguous where ids follow on."""
    rig = make_rig(lengths=(4096,), blocks=8)
    pages = np.frombuffer(rig.random.bytes(8 * 4096), np.uint8).reshape(8, 4096).copy()
    rig.pages = [pages]
    rig.group = rig.add_group(4)
    (stored,) = rig.run([rig.op(KIND_STORE)], [2, 3, 4, 6])
    before = rig.payload([2, 3, 4, 6])
    rig.poison()
    (loaded,) = rig.run([rig.load(0, 0, int(stored["crc"]))], [1, 5, 6, 7])
    assert loaded["result"] == 0
    assert rig.payload([1, 5, 6, 7]) == before


def test_skipped_blocks_are_verified_and_left_alone(make_rig: MakeRig) -> None:
    rig = make_rig()
    (stored,) = rig.run([rig.op(KIND_STORE)], [0, 1, 2, 3])
    expected = rig.payload([1, 3])
    rig.poison()
    untouched = rig.payload([0, 2, *range(4, 64)])
    (loaded,) = rig.run([rig.load(0, 0, int(stored["crc"]))], [-1, 1, -7, 3])
    assert loaded["result"] == 0 and loaded["crc"] == stored["crc"]
    assert rig.payload([1, 3]) == expected
    assert rig.payload([0, 2, *range(4, 64)]) == untouched
    rig.corrupt(0)  # in block 2, which is skipped
    (loaded,) = rig.run([rig.load(0, 0, int(stored["crc"]))], [-1, -1, -1, -1])
    assert loaded["result"] == -errno.EBADMSG


def test_a_flipped_bit_fails_the_load(make_rig: MakeRig) -> None:
    rig = make_rig()
    (stored,) = rig.run([rig.op(KIND_STORE)])
    rig.corrupt(0)
    loads = [rig.load(0, 0, int(stored["crc"])), rig.op(KIND_LOAD, 1)]
    verified, unverified = rig.run(loads)
    assert verified["result"] == -errno.EBADMSG and unverified["result"] == 0
    assert unverified["crc"] == verified["crc"] != stored["crc"]
    statistics = rig.engine.statistics(rig.device)
    assert statistics.checksum_failures == 1 and statistics.read_failures == 0
    assert statistics.bytes_read == rig.chunk_bytes


def test_a_load_keeps_a_copy_in_memory(make_rig: MakeRig) -> None:
    rig = make_rig()
    (stored,) = rig.run([rig.op(KIND_STORE)])
    payload = rig.payload(range(4))
    keep = dict(keep=rig.module, keep_offset=5 * rig.slot_bytes)
    good, bad = rig.run(
        [
            rig.load(0, 0, int(stored["crc"]), **keep),
            rig.load(1, 0, 1, keep=rig.module, keep_offset=6 * rig.slot_bytes),
        ]
    )
    assert (good["result"], good["kept"]) == (0, 1)
    assert (bad["result"], bad["kept"]) == (-errno.EBADMSG, 0)
    assert rig.module_bytes(5, rig.chunk_bytes) == payload
    assert not any(rig.module_bytes(6, rig.chunk_bytes)), "what failed is not kept"


def test_a_spill_moves_from_memory(make_rig: MakeRig) -> None:
    rig = make_rig()
    (stored,) = rig.run([rig.op(KIND_STORE, slot=0, device=rig.module)])
    payload = rig.payload(range(4))
    move = dict(keep=rig.module, length=rig.chunk_bytes, flags=FLAG_VERIFY)
    good, bad = rig.run(
        [
            rig.op(KIND_MOVE, 0, 3, crc=int(stored["crc"]), **move),
            rig.op(KIND_MOVE, 1, 4, crc=1, **move),
        ]
    )
    assert (good["result"], good["crc"]) == (0, stored["crc"])
    assert bad["result"] == -errno.EBADMSG
    assert rig.media(3, rig.chunk_bytes) == payload
    rig.poison()
    (loaded,) = rig.run([rig.load(0, 3, int(stored["crc"]))])
    assert loaded["result"] == 0 and rig.payload(range(4)) == payload


def test_raw_reads_and_writes(make_rig: MakeRig) -> None:
    """As long as they like: more than a slot, and more than a piece."""
    rig = make_rig(slot_bytes=512 << 10, slots=20)
    arena = Arena(20 * MIB)
    length = 9 * MIB + ALIGN
    arena.array[:length] = np.frombuffer(rig.random.bytes(length), np.uint8)
    target = arena.address + 10 * MIB
    (written,) = rig.run([rig.op(KIND_WRITE, slot=1, buffer=arena.address, length=length)])
    (read,) = rig.run([rig.op(KIND_READ, slot=1, buffer=target, length=length)])
    assert written["result"] == read["result"] == 0
    assert np.array_equal(arena.array[:length], arena.array[10 * MIB : 10 * MIB + length])
    arena.close()


def test_staged_comes_before_done_and_once(make_rig: MakeRig) -> None:
    rig = make_rig(store_buffers=2)
    rig.submit([rig.op(KIND_STORE, tag, tag) for tag in range(12)])
    events = rig.drain(12)
    for tag in range(12):
        kinds = [event["kind"] for event in events if event["tag"] == tag]
        assert kinds == [EVENT_STAGED, EVENT_DONE]
    assert {int(event["crc"]) for event in events} == {rig.crc(range(4))}
    assert all(event["nanoseconds"] > 0 for event in events)


def test_pages_are_free_once_staged(make_rig: MakeRig) -> None:
    """A slow medium does not hold the pages: what is written is what was there when staged."""
    rig = make_rig(write_bytes_s=4 * MIB)
    payload = rig.payload(range(4))
    rig.submit([rig.op(KIND_STORE)])
    staged = rig.wait_staged(1)
    rig.poison()
    if len(staged) == 1:
        rig.drain(1)
    assert rig.media(0, rig.chunk_bytes) == payload


def test_all_or_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(queue_entries=8)
    crc = int(rig.run([rig.op(KIND_STORE)])[0]["crc"])
    loads = [rig.load(tag, 0, crc) for tag in range(9)]
    with pytest.raises(QueueFullError):
        rig.submit(loads)
    assert rig.engine.statistics(rig.device).queue_depth == 0
    assert len(rig.run(loads[:8])) == 8, "nothing was queued, so all entries are free"
    stores = [rig.op(KIND_STORE, tag, 1 + tag) for tag in range(8)]
    assert len(rig.run([*loads[:8], *stores])) == 16, "each class has entries of its own"


def test_an_entry_is_taken_until_its_event_is_polled(make_rig: MakeRig) -> None:
    rig = make_rig(queue_entries=2)
    crc = int(rig.run([rig.op(KIND_STORE)])[0]["crc"])
    rig.submit([rig.load(tag, 0, crc) for tag in range(2)])
    with pytest.raises(QueueFullError):
        rig.submit(rig.load(2, 0, crc))
    rig.drain(2)
    rig.run([rig.load(tag, 0, crc) for tag in range(2)])


BAD = [
    ("device", dict(device=9)),
    ("kind", dict(kind=5)),
    ("flags", dict(flags=4)),
    ("group", dict(group=1)),
    ("length", dict(length=1)),
    ("unaligned offset", dict(offset=512)),
    ("offset past the end", dict(offset=2 * MIB)),
    ("offset that overflows", dict(offset=2**64 - 4096)),
    ("blocks past the end", dict(first_block=1)),
    ("first block that overflows", dict(first_block=2**32 - 1)),
    ("keep on itself", dict(keep=7)),
    ("keep past the end", dict(keep=1, keep_offset=2 * MIB)),
    ("unaligned keep", dict(keep=1, keep_offset=100)),
    ("read without buffer", dict(kind=KIND_READ, length=4096)),
    ("unaligned buffer", dict(kind=KIND_READ, length=4096, buffer=4097)),
    ("unaligned length", dict(kind=KIND_WRITE, length=4097, buffer=8192)),
    ("no bytes", dict(kind=KIND_WRITE, length=0, buffer=8192)),
    ("move without source", dict(kind=KIND_MOVE)),
    ("move of too much", dict(kind=KIND_MOVE, keep=1, length=(64 << 10) + 1)),
]


@pytest.mark.parametrize(("values"), [bad[1] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_bad_input_queues_nothing(make_rig: MakeRig, values: dict[str, int]) -> None:
    rig = make_rig()
    bad = rig.op(KIND_LOAD, 2)
    for name, value in values.items():
        bad[name] = value
    with pytest.raises(DeviceError) as caught:
        rig.submit([rig.op(KIND_LOAD, 1), bad])
    assert caught.value.errno == errno.EINVAL
    assert rig.engine.statistics(rig.device).queue_depth == 0


def test_a_store_names_all_its_blocks(make_rig: MakeRig) -> None:
    rig = make_rig()
    with pytest.raises(DeviceError) as caught:
        rig.submit(rig.op(KIND_STORE), [0, 1, -1, 3])
    assert caught.value.errno == errno.EINVAL


def test_loads_go_before_stores(make_rig: MakeRig) -> None:
    rig = make_rig(depth=1, threads=1, store_buffers=8)
    crc = int(rig.run([rig.op(KIND_STORE)])[0]["crc"])
    stores = [rig.op(KIND_STORE, 100 + tag, 1 + tag) for tag in range(8)]
    loads = [rig.load(tag, 0, crc) for tag in range(16)]
    rig.submit([*stores, *loads])
    done = [int(event["tag"]) for event in rig.drain(24) if event["kind"] == EVENT_DONE]
    # The queue of loads is empty while the last load is in flight: one write may start then.
    assert min(done.index(tag) for tag in range(100, 108)) >= 15


def test_a_load_waits_for_one_store_at_most(make_rig: MakeRig) -> None:
    rig = make_rig(store_buffers=8)
    crc = int(rig.run([rig.op(KIND_STORE)])[0]["crc"])
    rig.engine.set_shape(rig.device, 0, 4 * rig.chunk_bytes, 0)  # four stores a second
    rig.submit([rig.op(KIND_STORE, 100 + tag, 1 + tag) for tag in range(8)])
    rig.wait_staged(1)
    rig.submit(rig.load(1, 0, crc))
    done = [int(event["tag"]) for event in rig.drain(1) if event["kind"] == EVENT_DONE]
    assert 1 in done and len(done) <= 2


def test_cancel_drops_what_is_not_staged(make_rig: MakeRig) -> None:
    rig = make_rig(store_buffers=2)
    payloads = rig.payload(range(4))
    rig.engine.set_shape(rig.device, 0, 1000, 0)  # the first is admitted, the next in seconds
    rig.submit([rig.op(KIND_STORE, tag, tag) for tag in range(8)])
    # A file stages the first, which frees its slot when written, and two that keep theirs.
    staged = [int(e["tag"]) for e in rig.wait_staged(1 if rig.kind == "memory" else 3)]
    assert rig.engine.cancel_stores(6, 6) == 1
    dropped = rig.engine.cancel_stores(0, 6)
    assert dropped == 8 - len(staged) - 2
    rig.engine.set_shape(rig.device, 0, 0, 0)
    done = {int(e["tag"]): int(e["result"]) for e in rig.drain(8) if e["kind"] == EVENT_DONE}
    expected = dict.fromkeys(range(8), -errno.ECANCELED) | dict.fromkeys([*staged, 7], 0)
    assert done == expected
    assert rig.media(7, rig.chunk_bytes) == payloads
    statistics = rig.engine.statistics(rig.device)
    assert statistics.write_failures == 0 and statistics.queue_depth == 0


def test_statistics_add_up(make_rig: MakeRig) -> None:
    rig = make_rig(depth=2, threads=1)
    stored = rig.run([rig.op(KIND_STORE, tag, tag) for tag in range(10)])
    rig.run([rig.load(tag, tag, int(stored[tag]["crc"])) for tag in range(10)])
    statistics = rig.engine.statistics(rig.device)
    assert statistics.bytes_written == statistics.bytes_read == 10 * rig.chunk_bytes
    assert statistics.read_busy_ns > 0 and statistics.write_busy_ns > 0
    # Ten at once on a device that works on two or one: most were done with more waiting.
    assert 5 * rig.chunk_bytes <= statistics.saturated_read_bytes <= 10 * rig.chunk_bytes
    assert 0 < statistics.saturated_read_ns <= statistics.read_busy_ns
    assert statistics.queue_depth == 0
    assert rig.engine.statistics(rig.device) == statistics, "an idle device counts no time"


def test_one_load_at_a_time_is_not_saturated(make_rig: MakeRig) -> None:
    rig = make_rig(depth=2, threads=2)
    crc = int(rig.run([rig.op(KIND_STORE)])[0]["crc"])
    for tag in range(5):
        rig.run([rig.load(tag, 0, crc)])
    statistics = rig.engine.statistics(rig.device)
    assert statistics.bytes_read == 5 * rig.chunk_bytes
    assert statistics.saturated_read_bytes == statistics.saturated_read_ns == 0


def test_queue_depth_is_what_is_outstanding(make_rig: MakeRig) -> None:
    rig = make_rig()
    crc = int(rig.run([rig.op(KIND_STORE)])[0]["crc"])
    rig.engine.set_shape(rig.device, 1000, 0, 0)
    rig.submit([rig.load(tag, 0, crc) for tag in range(6)])
    assert rig.engine.statistics(rig.device).queue_depth == 6
    rig.engine.set_shape(rig.device, 0, 0, 0)
    rig.drain(6)
    assert rig.engine.statistics(rig.device).queue_depth == 0


def test_close_with_work_queued_and_in_flight(make_rig: MakeRig) -> None:
    rig = make_rig(slot_bytes=MIB, lengths=(8192,) * 16, blocks=64, blocks_per_chunk=8)
    stored = rig.run([rig.op(KIND_STORE, tag, tag) for tag in range(4)], range(8))
    ops = [rig.op(KIND_STORE, 100 + tag, 4 + tag % 12) for tag in range(40)]
    ops += [rig.load(tag, tag % 4, int(stored[0]["crc"])) for tag in range(40)]
    rig.submit(ops, range(8))
    rig.engine.close()
    after = rig.payload(range(64))
    rig.engine.close()
    assert rig.payload(range(64)) == after, "nothing writes to pages any more"
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if name.startswith("kvio")]


def test_close_with_a_shape_that_lets_nothing_through(make_rig: MakeRig) -> None:
    rig = make_rig(read_bytes_s=1, write_bytes_s=1, latency_us=1_000_000)
    rig.submit([rig.op(KIND_STORE, tag, tag) for tag in range(8)])
    rig.submit([rig.op(KIND_LOAD, 100 + tag, tag) for tag in range(8)])
    rig.wait_staged(1)
    rig.engine.close()


def test_longer_chunks_come_before_the_work(make_rig: MakeRig) -> None:
    rig = make_rig(slot_bytes=256 << 10)
    group = rig.add_group(32)
    length = 32 * sum(rig.lengths)
    (stored,) = rig.run([rig.op(KIND_STORE, group=group, length=length)], range(32))
    assert stored["crc"] == rig.crc(range(32))
    rig.submit(rig.op(KIND_LOAD))
    with pytest.raises(DeviceError) as caught:
        rig.add_group(33)
    assert caught.value.errno == errno.EBUSY
    rig.drain(1)
    rig.add_group(33)
