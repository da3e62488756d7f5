"""An instant that `why` names comes true: the job starts then, and no earlier."""

from math import inf
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.sim.submissions import submission

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Costs, Engine, Result, Settings
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.policies.queues import QueuePolicy
from slackwater.services.master.scheduling.registry import make, names
from slackwater.services.master.scheduling.view import Pending, Plan, Rules, View

ORDERED = [name for name in names() if isinstance(make(name), QueuePolicy)]
NODES = [(4, ""), (4, "")]
FOREVER_S = 12_000
_BORROWING = Rules(quotas={"a": 4, "b": 4}, borrowing=True, min_run_s=50, restart_s=0)

worlds = st.builds(
    Rules,
    quotas=st.sampled_from([{}, {"a": 4, "b": 4}]),
    borrowing=st.booleans(),
    min_run_s=st.sampled_from([0, 50, 600]),
    restart_s=st.sampled_from([0, 30]),
)


@st.composite
def workloads(draw: st.DrawFn) -> list[Submission]:
    """Some jobs end soon, the others not before all that is said has come true."""
    at_s, jobs = 0, []
    for number in range(draw(st.integers(2, 10))):
        at_s += draw(st.integers(0, 300))
        gpus = draw(st.integers(1, 4))
        duration_s = draw(st.integers(1, 500) | st.just(FOREVER_S))
        tenant, priority = draw(st.sampled_from("ab")), draw(st.integers(0, 1))
        jobs.append(
            submission(
                number,
                submit_s=at_s,
                gpus=gpus,
                duration_s=duration_s,
                tenant=tenant,
                priority=priority,
            )
        )
    return jobs


def _run(name: str, jobs: list[Submission], rules: Rules, at_s: float) -> Result:
    world = Settings(rules=rules, costs=Costs(restart_s=rules.restart_s), ask_why_s=(at_s,))
    return Engine(jobs, Cluster(NODES), make(name), FixedModel(), world).run()


def _started_s(result: Result, number: int, after_s: float) -> float:
    starts = (s.start_s for s in result.segments if s.number == number and s.start_s >= after_s)
    return min(starts, default=inf)


@pytest.mark.parametrize("name", ORDERED)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs=workloads(), rules=worlds, later_s=st.integers(0, 900))
def test_what_is_said_of_an_instant_is_true_then(
    name: str, jobs: list[Submission], rules: Rules, later_s: int
) -> None:
    """A job starts at the very instant that was named, and before none where none was, unless one
    ends before. Long jobs are cut: a run asks once, and is compared up to its next completion.
    Where quotas hold by planning parts (`tenants`), nobody names instants."""
    if getattr(make(name), "divisible", False):
        rules = replace(rules, quotas={})
    result = _run(name, jobs, rules, jobs[-1].submit_s + later_s)
    if not result.pending_reasons:
        return
    asked_s = result.pending_reasons[0][0]
    ends_s = min(o.end_s for o in result.outcomes if o.end_s > asked_s)
    for _, reason in result.pending_reasons:
        started_s = _started_s(result, int(reason.job[1:]), asked_s)
        if reason.until_s < ends_s:
            assert started_s == reason.until_s, reason
        else:
            assert started_s >= ends_s, reason


@pytest.mark.parametrize("name", ["fifo", "best-effort"])
def test_who_never_preempts_never_waits_for_protection(name: str) -> None:
    (reason,) = _reasons(name, min_run_s=600)
    assert reason.rule == "order"
    assert reason.until_s == inf


def test_a_job_that_comes_first_waits_for_protection_until_it_ends() -> None:
    (reason,) = _reasons("sf", min_run_s=600)
    assert reason.rule == "protected"
    assert reason.until_s == 600


def test_a_job_that_comes_later_does_not_wait_for_protection() -> None:
    """The one that runs is protected, and would come first without that too."""
    (reason,) = _reasons("tiresias-las", min_run_s=600)
    assert reason.rule == "order"
    assert reason.until_s == 900


def _reasons(name: str, min_run_s: float) -> list[Pending]:
    """Why a job of 3 GPUs waits at 100 s behind one that has 8 GPUs since 0 s."""
    jobs = [
        submission(0, gpus=4, duration_s=2000),
        submission(1, submit_s=100, gpus=3, duration_s=9),
    ]
    rules = Rules(min_run_s=min_run_s)
    world = Settings(rules=rules, ask_why_s=(100,))
    result = Engine(jobs, Cluster([(4, "")]), make(name), FixedModel(), world).run()
    return [reason for _, reason in result.pending_reasons]


@pytest.mark.parametrize("name", ["fifo", "best-effort"])
def test_a_tenant_s_later_job_pushes_none_of_its_own_out(name: str) -> None:
    """The third job starts on borrowed GPUs. The fourth would be within the guarantee; it comes
    later, and waits until the third has ended."""
    sizes = [(0, 1, 10_000), (51, 3, 20_000), (51, 2, 20_000), (51, 3, 500), (10_001, 1, 20_000)]
    result = _run(name, _of_one_tenant(sizes), _BORROWING, at_s=10_001)
    assert _started_s(result, 3, 0) == 10_000
    assert _started_s(result, 4, 0) == 10_500
    assert {s.why for s in result.segments} == {"completed"}


def test_the_protection_of_a_job_that_has_just_started_is_an_instant_to_decide_at() -> None:
    """A question right after a start names the same instants as the policy itself."""
    policy = make("fifo")
    jobs = _of_one_tenant([(0, 8, FOREVER_S), (0, 1, FOREVER_S)])
    said: list[float] = []
    allocate = policy.allocate

    class Listening:
        def __getattr__(self, name: str) -> Any:
            return getattr(policy, name)

        def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
            plan, memory = allocate(view, memory)
            said.append(plan.next_decision_s)
            return plan, memory

    Engine(jobs, Cluster(NODES), Listening(), FixedModel(), Settings(rules=_BORROWING)).run()
    assert said[0] == _BORROWING.min_run_s


def _of_one_tenant(sizes: list[tuple[int, int, int]]) -> list[Submission]:
    return [
        submission(i, submit_s=at_s, gpus=gpus, duration_s=duration_s, tenant="a", priority=0)
        for i, (at_s, gpus, duration_s) in enumerate(sizes)
    ]
