"""The contract of kvpool.devices.base.Device as a suite that each kind of device subclasses."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from kvpool.errors import ConfigurationError
from kvpool.types import PageType, Profile
from tests.pool.rank import Rank

PROFILE = Profile(4.0, 3.0, 2.0, 1.0)


def noise(rank: Rank, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Fill the pages with random bytes and return a copy of them."""
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    rank.pages[:] = random.integers(0, 256, rank.pages.shape, np.uint8)
    return rank.pages.copy()


def keys(count: int) -> list[bytes]:
    return [b"key %d" % index + bytes(4) for index in range(count)]


class DeviceContract:
    """Subclasses give `device` (a fixture: a string for SIZE bytes) and what they can do."""

    SIZE = 24 << 20
    kind: str
    durable = True  # what was recorded outlives the process

    def test_what_is_stored_is_loaded(self, device: str) -> None:
        with Rank(device) as rank:
            content = noise(rank, 1)
            slots = [rank.device.slots - 1, 0, *range(5, 35)]
            rank.store(slots, keys(len(slots)))
            rank.pages[:] = 0
            assert rank.load(slots) == [0] * len(slots)
            assert (rank.pages[: len(slots)] == content[: len(slots)]).all()

    def test_every_slot_can_be_used_and_none_touches_another(self, device: str) -> None:
        with Rank(device, slot_bytes=1 << 20) as rank:
            content = noise(rank, 2)
            everything = list(range(rank.device.slots))
            for slots in (everything, everything[::2]):
                rank.store(slots, keys(len(slots)))
            rank.pages[:] = 0
            assert set(rank.load(everything)) == {0}
            for slot in everything:
                expected = content[slot // 2] if slot % 2 == 0 else content[slot]
                assert (rank.pages[slot] == expected).all(), slot

    def test_offsets_are_disjoint_aligned_and_within_the_size(self, device: str) -> None:
        with Rank(device) as rank:
            assert rank.device.slots * rank.device.slot_bytes <= self.SIZE
            offsets = rank.device.offsets(np.arange(rank.device.slots, dtype=np.int32))
            assert offsets.dtype == np.uint64 and offsets.shape == (rank.device.slots,)
            assert not (offsets % 4096).any()
            assert (np.diff(np.sort(offsets)) >= rank.slot_bytes).all()
            assert int(offsets.max()) + rank.slot_bytes <= self.SIZE

    def test_no_slot_beyond_the_last(self, device: str) -> None:
        with Rank(device) as rank:
            for slot in (-1, rank.device.slots):
                with pytest.raises(IndexError):
                    rank.device.offsets(np.array([slot], np.int32))
                with pytest.raises(IndexError):
                    rank.device.forget(np.array([slot], np.int32))
                with pytest.raises(IndexError):
                    rank.store([slot], keys(1))

    def test_checksums_are_those_of_the_payloads(self, device: str) -> None:
        from kvpool.native import crc32c

        with Rank(device) as rank:
            content = noise(rank, 3)
            rank.store([4, 2], keys(2))
            assert rank.device.checksums.dtype == np.uint32
            assert rank.device.checksums.shape == (rank.device.slots,)
            assert int(rank.device.checksums[4]) == crc32c(content[0])
            assert int(rank.device.checksums[2]) == crc32c(content[1])

    def test_a_payload_that_is_another_does_not_verify(self, device: str) -> None:
        with Rank(device) as rank:
            noise(rank, 4)
            rank.store([0, 1], keys(2))
            rank.device.checksums[[0, 1]] = rank.device.checksums[[1, 0]]
            assert rank.load([0, 1]) == [-errno.EBADMSG] * 2

    def test_what_was_recorded_survives_or_nothing_does(self, device: str) -> None:
        with Rank(device) as rank:
            assert rank.device.survivors.keys == []
            content = noise(rank, 5)
            rank.store([3, 1], keys(2))
            checksums = rank.device.checksums[[3, 1]].tolist()
        with Rank(device) as rank:
            stored = rank.device.survivors
            if not self.durable:
                assert stored.slots.size == 0 and stored.keys == []
                return
            assert stored.slots.tolist() == [1, 3]
            assert stored.keys == keys(2)[::-1]
            assert stored.parents == [b"parent of " + key for key in stored.keys]
            assert stored.positions.tolist() == [32, 16]
            assert stored.groups.tolist() == [0, 0]
            assert stored.lengths.tolist() == [rank.slot_bytes] * 2
            assert stored.checksums.tolist() == checksums[::-1]
            assert rank.load([3, 1]) == [0, 0]
            assert (rank.pages[:2] == content[:2]).all()

    def test_what_was_not_recorded_durably_does_not_survive(self, device: str) -> None:
        with Rank(device) as rank:
            rank.store([1], keys(1))
            rank.store([2], keys(1), headers=False)
        with Rank(device) as rank:
            assert rank.device.survivors.slots.tolist() == [1] * self.durable

    def test_what_is_forgotten_does_not_survive(self, device: str) -> None:
        with Rank(device) as rank:
            rank.store([1, 2], keys(2))
            rank.write(rank.device.forget(np.array([1], np.int32)))
        with Rank(device) as rank:
            assert rank.device.survivors.slots.tolist() == [2] * self.durable

    @pytest.mark.parametrize("epoch", [0, 1, 7])
    def test_a_new_epoch_makes_all_before_invalid(self, device: str, epoch: int) -> None:
        with Rank(device) as rank:
            rank.store([1, 2], keys(2))
            rank.device.set_epoch(epoch)
            rank.store([2], keys(1))
        with Rank(device) as rank:
            assert rank.device.survivors.slots.tolist() == [2] * self.durable
            rank.device.set_epoch(epoch)
        with Rank(device) as rank:
            assert rank.device.survivors.slots.size == 0

    def test_another_namespace_or_owner_starts_empty(self, device: str) -> None:
        with Rank(device, ranks=4) as rank:
            rank.store([1], keys(1))
        with Rank(device, ranks=4, namespace=b"m" * 32) as rank:
            assert rank.device.survivors.slots.size == 0
        with Rank(device, ranks=4, owner=1) as rank:
            assert rank.device.survivors.slots.size == 0
        with Rank(device, ranks=4) as rank:
            assert rank.device.survivors.slots.tolist() == [1] * self.durable

    def test_ranks_share_the_size_and_do_not_meet(self, device: str) -> None:
        with Rank(device, rank=0, ranks=2) as one, Rank(device, rank=1, ranks=2) as two:
            assert one.device.slots == two.device.slots >= 1
            assert one.device.name == two.device.name
            assert 2 * one.device.slots * one.slot_bytes <= self.SIZE
            everything = list(range(one.device.slots))[:60]
            first, second = noise(one, 6), noise(two, 7)
            one.store(everything, keys(len(everything)))
            two.store(everything, keys(len(everything)))
            for rank, content in ((one, first), (two, second)):
                rank.pages[:] = 0
                assert set(rank.load(everything)) == {0}
                assert (rank.pages[: len(everything)] == content[: len(everything)]).all()

    def test_a_size_without_room_for_a_slot_is_refused(self, device: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            Rank(device, slot_bytes=self.SIZE + 4096, pages=1)
        assert device.partition("?")[0] in caught.value.key
        assert "slot of" in caught.value.allowed

    def test_the_report(self, device: str) -> None:
        with Rank(device) as rank:
            report = rank.device.report(PROFILE)
            assert report.kind == self.kind and report.name.startswith(self.kind)
            assert (report.slots, report.slot_bytes) == (rank.device.slots, rank.slot_bytes)
            assert report.profile is PROFILE
            assert isinstance(report.page_type, PageType)
            assert report.io_path in ("copy", "uring", "threads")

    def test_closing_twice_does_no_harm(self, device: str) -> None:
        with Rank(device) as rank:
            pass
        rank.device.close()
