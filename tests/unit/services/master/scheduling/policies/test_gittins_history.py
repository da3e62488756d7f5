"""2D-Gittins: equal to LAS where all jobs share one history, better where a group tells more."""

from random import Random

import pytest
from tests.sim.submissions import submission

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine, Result
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.policies.tiresias import TiresiasFacts, TiresiasGittins
from slackwater.services.master.scheduling.registry import make


def _jobs() -> list[Submission]:
    """Two models, one of which takes ten times as long; tenants and sizes say nothing."""
    rng, at_s, jobs = Random(5), 0, []
    for number in range(300):
        at_s += int(rng.expovariate(1 / 45))
        model = rng.choice(["short", "long"])
        duration_s = rng.randint(50, 150) * (10 if model == "long" else 1)
        gpus, tenant = rng.choice([1, 2, 4]), rng.choice("ab")
        jobs.append(
            submission(
                number, submit_s=at_s, gpus=gpus, duration_s=duration_s, model=model, tenant=tenant
            )
        )
    return jobs


def _run(name: str, **knobs: str) -> Result:
    policy = make(name, {"limits": "3200", **knobs})
    return Engine(_jobs(), Cluster.counted(16), policy, FixedModel()).run()


def _mean_jct_s(result: Result) -> float:
    return sum(o.end_s - o.job.submit_s for o in result.outcomes) / len(result.outcomes)


def test_one_history_for_all_and_two_queues_is_las_to_the_second() -> None:
    """Running jobs come first, all that wait in Q1 have attained nothing, and Q2 has no index."""
    assert _run("tiresias-gittins").segments == _run("tiresias-las").segments


def test_history_by_model_tells_who_will_take_long() -> None:
    las, by_model = _run("tiresias-las"), _run("tiresias-gittins", history_of="model")
    assert _mean_jct_s(by_model) < 0.85 * _mean_jct_s(las)


@pytest.mark.parametrize("group", ["tenant", "size"])
def test_history_by_what_says_nothing_is_near_las(group: str) -> None:
    las, by_group = _run("tiresias-las"), _run("tiresias-gittins", history_of=group)
    assert by_group.segments != las.segments
    assert _mean_jct_s(by_group) == pytest.approx(_mean_jct_s(las), rel=0.25)


def test_groups_outlast_the_process_and_older_facts_have_none() -> None:
    policy = TiresiasGittins(history_of="model", learn_jobs=20)
    facts = TiresiasFacts({}, {}, [10.0] * 20 + [90.0] * 20, 40, [], {}, 0.4, {},
                          ["a"] * 20 + ["b"] * 20)  # fmt: skip
    notes = policy.restored(facts).notes
    assert policy.durable(policy.restored(facts)) == facts
    assert sorted(notes.by_group) == ["a", "b"]
    assert notes.by_group["a"].index(0, 50) > notes.by_group["b"].index(0, 50)
    older = TiresiasFacts({}, {}, [10.0] * 40, 40, [], {}, 0.4, {})
    assert policy.restored(older).notes.by_group == {}
