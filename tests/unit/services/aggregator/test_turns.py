"""Whose turn it is: the paper's cycle with its late requests, and our deadlines."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.services.aggregator.schedule import SlotSchedule, Turn
from slackwater.services.aggregator.turns import CyclicTurns, DeadlineTurns, Turns

A, B = ("a", 0), ("b", 0)


class Cycle:
    """A cycle of 12 from 0, one task a job: (slot, every)."""

    def __init__(self, slack: float = 0.0, **tasks: tuple[float, float]) -> None:
        self.turns = CyclicTurns()
        self.slots_s = {job: slot_s for job, (slot_s, _) in tasks.items()}
        self.turns.plan(12.0, slack, {job: every_s for job, (_, every_s) in tasks.items()}, 0.0)

    def arrived(self, job: str, now_s: float, free_s: float = 0.0) -> float:
        return self.turns.arrived((job, 0), now_s, free_s, self.slots_s[job]).release_s

    def ran(self, *jobs: str) -> None:
        for job in jobs:
            self.turns.ran((job, 0))


def test_figure_5_a_faster_job_runs_twice_in_a_cycle_of_12() -> None:
    """J1 (6, 2) and J2 (12, 3): at 1 and 7, and at 2; what is expected stays reserved."""
    cycle = Cycle(j1=(2.0, 6.0), j2=(3.0, 12.0))
    assert cycle.arrived("j1", 1.0) == 1.0
    assert cycle.arrived("j2", 2.0, 3.0) == 2.0
    assert cycle.turns.reserved_s(3.0) == 2.0, "j1's second execution at 7"
    assert cycle.arrived("j1", 7.0) == 7.0
    assert cycle.turns.reserved_s(8.0) == 0.0
    assert cycle.turns.reserved_s(12.5) == 2.0 + 2.0 + 3.0, "the next cycle: 13, 19 and 14"
    assert cycle.turns.reserved_s(12.5, but="j1") == 3.0


def test_a_late_request_runs_in_this_cycle_if_enough_slots_remain() -> None:
    cycle = Cycle(a=(2.0, 12.0), b=(3.0, 12.0))
    cycle.arrived("a", 1.0)
    cycle.arrived("b", 4.0)
    cycle.ran("a", "b")
    # a is expected at 13 and comes at 16; b's 3 from 16 on are reserved: 16 + 3 + 2 <= 24.
    assert cycle.arrived("a", 16.0) == 16.0


def test_a_late_request_waits_for_the_next_cycle_where_the_rest_is_reserved() -> None:
    cycle = Cycle(a=(2.0, 12.0), b=(3.0, 12.0))
    cycle.arrived("a", 1.0)
    cycle.arrived("b", 10.0)
    cycle.ran("a", "b")
    assert cycle.arrived("a", 19.5) == 24.0, "19.5 + 2 + b's 3 at 22 is past 24"
    assert cycle.arrived("b", 22.0) == 22.0, "the scheduled one is not touched"
    cycle.ran("a", "b")
    assert cycle.arrived("a", 36.0) == 36.0, "delayed once, it is on time again"


def test_what_waits_and_what_runs_counts_against_a_late_request() -> None:
    cycle = Cycle(a=(2.0, 12.0), b=(5.0, 12.0))
    cycle.arrived("a", 1.0)
    cycle.ran("a")
    assert cycle.arrived("b", 18.0, 18.0) == 18.0
    assert cycle.arrived("a", 19.2, 18.5) == 24.0, "19.2 + b's 5 + 2 is past 24"
    early = Cycle(a=(2.0, 12.0), b=(5.0, 12.0))
    early.arrived("a", 1.0)
    early.ran("a")
    early.arrived("b", 16.0, 16.0)
    early.ran("b")
    assert early.arrived("a", 19.2, 21.0) == 19.2, "21 + 2 still ends in the cycle"


def test_a_late_request_of_a_job_that_is_alone_is_held_back_for_nobody() -> None:
    turns = CyclicTurns()
    turns.plan(12.0, 0.0, {"a": 12.0}, 0.0)
    for bucket in range(4):
        turns.arrived(("a", bucket), 1.0, 0.0, 2.0)
        turns.ran(("a", bucket))
    assert turns.arrived(("a", 0), 18.0, 0.0, 2.0).release_s == 18.0


def test_a_job_that_loses_less_than_its_slack_is_no_straggler() -> None:
    """Six per cent longer iterations, ever again: each is expected d_j after the last one came."""
    cycle = Cycle(slack=0.1, a=(0.01, 12.0), b=(11.0, 12.0))
    cycle.arrived("b", 0.0)
    cycle.ran("b")
    for turn in range(6):
        at_s = 1.0 + 12.7 * turn
        assert cycle.arrived("a", at_s) == at_s
        cycle.ran("a")


def test_a_job_that_pushes_more_often_than_planned_gets_what_is_left() -> None:
    cycle = Cycle(a=(4.0, 12.0), b=(4.0, 12.0))
    cycle.arrived("b", 0.5)
    cycle.ran("b")
    assert cycle.arrived("a", 1.0) == 1.0
    cycle.ran("a")
    assert cycle.arrived("a", 6.0) == 6.0, "6 + 4 fits before 12"
    cycle.ran("a")
    assert cycle.arrived("a", 9.0) == 12.0, "9 + 4 does not"


def test_running_a_little_ahead_adds_up() -> None:
    """A job of D = 4 that the plan stretches to 6: every third request is one too many, and waits
    at most until it is expected, where another job has the rest of the cycle."""
    cycle = Cycle(a=(1.0, 6.0), b=(7.0, 12.0))
    cycle.arrived("b", 10.0)
    cycle.ran("b")
    assert [cycle.arrived("a", at_s) for at_s in (12.0, 16.0)] == [12.0, 16.0]
    cycle.ran("a", "a")
    assert cycle.arrived("a", 20.0) == 24.0, "expected at 24, ahead by more than 3; b's 7 at 22"
    cycle.ran("a")
    assert cycle.arrived("a", 28.0) == 28.0


def test_a_straggler_is_held_back_once_and_not_with_each_of_its_tasks() -> None:
    """Its other requests come as much later as the first one; they are expected then."""
    turns = CyclicTurns()
    turns.plan(12.0, 0.1, {"a": 12.0, "b": 12.0}, 0.0)
    for at_s, task in ((1.0, ("a", 0)), (2.0, ("a", 1)), (10.0, B)):
        turns.arrived(task, at_s, 0.0, 2.0)
        turns.ran(task)
    assert turns.arrived(A, 20.5, 0.0, 2.0).release_s == 24.0, "20.5 + b's 2 + 2 is past 24"
    assert turns.arrived(("a", 1), 21.5, 0.0, 2.0).release_s == 21.5
    turns.ran(A)
    assert turns.arrived(A, 36.0, 0.0, 2.0).release_s == 36.0


def test_a_new_plan_keeps_what_is_expected_of_jobs_that_stay() -> None:
    cycle = Cycle(a=(2.0, 12.0), b=(3.0, 12.0))
    cycle.arrived("a", 1.0)
    cycle.turns.plan(20.0, 0.0, {"a": 20.0}, 5.0)
    assert cycle.turns.cycle_end_s(5.0) == 25.0, "the new cycle began at 5"
    assert not cycle.turns.planned(B)
    assert cycle.turns.reserved_s(5.0) == 2.0, "a's next is at 13 still"
    cycle.turns.forget(A)
    assert cycle.turns.reserved_s(5.0) == 0.0


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
    that waits and all that other jobs are still expected to ask for there."""
    turns = CyclicTurns()
    turns.plan(12.0, 0.0, {f"j{key}": every_s for key, (every_s, _, _) in enumerate(tasks)}, 0.0)
    slot: SlotSchedule[int] = SlotSchedule(0.5)
    late = dict(delays)
    arrivals = []
    for key, (every_s, _, phase_s) in enumerate(tasks):
        at_s = phase_s
        for turn in range(4):
            at_s += late.get(key, 0.0) if turn == 2 else 0.0
            arrivals.append((at_s, key))
            at_s += every_s
    expected_s: dict[int, float] = {}
    for at_s, key in sorted(arrivals):
        while slot and slot.free_s <= at_s and (begun := slot.begin(at_s)) is not None:
            slot.end(tasks[begun.task][1] * 0.5, begun.start_s)
            turns.ran((f"j{begun.task}", 0))
        every_s, slot_s, _ = tasks[key]
        due_s = max(at_s, slot.free_s) + turns.waiting_s(at_s) + turns.reserved_s(at_s, f"j{key}")
        decided = turns.arrived((f"j{key}", 0), at_s, slot.free_s, slot_s)
        assert at_s <= decided.release_s <= turns.cycle_end_s(at_s)
        missed_s = expected_s.get(key, inf) + max(slot_s, every_s / 2)
        if at_s > missed_s and decided.release_s == at_s:
            assert due_s + slot_s <= turns.cycle_end_s(at_s) + 1e-9
        expected_s[key] = max(decided.release_s, expected_s.get(key, 0.0)) + every_s
        slot.arrived(key, at_s, decided)


