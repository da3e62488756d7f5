"""Jobs that take turns are measured where they were started, and then moved to those that they fit:
what the master decides of what nodes and programs tell it."""

from collections import Counter
from typing import Any

from tests.unit.services.master.test_master_core import spec
from tests.unit.services.master.test_scaling import Obeyed

from slackwater.common.base.effects import Effect, Log
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import PermitUse, TurnGroup, WorkerHeartbeat
from slackwater.schemas.job_requests import (
    GetJob,
    JobInfo,
    Meet,
    PauseJob,
    RegisterJob,
    ScaleJob,
    SubmitJob,
)
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.progress import ProgramProgress
from slackwater.schemas.tensors import TensorSpec
from slackwater.services.master.gangs import ranks_at
from slackwater.services.master.regrouping import PROFILING_S

N1, N2, N3, N4 = (NodeId(f"n{n}") for n in range(1, 5))
COMPUTES, MOVES = (1.0, 0.1), (0.1, 1.0)


def elastic(id: str, **fields: Any) -> JobSpec:
    asked: dict[str, Any] = {"workers": 2, "by_turns": True, "consistency": "asynchronous"}
    return spec(id, **(asked | {"program": ("python", "p.py")} | fields))


class Turning(Obeyed):
    """Nodes whose permits are held by jobs as `times` says: seconds of computing and of moving, of
    an iteration. All jobs end one each second."""

    def __init__(self, nodes: int = 4, slots: int = 4, **config: Any) -> None:
        self.times: dict[str, tuple[float, float]] = {}
        self.logged: list[Log] = []
        self.held: Counter[tuple[str, NodeId, int]] = Counter()
        self.iterations: Counter[str] = Counter()
        self.silent: set[NodeId] = set()
        self.slots = slots
        super().__init__(**config)
        self.nodes = [NodeId(f"n{n + 1}") for n in range(nodes)]
        self.report("c1", 8.0)
        self.hear()

    def step(self, event: Any) -> list[Effect]:
        effects = super().step(event)
        self.logged += [effect for effect in effects if isinstance(effect, Log)]
        return effects

    def start(self, id: str, times: tuple[float, float], **fields: Any) -> None:
        self.times[id] = times
        self.ask(SubmitJob(spec=elastic(id, **fields)))
        self.confirm()

    def hear(self) -> None:
        for node in self.nodes:
            if node in self.silent:
                continue
            turns = tuple(
                PermitUse(
                    job=JobId(id), node=node,
                    computed_s=self.held[id, node, 0] / 1000,
                    moved_s=self.held[id, node, 1] / 1000,
                )
                for id in self.times
                if node in ranks_at(self.job(id))
            )  # fmt: skip
            running = tuple(
                (JobId(id), rank)
                for id in self.stored["jobs"]
                if self.job(id).state == "running"
                for rank in ranks_at(self.job(id)).get(node, ())
            )
            self.see(
                WorkerHeartbeat(
                    service="worker", id=node, incarnation=0, at_s=self.now_s, node=node,
                    slots=self.slots, turns=turns, running=running,
                )
            )  # fmt: skip

    def trains(self, seconds: int) -> None:
        """Jobs that run end an iteration a second; nodes and programs tell, the master looks."""
        for _ in range(seconds):
            for id, times in self.times.items():
                record = self.job(id)
                if record.state != "running":
                    continue
                self.iterations[id] += 1
                for node in ranks_at(record):
                    self.held[id, node, 0] += round(times[0] * 1000 / len(ranks_at(record)))
                    self.held[id, node, 1] += round(times[1] * 1000)
                progress = ProgramProgress(iteration=self.iterations[id], speed=1.0)
                self.ask(Meet(job=id, rank=0, address="h:1", secret="s" * 32, progress=progress))
            self.hear()
            self.tick()
            self.confirm()

    def places(self) -> dict[str, tuple[NodeId, ...]]:
        return {id: tuple(sorted(ranks_at(self.job(id)))) for id in self.times}

    def group(self, id: str) -> TurnGroup:
        info = self.answer(GetJob(job=id))
        assert isinstance(info, JobInfo)
        assert info.group is not None
        return info.group

    def regroupings(self) -> int:
        return sum(log.event == "turns.regrouped" for log in self.logged)


def four_jobs(**config: Any) -> Turning:
    """Two jobs that compute have come to share two nodes, and two that move bytes the others."""
    harness = Turning(**config)
    for id, times in (("c1", COMPUTES), ("m1", MOVES), ("c2", COMPUTES), ("m2", MOVES)):
        harness.start(id, times)
    assert harness.places() == {"c1": (N1, N2), "c2": (N1, N2), "m1": (N3, N4), "m2": (N3, N4)}
    return harness


def test_a_new_job_goes_to_idle_nodes_and_then_to_the_smallest_group() -> None:
    harness = Turning()
    for id, workers, expected in (
        ("a", 2, (N1, N2)), ("b", 1, (N3,)), ("c", 1, (N4,)), ("d", 2, (N1, N2)), ("e", 1, (N3,)),
    ):  # fmt: skip
        harness.start(id, COMPUTES, workers=workers)
        assert harness.places()[id] == expected, id


