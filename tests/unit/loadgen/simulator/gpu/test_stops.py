"""A victim holds its GPUs while it saves: whoever is given them waits, and so does the victim."""

from collections.abc import Mapping

import pytest
from tests.sim.submissions import submission

from slackwater.common.base.errors import ConfigRejected
from slackwater.loadgen.simulator.gpu.audit import audit
from slackwater.loadgen.simulator.gpu.build import build_policy, build_settings
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.eventlog import event_log
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.jobmodels.registry import make_model
from slackwater.loadgen.simulator.gpu.outcome import Costs, Result, Settings
from slackwater.loadgen.simulator.gpu.vacating import Vacating
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.loadgen.simulator.options import Options
from slackwater.services.master.scheduling.registry import make

COSTS = Costs(start_s=1, restart_s=2, stop_s=5)


def job(number: int, submit_s: float, gpus: int, duration_s: float) -> Submission:
    return submission(number, submit_s=submit_s, gpus=gpus, duration_s=duration_s)


def run(
    policy: str, jobs: list[Submission], gpus: int, options: Mapping[str, str] | None = None
) -> Result:
    cluster = Cluster([(gpus, "")])
    engine = Engine(jobs, cluster, make(policy, options), FixedModel(), Settings(costs=COSTS))
    result = engine.run()
    assert not audit(event_log(result, policy, "fixed", [(gpus, "")], True))
    return result


def test_the_next_job_begins_once_the_victim_has_left() -> None:
    """The long job works from 1 to 10; the short one is ready at 10 + 5 + 1 and works 10 s; the
    long one restarts in 2 s and has 91 s left."""
    result = run("srtf", [job(0, 0, 1, 100), job(1, 10, 1, 10)], 1)
    assert [each.end_s for each in result.outcomes] == [26 + 2 + 91, 26]
    assert [(s.start_s, s.ready_s) for s in result.segments] == [(0, 1), (10, 16), (26, 28)]


def test_idle_gpus_are_taken_first() -> None:
    """A job of one GPU gets the idle one of four and does not wait for the victim; one of two
    waits."""
    jobs = [job(0, 0, 3, 100), job(1, 10, 1, 5), job(2, 10, 2, 10)]
    result = run("srtf", jobs, 4)
    ready = {s.number: s.ready_s for s in result.segments if s.start_s == 10}
    assert ready == {1: 11, 2: 16}


def test_a_victim_that_has_not_begun_has_nothing_to_save() -> None:
    """The second job is stopped while it still waits for the first: the third waits for the first
    alone."""
    jobs = [job(0, 0, 1, 100), job(1, 10, 1, 50), job(2, 12, 1, 20)]
    result = run("srtf", jobs, 1)
    third = next(s for s in result.segments if s.number == 2)
    assert (third.start_s, third.ready_s) == (12, 16)


def test_idle_gpus_of_a_victim_that_has_not_begun_are_idle_again() -> None:
    """A job of two GPUs gets one that is idle and one that is being left. Stopped before it is
    ready, it leaves each as it was."""
    vacating = Vacating(1, stop_s=5)
    assert vacating.leave(((0, 1),), (), ready_s=0, now_s=10) == 15
    awaited = vacating.take(((0, 2),), (2,), 11)
    assert awaited == ((0, 15),)
    assert vacating.leave(((0, 2),), awaited, ready_s=16, now_s=12) == 12
    assert vacating.take(((0, 1),), (2,), 12) == ()
    assert vacating.take(((0, 1),), (1,), 12) == ((0, 15),)


def test_a_gpu_is_awaited_until_it_is_left() -> None:
    vacating = Vacating(2, stop_s=5)
    vacating.leave(((0, 2),), (), ready_s=0, now_s=10)
    assert vacating.take(((1, 2),), (2, 2), 11) == (), "node 1 is idle"
    assert vacating.take(((0, 1),), (2, 0), 11) == ((0, 15),)
    assert vacating.take(((0, 1),), (1, 0), 16) == (), "it has left by then"


def test_without_a_cost_nobody_waits() -> None:
    vacating = Vacating(1, stop_s=0)
    assert vacating.leave(((0, 1),), (), ready_s=0, now_s=10) == 10
    assert vacating.take(((0, 1),), (1,), 10) == ()


def test_the_option_reaches_the_costs_and_is_refused_where_it_has_no_meaning() -> None:
    options = Options(trace="t", stop_s=1.5)
    assert build_settings(options, [], 0).costs.stop_s == 1.5
    with pytest.raises(ConfigRejected, match="restarts free"):
        build_settings(Options(trace="t", stop_s=1.5, overhead="none"), [], 0)
    with pytest.raises(ConfigRejected, match="--stop-s knows one job"):
        build_policy(Options(trace="t", stop_s=1.5, colocate=2), "fifo")


def test_short_jobs_may_last_fractions_of_a_second() -> None:
    model = make_model("fixed", {"whole_seconds": "false"}, 0)
    jobs = [job(0, 0.25, 1, 2.125), job(1, 0.5, 1, 0.5)]
    engine = Engine(jobs, Cluster([(1, "")]), make("srtf", {}), model, Settings())
    ends = [each.end_s for each in engine.run().outcomes]
    assert ends == pytest.approx([2.875, 1.0], abs=2e-3)
