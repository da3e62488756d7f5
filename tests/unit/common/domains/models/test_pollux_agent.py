"""A training job's agent: what it learns from what was seen, and what it tunes by it."""

from collections.abc import Sequence
from math import inf, nan
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base import codec
from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.common.domains.models import pollux_agent
from slackwater.common.domains.models.efficiency import GradientMoments
from slackwater.common.domains.models.fitting import Observation
from slackwater.common.domains.models.goodput import BatchLimits
from slackwater.common.domains.models.goodput_report import profile_of
from slackwater.common.domains.models.pollux_agent import (
    CONFIGURATIONS_MAX,
    Learned,
    PolluxAgent,
    next_report_s,
)
from slackwater.common.domains.models.throughput import ThroughputParams
from slackwater.common.domains.models.throughput_table import ThroughputTable
from slackwater.schemas.base import JobId
from slackwater.schemas.telemetry import GoodputReport

THETA = ThroughputParams(0.05, 0.001, 0.02, 0.002, 0.1, 0.004, 1.5)
LIMITS = BatchLimits(initial=128, total_max=4096, per_gpu_max=256, per_gpu_min=8)
JOB = JobId("vgg-1")

bounds = st.builds(
    lambda initial, more, least, beyond, alone: BatchLimits(
        initial=initial, total_max=initial + more, per_gpu_min=least, per_gpu_max=least + beyond,
        accumulate_alone=alone,
    ),
    st.integers(1, 512), st.integers(0, 8192), st.integers(1, 64), st.integers(0, 512),
    st.booleans(),
)  # fmt: skip
allocations = st.integers(1, 64).flatmap(lambda k: st.tuples(st.integers(1, k), st.just(k)))


def iteration(
    nodes: int, gpus: int, per_gpu: int, steps: int = 0, noise: float = 1.0
) -> Observation:
    seconds = float(THETA.iteration_s(nodes, gpus, per_gpu, steps)) * noise
    return Observation(nodes, gpus, per_gpu, steps, seconds)


def trained(*shapes: tuple[int, int], limits: BatchLimits = LIMITS) -> PolluxAgent:
    """An agent that saw three batch sizes on each shape, and a noise scale of 1,000."""
    agent = PolluxAgent(limits)
    for nodes, gpus in shapes:
        for per_gpu in (16, 64, 256):
            agent.saw_iteration(iteration(nodes, gpus, per_gpu))
    agent.saw_gradients(GradientMoments(1.0, 1000.0 / limits.initial))
    assert agent.refit()
    return agent


def test_before_anything_was_seen_a_job_runs_its_smallest_batch() -> None:
    agent = PolluxAgent(LIMITS)
    assert not agent.refit()
    assert agent.profile().model is None
    assert agent.batch_split(1, 4) == (32, 0)
    assert agent.batch_split(4, 32) == (8, 0)  # 128 examples are 4 a GPU, and 8 is the least.
    with pytest.raises(Rejected, match="no goodput function yet: see an iteration, then refit"):
        agent.report(JOB)


def test_theta_is_fitted_to_what_was_seen_and_kept_until_something_changes() -> None:
    agent = trained((1, 1), (1, 2), (1, 4), (2, 8))
    model = agent.model
    assert model is not None
    for nodes, gpus, per_gpu in ((1, 1, 128), (1, 4, 100), (2, 8, 200)):
        ratio = float(model.throughput.iteration_s(nodes, gpus, per_gpu))
        ratio /= float(THETA.iteration_s(nodes, gpus, per_gpu))
        assert ratio == pytest.approx(1.0, rel=0.05)
    assert model.noise_scale == pytest.approx(1000.0)
    assert agent.gpus_seen == 8
    assert not agent.refit()
    assert agent.model is model
    agent.saw_gradients(GradientMoments(1.0, 80.0))
    assert agent.refit()
    assert agent.model is not model


