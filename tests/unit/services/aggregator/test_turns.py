"""Whose turn it is: the paper's cycle with its late requests, and our deadlines."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.services.aggregator.schedule import SlotSchedule, Turn
from slackwater.services.aggregator.turns import CyclicTurns, DeadlineTurns


def cycle(**tasks: tuple[float, float]) -> CyclicTurns[str]:
    """A cycle of 12 from 0; tasks as (slot, every)."""
    turns: CyclicTurns[str] = CyclicTurns(12.0, 0.0)
    for key, (slot_s, every_s) in tasks.items():
        turns.plan(key, slot_s, every_s)
    return turns


def test_figure_5_a_faster_job_runs_twice_in_a_cycle_of_12() -> None:
    """J1 (6, 2) and J2 (12, 3): at 1 and 7, and at 2; what is expected stays reserved."""
    turns = cycle(j1=(2.0, 6.0), j2=(3.0, 12.0))
    assert turns.arrived("j1", 1.0, 0.0) == Turn(1.0)
    assert turns.arrived("j2", 2.0, 3.0) == Turn(2.0)
    assert turns.reserved_s(3.0) == 2.0, "j1's second execution at 7"
    assert turns.arrived("j1", 7.0, 0.0) == Turn(7.0)
    assert turns.reserved_s(8.0) == 0.0
    assert turns.reserved_s(12.5) == 2.0 + 2.0 + 3.0, "the next cycle: 13, 19 and 14"


def test_a_late_request_runs_in_this_cycle_if_enough_slots_remain() -> None:
    turns = cycle(a=(2.0, 12.0), b=(3.0, 12.0))
    turns.arrived("a", 1.0, 0.0)
    turns.arrived("b", 4.0, 0.0)
    turns.ran("a")
    turns.ran("b")
    # a is expected at 13 and comes at 16; b's 3 from 16 on are reserved: 16 + 3 + 2 <= 24.
    assert turns.arrived("a", 16.0, 0.0) == Turn(16.0)


def test_a_late_request_waits_for_the_next_cycle_where_the_rest_is_reserved() -> None:
    turns = cycle(a=(2.0, 12.0), b=(3.0, 12.0))
    turns.arrived("a", 1.0, 0.0)
    turns.arrived("b", 10.0, 0.0)
    turns.ran("a")
    turns.ran("b")
    assert turns.arrived("a", 19.5, 0.0) == Turn(24.0), "19.5 + 2 + b's 3 at 22 is past 24"
    assert turns.arrived("b", 22.0, 0.0) == Turn(22.0), "the scheduled one is not touched"
    turns.ran("b")
    turns.ran("a")
    assert turns.arrived("a", 36.0, 0.0) == Turn(36.0), "delayed once, it is on time again"


def test_what_waits_and_what_runs_counts_against_a_late_request() -> None:
    turns = cycle(a=(2.0, 12.0), b=(5.0, 12.0))
    turns.arrived("a", 1.0, 0.0)
    turns.ran("a")
    assert turns.arrived("b", 16.0, 16.0) == Turn(16.0)
    assert turns.arrived("a", 17.0, 17.5) == Turn(24.0), "17.5 + b's 5 + 2 is past 24"
    early = cycle(a=(2.0, 12.0), b=(5.0, 12.0))
    early.arrived("a", 1.0, 0.0)
    early.ran("a")
    early.arrived("b", 16.0, 16.0)
    early.ran("b")
    assert early.arrived("a", 17.0, 21.0) == Turn(17.0), "21 + 2 still ends in the cycle"


def test_a_job_that_pushes_more_often_than_planned_gets_what_is_left() -> None:
    turns = cycle(a=(4.0, 12.0), b=(4.0, 12.0))
    turns.arrived("b", 0.5, 0.0)
    turns.ran("b")
    assert turns.arrived("a", 1.0, 0.0) == Turn(1.0)
    turns.ran("a")
    assert turns.arrived("a", 6.0, 0.0) == Turn(6.0), "6 + 4 fits before 12"
    turns.ran("a")
    assert turns.arrived("a", 9.0, 0.0) == Turn(12.0), "9 + 4 does not"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([6.0, 12.0]), st.floats(0.1, 1.5), st.floats(0.0, 5.9)),
             min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 9.0)), max_size=12),
)  # fmt: skip
def test_a_late_request_never_pushes_reserved_slots_out_of_their_cycle(
    tasks: list[tuple[float, float, float]], delays: list[tuple[int, float]]
) -> None:
    """Whatever comes late: a request that is let into a cycle late ends in it, together with all
    that waits and all that is still expected there."""
    turns: CyclicTurns[int] = CyclicTurns(12.0, 0.0)
    slot: SlotSchedule[int] = SlotSchedule(0.5)
    late = dict(delays)
    arrivals = []
    for key, (every_s, slot_s, phase_s) in enumerate(tasks):
        turns.plan(key, slot_s, every_s)
        at_s = phase_s
        for turn in range(4):
            at_s += late.get(key, 0.0) if turn == 2 else 0.0
            arrivals.append((at_s, key))
            at_s += every_s
    for at_s, key in sorted(arrivals):
        while slot and slot.free_s <= at_s and (begun := slot.begin(at_s)) is not None:
            slot.end(tasks[begun.task][1] * 0.5, begun.start_s)
            turns.ran(begun.task)
        waiting_s = turns._waiting_s()
        expected_s = turns._reserved[key].expected_s
        decided = turns.arrived(key, at_s, slot.free_s)
        assert decided.release_s in (at_s, turns.cycle_end_s(at_s))
        if at_s > expected_s + tasks[key][1] and decided.release_s == at_s:
            begin_s = max(at_s, slot.free_s)
            assert begin_s + waiting_s + tasks[key][1] <= turns.cycle_end_s(at_s) + 1e-9
        slot.arrived(key, at_s, decided)


def test_a_deadline_is_the_window_of_the_layer_plus_the_slack() -> None:
    """x = 0.5 of D = 2, slack a tenth: due 1.2 after it became complete; the first layer has its
    own cost and the slack only."""
    turns: DeadlineTurns[str] = DeadlineTurns()
    turns.plan("half", 0.5, 0.1, 2.0)
    turns.plan("first", 0.0, 0.1, 2.0)
    assert turns.arrived("half", 10.0, 0.3) == Turn(10.0, pytest.approx(11.2))
    assert turns.arrived("first", 10.0, 0.3) == Turn(10.0, pytest.approx(10.5))


def test_deadlines_are_an_iteration_apart_however_often_a_job_pushes() -> None:
    """A job that runs ahead of its profile cannot push others back: its deadlines do not hurry."""
    turns: DeadlineTurns[str] = DeadlineTurns()
    turns.plan("a", 0.0, 0.1, 2.0)
    deadlines = [turns.arrived("a", at_s, 0.0).deadline_s for at_s in (0.0, 0.5, 1.0, 9.0)]
    assert deadlines == pytest.approx([0.2, 2.2, 4.2, 9.2])


def test_a_job_in_profiling_is_due_as_it_comes_and_its_iteration_is_learned() -> None:
    turns: DeadlineTurns[str] = DeadlineTurns()
    turns.plan("a", 0.5, 0.1)
    assert turns.arrived("a", 0.0, 0.3) == Turn(0.0, 0.3)
    for turn in range(1, 20):
        at_s = 2.0 * turn
        decided = turns.arrived("a", at_s, 0.3)
    assert decided.deadline_s == pytest.approx(at_s + 1.2)
    assert decided.deadline_s < inf
    turns.forget("a")
    assert not turns.planned("a")
