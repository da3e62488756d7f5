"""When tasks run in an aggregator's slot, on a clock of our own."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base import limits
from slackwater.services.aggregator.schedule import Profile, SlotSchedule


def test_a_task_occupies_the_slot_for_its_cpu_time_over_the_share() -> None:
    slot: SlotSchedule[str] = SlotSchedule(0.1)
    slot.arrived("a", 10.0)
    assert slot.begin() == ("a", 10.0, 0.0)
    assert slot.end(0.02, 10.021) == (pytest.approx(10.2), True)
    assert slot.busy_s == pytest.approx(0.2)
    assert slot.begin() is None


def test_tasks_run_in_the_order_in_which_they_became_complete() -> None:
    slot: SlotSchedule[str] = SlotSchedule(0.5)
    for name, arrived_s in (("a", 1.0), ("b", 1.1), ("c", 9.0)):
        slot.arrived(name, arrived_s)
    assert slot.begin() == ("a", 1.0, 0.0)
    assert slot.end(1.0, 2.0) == (3.0, True)
    assert slot.begin() == ("b", 3.0, 0.0), "it waits for the slot"
    assert slot.end(1.0, 4.0) == (5.0, True)
    assert slot.begin() == ("c", 9.0, 0.0), "an idle slot begins at once"


def test_a_busy_machine_does_not_stretch_the_slots_after() -> None:
    """The kernel ended 5 s after its slot: what comes next begins where it should have."""
    slot: SlotSchedule[str] = SlotSchedule(0.1)
    slot.arrived("a", 0.0)
    slot.arrived("b", 0.0)
    slot.begin()
    assert slot.end(0.01, 5.1).at_s == pytest.approx(0.1)
    assert slot.begin() == ("b", pytest.approx(0.1), 0.0)


def test_a_whole_core_or_more_is_not_stretched() -> None:
    slot: SlotSchedule[str] = SlotSchedule(2.0)
    slot.arrived("a", 0.0)
    slot.begin()
    assert slot.end(0.5, 0.7) == (0.7, True)
    assert slot.busy_s == 0.25


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 1), st.floats(0, 10)), min_size=1, max_size=40
    ),
    st.floats(0.03, 0.99),
)
def test_slots_never_overlap_and_add_up(
    tasks: list[tuple[float, float, float]], share: float
) -> None:
    """Lateness changes nothing: the slot's own time line has one task at a time, first come
    first."""
    slot: SlotSchedule[int] = SlotSchedule(share)
    arrivals = sorted(arrived_s for arrived_s, _, _ in tasks)
    for index, arrived_s in enumerate(arrivals):
        slot.arrived(index, arrived_s)
    last_end = 0.0
    for index, (_, cpu_s, late_s) in enumerate(tasks):
        begun = slot.begin()
        assert begun is not None
        task, start_s, _ = begun
        assert task == index
        assert start_s == max(arrivals[index], last_end)
        last_end, done = slot.end(cpu_s, start_s + cpu_s + late_s)
        assert done
        assert last_end == pytest.approx(start_s + cpu_s / share)
    assert slot.busy_s == pytest.approx(sum(cpu_s for _, cpu_s, _ in tasks) / share)


CHUNK_S = limits.CHUNK_SLOT_S


def test_the_earliest_deadline_is_next_and_who_has_none_comes_last() -> None:
    slot: SlotSchedule[str] = SlotSchedule(0.1)
    slot.arrived("none", 1.0)
    slot.arrived("late", 1.1, 9.0)
    slot.arrived("soon", 1.2, 2.0)
    order = []
    while (begun := slot.begin()) is not None:
        slot.end(0.0001, 2.0)
        order.append(begun.task)
    assert order == ["soon", "late", "none"]


@pytest.mark.parametrize("deadline_s", [9.0, inf])
def test_a_task_gives_way_to_a_nearer_deadline_after_a_chunk_and_loses_nothing(
    deadline_s: float,
) -> None:
    """Three chunks of fc6; in the first one something comes that is due earlier."""
    slot: SlotSchedule[str] = SlotSchedule(0.1)
    slot.arrived("fc6", 0.0, deadline_s)
    assert slot.begin() == ("fc6", 0.0, 0.0)
    assert slot.end(0.3 * CHUNK_S, 0.0) == (pytest.approx(3 * CHUNK_S), True)
    assert slot.cut(0.001) is None
    slot.arrived("conv1", 0.001, 0.5)
    assert slot.urgent
    assert slot.cut(0.001) == (pytest.approx(CHUNK_S), False)
    assert slot.begin() == ("conv1", pytest.approx(CHUNK_S), 0.0)
    assert slot.end(0.05 * CHUNK_S, 0.1) == (pytest.approx(1.5 * CHUNK_S), True)
    assert slot.begin() == ("fc6", pytest.approx(1.5 * CHUNK_S), pytest.approx(2 * CHUNK_S))
    assert slot.end(0.0, 1.0) == (pytest.approx(3.5 * CHUNK_S), True)
    assert slot.begin() is None
    assert slot.busy_s == pytest.approx(3.5 * CHUNK_S)


def test_what_is_not_more_urgent_or_comes_in_the_last_chunk_ends_nobodys_slot() -> None:
    slot: SlotSchedule[str] = SlotSchedule(0.1)
    slot.arrived("fc6", 0.0, 1.0)
    slot.begin()
    assert slot.end(0.3 * CHUNK_S, 0.0).at_s == pytest.approx(3 * CHUNK_S)
    slot.arrived("equal", 0.0, 1.0)
    slot.arrived("later", 0.0, 2.0)
    slot.arrived("none", 0.0)
    assert not slot.urgent
    assert slot.cut(0.0) is None
    slot.arrived("soon", 2.5 * CHUNK_S, 0.5)
    assert slot.urgent
    assert slot.cut(2.5 * CHUNK_S) is None, "it is the last chunk"


def test_the_chunk_in_which_something_urgent_comes_is_the_last_one() -> None:
    slot: SlotSchedule[str] = SlotSchedule(0.1)
    slot.arrived("fc6", 0.0, 1.0)
    slot.begin()
    slot.end(1.0 * CHUNK_S, 0.0)
    slot.arrived("soon", 4.2 * CHUNK_S, 0.5)
    assert slot.cut(4.2 * CHUNK_S) == (pytest.approx(5 * CHUNK_S), False)
    assert not slot.urgent, "nobody has the slot from then on"


def test_first_executions_are_charged_what_they_measured_then_the_lower_quartile() -> None:
    profile = Profile()
    assert profile.cpu_s == 0.0
    measured = [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 11.0, 12.0]
    assert len(measured) == limits.PROFILE_EXECUTIONS
    for value in measured:
        assert profile.charge(value) == value
    assert profile.cpu_s == 4.0  # The fourth smallest of twelve.
    assert profile.charge(100.0) == 4.0, "contention is not charged"
    assert profile.cpu_s == 4.0


@pytest.mark.parametrize(
    ("measured", "learned"),
    [
        ([2.0] * 74 + [0.7] * 26, 0.7),  # Cheaper in a quarter of them, as at first.
        ([2.0] * 80 + [0.7] * 20, 1.0),
        ([1.5] * 99 + [1.1], 1.0),  # Somebody else used the machine: once it was not so.
        ([1.5] * 99 + [1.3], 1.3),  # It costs more, whoever uses the machine.
        ([1.1] * 100, 1.0),
    ],
)
def test_a_profile_is_calibrated_as_long_as_its_task_runs(
    measured: list[float], learned: float
) -> None:
    profile = Profile(kept_s=1.0)
    assert len(measured) == limits.CALIBRATION_EXECUTIONS
    assert [profile.charge(each_s) for each_s in measured] == [1.0] * len(measured)
    assert profile.cpu_s == learned
    assert profile.charge(9.0) == learned
    for _ in range(limits.CALIBRATION_EXECUTIONS):
        profile.charge(learned)
    assert profile.cpu_s == learned


def test_the_quartile_so_far_is_told_before_the_profile_is_done() -> None:
    profile = Profile()
    for value in (4.0, 2.0, 3.0, 1.0):
        profile.charge(value)
    assert profile.cpu_s == 2.0


def test_a_profile_that_came_with_the_region_is_kept() -> None:
    profile = Profile(kept_s=0.5)
    assert profile.charge(9.0) == 0.5
