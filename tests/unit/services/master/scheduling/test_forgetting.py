"""A master that restarts decides as one that did not, from the view and the durable facts alone.

In whole simulated runs each decision is asked for twice: of a scheduler that lives on, and of one
that a new process replaces at random instants with nothing but `durable()`'s bytes. Views come
without noted changes, as the live master's do.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.submissions import changed, submission

from slackwater.common.base import limits
from slackwater.loadgen.generate import generate
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Costs, Engine, Settings
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.interference import Slowdowns
from slackwater.loadgen.simulator.gpu.jobmodels.base import JobModel
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel, FixedRun
from slackwater.loadgen.simulator.gpu.jobmodels.interleaved import InterleavedModel
from slackwater.loadgen.simulator.gpu.jobmodels.queueing import QueueingModel
from slackwater.loadgen.simulator.gpu.jobmodels.subtasks import SubtasksModel
from slackwater.loadgen.simulator.gpu.workload import Submission, workload
from slackwater.services.master.scheduling.policies.colocation import Colocated
from slackwater.services.master.scheduling.policies.gittins import Distribution
from slackwater.services.master.scheduling.policies.tiresias import TiresiasGittins
from slackwater.services.master.scheduling.registry import make, names
from slackwater.services.master.scheduling.rules import EVERY_RULE
from slackwater.services.master.scheduling.scheduler import Decision, Scheduler
from slackwater.services.master.scheduling.view import Pending, Plan, Policy, View

FORGETS = {"pollux"}
"""Its population is a search's head start: without, the next round finds another good plan."""


def in_order(decision: Decision) -> Decision:
    """Return the decision with its pauses sorted, which come in any order."""
    return msgspec.structs.replace(decision, pause=tuple(sorted(decision.pause)))


class Restarting:
    """A policy for the engine: decides by one scheduler, and by one that is restarted."""

    honours = EVERY_RULE

    def __init__(self, policy: Policy, seed: int, share: float = 0.4) -> None:
        self.policy, self.share, self.rng = policy, share, Random(seed)
        self.kept, self.restarted = Scheduler(policy), Scheduler(policy)
        self.restarts = 0
        self.adaptive = getattr(policy, "adaptive", False)

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        asked = msgspec.structs.replace(view, changed=None)
        if self.rng.random() < self.share:
            facts = self.restarted.durable()
            self.restarted = Scheduler(self.policy)
            self.restarted.restore(facts)
            self.restarts += 1
        decision = self.kept.decide(asked)
        again = self.restarted.decide(asked)
        assert in_order(again) == in_order(decision), f"at {view.now_s} s"
        changes = {**dict.fromkeys(decision.pause, ()), **decision.resize, **decision.start}
        return Plan(changes, decision.groups, decision.wake_s, decision.desired_nodes), True

    def explain(self, view: View, memory: Any) -> list[Pending]:
        raise NotImplementedError


def run(
    name: str, options: Mapping[str, str], jobs: Sequence[Submission], model: JobModel,
    world: Settings, seed: int, ways: int = 1,
) -> Restarting:  # fmt: skip
    policy: Policy = make(name, options)
    if ways > 1:
        policy = Colocated(policy, ways)
    asking = Restarting(policy, seed)
    result = Engine(jobs, Cluster([(4, ""), (2, ""), (2, "")]), asking, model, world).run()
    assert all(outcome.end_s < float("inf") for outcome in result.outcomes)
    return asking


class Scaling(FixedRun):
    """A fixed run that tells Optimus its iteration times: linear in the GPUs."""

    @property
    def profile(self) -> Any:
        return self

    @property
    def remaining_iterations(self) -> float:
        return self.remaining_s()

    def iteration_s(self, gpus: int) -> float:
        return 1 / gpus


class ScalingModel(FixedModel):
    def run(self, job: Submission, cluster: Any) -> FixedRun:
        return Scaling(job)


