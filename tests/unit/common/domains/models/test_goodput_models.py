"""Pollux's models: the worked numbers of the paper's equations, and properties they must have."""

from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.domains.models.efficiency import (
    GradientMoments,
    efficiency,
    moments_of_differences,
    moments_of_replicas,
)
from slackwater.common.domains.models.fitness import (
    fair_share,
    fitness_of_worth,
    power_mean,
    realloc_factor,
    worth,
)
from slackwater.common.domains.models.goodput import (
    BatchLimits,
    GoodputModel,
    split_batch,
)
from slackwater.common.domains.models.lr_scaling import TrainingState, adascale, legw, rule
from slackwater.common.domains.models.throughput import (
    ThroughputParams,
)

THETA = ThroughputParams(0.05, 0.001, 0.02, 0.005, 0.1, 0.01, 2.0)
LIMITS = BatchLimits(initial=128, total_max=8192, per_gpu_max=200, per_gpu_min=16)
MODEL = GoodputModel(THETA, 1000.0, LIMITS)

times = st.floats(1e-4, 10.0)
thetas = st.builds(ThroughputParams, times, times, times, times, times, times, st.floats(1.0, 10.0))


def test_iteration_time_of_the_worked_example() -> None:
    """One GPU computes; four on a machine overlap; gamma 1 adds, infinity takes the maximum."""
    assert float(THETA.iteration_s(1, 1, 100)) == pytest.approx(0.15)
    assert float(THETA.iteration_s(1, 4, 100)) == pytest.approx(0.152971, abs=1e-6)
    assert float(THETA._replace(gamma=1.0).iteration_s(1, 4, 100)) == pytest.approx(0.18)
    assert float(THETA._replace(gamma=inf).iteration_s(1, 4, 100)) == pytest.approx(0.15)


def test_accumulation_over_two_machines() -> None:
    assert float(THETA.iteration_s(2, 8, 100, 1)) == pytest.approx(0.369317, abs=1e-6)
    assert 1600 / float(THETA.iteration_s(2, 8, 100, 1)) == pytest.approx(4332.32, abs=5e-3)
    assert float(MODEL.goodput(2, 8, 100, 1)) == pytest.approx(1879.56, abs=5e-3)


def test_efficiency_of_the_worked_example() -> None:
    assert float(efficiency(1000, 128, 512)) == pytest.approx(0.746032, abs=1e-6)
    assert float(efficiency(0, 128, 512)) == 0.25
    assert float(efficiency(inf, 128, 512)) == 1.0


@given(thetas, st.integers(1, 64), st.integers(1, 16), st.integers(1, 1000), st.integers(0, 8))
def test_iteration_time_lies_between_overlap_and_none(
    theta: ThroughputParams, gpus: int, nodes: int, per_gpu: int, steps: int
) -> None:
    """For any gamma: at least perfect overlap, at most none."""
    nodes = min(nodes, gpus)
    seconds = float(theta.iteration_s(nodes, gpus, per_gpu, steps))
    most = float(theta._replace(gamma=1.0).iteration_s(nodes, gpus, per_gpu, steps))
    least = float(theta._replace(gamma=inf).iteration_s(nodes, gpus, per_gpu, steps))
    assert least * (1 - 1e-9) <= seconds <= most * (1 + 1e-9)


@given(st.floats(0, 1e9), st.integers(1, 10_000), st.floats(1.0, 1000.0))
def test_efficiency_is_a_fraction_that_falls_with_the_batch(
    noise_scale: float, initial: int, factor: float
) -> None:
    small, large = efficiency(noise_scale, initial, [initial * factor, initial * factor * 2])
    assert 0 < large <= small <= 1 + 1e-12


def test_split_takes_the_fewest_accumulation_steps_that_fit() -> None:
    """M = 1024 on two GPUs of at most 200: s = 2 and m = 171, a true batch of 1026."""
    per_gpu, steps = split_batch(LIMITS, 1024, 2)
    assert (int(per_gpu), int(steps)) == (171, 2)


@given(st.integers(1, 64), st.integers(128, 8192))
def test_split_never_exceeds_memory_nor_shrinks_the_batch(gpus: int, batch: int) -> None:
    per_gpu, steps = (int(x) for x in split_batch(LIMITS, batch, gpus))
    assert per_gpu <= LIMITS.per_gpu_max
    total = gpus * per_gpu * (steps + 1)
    assert total >= batch or total + gpus * (steps + 1) > LIMITS.total_max
    if steps:
        assert batch / gpus > LIMITS.per_gpu_max * steps


def test_alone_above_m0_a_job_accumulates_when_its_estimator_needs_it() -> None:
    limits = BatchLimits(initial=100, total_max=1000, per_gpu_max=200, accumulate_alone=True)
    assert [int(x) for x in split_batch(limits, 150, 1)] == [75, 1]
    assert [int(x) for x in split_batch(limits, 150, 2)] == [75, 0]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 3), (2, 5), (4, 16), (16, 64)])
def test_tuning_is_near_the_best_of_every_configuration(nodes: int, gpus: int) -> None:
    """Sampling 50 batch sizes loses at most 1 % against trying all (m, s)."""
    steps, per_gpu = np.meshgrid(np.arange(0, 512), np.arange(16, 201))
    batch = gpus * per_gpu * (steps + 1)
    allowed = (batch >= LIMITS.initial) & (batch <= LIMITS.total_max)
    best = MODEL.goodput(nodes, gpus, per_gpu[allowed], steps[allowed]).max()
    tuning = MODEL.tune(nodes, gpus)
    assert 0.99 * best <= tuning.goodput <= best * (1 + 1e-9)
    assert tuning.goodput == pytest.approx(
        float(MODEL.goodput(nodes, gpus, tuning.per_gpu, tuning.accumulation))
    )


