"""How much of a hit is worth loading: all of it, its front, or nothing. Pure.

A hit costs the time until its chunks are read, and saves the time to compute its tokens. What is
compared is the expected time to the first token: the load, then the prefill of what is left.

    load(end)    = max over devices of (bytes to read + bytes queued before) / bandwidth + latency
    prefill(s,e) = token_s * (e - s) + context_s * (e^2 - s^2) / 2, learned from the steps that ran

A load that was worth it is never given up for noise: the whole hit is taken unless less of it is
sooner by more than `MARGIN`, and as long as the model of the prefill has not seen enough.

Not done: to wait for a chunk that is still being written (it counts as a miss). vLLM can defer a
request at look-up, but the whole of it, with all chunks that are readable, and asks again once a
step; and acknowledgements of writes come once a step too, with nothing in between that says how far
a write is. While a chunk is being written its pages were computed just now, so vLLM's own cache
mostly still has them and does not ask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvpool.types import Key

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

MARGIN = 0.1
"""Part of the time to the first token that less than the whole hit must gain to be taken."""

MOST_SAMPLES = 128
"""Chunks of one KV group that are looked at for a hit, and ends of it that are compared."""

TRIAL_EVERY, TRIAL_SLACK = 8, 0.25
"""Of so many hits that are cut, one is cut later, at the price of that part of the time to its
first token: nothing is known of a device that nothing is read from, and it may be fast again."""

ENOUGH_STEPS, ENOUGH_TOKENS = 8, 4096
HALF_LIFE_TOKENS = 1 << 18
OUTLIER = 4.0
EXTRAPOLATION = 2.0
_ALIKE = 1e-6
_GOLDEN = 0.618033988749895
_MOST_CONTEXT, _MOST_SECONDS = 1e9, 1e5
_MOST_STEPS = 64


class Take(Enum):
    """What becomes of a hit. The values are labels of a metric."""

    WHOLE = "whole"
    PART = "part"
    DECLINED = "declined"


# ---- what prefill costs -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prefill:
    """What prefill costs now: seconds a token, and seconds a token and token of its context."""

    token_s: float
    context_s: float

    def seconds(self, tokens: npt.ArrayLike) -> Float64:
        """Return the seconds to compute the first so many tokens of a request, item by item."""
        count = np.asarray(tokens, np.float64)
        seconds: Float64 = self.token_s * count + self.context_s * count * count / 2
        return seconds


class PrefillModel:
    """Learns what prefill costs: least squares that forget half in `HALF_LIFE_TOKENS` tokens.

    Each step counts as much as it has tokens. What took more than `OUTLIER` times as long as
    expected, or less than that part of it, counts as just that: one stall does not spoil the model,
    and a machine whose speed has changed is followed within some steps.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._seen_tokens = 0
        self._longest = 0.0
        # Weighted sums over steps: tokens, context, context squared, seconds, seconds * context.
        self._sums = [0.0] * 5

    def observe(self, tokens: int, context: float, seconds: float) -> None:
        """Take in a step that computed `tokens` tokens in `seconds`.

        `context` is the mean number of tokens that these attended to. What cannot be is ignored.
        """
        if tokens <= 0 or not (0 <= context <= _MOST_CONTEXT and 0 < seconds <= _MOST_SECONDS):
            return
        expected = self._fit() if self._enough() else None
        if expected is not None:
            likely_s = tokens * (expected.token_s + expected.context_s * context)
            seconds = min(max(seconds, likely_s / OUTLIER), likely_s * OUTLIER)
        left, weighted = 0.5 ** (tokens / HALF_LIFE_TOKENS), tokens * context
        step = (tokens, weighted, weighted * context, seconds, seconds * context)
        self._sums = [left * old + new for old, new in zip(self._sums, step, strict=True)]
        self._steps += 1
        self._seen_tokens += tokens
        self._longest = max(self._longest, context)

    def estimate(self, context: float) -> Prefill | None:
        """Return what prefill costs up to `context` tokens of context.

        None where too little was seen, or nothing like that: contexts of at most half of it.
        """
        if not self._enough() or context > EXTRAPOLATION * self._longest:
            return None
        return self._fit()

    def _enough(self) -> bool:
        return self._steps >= ENOUGH_STEPS and self._seen_tokens >= ENOUGH_TOKENS

    def _fit(self) -> Prefill:
        """Solve for seconds a token = token_s + context_s * context, both 0 or more."""
        tokens, context, square, seconds, product = self._sums
        spread = tokens * square - context * context
        if spread <= _ALIKE * tokens * square:
            return Prefill(seconds / tokens, 0.0)
        context_s = (tokens * product - context * seconds) / spread
        token_s = (seconds - context_s * context) / tokens
        if context_s < 0:
            return Prefill(seconds / tokens, 0.0)
        if token_s < 0:
            return Prefill(0.0, product / square)
        return Prefill(token_s, context_s)


@dataclass(slots=True)
class _Step:
    begun_s: float
    tokens: int
    context: float
    alone: bool


