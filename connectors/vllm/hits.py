"""What vLLM is told of a hit: all of it, or less where computing is sooner than loading."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from vllm.utils.math_utils import cdiv

from kvpool import cost
from kvpool.connectors.vllm.manager import KVPoolManager

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

MIN_STEP_TOKENS = 128


@dataclass(frozen=True, slots=True)
class _Decision:
    """What was answered last; `matched` is 0 where nothing spoke for less than the whole hit."""

    request_id: str
    matched: int = 0
    declined_tokens: int = 0

    @property
    def take(self) -> cost.Take:
        if not self.declined_tokens:
            return cost.Take.WHOLE
        return cost.Take.DECLINED if self.declined_tokens == self.matched else cost.Take.PART


class HitCosts:
    """Learns what prefill costs from vLLM's steps, and cuts hits that are not worth their load.

    A hit is cut only by asking vLLM's own look-up again with a cap: what that answers is what its
    state then holds, boundaries of all KV groups included.
    """

    def __init__(
        self,
        scheduler: OffloadingConnectorScheduler,
        manager: KVPoolManager,
        one_step_at_a_time: bool,
    ) -> None:
        self._scheduler, self._manager = scheduler, manager
        self._groups = scheduler.config.kv_group_configs
        self._model = cost.PrefillModel()
        self._timer = cost.StepTimer(self._model, one_step_at_a_time)
        # Every group has a chunk's end at its multiples.
        self._common_tokens = math.lcm(*(group.tokens_per_chunk for group in self._groups))
        # With windows vLLM's look-up stops one token short of its cap.
        self._windows = any(g.sliding_window_size_in_chunks is not None for g in self._groups)
        self._cut_hits = 0
        # vLLM admits a request right after its look-up, or looks it up again in a later step.
        self._decided: _Decision | None = None

    # ---- learning ---------------------------------------------------------------------------

    def step_scheduled(self, output: SchedulerOutput) -> None:
        """Note what a step computes. Steps that mostly decode tell nothing about prefill."""
        counts, tokens = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        context = 0.0
        if tokens < max(MIN_STEP_TOKENS, 2 * len(counts)) or output.scheduled_encoder_inputs:
            tokens = 0
        else:
            context = mean_context(output)
        self._timer.begin(time.perf_counter(), tokens, context)

    def step_ended(self) -> None:
        """The oldest step that was scheduled is over."""
        self._timer.end(time.perf_counter())

    # ---- deciding ---------------------------------------------------------------------------

    def choose(
        self, request: Request, computed: int, matched: int | None
    ) -> tuple[int | None, bool]:
        """Return what to answer vLLM, whose look-up has found `matched` tokens beyond `computed`.

        As `get_num_new_matched_tokens`; the state of its look-up fits the answer.
        """
        self._decided = _Decision(request.request_id) if matched else None
        if not matched:
            return matched, False
        end, total = computed + matched, request.num_tokens
        prefill = self._model.estimate(end)
        if prefill is None:
            return matched, True
        if cost.surely_whole(prefill, computed, total, end, self._manager.load_bounds()):
            return matched, True
        reads, ends = self._reads(request, computed, end)
        load_s = self._manager.load_seconds(reads, ends)
        wanted = cost.decide(prefill, computed, total, ends, load_s)
        if wanted == matched:
            return matched, True
        if self._cut_hits % cost.TRIAL_EVERY == cost.TRIAL_EVERY - 1:
            wanted = cost.decide(prefill, computed, total, ends, load_s, cost.TRIAL_SLACK)
        answer = self._look_up(request, computed, wanted)
        if answer is not None and answer != wanted:
            # Windows are not stored at every boundary: vLLM went back to one where they are.
            at = min(int(np.searchsorted(ends, computed + answer)), len(ends) - 1)
            ends, load_s = np.array([computed + answer, end]), np.array([load_s[at], load_s[-1]])
            wanted = cost.decide(prefill, computed, total, ends, load_s)
            answer = self._look_up(request, computed, wanted)
        self._decided = _Decision(request.request_id, matched, matched - (answer or 0))
        return answer, bool(answer)

    def admitted(self, request: Request) -> None:
        """The request was scheduled, with the answer of its last look-up."""
        decided = self._decided
        if decided is not None and decided.request_id == request.request_id:
            self._manager.observe_decision(decided.take, decided.declined_tokens)
            self._cut_hits += decided.matched > 0
        self._decided = None

    def _look_up(self, request: Request, computed: int, most: int) -> int | None:
        """Have vLLM look the request up again, for at most so many tokens."""
        cap = most + 1 if most and self._windows else most
        found: int | None = self._scheduler.get_num_new_matched_tokens(
            request, computed, max_num_new_tokens=cap
        )[0]
        return found

    def _reads(self, request: Request, start: int, end: int) -> tuple[cost.Reads, cost.Int64]:
        """Return what a hit reads, and where it may end: at one of the cuts, `end` the last."""
        status = self._scheduler._req_status[request.request_id]
        cuts = np.empty(0, np.int64)
        keys, ends, counts = [], [], []
        for group, state in zip(self._groups, status.group_states, strict=True):
            tokens, window = group.tokens_per_chunk, group.load_window_size_in_chunks(end)
            first, last = start // tokens, min(cdiv(end, tokens), len(state.offload_keys))
            if window is not None:
                first = max(first, last - window)
            picks, strata = cost.sample(first, last)
            keys += [state.offload_keys[pick] for pick in picks.tolist()]
            counts.append(np.diff(strata, prepend=first))
            ends.append(strata * tokens if window is None else np.zeros_like(strata))
            if window is None and not cuts.size:
                cuts = np.unique(strata * tokens // self._common_tokens * self._common_tokens)
        cuts = np.append(cuts[(cuts > start) & (cuts < end)], end)
        # The last chunk may reach beyond the end of the hit.
        reads = cost.Reads(keys, np.minimum(np.concatenate(ends), end), np.concatenate(counts))
        return reads, cuts


def mean_context(output: SchedulerOutput) -> float:
    """Return how many tokens the tokens of a step attend to, on average."""
    counts, work = output.num_scheduled_tokens, 0.0
    for new in output.scheduled_new_reqs:
        tokens = counts[new.req_id]
        work += tokens * (new.num_computed_tokens + tokens / 2)
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        tokens = counts[request_id]
        work += tokens * (computed + tokens / 2)
    tokens = int(output.total_num_scheduled_tokens)
    return float(work / tokens)
