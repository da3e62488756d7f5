"""Services that `slackwater up` starts by default."""

import inspect

import pytest

from slackwater.cli.up import up
from slackwater.common.embedded import (
    ClusterOptions,
    controllers_for,
    fit_cpu_share,
    whole_cores,
)
from slackwater.common.embedded.cluster import service_stages


@pytest.mark.parametrize(("cores", "aggregators"), [(1, 1), (2, 1), (3, 2), (9, 8), (64, 63)])
def test_its_aggregators_are_whole_cores_and_leave_one_to_the_jobs(
    cores: int, aggregators: int
) -> None:
    """People train there. Emulated pools of fractions are what `loadgen replay` starts."""
    share = inspect.signature(up).parameters["cpu_share"].default
    assert whole_cores(share, cores) == aggregators
    assert fit_cpu_share(share, aggregators, cores) == 1.0


def test_fractions_are_a_pool_of_ten() -> None:
    assert whole_cores(0.1, 2) == 10


@pytest.mark.parametrize(("aggregators", "controllers"), [(1, 1), (2, 1), (7, 1), (8, 2), (63, 2)])
def test_a_small_pool_is_not_split(aggregators: int, controllers: int) -> None:
    """A job's profiling needs servers of its own beside those that are shared."""
    assert controllers_for(aggregators) == controllers


@pytest.mark.parametrize(
    ("aggregators", "controllers", "bound"),
    [(10, 1, 10), (10, 2, 8), (10, 3, 6), (2, 2, 1), (3, 2, 2), (64, 4, 58)],
)
def test_a_cluster_may_have_what_the_decision_record_says(
    aggregators: int, controllers: int, bound: int
) -> None:
    """Regression: docs/adr/0005 said an equal part, 5 of 10, and the code did otherwise."""
    options = ClusterOptions(controllers=controllers, aggregators=aggregators)
    [master] = [
        fields
        for stage in service_stages(options, 1.0, "")
        for service, _, fields in stage
        if service == "master"
    ]
    assert master["aggregators_max"] == bound