class StepTimer:
    """Tells the model how long each step took, from when steps are scheduled and end, in order.

    Steps may overlap: the next is scheduled while one runs. Where the engine runs one after the
    other (`one_by_one`), a step begins with the end of the one before, if it was scheduled
    earlier; in a pipeline only steps that were alone in it tell anything.
    """

    def __init__(self, model: PrefillModel, one_by_one: bool) -> None:
        self._model, self._one_by_one = model, one_by_one
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self._last_end_s = -np.inf

    def begin(self, now_s: float, tokens: int, context: float) -> None:
        """A step was scheduled; with 0 tokens there is nothing to learn from it."""
        alone = not self._steps
        for step in self._steps:
            step.alone = False
        self._steps.append(_Step(now_s, tokens, context, alone))

    def end(self, now_s: float) -> None:
        """The oldest step that has not ended has ended."""
        if not self._steps:
            return
        step = self._steps.popleft()
        if step.tokens and (self._one_by_one or step.alone):
            seconds = now_s - max(step.begun_s, self._last_end_s)
            self._model.observe(step.tokens, step.context, seconds)
        self._last_end_s = now_s


# ---- what a load costs --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reads:
    """Chunks that stand for all that a hit reads. Arrays have shape (n,).

    Each stands for `counts` chunks of its KV group, which are read by every load that ends, in
    tokens, at `ends` or later (0: by every load).
    """

    keys: list[Key]
    ends: Int64
    counts: Int64


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a load costs wherever its chunks lie: at most for each token, at most once besides, and
    at least for each token."""

    token_s: float
    once_s: float
    least_token_s: float


def sample(first: int, last: int) -> tuple[Int64, Int64]:
    """Return at most `MOST_SAMPLES` of the numbers from `first` up to `last`, and where strata end.

    Shape (n,) each. Where each number is a sample, strata have one number; where not, the sample's
    place in its stratum changes from one to the next, so that no pattern of placement hides.
    """
    count = max(last - first, 0)
    strata = min(count, MOST_SAMPLES)
    number = np.arange(strata + 1, dtype=np.int64)
    bounds = first + count * number // max(strata, 1)
    width = np.diff(bounds)
    place = (number[:-1] * _GOLDEN % 1 * width).astype(np.int64)
    return bounds[:-1] + place, bounds[1:]


def load_seconds(
    ends: Int64,
    chunk_end: Int64,
    chunk_bytes: Float64,
    device: npt.NDArray[np.uint8],
    queued_bytes: Sequence[float],
    bandwidth_bytes_s: Sequence[float],
    latency_s: Sequence[float],
) -> Float64:
    """Return the seconds that a load takes which ends at each of `ends`, in tokens. Shape (m,).

    `chunk_*` and `device` have one item a chunk that is read, the others one a device.
    """
    seconds = np.zeros(len(ends))
    for index in np.unique(device).tolist():
        on = np.flatnonzero(device == index)
        on = on[np.argsort(chunk_end[on], kind="stable")]
        passed = np.concatenate(([0.0], chunk_bytes[on].cumsum()))
        read = passed[np.searchsorted(chunk_end[on], ends, side="right")]
        busy_s = (read + queued_bytes[index]) / bandwidth_bytes_s[index] + latency_s[index]
        seconds = np.maximum(seconds, np.where(read > 0, busy_s, 0.0))
    return seconds


# ---- the decision -------------------------------------------------------------------------------


def surely_whole(prefill: Prefill, start: int, total: int, end: int, bounds: Bounds) -> bool:
    """Whether `decide` takes all of a hit up to `end`, wherever its chunks lie.

    That it is so mostly costs no look at them: where a token is loaded sooner than computed even
    from the slowest device, less than the whole gains at most what a load costs once.
    """
    computed_s = prefill.token_s + prefill.context_s * start
    if bounds.token_s > computed_s:
        return False
    rest_s = float(prefill.seconds(total) - prefill.seconds(end))
    return bounds.once_s <= MARGIN * (bounds.least_token_s * (end - start) + rest_s)


def decide(
    prefill: Prefill | None,
    start: int,
    total: int,
    ends: Int64,
    load_s: Float64,
    slack: float = 0.0,
) -> int:
    """Return how many tokens beyond `start` to load, so that the first token comes soonest.

    A request of `total` tokens has `start` of them already; its hit may end at any of `ends`
    (rising, at least one, at most `total`), which takes `load_s` seconds. With `slack`, the first
    token may come later by that part of its time, and as much is loaded as that allows. Returns
    one of `ends - start`, or 0.
    """
    whole = int(ends[-1]) - start
    if prefill is None:
        return whole
    # From the whole hit down to nothing: of two that are equally soon, the larger one.
    taken = np.append(ends[::-1], start) - start
    left_s = np.maximum(prefill.seconds(total) - prefill.seconds(start + taken), 0.0)
    first_token_s = left_s + np.append(load_s[::-1], 0.0)
    soonest_s = first_token_s.min()
    if soonest_s >= (1 - MARGIN) * first_token_s[0]:
        return whole
    return int(taken[np.argmax(first_token_s <= (1 + slack) * soonest_s)])