def test_a_deadline_is_the_window_of_the_layer_plus_the_slack() -> None:
    """x = 0.5 of D = 2, slack a tenth: due 1.2 after it became complete; the first layer has its
    own cost and the slack only."""
    turns = DeadlineTurns()
    turns.plan(A, 0.5, 0.1, 2.0)
    turns.plan(B, 0.0, 0.1, 2.0)
    assert turns.arrived(A, 10.0, 0.3) == Turn(10.0, pytest.approx(11.2))
    assert turns.arrived(B, 10.0, 0.3) == Turn(10.0, pytest.approx(10.5))


def test_deadlines_are_an_iteration_apart_however_often_a_job_pushes() -> None:
    """A job that runs ahead of its profile cannot push others back: its deadlines do not hurry."""
    turns = DeadlineTurns()
    turns.plan(A, 0.0, 0.1, 2.0)
    deadlines = [turns.arrived(A, at_s, 0.0).deadline_s for at_s in (0.0, 0.5, 1.0, 9.0)]
    assert deadlines == pytest.approx([0.2, 2.2, 4.2, 9.2])


def test_a_job_in_profiling_is_due_as_it_comes_and_its_iteration_is_learned() -> None:
    turns = DeadlineTurns()
    turns.plan(A, 0.5, 0.1)
    assert turns.arrived(A, 0.0, 0.3) == Turn(0.0, 0.3)
    for turn in range(1, 20):
        at_s = 2.0 * turn
        decided = turns.arrived(A, at_s, 0.3)
    assert decided.deadline_s == pytest.approx(at_s + 1.2)
    assert decided.deadline_s < inf
    turns.forget(A)
    assert not turns.planned(A)


def test_each_job_follows_its_own_rule() -> None:
    """b's deadlines come with its buckets, a's cycle with the plan; others run as they come."""
    turns = Turns()
    turns.deadlines.plan(B, 0.0, 0.1)
    turns.plan(12.0, 0.1, {"a": 6.0}, 0.0)
    assert turns.arrived(A, 1.0, 0.0, 0.5) == Turn(1.0)
    assert turns.arrived(B, 1.0, 0.0, 0.5) == Turn(1.0, 1.5)
    assert not turns.planned(("c", 0))
    turns.plan(0.0, 0.2, {"b": 2.0}, 2.0)
    assert not turns.planned(A), "the plan is all anew"
    assert turns.arrived(B, 3.0, 0.0, 0.5) == Turn(3.0, pytest.approx(3.9)), "D and slack are told"
    turns.ran(A)
    turns.forget(B)
    assert not turns.planned(B)