MODELS = {"vgg16": 0.743, "resnet50": 0.092, "alexnet": 0.61}
WORLDS = {
    "plain": Settings(costs=Costs(start_s=5, restart_s=30)),
    "spread": Settings(slowdowns=Slowdowns(spread=1.0)),
    "failing": Settings(failures=Failures(8000, 300, 60, 3)),
}
FIXED: dict[str, tuple[str, dict[str, str]]] = {
    "fifo": ("fifo", {}), "best-effort": ("best-effort", {}),
    "easy-backfill": ("easy-backfill", {}), "sf": ("sf", {}),
    "srtf": ("srtf", {}), "srsf": ("srsf", {}), "gandiva": ("gandiva", {"quantum_s": "300"}),
    "isolated": ("isolated", {}), "optimus": ("optimus", {}),
    "las": ("tiresias-las", {"limits": "600,3000"}),
    "promoting": ("tiresias-las", {"limits": "600,3000", "promote_knob": "1"}),
    "by-entry": ("tiresias-las", {"limits": "600,3000", "order": "entry"}),
    "gittins": (
        "tiresias-gittins", {"limits": "2000", "learn_jobs": "2", "running_first": "false"},
    ),
    "supremum": ("tiresias-gittins", {"learn_jobs": "2", "quantum": "supremum"}),
    "artifact": ("tiresias-artifact", {"limit_gpu_s": "2000"}),
    "naive": ("naive-colocation", {}), "jsq": ("jsq-chunk", {"chunk": "4"}),
    "equal-share": ("equal-share", {}), "srpt": ("srpt", {}), "waterfill": ("waterfill", {}),
}  # fmt: skip
QUEUEING: dict[str, tuple[str, dict[str, str]]] = {
    "hell": ("hell", {}), "knee": ("knee", {}), "srpt": ("srpt", {}),
    "hell-moldable": ("hell", {"mode": "moldable"}),
    "knee-moldable": ("knee", {"mode": "moldable"}), "jsq": ("jsq-chunk", {"chunk": "3"}),
}  # fmt: skip
SUBTASKS = ("harmony", "naive-colocation")


@st.composite
def workloads(draw: st.DrawFn) -> list[Submission]:
    count = draw(st.integers(4, 16))
    at_s, jobs = 0, []
    for number in range(count):
        at_s += draw(st.integers(0, 300))
        gpus = draw(st.integers(1, 4))
        model = draw(st.sampled_from(sorted(MODELS)))
        jobs.append(
            submission(
                number,
                submit_s=at_s,
                gpus=gpus,
                duration_s=draw(st.integers(1, 3000)),
                model=model,
                skew=MODELS[model],
            )
        )
    return jobs


@pytest.mark.parametrize("world", sorted(WORLDS))
@pytest.mark.parametrize("case", sorted(FIXED))
@settings(max_examples=12)
@given(jobs=workloads(), seed=st.integers(0, 1000))
def test_a_restarted_master_decides_the_same(
    case: str, world: str, jobs: list[Submission], seed: int
) -> None:
    name, options = FIXED[case]
    model: JobModel = FixedModel()
    if name == "optimus":
        model = ScalingModel()
        jobs = [changed(job, gpus_min=1, gpus_max=8) for job in jobs]
    assert run(name, options, jobs, model, WORLDS[world], seed).kept.durable() is not None


@pytest.mark.parametrize("name", ["srsf", "tiresias-las", "tiresias-gittins"])
@settings(max_examples=10)
@given(jobs=workloads(), seed=st.integers(0, 1000))
def test_so_it_does_where_jobs_share_gpus(name: str, jobs: list[Submission], seed: int) -> None:
    rng = Random(seed)
    staged = [
        changed(job, stages_s=tuple(rng.random() for _ in range(3)), iteration_s=1.0)
        for job in jobs
    ]
    run(name, {}, staged, InterleavedModel(), WORLDS["plain"], seed, ways=2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", sorted(QUEUEING))
def test_so_it_does_with_jobs_of_any_size(case: str, seed: int) -> None:
    name, options = QUEUEING[case]
    rows = generate("lin", seed, load=0.8, jobs=30, nodes=8)
    jobs = [changed(job, gpus_min=1, gpus_max=8) for job in workload(rows, whole_seconds=False)]
    assert run(name, options, jobs, QueueingModel(), Settings(), seed).restarts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SUBTASKS)
def test_so_it_does_with_groups_of_jobs(name: str, seed: int) -> None:
    rows = generate("harmony", seed, mean_gap_s=600.0)[:20]
    jobs = [
        changed(
            job, gpus=8, gpus_min=1 if name == "harmony" else 8, gpus_max=8
        )
        for job in workload(rows, whole_seconds=False)
    ]  # fmt: skip
    assert run(name, {}, jobs, SubtasksModel(), Settings(), seed).restarts


def test_every_policy_is_restarted_or_said_to_forget() -> None:
    tested = {name for name, _ in (*FIXED.values(), *QUEUEING.values())} | {*SUBTASKS}
    assert tested == set(names()) - FORGETS


def test_the_history_of_services_is_bounded_and_the_newest() -> None:
    """A master that runs for years keeps no more than its durable facts may hold."""
    policy = TiresiasGittins(history=",".join(map(str, range(limits.SERVICE_HISTORY_MAX + 500))))
    notes = policy.fresh_notes()
    assert notes.history[0] == 500
    assert len(notes.history) == limits.SERVICE_HISTORY_MAX == notes.learned_from
    assert isinstance(notes.distribution, Distribution)
