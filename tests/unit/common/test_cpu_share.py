"""The CPU share rule: emulated aggregators together use at most half of the cores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.embedded import ClusterOptions, fit_cpu_share
from slackwater.common.embedded.cluster import service_stages


@pytest.mark.parametrize(
    ("requested", "aggregators", "cores", "share"),
    [
        (0.1, 10, 2, 0.1),
        (0.1, 16, 2, 0.0625),
        (0.5, 10, 2, 0.1),
        (0.1, 1, 64, 0.1),
        (0.9, 1, 1, 0.5),
    ],
)
def test_the_share_shrinks_to_fit(
    requested: float, aggregators: int, cores: int, share: float
) -> None:
    assert fit_cpu_share(requested, aggregators, cores) == pytest.approx(share)


def test_too_many_aggregators_are_refused_with_the_most_that_fit() -> None:
    with pytest.raises(ConfigRejected, match=r"40 aggregators on 2 cores .* start at most 33"):
        fit_cpu_share(0.1, 40, 2)
    with pytest.raises(ConfigRejected, match="ask for more"):
        fit_cpu_share(0.01, 2, 2)
    with pytest.raises(ConfigRejected, match="must be positive"):
        fit_cpu_share(0.0, 2, 2)


@pytest.mark.parametrize("requested", [1.0, 1.5, 8.0])
def test_whole_cores_are_left_as_they_are(requested: float) -> None:
    """A slot of a core or more stretches nothing: it does not slow a job that really trains down,
    however small the machine is. (With .1 cores such a job took 1.6 times as long as with DDP.)"""
    assert fit_cpu_share(requested, 10, 2) == requested


@given(st.floats(0.001, 1.0, exclude_max=True), st.integers(1, 2000), st.integers(1, 256))
def test_never_over_half_and_never_below_the_least(
    requested: float, aggregators: int, cores: int
) -> None:
    try:
        share = fit_cpu_share(requested, aggregators, cores)
    except ConfigRejected:
        assert min(requested, cores / 2 / aggregators) < limits.CPU_SHARE_MIN
        return
    assert limits.CPU_SHARE_MIN <= share <= requested
    assert share * aggregators <= cores / 2 * (1 + 1e-9)


def test_a_cluster_is_what_the_options_say() -> None:
    options = ClusterOptions(
        controllers=2, aggregators=3, memory_bytes=3 << 20, policy="static", worker={"slots": 4}
    )
    stages = service_stages(options, 0.05, "secret")
    names = [f"{service}-{id}" for stage in stages for service, id, _ in stage]
    assert names == [
        "master-m1",
        "profiler-p1",
        "controller-c1",
        "controller-c2",
        "aggregator-a1",
        "aggregator-a2",
        "aggregator-a3",
        "worker-w1",
    ]
    fields = {f"{service}-{id}": values for stage in stages for service, id, values in stage}
    assert fields["aggregator-a2"] == {
        "cpu_share": 0.05,
        "tcp_address": "127.0.0.1:0",
        "cluster_token": "secret",
        "memory_bytes_max": 3 << 20,
        "node_memory_bytes_max": 3 << 20,
    }
    assert fields["controller-c1"] == {"policy": "static"}
    assert fields["worker-w1"] == {"slots": 4}
    (first, _) = service_stages(ClusterOptions(charge_ns_per_byte=0.5), 0.05, "secret")
    charged = [values["charge_ns_per_byte"] for service, _, values in first if service[:2] == "ag"]
    assert charged == [0.5] * 10
