"""Properties of every registered policy, whatever it decides.

Never over capacity, gangs whole (the plan of each decision is validated, and an auditor who shares
no code re-checks the whole run), deterministic, nobody lost, nobody starved for ever, and an empty
cluster, an empty queue or a lost machine are survived.
"""

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sim.submissions import changed, submission

from slackwater.common.base.errors import ConfigRejected
from slackwater.loadgen.simulator.gpu.audit import audit
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Costs, Engine, Result, Settings
from slackwater.loadgen.simulator.gpu.eventlog import event_log
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.interference import Slowdowns
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.jobmodels.interleaved import InterleavedModel
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.policies.colocation import Colocated
from slackwater.services.master.scheduling.policies.queues import QueuePolicy
from slackwater.services.master.scheduling.policies.tiresias_artifact import TiresiasArtifact
from slackwater.services.master.scheduling.registry import make, names, options_of
from slackwater.services.master.scheduling.rules import honours_of
from slackwater.services.master.scheduling.validation import validate
from slackwater.services.master.scheduling.view import Rules, View

QUEUE_POLICIES = [
    name for name in names() if isinstance(make(name), QueuePolicy | TiresiasArtifact)
]
"""Policies that schedule jobs of the fixed model; the others are held to the same by the tests of
the job model that they need."""

MODELS = {"vgg16": 0.743, "resnet50": 0.092}


@st.composite
def workloads(draw: st.DrawFn, gpus_max: int = 8) -> list[Submission]:
    count = draw(st.integers(1, 12))
    at_s = 0
    jobs = []
    for number in range(count):
        at_s += draw(st.integers(0, 200))
        gpus = draw(st.integers(1, gpus_max))
        model = draw(st.sampled_from(sorted(MODELS)))
        jobs.append(
            submission(
                number,
                submit_s=at_s,
                gpus=gpus,
                duration_s=draw(st.integers(1, 3000)),
                model=model,
                skew=MODELS[model],
                tenant=draw(st.sampled_from(["a", "b"])),
                priority=draw(st.integers(0, 1)),
            )
        )
    return jobs


def run(
    name: str, jobs: Sequence[Submission], nodes: list[tuple[int, str]], world: Settings
) -> Result:
    policy = make(name)
    if "priorities" not in honours_of(policy):
        jobs = [changed(job, priority=0) for job in jobs]
    return Engine(jobs, Cluster(nodes), policy, FixedModel(), world).run()


WORLDS = {
    "free": Settings(),
    "costly": Settings(costs=Costs(start_s=5, restart_s=30)),
    "spread": Settings(slowdowns=Slowdowns(spread=1.0, interference=0.25)),
    "protected": Settings(rules=Rules(min_run_s=100)),
    "quotas": Settings(rules=Rules(quotas={"a": 4, "b": 4})),
}

relaxed = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("world", sorted(WORLDS))
@pytest.mark.parametrize("name", QUEUE_POLICIES)
@relaxed
@given(jobs=workloads())
def test_the_auditor_finds_nothing(name: str, world: str, jobs: list[Submission]) -> None:
    nodes = [(4, ""), (2, ""), (2, "")]
    result = run(name, jobs, nodes, WORLDS[world])
    rules = WORLDS[world].rules
    log = event_log(result, name, "fixed", nodes, exact=world != "spread", rules=rules)
    assert audit(log) == []
    assert len(result.outcomes) == len(jobs)
    assert all(outcome.end_s < float("inf") for outcome in result.outcomes)


@pytest.mark.parametrize("name", QUEUE_POLICIES)
@relaxed
@given(jobs=workloads(), seed=st.integers(0, 100), checkpoint_s=st.sampled_from([0, 60, 10_000]))
def test_lost_machines_are_survived(
    name: str, jobs: list[Submission], seed: int, checkpoint_s: int
) -> None:
    """Machines fail every half hour; every job still ends, and the lost work is accounted for."""
    nodes = [(4, ""), (4, "")]
    world = Settings(failures=Failures(8000, 300, checkpoint_s, seed), costs=Costs(restart_s=10))
    result = run(name, jobs, nodes, world)
    assert audit(event_log(result, name, "fixed", nodes, exact=True)) == []
    if checkpoint_s == 0:
        for outcome in result.outcomes:
            asked = outcome.job.spec.gpus * max(1, outcome.job.oracle.duration_s)
            assert outcome.gpu_s - outcome.wasted_gpu_s == asked


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("name", ["fifo", "srsf", "gandiva", "tiresias-las", "tiresias-gittins"])
@relaxed
@given(jobs=workloads(), stages=st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=12))
def test_co_located_jobs_pass_the_audit(
    name: str, ways: int, jobs: list[Submission], stages: list[tuple[float, float, float]]
) -> None:
    """Sharing under any queue order: GPUs of a group counted once, nobody lost, nobody doubled."""
    staged = [
        changed(job, stages_s=times, iteration_s=sum(times) or 1.0)
        for job, times in zip(jobs, stages, strict=False)
    ]
    nodes = [(4, ""), (4, "")]
    policy = Colocated(make(name), ways=ways)
    world = Settings(rules=Rules(restart_s=10), costs=Costs(restart_s=10))
    result = Engine(staged, Cluster(nodes), policy, InterleavedModel(), world).run()
    assert audit(event_log(result, name, "interleaved", nodes, exact=False)) == []
    members = {}
    for segment in result.segments:
        members.setdefault(segment.group, []).append(segment)
    for group in members.values():
        instants = {segment.start_s for segment in group}
        assert all(sum(s.start_s <= at < s.end_s for s in group) <= ways for at in instants)


