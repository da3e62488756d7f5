"""HELL, KNEE and their baselines: the worked allocations, filling, and what holds for each of them
in a whole run on the queueing model."""

from collections.abc import Mapping, Sequence
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.submissions import changed, submission

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.domains.models.speedup import ElasticProfile, SpeedupCurve
from slackwater.loadgen.generate import generate
from slackwater.loadgen.simulator.gpu.audit import audit
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Costs, Engine, Result, Settings
from slackwater.loadgen.simulator.gpu.eventlog import event_log
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.jobmodels.queueing import QueueingModel
from slackwater.loadgen.simulator.gpu.workload import Submission, workload
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.elastic import Choice, fill
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.rules import honours_of
from slackwater.services.master.scheduling.scheduler import Scheduler
from slackwater.services.master.scheduling.validation import validate
from slackwater.services.master.scheduling.view import Rules, View

FIRST = SpeedupCurve([0, 1, 1.9, 2.6, 3.1, 3.4, 3.55, 3.6, 3.61])
SECOND = SpeedupCurve([0, 1, 1.5, 1.8, 2, 2.1, 2.15, 2.17, 2.18])
ELASTIC = [
    ("hell", {}),
    ("hell", {"filling": "false"}),
    ("hell", {"mode": "moldable"}),
    ("hell", {"mode": "moldable", "strict": "true"}),
    ("hell", {"gamma": "1.05"}),
    ("knee", {}),
    ("knee", {"mode": "moldable"}),
    ("srpt", {}),
    ("waterfill", {}),
    ("equal-share", {}),
    ("jsq-chunk", {"chunk": "3"}),
]


class Curves:
    """A job model of given curves: `iterations` is J, the job's name picks the curve."""

    name = "curves"
    integer_times = False

    def __init__(self, curves: Mapping[str, SpeedupCurve]) -> None:
        self.curves = curves

    def run(self, job: Submission, cluster: object) -> object:
        from slackwater.loadgen.simulator.gpu.jobmodels.queueing import QueueingRun

        return QueueingRun(job, self.curves[job.spec.model])


def sim_job(
    number: int, work: int, model: str = "a", submit_s: float = 0.0, most: int = 8
) -> Submission:
    return submission(
        number, submit_s=submit_s, gpus=1, gpus_min=1, gpus_max=most, model=model, iterations=work
    )


class Watcher:
    """A policy that notes the sizes of the first plan."""

    def __init__(self, inner: object) -> None:
        self.inner = inner
        self.first: dict[JobId, int] = {}

    def allocate(self, view: View, memory: object) -> tuple[object, object]:
        plan, memory = self.inner.allocate(view, memory)  # type: ignore[attr-defined]
        if not self.first:
            self.first = {k: sum(n for _, n in v) for k, v in plan.allocations.items()}
        return plan, memory

    def explain(self, view: View, memory: object) -> list[object]:
        return []


def first_sizes(name: str, options: dict[str, str], nodes: int) -> list[int]:
    """Return the sizes of the worked jobs: J = 100 on the first curve, 60 on the second."""
    watcher = Watcher(make(name, options))
    jobs = [sim_job(0, 100, "a", most=nodes), sim_job(1, 60, "b", most=nodes)]
    model = Curves({"a": FIRST, "b": SECOND})
    Engine(jobs, Cluster.counted(nodes), watcher, model).run()  # type: ignore[arg-type]
    return [watcher.first.get(JobId(job.spec.id), 0) for job in jobs]


@pytest.mark.parametrize(
    ("name", "options", "nodes", "sizes"),
    [
        ("hell", {"filling": "false"}, 8, [4, 2]),
        ("hell", {}, 8, [6, 2]),
        ("knee", {"alpha": "0.05", "filling": "false"}, 8, [5, 3]),
        ("hell", {}, 4, [4, 0]),
        ("knee", {"alpha": "0.05"}, 4, [0, 4]),
        ("srpt", {}, 8, [0, 8]),
        ("equal-share", {}, 8, [4, 4]),
        # The second finishes soonest with all idle nodes, one by one: 60/2.18 is below 100 always.
        ("waterfill", {}, 8, [1, 7]),
        # Sizes for the whole cluster (4 and 2): the second's place is idle until the first is done.
        ("hell", {"mode": "moldable"}, 4, [4, 0]),
        ("hell", {"mode": "moldable"}, 5, [4, 0]),
    ],
)
def test_the_worked_allocations(
    name: str, options: dict[str, str], nodes: int, sizes: list[int]
) -> None:
    assert first_sizes(name, options, nodes) == sizes


def test_jsq_chunk_responses() -> None:
    """Four nodes in chunks of two, X = 1, 2; (submission, size) = (0, 10), (0, 4), (1, 4)."""
    jobs = [sim_job(0, 10), sim_job(1, 4), sim_job(2, 4, submit_s=1.0)]
    model = Curves({"a": SpeedupCurve([0, 1, 2])})
    policy = make("jsq-chunk", {"chunk": "2"})
    result = Engine(jobs, Cluster.counted(4), policy, model).run()  # type: ignore[arg-type]
    assert [o.end_s - o.job.submit_s for o in result.outcomes] == pytest.approx([5, 2, 6])


