"""Turns of tasks: the paper's cycle with its late requests, and our deadlines."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.services.aggregator.task_scheduling import CyclicRule, DeadlineRule, TaskRules

A, B = ("a", 0), ("b", 0)


class Cycle:
    """A cycle of 12, one task a job: (slot, every)."""

    def __init__(self, slack: float = 0.0, **tasks: tuple[float, float]) -> None:
        self.turns = CyclicRule()
        self.slots_s = {job: slot_s for job, (slot_s, _) in tasks.items()}
        self.turns.plan(slack, {job: every_s for job, (_, every_s) in tasks.items()})

    def arrived(self, job: str, now_s: float) -> float:
        return self.turns.arrived((job, 0), now_s, self.slots_s[job])


def test_figure_5_a_faster_job_runs_twice_in_a_cycle_of_12() -> None:
    """J1 (6, 2) and J2 (12, 3): at 1 and 7, and at 2, each as it comes."""
    cycle = Cycle(j1=(2.0, 6.0), j2=(3.0, 12.0))
    for job, at_s in (("j1", 1.0), ("j2", 2.0), ("j1", 7.0), ("j1", 13.0), ("j2", 14.0)):
        assert cycle.arrived(job, at_s) == at_s


def test_a_late_request_has_what_others_leave_until_its_own_slot_comes_again() -> None:
    """a is expected at 13 and comes at 19.5: until 25 everybody who is expected is before it,
    from then on it is before them."""
    cycle = Cycle(a=(2.0, 12.0), b=(3.0, 12.0))
    cycle.arrived("a", 1.0)
    cycle.arrived("b", 10.0)
    assert cycle.arrived("a", 19.5) == 25.0
    assert cycle.arrived("b", 22.0) == 22.0, "the scheduled one is not touched"
    assert cycle.arrived("a", 31.5) == 31.5, "late once, it is on time again"
    assert cycle.arrived("b", 34.0) == 34.0
    faster = Cycle(a=(0.5, 4.0), b=(3.0, 12.0))
    faster.arrived("a", 1.0)
    assert faster.arrived("a", 7.5) == 9.0, "a faster job's own slot comes in this cycle"


def test_a_job_that_loses_less_than_its_slack_is_no_straggler() -> None:
    """Six per cent longer iterations, ever again: each is expected d_j after the last one came."""
    cycle = Cycle(slack=0.1, a=(0.01, 12.0), b=(11.0, 12.0))
    cycle.arrived("b", 0.0)
    for turn in range(6):
        at_s = 1.0 + 12.7 * turn
        assert cycle.arrived("a", at_s) == at_s


def test_a_job_that_pushes_more_often_than_planned_keeps_its_places() -> None:
    """However often it comes: they are 12 s apart, and the nearest is 12 s away at most."""
    cycle = Cycle(a=(4.0, 12.0), b=(4.0, 12.0))
    assert [cycle.arrived("a", at_s) for at_s in (1.0, 2.0, 3.0, 14.5)] == [1.0, 13.0, 15.0, 26.5]
    assert cycle.arrived("b", 61.0) == 61.0


def test_running_a_little_ahead_adds_up() -> None:
    """A job of D = 4 that the plan stretches to 6: ever more of its requests wait for their place,
    where another job asks for slots."""
    cycle = Cycle(a=(1.0, 6.0), b=(7.0, 12.0))
    assert [cycle.arrived("a", at_s) for at_s in (12.0, 16.0, 20.0)] == [12.0, 18.0, 24.0]
    assert cycle.arrived("a", 23.0) == 29.0, (
        "what was used when nobody else did is not a debt for ever"
    )


def test_a_straggler_is_held_back_once_and_not_with_each_of_its_tasks() -> None:
    """Its other requests come as much later as the first one; they are expected then."""
    turns = CyclicRule()
    turns.plan(0.1, {"a": 12.0, "b": 12.0})
    for at_s, task in ((1.0, ("a", 0)), (2.0, ("a", 1)), (10.0, B)):
        turns.arrived(task, at_s, 2.0)
    assert turns.arrived(A, 20.5, 2.0) == 25.0
    assert turns.arrived(("a", 1), 21.5, 2.0) == 21.5
    assert turns.arrived(A, 32.5, 2.0) == 32.5


def test_a_new_plan_keeps_what_is_expected_of_jobs_that_stay() -> None:
    cycle = Cycle(a=(2.0, 12.0), b=(3.0, 12.0))
    cycle.arrived("a", 1.0)
    cycle.turns.plan(0.0, {"a": 20.0})
    assert not cycle.turns.planned(B)
    assert cycle.arrived("a", 9.0) == 13.0, "it is expected at 13 still"
    cycle.turns.forget(A)
    assert cycle.arrived("a", 9.0) == 9.0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 15.0), st.floats(0.0, 9.0)), min_size=2, max_size=30),
    st.sampled_from([4.0, 6.0, 12.0]),
)
def test_places_that_are_waited_for_are_a_slot_s_period_apart_whatever_a_job_does(
    behaviour: list[tuple[float, float]], every_s: float
) -> None:
    """It comes, has its slot after a while, and comes again when it likes. What it had before its
    place came it had of slots that nobody else asked for; a late one has no place of its own."""
    turns = CyclicRule()
    turns.plan(0.1, {"a": every_s, "b": 12.0})
    now_s, last_s, expected_s = 0.0, -inf, inf
    for pause_s, served_s in behaviour:
        now_s += pause_s
        place_s = turns.arrived(A, now_s, 0.5)
        late = now_s > expected_s + max(0.5, every_s / 2)
        assert now_s <= place_s <= now_s + every_s
        expected_s = (now_s if late else place_s) + every_s
        now_s += served_s
        if now_s >= place_s and not late:
            assert place_s >= last_s + every_s - 1e-9
            last_s = place_s


def test_a_deadline_is_the_window_of_the_layer_plus_the_slack() -> None:
    """x = 0.5 of D = 2, slack a tenth: due 1.2 after it became complete; the first layer has its
    own cost and the slack only."""
    turns = DeadlineRule()
    turns.plan(A, 0.5, 0.1, 2.0)
    turns.plan(B, 0.0, 0.1, 2.0)
    assert turns.arrived(A, 10.0, 0.3) == pytest.approx(11.2)
    assert turns.arrived(B, 10.0, 0.3) == pytest.approx(10.5)


def test_deadlines_are_an_iteration_apart_however_often_a_job_pushes() -> None:
    """A job that runs ahead of its profile cannot push others back: its deadlines do not hurry."""
    turns = DeadlineRule()
    turns.plan(A, 0.0, 0.1, 2.0)
    deadlines = [turns.arrived(A, at_s, 0.0) for at_s in (0.0, 0.5, 1.0, 9.0)]
    assert deadlines == pytest.approx([0.2, 2.2, 4.2, 9.2])


def test_a_job_in_profiling_is_due_as_it_comes_and_its_iteration_is_learned() -> None:
    turns = DeadlineRule()
    turns.plan(A, 0.5, 0.1)
    assert turns.arrived(A, 0.0, 0.3) == 0.3
    for turn in range(1, 20):
        at_s = 2.0 * turn
        decided = turns.arrived(A, at_s, 0.3)
    assert decided == pytest.approx(at_s + 1.2)
    turns.forget(A)
    assert not turns.planned(A)


def test_each_job_follows_its_own_rule() -> None:
    """b's deadlines come with its buckets, a's cycle with the plan; others run as they come."""
    turns = TaskRules()
    turns.deadlines.plan(B, 0.0, 0.1)
    turns.plan(12.0, 0.1, {"a": 6.0})
    assert turns.arrived(A, 1.0, 0.5) == 1.0
    assert turns.arrived(B, 1.0, 0.5) == 1.5
    assert not turns.planned(("c", 0))
    turns.plan(0.0, 0.2, {"b": 2.0})
    assert not turns.planned(A), "the plan is all anew"
    assert turns.arrived(B, 3.0, 0.5) == pytest.approx(3.9), "D and slack are told"
    turns.forget(B)
    assert not turns.planned(B)