def test_jobs_that_fit_are_brought_together_once_all_are_measured() -> None:
    harness = four_jobs()
    assert harness.group("c1") == TurnGroup(state="profiling", shares_with=(JobId("c2"),))
    harness.trains(4)
    assert harness.regroupings() == 0
    harness.trains(30)
    assert harness.regroupings() == 1
    together = harness.places()
    assert together["c1"] != together["c2"]
    assert together["m1"] != together["m2"]
    for id in ("c1", "c2"):
        group = harness.group(id)
        assert group.state == "running"
        assert (group.computing_s, group.moving_s, group.nodes) == (0.5, 0.1, 2)
        assert [other[0] for other in group.shares_with] == ["m"]
    moved = [event for event in harness.told if event.fact == "resized"]
    assert len(moved) == 2, "two of four move"
    assert all("it goes on where it uses nodes best: n" in event.reason for event in moved)
    harness.trains(60)
    assert harness.regroupings() == 1, "it stays so"
    assert harness.places() == together


def test_a_master_that_begins_measures_anew_and_moves_nobody_twice() -> None:
    harness = four_jobs()
    harness.trains(30)
    together = harness.places()
    harness.restart()
    harness.report("c1", 8.0)
    harness.trains(60)
    assert harness.places() == together
    assert all(harness.job(id).reallocations <= 1 for id in harness.times)


def test_nobody_is_moved_where_an_operator_says_so() -> None:
    harness = four_jobs(regroup_gain=0.0)
    before = harness.places()
    harness.trains(60)
    assert harness.places() == before


def test_a_job_that_cannot_be_measured_is_not_waited_for_for_ever() -> None:
    harness = four_jobs()
    harness.ask(SubmitJob(spec=elastic("mute", workers=1)))
    harness.confirm()
    harness.trains(60)
    assert harness.regroupings() == 0
    assert harness.group("mute").state == "profiling"
    harness.trains(int(PROFILING_S))
    assert harness.regroupings() == 1


def test_a_profile_that_lies_is_mended_by_what_is_measured() -> None:
    """One says that it computes a third of what it does: jobs are grouped by that, then anew."""
    harness = Turning(nodes=2)
    harness.start("a", (0.3, 0.1), workers=1, workers_max=2)
    harness.start("b", (0.1, 0.3), workers=1, workers_max=2)
    harness.trains(30)
    harness.times["a"] = (0.9, 0.1)
    harness.trains(90)
    group = harness.group("a")
    assert group.computing_s * group.nodes > 0.85
    assert harness.job("a").state == harness.job("b").state == "running"


def test_a_job_gets_more_hosts_while_it_runs_if_its_user_did_not_say_how_many() -> None:
    for asked in (False, True):
        harness = Turning(nodes=3)
        harness.start("c", (4.0, 0.1), workers=1, workers_min=1, workers_max=3)
        harness.start("m", (0.1, 1.0), workers=1)
        for id in ("c", "m"):
            tensors = (TensorSpec(name="w", shape=(8,)),)
            harness.ask(RegisterJob(job=id, rank=0, tensors=tensors))
        if asked:
            harness.ask(ScaleJob(job="c", workers=2))
            harness.ask(ScaleJob(job="c", workers=1))
        harness.trains(20)
        record = harness.job("c")
        more = record.resizing == "joining" and len(record.allocation) > 1
        assert more != asked
        assert record.attempt == 0, "it was not stopped"


def test_a_move_waits_until_there_is_room_and_is_forgotten_if_there_never_is() -> None:
    harness = four_jobs(slots=3)
    for id in ("x1", "x2", "x3", "x4"):  # They fill all nodes, and take no turns.
        harness.ask(SubmitJob(spec=elastic(id, workers=1, by_turns=False)))
    harness.confirm()
    assert sum(len(ranks_at(harness.job(f"x{n}"))) for n in range(1, 5)) == 4
    before = harness.places()
    harness.trains(40)
    assert harness.places() == before
    assert all(harness.job(id).state == "running" for id in harness.times)


def test_a_job_that_is_paused_or_ends_meanwhile_is_left_alone() -> None:
    harness = four_jobs()
    harness.trains(8)
    harness.ask(PauseJob(job="c2"))
    harness.confirm()
    harness.trains(30)
    assert harness.job("c2").state == "paused"
    assert harness.group("c2").state == "paused"
    assert harness.job("c2").allocation == ()


def test_a_node_that_is_lost_moves_nobody_there() -> None:
    harness = four_jobs()
    harness.trains(4)
    harness.silent = {N4}
    harness.trains(60)
    assert all(N4 not in nodes for id, nodes in harness.places().items() if id[0] == "c")
    assert harness.job("c1").state == harness.job("c2").state == "running"