def test_the_batch_grows_with_the_noise_and_with_the_allocation() -> None:
    agent = trained((1, 1), (1, 4), (2, 8))
    quiet = agent.batch_split(2, 8)
    for _ in range(200):
        agent.saw_gradients(GradientMoments(1.0, 200.0))
    agent.refit()
    noisy = agent.batch_split(2, 8)
    assert noisy.per_gpu * (noisy.accumulation + 1) > quiet.per_gpu * (quiet.accumulation + 1)
    alone = agent.batch_split(1, 1)
    assert 8 * noisy.per_gpu * (noisy.accumulation + 1) > alone.per_gpu * (alone.accumulation + 1)


@settings(deadline=None)
@given(bounds, allocations, st.floats(0, 1e6))
def test_every_split_keeps_the_limits(
    limits: BatchLimits, allocation: tuple[int, int], noise_scale: float
) -> None:
    """Learned or not. Allocations of more GPUs than the batch has smallest shares are excepted:
    nothing fits them, and no policy gives them."""
    nodes, gpus = allocation
    if gpus > limits.gpus_max:
        return
    agent = PolluxAgent(limits, known=THETA)
    agent.saw_gradients(GradientMoments(1.0, noise_scale / limits.initial))
    for _ in range(2):
        per_gpu, steps = agent.batch_split(nodes, gpus)
        total = gpus * per_gpu * (steps + 1)
        assert per_gpu <= limits.per_gpu_max
        assert steps >= 0
        if agent.model is not None and agent.model.tune(nodes, gpus).goodput > 0:
            assert limits.per_gpu_min <= per_gpu
            # A batch that is rounded up passes the largest one by less than a share.
            assert total <= max(limits.total_max, gpus * limits.per_gpu_min * (steps + 1))
        agent.saw_iteration(iteration(nodes, gpus, max(per_gpu, 1)))
        agent.refit()


@settings(deadline=None)
@given(st.integers(0, 2**32), st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60))
def test_noise_of_iterations_is_averaged_within_what_was_seen(
    seed: int, noises: Sequence[float]
) -> None:
    """The order does not matter, and the mean lies between the least and the most."""
    mixed = list(noises)
    Random(seed).shuffle(mixed)
    agent = PolluxAgent(LIMITS)
    for noise in mixed:
        agent.saw_iteration(iteration(1, 1, 64, noise=noise))
    ((mean, _),) = agent._seen.values()
    alone_s = float(THETA.iteration_s(1, 1, 64))
    assert min(noises) - 1e-9 <= mean.iteration_s / alone_s <= max(noises) + 1e-9
    assert mean.iteration_s / alone_s == pytest.approx(sum(noises) / len(noises))


def test_a_configuration_that_becomes_slower_is_believed_after_a_while() -> None:
    agent = PolluxAgent(LIMITS)
    for noise in [1.0] * 1000 + [2.0] * 500:
        agent.saw_iteration(iteration(1, 1, 64, noise=noise))
    ((mean, _),) = agent._seen.values()
    assert mean.iteration_s / float(THETA.iteration_s(1, 1, 64)) == pytest.approx(2.0, rel=0.01)


def test_exact_repetitions_change_nothing_to_the_last_bit() -> None:
    agent = PolluxAgent(LIMITS, smoothing=0.0)
    moments = GradientMoments(0.1, 0.7)
    for _ in range(7):
        agent.saw_iteration(iteration(1, 3, 33)._replace(grad_s=0.0123))
        agent.saw_gradients(moments)
    ((mean, _),) = agent._seen.values()
    assert mean == iteration(1, 3, 33)._replace(grad_s=0.0123)
    assert agent.noise_scale == moments.noise_scale(LIMITS.initial)


