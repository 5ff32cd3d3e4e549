"""Random histories: late, shuffled, contradictory acknowledgements; all invariants every step."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.control.history import DOCUMENTS, GROUPS, PLACEMENTS, POOLS, History

WHICH = st.integers(0, 5)


class Histories(RuleBasedStateMachine):
    """Hypothesis chooses the steps, and finds a short history where one goes wrong."""

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        pool=st.sampled_from(sorted(POOLS)),
        ranks=st.integers(1, 3),
        placement=st.sampled_from(PLACEMENTS),
        seed=st.integers(0, 2**32),
        backup=st.booleans(),
    )
    def start(
        self, groups: str, pool: str, ranks: int, placement: str, seed: int, backup: bool
    ) -> None:
        self.history = History(GROUPS[groups], pool, ranks, placement, seed, backup)

    @rule(document=st.sampled_from(DOCUMENTS))
    def begin(self, document: str) -> None:
        self.history.begin(document)

    @rule(which=WHICH, chunks=st.integers(1, 5))
    def compute(self, which: int, chunks: int) -> None:
        self.history.compute(which, chunks)

    @rule(document=st.sampled_from(DOCUMENTS), chunks=st.integers(1, 12))
    def compute_another(self, document: str, chunks: int) -> None:
        self.history.begin(document)
        self.history.compute(5, chunks)

    @rule(which=WHICH, local=st.integers(0, 3), stale=st.booleans())
    def load(self, which: int, local: int, stale: bool) -> None:
        self.history.load(which, local, stale)

    @rule()
    def spill(self) -> None:
        self.history.spill()

    @rule(amount=st.integers(1, 30), failure_rate=st.sampled_from([0.0, 0.0, 0.1, 0.5]))
    def work(self, amount: int, failure_rate: float) -> None:
        self.history.work(amount, failure_rate)

    @rule()
    def drain(self) -> None:
        self.history.drain()

    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        self.history.finish(which)

    @rule(luck=st.integers(0, 5))
    def reset(self, luck: int) -> None:
        if luck == 5:
            self.history.reset()

    @rule(luck=st.integers(0, 9), which=st.integers(0, 2))
    def break_device(self, luck: int, which: int) -> None:
        if luck == 9:
            self.history.break_device(which)

    @rule(luck=st.integers(0, 9), which=st.integers(0, 2))
    def fill_device(self, luck: int, which: int) -> None:
        if luck > 7:
            self.history.fill_device(which)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "history"):
            self.history.check()

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.end()


Histories.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestHistories = Histories.TestCase

# What must have happened at least once in the histories of a pool, so that they prove something.
EXPECTED = {
    "dram and two ssds": {"stored", "hit", "evicted", "spilled"},
    "dram alone": {"stored", "hit", "evicted", "dropped"},
    "no dram": {"stored", "hit", "evicted", "dropped"},
    "two drams": {"stored", "hit", "evicted", "spilled"},
    "small dram": {"stored", "hit", "spilled"},
    "room for all": {"stored", "hit"},
}


# With backups memory empties by dropping what lies on an SSD as well: that counts as spilled.
MEMORY_AND_MORE = ("dram and two ssds", "two drams", "small dram", "room for all")


@pytest.mark.parametrize("backup", [False, True], ids=["moves", "backups"])
@pytest.mark.parametrize("failure_rate", [0.0, 0.03], ids=["healthy", "failing"])
@pytest.mark.parametrize("groups", sorted(GROUPS))
@pytest.mark.parametrize("pool", sorted(POOLS))
def test_long_histories(pool: str, groups: str, failure_rate: float, backup: bool) -> None:
    """A busy engine for some hundred steps, on 1 and on 2 ranks."""
    seen: Counter[str] = Counter()
    for seed in range(2):
        rng = random.Random(f"{pool}/{groups}/{failure_rate}/{seed}")
        policy = PLACEMENTS[(len(pool) + len(groups) + seed) % 3]
        history = History(GROUPS[groups], pool, 1 + seed, policy, seed, backup)
        try:
            seen += history.run(200, rng, failure_rate)
        except BaseException:
            print(f"{pool=} {groups=} {failure_rate=} {seed=} {policy=} {backup=}")
            raise
    print(pool, groups, failure_rate, dict(seen))
    expected = EXPECTED[pool] | ({"backed_up"} if backup and pool in MEMORY_AND_MORE else set())
    assert failure_rate or expected <= set(seen)