@pytest.mark.parametrize("name", QUEUE_POLICIES)
@relaxed
@given(jobs=workloads())
def test_the_same_again(name: str, jobs: list[Submission]) -> None:
    nodes = [(4, ""), (4, "")]
    assert run(name, jobs, nodes, WORLDS["costly"]).segments == (
        run(name, list(jobs), nodes, WORLDS["costly"]).segments
    )


@pytest.mark.parametrize("name", QUEUE_POLICIES)
def test_nothing_to_do(name: str) -> None:
    """No jobs on a cluster, and no GPUs: no plan, no complaint."""
    policy = make(name)
    for cluster in (Cluster([(4, "")]), Cluster([(4, "")], up=0)):
        view = View(0, cluster.view, {}, cluster.free)
        plan, memory = policy.allocate(view, None)
        assert plan.allocations == {}
        assert policy.explain(view, memory) == []
        validate(plan, view)


@pytest.mark.parametrize("name", QUEUE_POLICIES)
def test_every_pending_job_has_a_reason(name: str) -> None:
    jobs = [submission(i, gpus=4, duration_s=500) for i in range(5)]
    world = Settings(ask_why_s=(0, 100))
    result = run(name, jobs, [(4, ""), (4, "")], world)
    for at_s in {at_s for at_s, _ in result.pending_reasons}:
        reasons = [reason for when_s, reason in result.pending_reasons if when_s == at_s]
        assert all(reason.rule and reason.text and reason.resource for reason in reasons)
        if at_s == 0:
            assert len(reasons) == 3


def test_time_sharing_gives_a_large_job_its_turn() -> None:
    """Small jobs keep coming so that eight GPUs are never idle at once: without slices the large
    job waits for the last of them, with slices it does not."""
    submits = [("big", 1, 8, 600)] + [(f"s{i}", 50 * i, 4, 100) for i in range(400)]
    submits.sort(key=lambda row: row[1])
    jobs = [
        submission(n, id=i, submit_s=s, gpus=g, duration_s=d)
        for n, (i, s, g, d) in enumerate(submits)
    ]
    ends = {}
    for name in ("gandiva", "best-effort"):
        outcomes = run(name, jobs, [(4, ""), (4, "")], WORLDS["free"]).outcomes
        ends[name] = next(o.end_s for o in outcomes if o.job.spec.id == "big")
    assert ends["gandiva"] < 10_000
    assert ends["best-effort"] > 20_000


NUMERIC = [
    (name, knob, number)
    for name in names()
    for knob, number in options_of(name).items()
    if isinstance(number, int | float) and not isinstance(number, bool)
]


@pytest.mark.parametrize(("name", "knob"), [(name, knob) for name, knob, _ in NUMERIC])
@pytest.mark.parametrize("text", ["nan", "inf", "", "a"])
def test_a_number_that_is_none_is_refused_with_its_knob(name: str, knob: str, text: str) -> None:
    with pytest.raises(ConfigRejected, match=rf"{name}\.{knob}="):
        make(name, {knob: text})


@pytest.mark.parametrize(("name", "knob", "number"), NUMERIC)
def test_every_default_is_within_its_own_bounds(name: str, knob: str, number: float) -> None:
    make(name, {knob: str(number)})


@pytest.mark.parametrize(
    ("knob", "text", "said"),
    [("fifo.consolidate", "maybe", "prefer, require, no"), ("gandiva.quantum_s", "0", ">= 0.001"),
     ("optimus.round_s", "0", ">= 0.001"), ("tiresias-artifact.round_s", "0", ">= 0.001"),
     ("tiresias-las.promote_knob", "-1", ">= 0.0"), ("tiresias-las.limits", "nan", "3600,57600"),
     ("tiresias-gittins.history", "abc", "3600,57600"), ("hell.mode", "x", "malleable, moldable"),
     ("sf.preemptive", "perhaps", "true or false"), ("fifo.nothing", "1", "it has consolidate")],
)  # fmt: skip
def test_a_bad_knob_is_refused_with_what_is_good(knob: str, text: str, said: str) -> None:
    name, _, option = knob.partition(".")
    with pytest.raises(ConfigRejected, match=said):
        make(name, {option: text})


@pytest.mark.parametrize("name", names())
def test_several_gpu_types_are_placed_on_or_refused_by_name(name: str) -> None:
    """Never waited for: a policy that places without regard to types says so."""
    speeds = {"slow": 0.5, "fast": 1.0}
    jobs = [submission(n, submit_s=n, gpus=2, duration_s=50, gpu_types=speeds) for n in range(4)]
    nodes = [(2, "slow"), (2, "fast")]
    if name in ONE_TYPE:
        with pytest.raises(ConfigRejected, match=f"^{name} knows one GPU type"):
            run(name, jobs, nodes, Settings())
    else:
        result = run(name, jobs, nodes, Settings())
        assert all(outcome.end_s < inf for outcome in result.outcomes)


ONE_TYPE = {
    "equal-share", "harmony", "hell", "jsq-chunk", "knee", "naive-colocation", "optimus", "srpt",
    "tiresias-artifact", "waterfill",
}  # fmt: skip
