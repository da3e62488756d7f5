"""Elastic jobs that give slots to a job of higher priority, and get them back."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.master.test_master_core import facts, orders, spec
from tests.unit.services.master.test_scaling import Elastic

from slackwater.common.base.effects import Effect
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.gpus import held
from slackwater.schemas.job_requests import CancelJob, ScaleJob, SubmitJob
from slackwater.schemas.workers import StartWorkers, StopWorkers, WorkerExited
from slackwater.services.master.scaling import trimmed
from slackwater.services.master.yielding import Giver, givings

A, B = JobId("a"), JobId("b")
N1, N2 = NodeId("n1"), NodeId("n2")


class Yielding(Elastic):
    """A job of four workers on four slots, which must have one."""

    def __init__(self, **fields: object) -> None:
        super().__init__(slots=4, **({"workers": 4} | fields))

    def submit(self, id: str, workers: int, priority: int = 0) -> list[Effect]:
        return self.ask(SubmitJob(spec=spec(id, workers=workers, priority=priority)))

    def workers(self) -> int:
        return held(self.job("a").allocation)

    def ends(self, id: str, workers: int) -> list[Effect]:
        effects: list[Effect] = []
        for rank in range(workers):
            effects += self.step_exit(id, rank)
        return effects

    def step_exit(self, id: str, rank: int) -> list[Effect]:
        return self.see_exit(WorkerExited(job=id, rank=rank, node=N1, code=0))

    def see_exit(self, exited: WorkerExited) -> list[Effect]:
        return self.ask(exited)


def test_a_job_of_higher_priority_starts_on_slots_that_are_given() -> None:
    harness = Yielding()
    effects = harness.submit("urgent", 2, priority=5)
    assert facts(effects) == ["pending", "waiting", "resizing", "gives-way"]
    assert harness.job("urgent").state == "pending", "they are not free yet"
    assert harness.rank_0() == 2
    harness.rank_0(2)
    stops = [each for each in harness.confirm() if isinstance(each, StopWorkers)]
    assert [stop.ranks for stop in stops] == [(2, 3)]
    assert harness.settled() == (2, "running")
    assert harness.job("urgent").state == "running"


def test_they_are_had_back_before_jobs_of_no_higher_priority() -> None:
    harness = Yielding()
    harness.submit("urgent", 2, priority=5)
    harness.rank_0(2)
    harness.confirm()
    harness.submit("later", 2)
    assert harness.job("later").state == "pending"
    effects = harness.ends("urgent", 2)
    assert "joining" in facts(effects)
    starts = [each for each in orders(effects) if isinstance(each, StartWorkers)]
    assert {start.job for start in starts} == {A}
    for rank in (2, 3):  # Each as soon as a slot is free.
        harness.confirm()
        harness.join(rank)
        harness.rank_0(rank + 1)
    assert harness.settled() == (4, "running")
    assert harness.job("later").state == "pending"


def test_nobody_gives_to_an_equal_nor_more_than_it_can_nor_in_vain() -> None:
    harness = Yielding()
    harness.submit("equal", 2)
    assert not harness.job("a").resizing
    assert facts(harness.submit("large", 4, priority=1)) == ["pending", "waiting"]
    assert not harness.job("a").resizing, "one worker must stay, so that four would never be free"


def test_what_was_given_is_not_taken_back_while_the_other_waits() -> None:
    harness = Yielding()
    harness.submit("urgent", 2, priority=5)
    harness.rank_0(2)
    harness.confirm()
    harness.submit("urgent2", 1, priority=5)
    harness.rank_0(1)
    harness.confirm()
    assert harness.settled() == (1, "running")
    assert harness.job("urgent2").state == "running"
    for _ in range(3):
        harness.tick()
    assert harness.settled() == (1, "running")
    harness.ends("urgent2", 1)
    harness.tick()
    assert (harness.workers(), harness.job("a").resizing) == (2, "joining"), "one is free"


def test_a_person_s_wish_waits_for_a_job_of_higher_priority() -> None:
    harness = Yielding(workers=2)
    harness.submit("urgent", 4, priority=5)
    harness.ask(ScaleJob(job="a", workers=4))
    assert not harness.job("a").resizing, "two slots are free, and another job is to have them"
    assert "2 more free slots" in harness.why("a")
    harness.ask(CancelJob(job="urgent"))
    harness.tick()
    assert harness.job("a").resizing == "joining"


def test_a_master_that_begins_anew_goes_on_with_it() -> None:
    harness = Yielding()
    harness.submit("urgent", 2, priority=5)
    harness.restart()
    harness.node(slots=4)
    harness.tick()
    harness.rank_0(2)
    harness.confirm()
    assert harness.workers() == 2
    assert harness.job("a").workers == 4, "so many it is to have back"


def test_the_node_is_chosen_for_which_least_is_given() -> None:
    spread = Giver(A, ((N1, 2), (N2, 2)), 1)
    assert givings(3, {N1: 1, N2: 1}, [spread]) == {A: 2}, "the last two of it are on n2"
    assert givings(3, {N1: 1, N2: 0}, [spread]) is None, "one worker stays on n1"
    assert givings(2, {N1: 1, N2: 0}, [spread]) == {A: 2}
    assert givings(1, {N1: 1, N2: 0}, [spread]) == {}
    assert givings(2, {N1: 1}, [Giver(B, ((N1, 2),), 1), spread]) == {B: 1}, "who is first gives"


def test_a_job_gives_less_where_that_leaves_room_on_another_node() -> None:
    """On the node that was chosen it would give three, and on the other one another job before."""
    free = {NodeId("n0"): 1, N1: 3, N2: 2}
    before = Giver(A, ((N1, 2), (N2, 2), (NodeId("n0"), 1)), 2)
    giver = Giver(B, ((NodeId("n0"), 1), (N1, 3), (N2, 2)), 1)
    assert givings(4, free, [before, giver]) == {B: 4}


@given(st.integers(0, 2**32))
def test_what_is_given_is_enough_and_not_one_more_than_needed(seed: int) -> None:
    rng = Random(seed)
    nodes = [NodeId(f"n{index}") for index in range(rng.randint(1, 3))]
    free = {node: rng.randint(0, 3) for node in nodes}
    givers = []
    for number in range(rng.randint(0, 3)):
        placed = rng.sample(nodes, rng.randint(1, len(nodes)))
        allocation = tuple((node, rng.randint(1, 3)) for node in placed)
        givers.append(Giver(JobId(f"j{number}"), allocation, rng.randint(1, held(allocation))))
    slots = rng.randint(1, 6)

    def room(given: dict[JobId, int]) -> int:
        left = dict(free)
        for giver in givers:
            kept = dict(trimmed(giver.allocation, given.get(giver.id, held(giver.allocation))))
            for node, number in giver.allocation:
                left[node] += number - kept.get(node, 0)
        return max(left.values())

    found = givings(slots, free, givers)
    if found is None:
        assert room({giver.id: giver.least for giver in givers}) < slots
        return
    assert room(found) >= slots
    least = {giver.id: giver.least for giver in givers}
    assert all(kept >= least[id] for id, kept in found.items())
    for id, kept in found.items():
        assert room(found | {id: kept + 1}) < slots, "one would have done less"
