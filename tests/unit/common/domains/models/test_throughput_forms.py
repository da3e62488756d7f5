"""THROUGHPUT in each of its forms, under one suite; and a policy that takes any of them."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.domains.models.goodput import BatchLimits, GoodputModel, GoodputProfile
from slackwater.common.domains.models.throughput import (
    Throughput,
    ThroughputParams,
)
from slackwater.common.domains.models.throughput_table import ThroughputTable
from slackwater.schemas.base import JobId, NodeId
from slackwater.services.master.scheduling.policies.pollux import Pollux
from slackwater.services.master.scheduling.view import ClusterView, JobView, NodeView, View

THETA = ThroughputParams(0.05, 0.001, 0.02, 0.002, 0.1, 0.004, 1.0)
LIMITS = BatchLimits(initial=64, total_max=2048, per_gpu_max=256)


def theta() -> Throughput:
    return THETA


def table() -> Throughput:
    """The same times, read off measurements: without overlap they are linear, as the table is
    between its rows."""
    shapes = [(1, k) for k in (1, 2, 4, 8)] + [(n, 4 * n) for n in (2, 4, 8)] + [(2, 2), (8, 8)]
    rows = [
        (n, k, m, float(THETA.iteration_s(n, k, m)), float(THETA.sync_s(n, k)))
        for (n, k), m in product(shapes, (16.0, 64.0, 256.0))
    ]
    return ThroughputTable(np.array(rows))


FORMS: dict[str, Callable[[], Throughput]] = {"theta": theta, "table": table}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Throughput:
    return FORMS[request.param]()


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(16, 256), st.integers(0, 8))
def test_accumulation_adds_steps_without_synchronising(
    form: Throughput, gpus: int, per_gpu: int, steps: int
) -> None:
    one = float(form.iteration_s(1, gpus, per_gpu))
    more = float(form.iteration_s(1, gpus, per_gpu, steps))
    assert more == pytest.approx(one + steps * float(THETA.grad_s(per_gpu)), rel=0.02)


def test_arrays_are_answered_as_their_elements(form: Throughput) -> None:
    nodes, gpus, per_gpu = np.array([1, 1, 2]), np.array([1, 4, 8]), np.array([[32], [200]])
    found = form.iteration_s(nodes, gpus, per_gpu, 1)
    assert found.shape == (2, 3)
    for row, column in np.ndindex(2, 3):
        single = form.iteration_s(int(nodes[column]), int(gpus[column]), int(per_gpu[row, 0]), 1)
        assert float(single) == pytest.approx(float(found[row, column]))


def test_faster_gpus_compute_faster_and_synchronise_alike(form: Throughput) -> None:
    slow, fast = (float(form.iteration_s(1, 4, 64, 0, speed)) for speed in (1.0, 2.0))
    assert slow - fast == pytest.approx(float(THETA.grad_s(64)) / 2, rel=1e-6)


def test_goodput_is_useful_examples_over_seconds(form: Throughput) -> None:
    model = GoodputModel(form, 1000.0, LIMITS)
    per_s = 512 / float(form.iteration_s(1, 4, 64, 1))
    found = float(model.goodput(1, 4, 64, 1))
    assert found == pytest.approx(per_s * (1000 + 64) / (1000 + 512))


def test_goodput_and_the_policy_take_any_form(form: Throughput) -> None:
    """Four machines, two jobs that scale: every GPU is given, whatever form the profiles have."""
    model = GoodputModel(form, 5000.0, LIMITS)
    assert (np.diff(model.goodput_table(4)[0]) > 0).all()
    cluster = ClusterView(
        tuple(NodeView(n, NodeId(f"n{n}"), 4, "") for n in range(4)), 16, ("",), 4
    )
    jobs = {
        JobId(f"j{n}"): JobView(
            id=JobId(f"j{n}"), number=n, submitted_s=0.0, gpus=1, gpus_min=1, gpus_max=8,
            profile=GoodputProfile(model, 8),
        )
        for n in range(2)
    }  # fmt: skip
    plan, _ = Pollux(round_s=60).allocate(View(600.0, cluster, jobs, [4] * 4, None), None)
    given_gpus = [sum(gpus for _, gpus in each) for each in plan.allocations.values()]
    assert sorted(given_gpus) == [8, 8]


def test_beyond_its_rows_a_table_answers_by_theta_fitted_to_them() -> None:
    found = table()
    far = float(found.iteration_s(16, 64, 300))
    assert far == pytest.approx(float(THETA.iteration_s(16, 64, 300)), rel=0.1)