def fill_slowly(
    sizes: list[int], work: Sequence[float], curves: Sequence[SpeedupCurve], budget: int
) -> list[int]:
    """Eq. 5, looking at every job and every number of nodes."""
    sizes = list(sizes)
    while budget > 0:
        shortest = min(c.service_s(w, s) for c, w, s in zip(curves, work, sizes, strict=True))
        options = [
            (nodes, curve.service_s(w, size + nodes), i)
            for i, (curve, w, size) in enumerate(zip(curves, work, sizes, strict=True))
            for nodes in range(1, min(budget, curve.most - size) + 1)
            if curve.service_s(w, size + nodes) < shortest * (1 - 1e-9)
        ]
        if not options:
            break
        nodes, _, i = min(options)
        sizes[i] += nodes
        budget -= nodes
    return sizes


@settings(max_examples=200)
@given(
    jobs=st.lists(
        st.tuples(
            st.lists(st.floats(0.5, 4.0), min_size=8, max_size=8),
            st.floats(1.0, 50.0),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=4,
    ),
    budget=st.integers(0, 12),
)
def test_filling_is_equation_5(jobs: list[tuple[list[float], float, int]], budget: int) -> None:
    """Ties within rounding apart, the heap of bids is the search over all jobs and numbers."""
    curves = [SpeedupCurve([0.0, *x]) for x, _, _ in jobs]
    work = [w for _, w, _ in jobs]
    views = [job_view(i, curve, w) for i, (curve, w) in enumerate(zip(curves, work, strict=True))]
    sizes = {view.id: size for view, (_, _, size) in zip(views, jobs, strict=True)}
    slow = fill_slowly(list(sizes.values()), work, curves, budget)
    choices = [Choice(v, w, c) for v, w, c in zip(views, work, curves, strict=True)]
    fill(sizes, choices, budget)
    shortest = [
        min(c.service_s(w, s) for c, w, s in zip(curves, work, found, strict=True))
        for found in (slow, list(sizes.values()))
    ]
    assert list(sizes.values()) == slow or shortest[0] == pytest.approx(shortest[1], rel=1e-6)


def job_view(number: int, curve: SpeedupCurve, work: float):  # type: ignore[no-untyped-def]
    from slackwater.services.master.scheduling.view import JobView

    return JobView(
        id=JobId(f"j{number}"), number=number, submitted_s=0.0, gpus=1, gpus_min=1,
        gpus_max=curve.nodes, remaining_s_then=work / curve.x[1],
        profile=ElasticProfile(curve, work),
    )  # fmt: skip


def lin_jobs(seed: int, count: int, nodes: int, load: float = 0.7) -> list[Submission]:
    rows = generate("lin", seed, load=load, jobs=count, nodes=nodes)
    return [changed(job, gpus_min=1, gpus_max=nodes) for job in workload(rows, whole_seconds=False)]


def run(
    name: str,
    options: dict[str, str],
    jobs: list[Submission],
    nodes: list[tuple[int, str]],
    world: Settings,
) -> Result:
    return Engine(jobs, Cluster(nodes), make(name, options), QueueingModel(), world).run()


WORLDS = {
    "free": Settings(),
    "costly": Settings(costs=Costs(start_s=100, restart_s=3000)),
    "protected": Settings(rules=Rules(min_run_s=50_000)),
    "failing": Settings(failures=Failures(2e6, 1e5, 3600, 1), costs=Costs(restart_s=10)),
}


@pytest.mark.parametrize("world", sorted(WORLDS))
@pytest.mark.parametrize(("name", "options"), ELASTIC)
def test_whole_runs_hold_up(name: str, options: dict[str, str], world: str) -> None:
    """On machines of several sizes: capacity, gangs and accounts by the auditor, all jobs done,
    the same again from equal inputs."""
    nodes = [(4, ""), (2, ""), (1, ""), (1, "")]
    jobs = lin_jobs(3, 30, 8)
    result = run(name, options, jobs, nodes, WORLDS[world])
    assert audit(event_log(result, name, "queueing", nodes, exact=False)) == []
    assert all(outcome.end_s < inf for outcome in result.outcomes)
    again = run(name, options, lin_jobs(3, 30, 8), nodes, WORLDS[world])
    assert again.segments == result.segments


@pytest.mark.parametrize(("name", "options"), ELASTIC)
def test_a_restarted_master_plans_the_same_sizes(name: str, options: dict[str, str]) -> None:
    """Without memory a policy works from the view alone; its plan keeps every bound."""
    policy = make(name, options)

    class Forgetful:
        def allocate(self, view: View, memory: object) -> tuple[object, object]:
            plan, _ = policy.allocate(view, None)
            validate(plan, view)
            return plan, None

        def explain(self, view: View, memory: object) -> list[object]:
            return []

    jobs = lin_jobs(5, 20, 8)
    result = Engine(jobs, Cluster.counted(8), Forgetful(), QueueingModel()).run()  # type: ignore[arg-type]
    assert all(outcome.end_s < inf for outcome in result.outcomes)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(("name", "options"), ELASTIC)
@settings(max_examples=10)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 8), st.integers(1, 2000), st.integers(0, 1)),
        min_size=1,
        max_size=10,
    ),
    failing=st.booleans(),
)
def test_jobs_without_a_curve_are_taken_to_scale_linearly(
    name: str,
    options: dict[str, str],
    elastic: bool,
    shapes: list[tuple[int, int, int, int]],
    failing: bool,
) -> None:
    """The fixed model: gangs that must be whole, or any number of GPUs up to twice the asked."""
    if name == "jsq-chunk":
        options = {"chunk": "8"}
    policy = make(name, options)
    ranked = "priorities" in honours_of(policy)
    jobs, at_s = [], 0
    for number, (gap_s, gpus, duration_s, priority) in enumerate(shapes):
        at_s += gap_s
        jobs.append(
            submission(
                number,
                submit_s=at_s,
                gpus=gpus,
                duration_s=duration_s,
                gpus_min=1 if elastic else gpus,
                gpus_max=min(8, 2 * gpus) if elastic else gpus,
                priority=priority if ranked else 0,
            )
        )
    nodes = [(4, ""), (2, ""), (2, "")]
    world = Settings(failures=Failures(4000, 300, 60, 1)) if failing else Settings()
    result = Engine(jobs, Cluster(nodes), policy, FixedModel(), world).run()
    assert audit(event_log(result, name, "fixed", nodes, exact=not elastic)) == []
    assert all(outcome.end_s < inf for outcome in result.outcomes)