def test_configurations_seen_first_make_room() -> None:
    agent = PolluxAgent(LIMITS)
    for per_gpu in range(1, CONFIGURATIONS_MAX + 3):
        agent.saw_iteration(iteration(1, 1, per_gpu))
    assert len(agent._seen) == CONFIGURATIONS_MAX
    assert not agent.has_seen(1, 1, 2)
    assert agent.has_seen(1, 1, 3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, inf, nan])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    agent = PolluxAgent(LIMITS)
    with pytest.raises(Rejected, match="give iteration_s above 0"):
        agent.saw_iteration(Observation(1, 1, 64, 0, seconds))
    assert agent.gpus_seen == 0


def test_gradients_that_overflowed_are_left_out() -> None:
    agent = PolluxAgent(LIMITS)
    assert agent.saw_replicas(3.0, 2.0, 32, 128)
    before = agent.noise_scale
    for broken in (inf, nan):
        assert not agent.saw_replicas(broken, 2.0, 32, 128)
        assert not agent.saw_difference(1.0, broken, 128)
    assert agent.noise_scale == before


def test_a_single_gradient_is_not_taken_for_replicas() -> None:
    with pytest.raises(Rejected, match="tell one gradient an iteration to saw_difference"):
        PolluxAgent(LIMITS).saw_replicas(2.0, 2.0, 128, 128)


@settings(deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(1e-2, 1e5), st.integers(2, 16), st.integers(1, 256))
def test_both_estimators_find_the_noise_scale_behind_exact_expectations(
    sqr: float, noise_scale: float, replicas: int, per_gpu: int
) -> None:
    """E|g_b|^2 = |g|^2 + tr(Sigma) / b; a difference of two gradients has twice their noise."""
    trace = noise_scale * sqr
    large = replicas * per_gpu
    by_replicas, by_differences = PolluxAgent(LIMITS), PolluxAgent(LIMITS)
    for _ in range(3):
        by_replicas.saw_replicas(sqr + trace / per_gpu, sqr + trace / large, per_gpu, large)
        by_differences.saw_difference(sqr + trace / large, 2 * trace / large, large)
    assert by_replicas.noise_scale == pytest.approx(noise_scale, rel=1e-4)
    assert by_differences.noise_scale == pytest.approx(noise_scale, rel=1e-4)


def test_moments_are_smoothed_and_not_their_quotient() -> None:
    """One gradient in which no signal is left would make any mean of noise scales infinite."""
    agent = PolluxAgent(LIMITS, smoothing=0.9)
    for sqr in (1.0, -0.5) * 50:
        agent.saw_gradients(GradientMoments(sqr, 1.0))
    assert agent.noise_scale == pytest.approx(LIMITS.initial / 0.25, rel=0.5)


def test_replicas_forget_what_differences_told() -> None:
    agent = PolluxAgent(LIMITS)
    for _ in range(50):
        agent.saw_difference(1.0, 1.9, 128)
    agent.saw_replicas(1.0 + 10 / 32, 1.0 + 10 / 128, 32, 128)
    assert agent.noise_scale == pytest.approx(10.0)


def test_rates_are_scaled_by_the_rule_that_was_chosen() -> None:
    assert PolluxAgent(LIMITS, lr_rule="linear").learning_rate_scale(512) == 4.0
    assert PolluxAgent(LIMITS, lr_rule="square-root").learning_rate_scale(512) == 2.0
    slow = PolluxAgent(LIMITS, lr_rule="legw", warmup_epochs=1.0)
    assert slow.learning_rate_scale(512, epoch=2.0) == pytest.approx(2.0 * 2 / 4)
    assert slow.learning_rate_scale(512, epoch=9.0) == 2.0
    agent = PolluxAgent(LIMITS)
    assert agent.learning_rate_scale(512) == pytest.approx(1.0)  # No noise known: no gain.
    agent.saw_gradients(GradientMoments(1.0, 1e9))
    assert agent.learning_rate_scale(512) == pytest.approx(4.0)
    with pytest.raises(ConfigRejected, match="no learning-rate rule 'guess'"):
        PolluxAgent(LIMITS, lr_rule="guess")