def test_table_holds_every_allocation() -> None:
    table = MODEL.goodput_table(12)
    assert table.shape == (2, 13)
    assert table[0, 0] == table[1, 0] == table[1, 1] == 0.0
    for gpus in range(2, 13):
        assert table[0, gpus] == pytest.approx(MODEL.tune(1, gpus).goodput)
        assert table[1, gpus] == pytest.approx(MODEL.tune(2, gpus).goodput)
    assert all(a < b for a, b in pairwise(table[0]))


def test_more_gpus_than_the_smallest_batches_allow_are_worth_nothing() -> None:
    model = GoodputModel(THETA, 1000.0, BatchLimits(initial=8, total_max=64, per_gpu_max=64,
                                                   per_gpu_min=16))  # fmt: skip
    assert model.limits.gpus_max == 4
    assert (model.goodput_table(6)[1] > 0).tolist() == [False, False, True, True, True, False,
                                                       False]  # fmt: skip


def test_fixed_batch_has_efficiency_one() -> None:
    """A non-adaptive job is judged by throughput alone."""
    limits = BatchLimits(initial=512, total_max=512, per_gpu_max=200, fixed=512)
    model = GoodputModel(THETA, 0.0, limits)
    tuning = model.tune(1, 4)
    assert (tuning.per_gpu, tuning.accumulation) == (128, 0)
    assert tuning.goodput == pytest.approx(512 / float(THETA.iteration_s(1, 4, 128)))


def test_slower_gpus_compute_slower_and_synchronise_alike() -> None:
    assert MODEL.tune(1, 1, 0.5).goodput == pytest.approx(MODEL.tune(1, 1).goodput / 2)
    assert MODEL.tune(1, 4, 0.5).goodput > MODEL.tune(1, 4).goodput / 2


def test_moments_are_recovered_from_exact_expectations() -> None:
    """|g|^2 = 4 and tr(Sigma) = 600: either estimator finds phi = 150."""
    sqr, trace = 4.0, 600.0

    def expected(batch: float) -> float:
        return sqr + trace / batch

    found = moments_of_replicas(expected(32), expected(128), 32, 128, 64)
    assert found.sqr == pytest.approx(sqr)
    assert found.noise_scale(64) == pytest.approx(150)
    found = moments_of_differences(expected(32), 2 * trace / 32, 32, 64)
    assert found.noise_scale(64) == pytest.approx(150)


def test_moments_that_noise_made_negative_are_cut_off() -> None:
    assert GradientMoments(-1.0, 2.0).noise_scale(64) == inf
    assert GradientMoments(1.0, -2.0).noise_scale(64) == 0.0
    assert GradientMoments(0.0, 0.0).noise_scale(64) == 0.0


def test_power_mean_of_the_worked_examples() -> None:
    assert power_mean([1, 4], 1) == pytest.approx(2.501)
    assert power_mean([1, 4], -1) == pytest.approx(1.60136, abs=1e-5)
    assert power_mean([1, 4], -10) == pytest.approx(1.072845, abs=1e-6)
    assert power_mean([0, 4], -1) == pytest.approx(0.0019995, abs=1e-7)
    assert power_mean([1, 4], 0) == pytest.approx((1.001 * 4.001) ** 0.5)


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=20),
    st.sampled_from([-10.0, -1.0, 0.0, 0.5, 1.0, 2.0]),
)
def test_worth_adds_up_to_the_fitness(speedups: list[float], p: float) -> None:
    total = float(np.sum(worth(speedups, p)))
    assert fitness_of_worth(total, len(speedups), p) == pytest.approx(power_mean(speedups, p))


def test_realloc_factor_of_the_worked_examples() -> None:
    assert realloc_factor(60, 1, 30) == pytest.approx(1 / 3)
    assert realloc_factor(30, 2, 30) == 0.0
    assert realloc_factor(0, 0, 0) == 1.0


def test_fair_share_is_rounded_up_and_lies_on_few_machines() -> None:
    assert fair_share(64, 3, 4) == (6, 22)
    assert fair_share(64, 64, 4) == (1, 1)
    assert fair_share(64, 200, 4) == (1, 1)
    assert fair_share(0, 5, 4) == (1, 1)


def test_learning_rate_rules() -> None:
    state = TrainingState(noise_scale=1000.0)
    assert rule("linear")(128, 512, state) == 4.0
    assert rule("square-root")(128, 512, state) == 2.0
    # The gain is the batch's ratio times its efficiency.
    assert adascale(128, 512, state) == pytest.approx(4 * 0.7460317, abs=1e-6)
    assert adascale(128, 512, TrainingState(noise_scale=inf)) == 4.0
    assert adascale(128, 512, TrainingState()) == 1.0
    warming = TrainingState(epoch=2.0, warmup_epochs=1.0)
    assert legw(128, 512, warming) == pytest.approx(2.0 * 0.5)
    assert legw(128, 512, TrainingState(warmup_epochs=1.0)) == 2.0
    with pytest.raises(ConfigRejected, match="adascale, legw, linear, square-root"):
        rule("magic")
