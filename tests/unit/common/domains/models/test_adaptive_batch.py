"""The core of an adaptive program, told what a machine and gradients of known noise would show."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.common.domains.models.adaptive_batch import (
    CONFIGURATIONS_MAX,
    GROWTH_MAX,
    SEEN_MIN,
    AdaptiveBatch,
    Decision,
    IterationTimes,
)
from slackwater.common.domains.models.fitting import fit
from slackwater.common.domains.models.goodput import BatchLimits
from slackwater.common.domains.models.throughput import ThroughputParams

THETA = ThroughputParams(0.02, 0.0001, 0.005, 0.0, 0.01, 0.0, 1.5)
LIMITS = BatchLimits(initial=32, total_max=1024, per_gpu_max=128)


def see_noise(core: AdaptiveBatch, phi: float, times: int = SEEN_MIN) -> None:
    """Gradients of 16 and of 32 examples whose squared lengths are as expected."""
    for _ in range(times):
        core.saw_squares(1.0 + phi / 16, 1.0 + phi / 32, 16, 32)


def train(core: AdaptiveBatch, rng: Random, iterations: int) -> None:
    """Iterations of the present (m, s), of THETA's length within 2 %."""
    now = core.decision()
    for _ in range(iterations):
        true_s = float(THETA.iteration_s(core.nodes, core.gpus, now.per_gpu, now.accumulation))
        core.saw_iteration(now.per_gpu, now.accumulation, true_s * rng.uniform(0.98, 1.02))


def tuned(core: AdaptiveBatch, rng: Random, until_s: float = 400.0) -> list[Decision]:
    """Let time go by; return the decisions in turn."""
    now_s, found = 0.0, [core.decision()]
    while now_s < until_s:
        train(core, rng, 5)
        if (wanted := core.due_fit(now_s)) is not None:
            core.fitted(fit(wanted.observations, wanted.guess))
            found.append(core.decision())
        now_s += 1.0
    return found


def test_the_batch_grows_to_what_noise_and_machine_make_best() -> None:
    limits = BatchLimits(initial=32, total_max=1024, per_gpu_max=64)
    core = AdaptiveBatch(limits, 1, 2, fit_s=30.0)
    see_noise(core, 2000.0)
    decisions = tuned(core, Random(1))
    batches = [decision.batch(2) for decision in decisions]
    assert core.agent.model is not None
    best = core.agent.model.tune(1, 2)
    assert core.goodput() == pytest.approx(best.goodput, rel=0.06)
    assert batches[0] == 32
    assert batches[-1] > 200
    for before, after in pairwise(batches):
        assert after <= GROWTH_MAX * before + 2, "a batch at most doubles, but for rounding"
    assert decisions[-1].accumulation >= 1, "64 a GPU is the most that fits"


def test_without_noise_the_batch_stays() -> None:
    core = AdaptiveBatch(LIMITS)
    see_noise(core, 0.0)
    assert {decision.batch(1) for decision in tuned(core, Random(2))} == {32}


def test_while_noise_is_unknown_the_batch_stays_and_a_fit_is_made_all_the_same() -> None:
    core = AdaptiveBatch(LIMITS)
    see_noise(core, 5000.0, SEEN_MIN - 1)
    assert core.noise_scale is None
    assert {decision.batch(1) for decision in tuned(core, Random(3))} == {32}
    assert core.goodput() is not None
    see_noise(core, 5000.0, 1)
    assert core.noise_scale == pytest.approx(5000.0)


def test_noise_that_hides_the_gradient_is_capped_by_its_error() -> None:
    """The squared length comes out below 0 in half of the iterations: phi is what can be resolved,
    neither infinite nor 0."""
    core = AdaptiveBatch(LIMITS)
    rng = Random(4)
    for _ in range(200):
        core.saw_squares(100.0, 50.0 + rng.gauss(0.0, 1.0), 16, 32)
    assert core.noise_scale is not None
    assert 1600 < core.noise_scale < 100 * 1600


def test_the_interval_has_the_noise_scale_and_narrows() -> None:
    core, rng, widths = AdaptiveBatch(LIMITS), Random(5), []
    assert core.noise_interval == (None, None)
    for iteration in range(1, 61):
        phi = 1000.0 * rng.uniform(0.8, 1.2)
        core.saw_squares(1.0 + phi / 16, 1.0 + phi / 32, 16, 32)
        if iteration in (5, 60):
            low, high = core.noise_interval
            assert low is not None
            assert high is not None
            assert core.noise_scale is None or low < core.noise_scale < high
            widths.append(high - low)
    assert widths[1] < widths[0]


