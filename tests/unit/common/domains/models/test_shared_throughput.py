"""THROUGHPUT through shared aggregators: planted parameters are found, and GPUs are chosen together
with aggregators."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base import codec
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.fitting import Observation
from slackwater.common.domains.models.goodput import BatchLimits, GoodputModel
from slackwater.common.domains.models.goodput_report import profile_of
from slackwater.common.domains.models.pollux_agent import PolluxAgent
from slackwater.common.domains.models.shared_fitting import fit_shared
from slackwater.common.domains.models.shared_throughput import (
    Carried,
    SharedThroughput,
)
from slackwater.schemas.base import JobId
from slackwater.schemas.telemetry import GoodputReport

MB = 1e6
PLANTED = SharedThroughput(0.02, 0.001, 0.005, 400 * MB, 0.002, 2.0, Carried(100 * MB))
SHAPES = [(1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (8, 4)]
LIMITS = BatchLimits(initial=64, total_max=4096, per_gpu_max=256)


def observe(form: SharedThroughput, noise: float = 0.0, seed: int = 0) -> list[Observation]:
    rng = np.random.default_rng(seed)
    return [
        Observation(
            1, workers, m, steps,
            float(form.iteration_with_s(count, workers, m, steps) * np.exp(rng.normal(0, noise))),
            float(form.grad_s(m)), count,
        )
        for workers, count in SHAPES
        for m in (16, 64)
        for steps in (0, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("link_bytes_s", [0.0, 1000 * MB])
@pytest.mark.parametrize("unit_s", [1e-2, 1.0, 60.0])
def test_planted_parameters_are_found(link_bytes_s: float, unit_s: float) -> None:
    """From exact times of six shapes, with and without a link that bounds a worker alone."""
    planted = PLANTED._replace(
        alpha_grad_s=unit_s * PLANTED.alpha_grad_s, beta_grad_s=unit_s * PLANTED.beta_grad_s,
        alpha_sync_s=unit_s * PLANTED.alpha_sync_s, incast_s=unit_s * PLANTED.incast_s,
        share_bytes_s=PLANTED.share_bytes_s / unit_s,
        carried=Carried(100 * MB, link_bytes_s / unit_s),
    )  # fmt: skip
    found = fit_shared(observe(planted), planted.carried)
    assert found[:4] == pytest.approx(planted[:4], rel=0.05)
    assert found.incast_s == pytest.approx(planted.incast_s, rel=0.05)
    assert found.gamma == pytest.approx(planted.gamma, rel=0.05)


@settings(max_examples=15, derandomize=True)
@given(
    st.integers(0, 2**32 - 1), st.floats(0.01, 0.2), st.floats(0.0, 0.02), st.floats(50, 2000),
    st.floats(0.0, 0.01), st.floats(1.0, 4.0),
)  # fmt: skip
def test_noisy_measurements_rank_configurations_as_the_truth_does(
    seed: int, alpha_s: float, sync_s: float, share_mb: float, incast_s: float, gamma: float
) -> None:
    """With 2 % noise: of two shapes that were never measured and differ by a fifth or more, the
    shorter one is told."""
    carried = Carried(100 * MB)
    planted = SharedThroughput(
        alpha_s, alpha_s / 50, sync_s, share_mb * MB, incast_s, gamma, carried
    )
    found = fit_shared(observe(planted, 0.02, seed), carried)
    unseen = [(2, 2), (3, 1), (6, 2), (6, 3), (8, 3), (12, 4)]
    true_s, told_s = (
        np.array([float(form.iteration_with_s(a, k, 32)) for k, a in unseen])
        for form in (planted, found)
    )
    for i in range(len(unseen)):
        for j in range(len(unseen)):
            assert not (true_s[i] > 1.2 * true_s[j] and told_s[i] < told_s[j])


def test_a_guess_explains_as_well() -> None:
    first = fit_shared(observe(PLANTED)[:8], PLANTED.carried)
    found = fit_shared(observe(PLANTED), PLANTED.carried, first)
    assert found[:4] == pytest.approx(PLANTED[:4], rel=0.05)


def test_a_job_seen_with_one_number_of_workers_is_believed_to_scale() -> None:
    """One worker: neither an aggregator's share nor incast is known, so that more GPUs are tried.
    The time that synchronising took stays."""
    found = fit_shared([each for each in observe(PLANTED) if each.gpus == 1], PLANTED.carried)
    assert found.share_bytes_s == inf
    assert found.incast_s == 0.0
    once_s = PLANTED.sync_s(1, 1)
    assert found.sync_s([1, 8], 1) == pytest.approx([float(once_s)] * 2, rel=0.1)


@pytest.mark.parametrize("count", [0, 1])
def test_measurements_that_cannot_be_are_refused(count: int) -> None:
    with pytest.raises(Rejected, match=r"aggregators|nothing|positive"):
        fit_shared([Observation(1, 1, 8, 0, float(count and 0.0), 0.0, count)])


def test_the_best_number_of_aggregators_is_the_fewest_that_is_nearly_as_fast() -> None:
    """A form by which eight aggregators would help eight workers, and one worker needs one."""
    form = PLANTED._replace(aggregators_max=8, carried=Carried(100 * MB, 10_000 * MB))
    best = form.best_aggregators(np.array([1, 8]), 16)
    shorter_s = [float(form.iteration_with_s(a, 8, 16)) for a in range(1, 9)]
    assert shorter_s == sorted(shorter_s, reverse=True)
    assert best[1] == 8
    assert best[0] <= best[1]
    free = form._replace(aggregators_max=2)
    assert free.best_aggregators(8, 16) == 2
    assert free.iteration_s(1, 8, 16) == pytest.approx(shorter_s[1])
    cheap = form._replace(share_bytes_s=inf, incast_s=0.0)
    assert cheap.best_aggregators(8, 16) == 1


def test_a_job_is_worth_more_gpus_where_it_can_have_more_aggregators() -> None:
    """GPUs and aggregators are chosen together: with one aggregator eight GPUs are hardly faster
    than four; with eight they are."""
    few, many = (
        GoodputModel(PLANTED._replace(aggregators_max=most), 1e5, LIMITS).best_goodput(
            [1, 1], [4, 8]
        )
        for most in (1, 8)
    )
    assert few[1] / few[0] < 1.3 < many[1] / many[0]


def test_a_report_tells_the_form_and_survives_the_wire() -> None:
    agent = PolluxAgent(LIMITS, carried=PLANTED.carried)
    for each in observe(PLANTED):
        agent.saw_iteration(each)
    agent.refit()
    report = codec.decode(codec.encode(agent.report(JobId("a"))), GoodputReport)
    assert report.aggregated is not None
    assert profile_of(report) == agent.profile()
    wide = profile_of(report, aggregators_max=6).model
    assert wide is not None
    assert isinstance(wide.throughput, SharedThroughput)
    assert wide.throughput.aggregators_max == 6


def test_who_knows_all_reduce_alone_reads_the_same_times() -> None:
    theta = PLANTED.as_all_reduce()
    for workers in (2, 3, 8):
        shared_s = PLANTED.iteration_with_s(1, workers, 32)
        assert theta.iteration_s(1, workers, 32) == pytest.approx(shared_s)
