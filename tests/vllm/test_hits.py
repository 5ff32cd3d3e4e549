"""What vLLM is answered, and asked again, when a hit is cut: against a look-up made of numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool import cost
from kvpool.cost import Take
from kvpool.types import Key

pytestmark = pytest.mark.vllm

CHUNK = 16
WHOLE = 100 * CHUNK


class Rig:
    """A scheduler whose look-up hits where it is told to, and a pool whose loads take so long."""

    def __init__(self, boundaries: list[int], chunk_s: float, windows: bool = False) -> None:
        from kvpool.connectors.vllm.hits import HitCosts

        self.boundaries, self.chunk_s = boundaries, chunk_s
        self.caps: list[int] = []
        self.decided: list[tuple[Take, int]] = []
        full = SimpleNamespace(
            tokens_per_chunk=CHUNK,
            sliding_window_size_in_chunks=None,
            load_window_size_in_chunks=lambda tokens: None,
        )
        window = SimpleNamespace(
            tokens_per_chunk=CHUNK,
            sliding_window_size_in_chunks=2,
            load_window_size_in_chunks=lambda tokens: 2,
        )
        groups = [full, window] if windows else [full]
        keys: list[Key] = [bytes([i]) for i in range(WHOLE // CHUNK)]
        status = SimpleNamespace(group_states=[SimpleNamespace(offload_keys=keys)] * len(groups))
        self.config = SimpleNamespace(kv_group_configs=groups)
        self._req_status = {"r": status, "s": status}
        self.windows = windows
        self.costs = HitCosts(self, self, True)  # type: ignore[arg-type]
        for _ in range(cost.ENOUGH_STEPS):
            self.costs._model.observe(2048, 2048.0, 2.048)  # a token in 1 ms

    # -- the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, computed: int, max_num_new_tokens: int
    ) -> tuple[int, bool]:
        self.caps.append(max_num_new_tokens)
        most = max_num_new_tokens - self.windows
        found = max((b for b in self.boundaries if b <= most), default=0)
        return found, bool(found)

    # -- the manager

    def load_bounds(self) -> cost.Bounds:
        return cost.Bounds(self.chunk_s / CHUNK, self.chunk_s, self.chunk_s / CHUNK)

    def load_seconds(self, reads: cost.Reads, ends: cost.Int64) -> cost.Float64:
        self.reads = reads
        fast = np.minimum(ends, WHOLE // 2) / CHUNK * 1e-4
        slow = np.maximum(ends - WHOLE // 2, 0) / CHUNK * self.chunk_s
        return fast + slow

    def observe_decision(self, take: Take, declined_tokens: int) -> None:
        self.decided.append((take, declined_tokens))

    # -- vLLM's calls

    def ask(self, name: str = "r", matched: int | None = WHOLE) -> tuple[int | None, bool]:
        request: Any = SimpleNamespace(request_id=name, num_tokens=WHOLE + 10)
        return self.costs.choose(request, 0, matched)

    def admit(self, name: str = "r") -> None:
        request: Any = SimpleNamespace(request_id=name)
        self.costs.admitted(request)


EVERYWHERE = list(range(CHUNK, WHOLE + 1, CHUNK))


def test_a_fast_hit_is_left_alone() -> None:
    rig = Rig(EVERYWHERE, 1e-4)
    assert rig.ask() == (WHOLE, True)
    rig.admit()
    assert rig.caps == []
    assert rig.decided == [(Take.WHOLE, 0)]


@pytest.mark.parametrize("windows", [False, True])
def test_vllm_is_asked_for_the_fast_front(windows: bool) -> None:
    rig = Rig(EVERYWHERE, 1.0, windows)
    assert rig.ask() == (WHOLE // 2, True)
    assert rig.caps == [WHOLE // 2 + windows]
    rig.admit()
    assert rig.decided == [(Take.PART, WHOLE // 2)]


def test_windows_are_read_whole_wherever_a_hit_ends() -> None:
    rig = Rig(EVERYWHERE, 1.0, windows=True)
    rig.ask()
    assert rig.reads.ends.tolist() == [*EVERYWHERE, 0, 0]
    assert rig.reads.keys[-2:] == [bytes([98]), bytes([99])]
    assert rig.reads.counts.tolist() == [1] * 102


def test_where_vllm_goes_back_to_is_weighed_again() -> None:
    near = Rig([WHOLE // 2 - 10 * CHUNK, WHOLE], 1.0)
    assert near.ask() == (WHOLE // 2 - 10 * CHUNK, True)
    nothing = Rig([WHOLE], 1.0)
    assert nothing.ask() == (0, False)
    assert nothing.caps[-1] == 0
    # Without the front, the whole is sooner than nothing: its state is restored.
    whole = Rig([WHOLE], 0.024)
    assert whole.ask() == (WHOLE, True)
    assert whole.caps == [WHOLE // 2, WHOLE]
    whole.admit()
    assert whole.decided == [(Take.WHOLE, 0)]


def test_once_in_a_while_a_cut_is_made_later() -> None:
    rig = Rig(EVERYWHERE, 0.05)
    answers = []
    for _ in range(2 * cost.TRIAL_EVERY):
        answers.append(rig.ask()[0])
        rig.admit()
    later = [i for i, answer in enumerate(answers) if answer != WHOLE // 2]
    assert later == [cost.TRIAL_EVERY - 1, 2 * cost.TRIAL_EVERY - 1]
    assert WHOLE // 2 < (answers[later[0]] or 0) < WHOLE


def test_only_what_is_admitted_counts() -> None:
    rig = Rig(EVERYWHERE, 1.0)
    for _ in range(3):
        rig.ask()  # no blocks to be had: asked again in the next step
    rig.ask("s")
    rig.admit("r")
    assert rig.decided == []
    rig.ask()
    assert rig.ask(matched=0) == (0, False)
    rig.admit()
    assert rig.ask(matched=None) == (None, False)
    rig.admit()
    assert rig.decided == []