def test_fits_are_rare_and_come_early_first() -> None:
    core = AdaptiveBatch(LIMITS, fit_s=32.0)
    due = []
    for second in range(200):
        core.saw_iteration(32, 0, 0.1)
        if core.due_fit(1000.0 + second) is not None:
            due.append(second)
    assert due[:6] == [2, 4, 8, 16, 32, 64]
    assert all(after - before == 32 for before, after in pairwise(due[5:]))


def test_nothing_new_is_not_fitted() -> None:
    core = AdaptiveBatch(LIMITS, fit_s=1.0)
    assert core.due_fit(0.0) is None
    for _ in range(3):
        core.saw_iteration(32, 0, 0.1)
    assert core.due_fit(10.0) is not None
    assert core.due_fit(20.0) is None


def test_a_fixed_batch_stays_and_counts_fully() -> None:
    core = AdaptiveBatch(BatchLimits(initial=32, total_max=1024, per_gpu_max=128, fixed=64))
    see_noise(core, 1e4)
    assert set(tuned(core, Random(5))) == {Decision(64, 0, 1.0, 1.0)}


@pytest.mark.parametrize(
    ("rule", "factor"), [("linear", 4.0), ("square-root", 2.0), ("adascale", 52 / 16)]
)
def test_each_rule_scales_the_rate(rule: str, factor: float) -> None:
    """A batch of 4 M0 and phi = 12 M0: AdaScale's gain is (1 + 12) / (1 + 12 / 4)."""
    core = AdaptiveBatch(
        BatchLimits(initial=32, total_max=1024, per_gpu_min=128, per_gpu_max=128), lr_rule=rule
    )
    see_noise(core, 12 * 32.0)
    assert core.decision().rate == pytest.approx(factor)
    assert core.decision().efficiency == pytest.approx(13 / 16)


def test_legw_warms_up_by_statistical_epochs() -> None:
    core = AdaptiveBatch(
        BatchLimits(initial=32, total_max=1024, per_gpu_min=128, per_gpu_max=128),
        lr_rule="legw", warmup_epochs=0.5,
    )  # fmt: skip
    assert core.decision(1.0).rate == pytest.approx(1.0)
    assert core.decision(2.0).rate == core.decision(9.0).rate == pytest.approx(2.0)


def test_a_new_process_goes_on_and_another_size_tunes_at_once() -> None:
    core = AdaptiveBatch(LIMITS, 1, 2)
    see_noise(core, 2000.0)
    tuned(core, Random(6))
    same, more = AdaptiveBatch(LIMITS, 1, 2), AdaptiveBatch(LIMITS, 2, 4)
    same.recall(core.remember())
    assert same.decision() == core.decision()
    assert same.remember() == core.remember()
    more.recall(core.remember())
    assert more.decision().batch(4) > 32
    assert more.noise_scale == core.noise_scale
    with pytest.raises(Rejected, match="leave it out"):
        same.recall({"learned": 3})


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigRejected, match="no learning-rate rule 'guess'"):
        AdaptiveBatch(LIMITS, lr_rule="guess")
    with pytest.raises(Rejected, match="fit_s is 0"):
        AdaptiveBatch(LIMITS, fit_s=0.0)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(Rejected, match="was not measured"):
            AdaptiveBatch(LIMITS).saw_iteration(32, 0, seconds)


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0.001, 9.0)), max_size=300))
def test_times_are_medians_of_at_most_64_configurations(seen: list[tuple[int, float]]) -> None:
    times = IterationTimes()
    for per_gpu, seconds in seen:
        times.add((1, 1, per_gpu, 0), seconds)
    found = times.observations()
    assert len(times.kept()) <= CONFIGURATIONS_MAX
    for observation in found:
        every = sorted(s for m, s in seen if m == observation.per_gpu)
        assert every[0] <= observation.iteration_s <= every[-1]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 8), st.integers(1, 64), st.integers(1, 64), st.floats(0.0, 1e5),
    st.integers(0, 99),
)  # fmt: skip
def test_decisions_keep_the_limits(
    gpus: int, initial: int, per_gpu_max: int, phi: float, seed: int
) -> None:
    """Rounding up to whole examples on each GPU may pass M0, never `max_batch` by more."""
    limits = BatchLimits(initial=initial, total_max=16 * initial, per_gpu_max=per_gpu_max)
    core = AdaptiveBatch(limits, 1, gpus)
    see_noise(core, phi)
    for decision in tuned(core, Random(seed), 100.0):
        assert 1 <= decision.per_gpu <= per_gpu_max
        assert decision.batch(gpus) < max(limits.total_max, gpus) + gpus
        assert 0.0 < decision.efficiency <= 1.0
        assert 0.0 < decision.rate <= max(1.0, decision.batch(gpus) / initial)
