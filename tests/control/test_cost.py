"""How much of a hit is taken: what prefill and loads cost, the decision, and the pool behind it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import cost
from kvpool.cost import MARGIN, MOST_SAMPLES, Float64, Int64, Prefill, PrefillModel, Reads
from kvpool.metrics import Collector
from kvpool.orchestrator import Orchestrator
from kvpool.types import WorkerReport
from tests.control.rig import (
    FULL,
    SIZE,
    TOKENS,
    WINDOW,
    counters,
    device,
    key,
    load,
    make,
    pool_of,
    store,
)

rates = st.floats(1e-7, 1e-2)
factors = st.floats(1.0, 1e4)


def prefill_of(token_s: float, context_s: float = 0.0) -> Prefill:
    return Prefill(token_s, context_s)


# ---- the decision ---------------------------------------------------------------------------


@st.composite
def hits(draw: st.DrawFn) -> tuple[Prefill, int, int, Int64, Float64]:
    """A model, a start, a total, ends of the hit, and the seconds to load up to each."""
    start = draw(st.integers(0, 100_000))
    steps = draw(st.lists(st.integers(1, 10_000), min_size=1, max_size=40))
    ends = start + np.cumsum(np.array(steps, np.int64))
    times = draw(st.lists(st.floats(0, 10), min_size=len(steps), max_size=len(steps)))
    total = int(ends[-1]) + draw(st.integers(0, 10_000))
    prefill = Prefill(draw(rates), draw(st.floats(0, 1e-6)))
    return prefill, start, total, ends, np.cumsum(times)


def first_token_s(hit: tuple[Prefill, int, int, Int64, Float64], taken: int) -> float:
    """The expected seconds to the first token, computed one candidate at a time."""
    prefill, start, total, ends, load_s = hit
    load = {int(end) - start: float(s) for end, s in zip(ends, load_s, strict=True)} | {0: 0.0}
    done = start + taken
    work = prefill.token_s * (total - done) + prefill.context_s * (total**2 - done**2) / 2
    return load[taken] + work


@given(hits())
def test_the_answer_is_a_cut_and_never_clearly_later_than_another(
    hit: tuple[Prefill, int, int, Int64, Float64],
) -> None:
    _, start, _, ends, _ = hit
    taken = cost.decide(*hit)
    cuts = [0, *(int(end) - start for end in ends)]
    assert taken in cuts
    soonest = min(first_token_s(hit, cut) for cut in cuts)
    if taken == cuts[-1]:
        assert soonest >= (1 - MARGIN) * first_token_s(hit, taken) * (1 - 1e-9) - 1e-9
    else:
        assert first_token_s(hit, taken) <= soonest * (1 + 1e-9) + 1e-9
        assert first_token_s(hit, taken) < (1 - MARGIN) * first_token_s(hit, cuts[-1]) + 1e-9


@given(hits(), factors)
def test_a_slower_load_is_never_taken_further(
    hit: tuple[Prefill, int, int, Int64, Float64], factor: float
) -> None:
    prefill, start, total, ends, load_s = hit
    slower = cost.decide(prefill, start, total, ends, load_s * factor)
    assert slower <= cost.decide(*hit)


@given(hits(), factors)
def test_a_slower_prefill_never_takes_less(
    hit: tuple[Prefill, int, int, Int64, Float64], factor: float
) -> None:
    prefill, *rest = hit
    slower = Prefill(prefill.token_s * factor, prefill.context_s * factor)
    assert cost.decide(slower, *rest) >= cost.decide(*hit)


@given(hits())
def test_without_a_model_all_is_taken(hit: tuple[Prefill, int, int, Int64, Float64]) -> None:
    _, start, total, ends, load_s = hit
    assert cost.decide(None, start, total, ends, load_s * 1e9) == ends[-1] - start


@given(hits(), st.floats(0, 1))
def test_whole_where_every_piece_loads_sooner_than_it_is_computed(
    hit: tuple[Prefill, int, int, Int64, Float64], part: float
) -> None:
    prefill, start, total, ends, _ = hit
    computed_s = np.diff(prefill.seconds(np.append(start, ends)))
    load_s = np.cumsum(part * computed_s)
    assert cost.decide(prefill, start, total, ends, load_s) == ends[-1] - start


@given(hits(), st.floats(1.5, 100))
def test_nothing_where_every_piece_loads_clearly_later_than_it_is_computed(
    hit: tuple[Prefill, int, int, Int64, Float64], times: float
) -> None:
    prefill, start, _, ends, _ = hit
    computed_s = np.diff(prefill.seconds(np.append(start, ends)))
    load_s = np.cumsum(times * computed_s)
    assert cost.decide(prefill, start, int(ends[-1]), ends, load_s) == 0


def test_the_front_where_the_front_is_fast() -> None:
    ends = np.arange(1, 11, dtype=np.int64) * 100
    load_s = np.where(ends <= 600, ends / 1e5, 10.0)
    assert cost.decide(Prefill(1e-3, 0.0), 0, 1000, ends, load_s) == 600


@given(hits(), st.floats(0, 1))
def test_a_trial_reads_more_and_is_late_by_no_more_than_its_slack(
    hit: tuple[Prefill, int, int, Int64, Float64], slack: float
) -> None:
    taken, trial = cost.decide(*hit), cost.decide(*hit, slack)
    assert trial >= taken
    if trial > taken:
        assert first_token_s(hit, trial) <= (1 + slack) * first_token_s(hit, taken) + 1e-9


def test_less_than_a_clear_gain_is_not_taken() -> None:
    ends = np.array([1000], np.int64)
    prefill = Prefill(1e-3, 0.0)
    assert cost.decide(prefill, 0, 1000, ends, np.array([1 / (1 - MARGIN) - 0.01])) == 1000
    assert cost.decide(prefill, 0, 1000, ends, np.array([1 / (1 - MARGIN) + 0.01])) == 0


# ---- what prefill costs ---------------------------------------------------------------------


def teach(
    model: PrefillModel, prefill: Prefill, steps: Sequence[tuple[int, float]], noise: random.Random
) -> None:
    for tokens, context in steps:
        seconds = tokens * (prefill.token_s + prefill.context_s * context)
        model.observe(tokens, context, seconds * noise.uniform(0.9, 1.1))


def chunked(prompt: int, budget: int) -> list[tuple[int, float]]:
    """(tokens, mean context) of the steps that compute a prompt."""
    return [
        (min(budget, prompt - start), start + min(budget, prompt - start) / 2)
        for start in range(0, prompt, budget)
    ]


def test_the_model_converges(rng: random.Random) -> None:
    truth = Prefill(5e-5, 1e-9)
    model = PrefillModel()
    for _ in range(20):
        teach(model, truth, chunked(rng.randrange(20_000, 131_072), 8192), rng)
    found = model.estimate(100_000)
    assert found is not None
    for tokens in (1000, 20_000, 100_000):
        assert float(found.seconds(tokens)) == pytest.approx(float(truth.seconds(tokens)), rel=0.1)


def test_it_follows_a_machine_that_changes(rng: random.Random) -> None:
    model = PrefillModel()
    for factor in (1, 20, 1):
        truth = Prefill(5e-5 * factor, 1e-9 * factor)
        for _ in range(30):
            teach(model, truth, chunked(131_072, 8192), rng)
        found = model.estimate(131_072)
        assert found is not None
        expected = float(truth.seconds(131_072))
        assert float(found.seconds(131_072)) == pytest.approx(expected, rel=0.1)


def test_a_stall_hardly_matters(rng: random.Random) -> None:
    truth = Prefill(5e-5, 0.0)
    model = PrefillModel()
    teach(model, truth, [(2048, 1024.0)] * 40, rng)
    model.observe(2048, 1024.0, 1000.0)
    found = model.estimate(2048)
    assert found is not None
    assert float(found.seconds(2048)) < 1.2 * float(truth.seconds(2048))


observations = st.lists(
    st.tuples(
        st.integers(-10, 200_000),
        st.floats(allow_nan=True, allow_infinity=True),
        st.floats(allow_nan=True, allow_infinity=True),
    ),
    max_size=60,
)
plausible = st.lists(
    st.tuples(st.integers(1, 16384), st.floats(0, 1e6), st.floats(1e-6, 100)),
    min_size=8,
    max_size=60,
)


@given(observations | plausible)
def test_the_model_is_never_negative(steps: list[tuple[int, float, float]]) -> None:
    model = PrefillModel()
    for step in steps:
        model.observe(*step)
    found = model.estimate(0.0)
    if found is not None:
        assert found.token_s >= 0 and found.context_s >= 0
        seconds = found.seconds(np.array([0.0, 1.0, 1000.0]))
        assert np.isfinite(seconds).all() and (np.diff(seconds) >= 0).all()


def test_it_says_nothing_before_it_has_seen_enough() -> None:
    model = PrefillModel()
    for seen in range(cost.ENOUGH_STEPS):
        assert model.estimate(100.0) is None, seen
        model.observe(1024, 512.0, 0.1)
    assert model.estimate(100.0) is not None
    few = PrefillModel()
    for _ in range(cost.ENOUGH_STEPS):
        few.observe(cost.ENOUGH_TOKENS // cost.ENOUGH_STEPS - 1, 10.0, 0.1)
    assert few.estimate(10.0) is None


def test_it_says_nothing_about_contexts_it_has_not_seen() -> None:
    model = PrefillModel()
    for _ in range(10):
        model.observe(1024, 512.0, 0.1)
    assert model.estimate(1024.0) is not None
    assert model.estimate(1025.0) is None


# ---- how long steps took --------------------------------------------------------------------


class Seen(PrefillModel):
    """A model that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, float, float]] = []

    def observe(self, tokens: int, context: float, seconds: float) -> None:
        self.steps.append((tokens, context, seconds))


