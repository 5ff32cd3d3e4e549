"""The whole pool on files that fail in every way, against a model; see fault_history.py.

More of it: KVPOOL_FAULT_SEEDS=20 KVPOOL_FAULT_STEPS=10000 pytest tests/dataplane/test_faults.py
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from kvpool.faults import FaultKind
from tests.dataplane.fault_history import FaultHistory

SEEDS = int(os.environ.get("KVPOOL_FAULT_SEEDS", "2"))
STEPS = int(os.environ.get("KVPOOL_FAULT_STEPS", "500"))
POOL_STEPS = 600
"""Steps of one pool at most: files that fail are soon out of it."""
SOON = frozenset({"stored", "loaded", "failed loads", "evicted", "spilled", "backed_up", "retired"})
IN_TIME = {"returned", "restored", "lost devices", "reset"} | {kind.name for kind in FaultKind}
HAPPENED: Counter[str] = Counter()

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.timeout(max(300, STEPS // 2))
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_loaded_is_right_or_a_miss(ranks: int, seed: int, tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    rng, left, pools = random.Random(f"{ranks}/{seed}"), STEPS, 0
    while left > 0:
        steps = min(left, rng.randint(POOL_STEPS // 3, POOL_STEPS))
        name = f"{ranks}/{seed}/{pools}"
        try:
            total += _live(name, ranks, steps, tmp_path)
        except BaseException:
            print(f"pool {name!r} of {ranks=}, {steps=}")
            raise
        left, pools = left - steps, pools + 1
    print(ranks, seed, dict(total))
    HAPPENED.update(total, steps=STEPS)


def test_all_of_it_happened() -> None:
    """What the test above was for did happen, in all of its histories together."""
    print(dict(HAPPENED))
    steps = HAPPENED["steps"]
    assert set(HAPPENED) >= SOON or steps < 2000
    assert set(HAPPENED) >= IN_TIME or steps < 50_000


def _live(name: str, ranks: int, steps: int, parent: Path) -> Counter[str]:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        history = FaultHistory(Path(folder), ranks, name)
        try:
            return history.run(steps)
        finally:
            history.close()