def test_a_new_process_goes_on_with_what_the_former_one_had_learned() -> None:
    """A job that is given other GPUs begins anew, and must not explore what it knows."""
    former = trained((1, 1), (1, 4), (2, 8))
    former.saw_gradients(GradientMoments(1.0, 3000.0))
    former.refit()
    kept = msgspec.json.decode(msgspec.json.encode(former.learned()), type=Learned)
    again = PolluxAgent(LIMITS)
    again.recall(kept)
    assert again.refit()
    assert again.profile().gpus_seen == 8
    assert again.noise_scale == former.noise_scale
    assert again.learned() == former.learned()
    assert again.batch_split(2, 8) == former.batch_split(2, 8)


def test_a_report_survives_the_wire() -> None:
    agent = trained((1, 1), (1, 4), (2, 8))
    report = agent.report(JOB)
    read = codec.decode(codec.encode(report), GoodputReport)
    assert profile_of(read) == agent.profile()


def test_an_infinite_noise_scale_survives_json() -> None:
    agent = PolluxAgent(LIMITS, known=THETA, throughput_only=True)
    agent.saw_iteration(iteration(1, 2, 64))
    agent.refit()
    sent = msgspec.json.encode(agent.report(JOB))
    found = profile_of(msgspec.json.decode(sent, type=GoodputReport))
    assert found.model is not None
    assert found.model.noise_scale == inf


def test_a_reader_refuses_bounds_that_contradict_each_other() -> None:
    report = trained((1, 1)).report(JOB)
    odd = msgspec.structs.replace(
        report, batch=msgspec.structs.replace(report.batch, per_gpu_min=300)
    )
    with pytest.raises(Rejected, match="per_gpu_min=300 and per_gpu_max=256"):
        profile_of(odd)


def test_a_known_throughput_is_not_fitted_and_a_table_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> ThroughputParams:
        raise AssertionError("fitted")

    monkeypatch.setattr(pollux_agent, "fit", never)
    points = [(n, k, m) for n, k in ((1, 1), (1, 4), (2, 8), (4, 8)) for m in (16.0, 64.0, 256.0)]
    times = [
        (float(THETA.iteration_s(*point)), float(THETA.sync_s(*point[:2]))) for point in points
    ]
    table = ThroughputTable(np.hstack([points, times]))
    for known in (THETA, table):
        agent = PolluxAgent(LIMITS, known=known)
        agent.saw_iteration(iteration(1, 1, 64, noise=3.0))
        assert agent.refit()
        assert agent.model is not None
        assert agent.model.throughput is known
    with pytest.raises(Rejected, match="only theta_sys is reported"):
        agent.report(JOB)


def test_agents_report_in_one_rhythm() -> None:
    assert next_report_s(0.0, 30.0) == 30.0
    assert next_report_s(29.9, 30.0) == 30.0
    assert next_report_s(30.0, 30.0) == 60.0


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_the_next_report_is_later_than_the_last(number: int, period_s: float) -> None:
    """Regression: every .95 s, the report at 2.85 s was followed by itself, for ever."""
    last_s = number * period_s
    assert last_s < next_report_s(last_s, period_s) <= last_s + 2 * period_s
    assert next_report_s(3 * 0.95, 0.95) == 4 * 0.95


def test_moments_that_are_given_without_error_are_taken_as_they_are() -> None:
    """The simulator's come from profiles: cut at a standard error, they would decide otherwise."""
    exact, measured = PolluxAgent(LIMITS), PolluxAgent(LIMITS)
    for sqr in (-1.0, 1.0):
        exact.saw_gradients(GradientMoments(sqr, 1.0))
        small, large = sqr + LIMITS.initial, sqr + LIMITS.initial / 2
        measured.saw_replicas(small, large, 1, 2)  # The same moments.
    assert exact.noise_scale == pytest.approx(LIMITS.initial * 1.95 / 0.05)
    assert measured.noise_scale < exact.noise_scale / 5