def test_steps_one_after_the_other() -> None:
    seen = Seen()
    timer = cost.StepTimer(seen, one_by_one=True)
    for begun_s, tokens in ((10.0, 100), (20.0, 0), (30.0, 300)):
        timer.begin(begun_s, tokens, 1.0)
        timer.end(begun_s + 4.0)
    assert seen.steps == [(100, 1.0, 4.0), (300, 1.0, 4.0)]


def test_a_step_that_was_scheduled_while_another_ran_begins_with_its_end() -> None:
    seen = Seen()
    timer = cost.StepTimer(seen, one_by_one=True)
    timer.begin(0.0, 100, 1.0)
    timer.begin(1.0, 200, 1.0)
    timer.end(5.0)
    timer.begin(5.5, 300, 1.0)
    timer.end(7.0)
    timer.end(10.0)
    assert seen.steps == [(100, 1.0, 5.0), (200, 1.0, 2.0), (300, 1.0, 3.0)]


def test_in_a_pipeline_only_steps_that_were_alone_count() -> None:
    seen = Seen()
    timer = cost.StepTimer(seen, one_by_one=False)
    timer.begin(0.0, 100, 1.0)
    timer.begin(1.0, 200, 1.0)
    timer.end(5.0)
    timer.end(7.0)
    timer.begin(8.0, 300, 1.0)
    timer.end(9.0)
    assert seen.steps == [(300, 1.0, 1.0)]