@pytest.mark.parametrize(("name", "options"), [*ELASTIC, ("harmony", {}), ("naive-colocation", {})])
def test_nothing_to_do(name: str, options: dict[str, str]) -> None:
    policy = make(name, options)
    for cluster in (Cluster([(4, "")]), Cluster([(4, "")], up=0)):
        view = View(0, cluster.view, {}, cluster.free)
        plan, memory = policy.allocate(view, None)
        assert plan.allocations == {}
        assert policy.explain(view, memory) == []


def test_several_gpu_types_are_refused_by_name() -> None:
    cluster = Cluster([(4, "t4"), (4, "a100")])
    for name in ("hell", "srpt", "jsq-chunk"):
        with pytest.raises(ConfigRejected, match="a100"):
            Scheduler(make(name)).decide(View(0, cluster.view, {}, cluster.free))


def test_moldable_sizes_never_change() -> None:
    nodes = [(20, "")]
    for name in ("hell", "knee"):
        result = run(name, {"mode": "moldable"}, lin_jobs(1, 60, 20), nodes, Settings())
        sizes: dict[int, set[int]] = {}
        for segment in result.segments:
            held = sum(count for _, count in segment.allocation)
            sizes.setdefault(segment.number, set()).add(held)
        assert all(len(found) == 1 for found in sizes.values())


def test_knee_grows_careful_with_the_load() -> None:
    """A larger threshold at a higher load: fewer nodes for a job."""
    jobs = lin_jobs(1, 1, 100)
    held = []
    for load in ("0", "1"):
        options = {"mode": "moldable", "load": load}
        result = run("knee", options, jobs, [(100, "")], Settings())
        held.append(sum(count for _, count in result.segments[0].allocation))
    assert held[0] > held[1]


def test_early_termination_puts_new_jobs_first() -> None:
    """Two alike, one half done: without the exponent the older one keeps its nodes, with a large
    one the newcomer takes them."""
    curve = SpeedupCurve([0, 1])
    jobs = [sim_job(0, 100, most=1), sim_job(1, 90, submit_s=50.0, most=1)]
    ends = []
    for gamma in ("0", "3"):
        policy = make("hell", {"gamma": gamma})
        model = Curves({"a": curve})
        result = Engine(jobs, Cluster.counted(1), policy, model).run()  # type: ignore[arg-type]
        ends.append([outcome.end_s for outcome in result.outcomes])
    assert ends[0] == pytest.approx([100, 190])
    assert ends[1] == pytest.approx([190, 140])


@pytest.mark.parametrize(("name", "options"), ELASTIC)
def test_every_waiting_job_has_a_reason(name: str, options: dict[str, str]) -> None:
    world = Settings(ask_why_s=(0,))
    jobs = [msgspec.structs.replace(job, submit_s=0.0) for job in lin_jobs(2, 12, 4)]
    result = run(name, options, jobs, [(4, "")], world)
    assert result.pending_reasons
    assert all(reason.rule and reason.text for _, reason in result.pending_reasons)
