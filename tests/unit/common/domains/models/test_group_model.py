"""Harmony's group model: the worked numbers, and what must hold for any group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.group import (
    Subtasks,
    check,
    group_iteration_s,
    uncoordinated_s,
    utilization,
    weighted,
)

A, B, C = (Subtasks(cpu, net, 4) for cpu, net in ((6.0, 2.0), (2.0, 6.0), (3.0, 3.0)))

jobs = st.lists(
    st.builds(Subtasks, st.floats(0.1, 100), st.floats(0.1, 100), st.integers(1, 32)),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize(
    ("group", "machines", "iteration_s", "used"),
    [
        ([A, B], 4, 8.0, (1.0, 1.0)),
        ([A], 4, 8.0, (0.75, 0.25)),
        ([A, C], 8, 5.0, (0.9, 1.0)),
    ],
)
def test_the_worked_groups(
    group: list[Subtasks], machines: int, iteration_s: float, used: tuple[float, float]
) -> None:
    assert group_iteration_s(group, machines) == pytest.approx(iteration_s)
    assert utilization(group, machines) == pytest.approx(used)


@given(group=jobs, machines=st.integers(1, 64))
def test_nothing_is_used_more_than_all_the_time(group: list[Subtasks], machines: int) -> None:
    used = utilization(group, machines)
    assert all(0 <= part <= 1 + 1e-12 for part in used)
    assert 0 <= weighted(used) <= 1 + 1e-12


@given(group=jobs, machines=st.integers(1, 64))
def test_an_order_of_subtasks_never_slows_anybody(group: list[Subtasks], machines: int) -> None:
    """Meeting at random takes each job at least as long as its own subtasks, and the group as a
    whole at least as long per iteration as its busiest resource."""
    alone = [job.iteration_s(machines) for job in group]
    times_s = uncoordinated_s(tuple(group), machines)
    assert all(time >= own * (1 - 1e-9) for time, own in zip(times_s, alone, strict=True))
    cpu = sum(j.cpu_on_s(machines) / t for j, t in zip(group, times_s, strict=True))
    assert cpu <= 1 + 1e-9


def test_two_jobs_that_fit_lose_without_an_order() -> None:
    """A and B: 8 s in turns; by chance each finds the other on a resource a quarter of the time."""
    assert uncoordinated_s((A, B), 4) == pytest.approx((11.0, 11.0))


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(Rejected, match="job x"):
        check(Subtasks(0.0, 0.0, 4), "job x")
    with pytest.raises(Rejected, match="machines"):
        check(Subtasks(1.0, 0.0, 0), "job x")