def test_ends_without_a_begin_and_begins_without_an_end() -> None:
    seen = Seen()
    timer = cost.StepTimer(seen, one_by_one=True)
    timer.end(1.0)
    for i in range(10_000):
        timer.begin(float(i), 1, 1.0)
    assert len(timer._steps) < 100
    assert seen.steps == []


# ---- what a load costs ----------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_samples_stand_for_all(first: int, count: int) -> None:
    picks, strata = cost.sample(first, first + count)
    assert len(picks) == len(strata) == min(count, MOST_SAMPLES)
    begins = np.append(first, strata[:-1])
    assert ((begins <= picks) & (picks < strata)).all()
    assert int(np.diff(strata, prepend=first).sum()) == count
    if count <= MOST_SAMPLES:
        assert picks.tolist() == list(range(first, first + count))


@pytest.mark.parametrize("period", [2, 3, 4, 8, 16])
def test_no_pattern_of_placement_hides_from_samples(period: int) -> None:
    picks, _ = cost.sample(0, 8 * MOST_SAMPLES)
    found = np.bincount(picks % period, minlength=period) / len(picks)
    assert found == pytest.approx(np.full(period, 1 / period), abs=0.08)


def documents(chunks: int, group: int = 0, first: int = 0) -> Reads:
    """What a hit on document "a" reads of a FULL group, chunk by chunk."""
    ends = np.arange(first + 1, chunks + 1, dtype=np.int64) * TOKENS
    return Reads([key("a", group, int(end)) for end in ends], ends, np.ones_like(ends))


def seconds(orchestrator: Orchestrator, chunks: int) -> list[float]:
    reads = documents(chunks)
    return [float(s) for s in orchestrator.load_seconds(reads, reads.ends)]


def test_devices_read_at_the_same_time() -> None:
    orchestrator = make([device("dram", 9, 2.0), device("file", 9, 1.0)])
    plan = store(orchestrator, "a", 6)
    expected = []
    for chunks in range(1, 7):
        read = np.bincount(plan.device[:chunks], minlength=2) * SIZE
        alone = [b / bw + 1e-4 for b, bw in zip(read, (2e9, 1e9), strict=True) if b]
        expected.append(max(alone))
    assert seconds(orchestrator, 6) == pytest.approx(expected)


def test_windows_are_read_by_every_load() -> None:
    orchestrator = make([device("file", 40, 1.0)], groups=(FULL, WINDOW))
    store(orchestrator, "a", 6)
    full = documents(6)
    window = [key("a", 1, end * TOKENS) for end in (4, 5, 6)]
    reads = Reads(
        full.keys + window,
        np.append(full.ends, [0, 0, 0]),
        np.append(full.counts, [1, 1, 1]),
    )
    found = orchestrator.load_seconds(reads, full.ends)
    expected = (np.arange(1, 7) * SIZE + 3 * SIZE // 2) / 1e9 + 1e-4
    assert found == pytest.approx(expected)


def test_a_load_waits_for_those_under_way() -> None:
    orchestrator = make([device("file", 40, 1.0)])
    store(orchestrator, "a", 6)
    store(orchestrator, "b", 8)
    before = seconds(orchestrator, 6)
    plan, request = load(orchestrator, "b", 8)
    behind = seconds(orchestrator, 6)
    assert behind == pytest.approx([s + 8 * SIZE / 1e9 for s in before])
    read = WorkerReport(counters={(0, 0): counters(bytes_read=5 * SIZE)})
    orchestrator.acknowledge(read)
    assert seconds(orchestrator, 6) == pytest.approx([s + 3 * SIZE / 1e9 for s in before])
    rest = WorkerReport(
        finished_loads={plan.load_id: 1}, counters={(0, 0): counters(bytes_read=3 * SIZE)}
    )
    orchestrator.acknowledge(rest)
    assert seconds(orchestrator, 6) == pytest.approx(before)
    orchestrator.complete_load(request)
    assert seconds(orchestrator, 6) == pytest.approx(before)


def test_what_is_queued_never_drifts(rng: random.Random) -> None:
    """Reports that tell too much or too little leave nothing behind when no load is under way."""
    orchestrator = make([device("dram", 9, 2.0), device("file", 40, 1.0)], ranks=2)
    store(orchestrator, "a", 12)
    loads = pool_of(orchestrator) and orchestrator._loads
    assert loads is not None
    open_requests = []
    for _ in range(200):
        if rng.random() < 0.5:
            open_requests.append(load(orchestrator, "a", rng.randrange(1, 13))[1])
        elif open_requests:
            orchestrator.complete_load(open_requests.pop(rng.randrange(len(open_requests))))
        label = (rng.randrange(2), rng.randrange(2))
        read = counters(bytes_read=rng.randrange(20) * SIZE)
        orchestrator.acknowledge(WorkerReport(counters={label: read}))
        assert min(loads.queued_bytes()) >= 0
    for request in open_requests:
        orchestrator.complete_load(request)
    assert loads.queued_bytes() == [0.0, 0.0]


def test_chunks_that_are_gone_cost_nothing() -> None:
    orchestrator = make([device("file", 9, 1.0)])
    assert seconds(orchestrator, 3) == [0.0, 0.0, 0.0]


@given(
    st.lists(st.tuples(st.floats(0.01, 50.0), st.booleans()), min_size=1, max_size=3),
    st.floats(1e-9, 1e-3),
    st.floats(0, 1e-7),
    st.integers(0, 7),
    st.integers(0, 1000),
    st.integers(0, 12),
)
def test_what_is_surely_whole_is_taken_whole(
    devices: list[tuple[float, bool]],
    token_s: float,
    context_s: float,
    first: int,
    rest: int,
    queued: int,
) -> None:
    """However chunks are spread, with a window, and with a load under way."""
    orchestrator = make(
        [
            device(("dram" if memory else "file") + str(i), 30, bandwidth)
            for i, (bandwidth, memory) in enumerate(devices)
        ],
        groups=(FULL, WINDOW),
    )
    store(orchestrator, "a", 8)
    store(orchestrator, "b", 12)
    if queued:
        load(orchestrator, "b", queued)
    full = documents(8, first=first)
    window = [key("a", 1, end * TOKENS) for end in (6, 7, 8)]
    reads = Reads(
        full.keys + window, np.append(full.ends, [0] * 3), np.ones(len(full.keys) + 3, np.int64)
    )
    start, end = first * TOKENS, 8 * TOKENS
    prefill = Prefill(token_s, context_s)
    bounds = orchestrator.load_bounds()
    whole = cost.decide(
        prefill, start, end + rest, full.ends, orchestrator.load_seconds(reads, full.ends)
    )
    if cost.surely_whole(prefill, start, end + rest, end, bounds):
        assert whole == end - start


def test_most_hits_are_surely_whole_at_once() -> None:
    """A model that computes 10,000 tokens a second beside a disk that reads 1 GB/s."""
    orchestrator = make([device("dram", 900, 10.0), device("file", 900, 1.0)])
    bounds = orchestrator.load_bounds()
    chunk = 1 << 20
    assert chunk / TOKENS / 1e9 == pytest.approx(bounds.token_s)
    assert cost.surely_whole(Prefill(1e-4, 0.0), 0, 2000, 1600, bounds)
    assert not cost.surely_whole(Prefill(1e-5, 0.0), 0, 2000, 1600, bounds)
    store(orchestrator, "a", 800)
    load(orchestrator, "a", 800)
    assert not cost.surely_whole(Prefill(1e-4, 0.0), 0, 2000, 1600, orchestrator.load_bounds())


# ---- metrics --------------------------------------------------------------------------------


def test_decisions_are_counted() -> None:
    collector = Collector()
    collector.add_decision(cost.Take.WHOLE, 0)
    collector.add_decision(cost.Take.PART, 256)
    samples = collector.collect(make([device("file", 9, 1.0)]).snapshot())
    decided = {s.labels: s.value for s in samples if s.name == "kvpool_hit_decisions_total"}
    assert decided == {("whole",): 1.0, ("part",): 1.0}
    assert sum(s.value for s in samples if s.name == "kvpool_declined_tokens_total") == 256
