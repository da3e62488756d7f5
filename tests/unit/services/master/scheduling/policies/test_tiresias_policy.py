"""Tiresias against the numbers of its chapter, as worked out by hand."""

from math import inf
from random import Random

import pytest
from tests.sim.submissions import submission

from slackwater.common.base.errors import ConfigRejected
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.services.master.scheduling.policies.gittins import Distribution
from slackwater.services.master.scheduling.policies.tiresias import Notes, TiresiasLas, parse_limits
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.view import JobView


def completions(
    policy: str, sizes: list[tuple[int, int]], gpus: int, **options: str
) -> list[float]:
    """Completion times of jobs (GPUs, duration) that all arrive at 0."""
    jobs = [submission(i, gpus=g, duration_s=d) for i, (g, d) in enumerate(sizes)]
    engine = Engine(jobs, Cluster.counted(gpus), make(policy, options), FixedModel())
    return [outcome.end_s for outcome in engine.run().outcomes]


FIGURE_3_7 = [(2, 2), (1, 8), (2, 6)]


def test_figure_3_7_srsf() -> None:
    assert completions("srsf", FIGURE_3_7, 2) == [2, 10, 16]


def test_figure_3_7_las_in_rounds_of_one_second() -> None:
    """2D-LAS without discretisation: at each second whoever has had least, ties by number."""
    ends = completions(
        "tiresias-las", FIGURE_3_7, 2, limits="", order="index", running_first="false", round_s="1"
    )
    assert ends == [5, 14, 16]


def test_figure_3_7_discretized_gittins() -> None:
    """K = 2, Q1 up to 4 GPU-s, plain FIFO in Q2; the three services are the known distribution."""
    ends = completions(
        "tiresias-gittins", FIGURE_3_7, 2, limits="4", history="4,8,12", running_first="false"
    )
    assert ends == [2, 12, 16]


def test_figure_3_7_supremum_index() -> None:
    """Pseudocode 1 to the letter reaches what SRSF reaches."""
    ends = completions(
        "tiresias-gittins", FIGURE_3_7, 2, limits="", order="index", running_first="false",
        round_s="1", history="4,8,12", quantum="supremum",
    )  # fmt: skip
    assert sum(ends) / 3 == pytest.approx(9.33, abs=0.01)


def test_gittins_index_values() -> None:
    distribution = Distribution([4, 8, 12])
    supremum = [distribution.supremum(a) for a in range(5)]
    assert supremum == pytest.approx([0.125, 0.1429, 0.1667, 0.3333, 0.1667], abs=1e-4)
    quantum = [distribution.index(a, 4) for a in range(4)]
    assert quantum == pytest.approx([0.0833, 0.0909, 0.1, 0.1111], abs=1e-4)
    assert distribution.index(12, 4) == 0
    assert distribution.index(0, inf) == pytest.approx(3 / 24)


def waiting(attained: float, run_s: float, since_s: float, gpus: int = 4) -> JobView:
    return JobView(
        id="j", number=0, submitted_s=0, gpus=gpus, gpus_min=gpus, gpus_max=gpus,
        attained_gpu_s_then=attained, run_s_then=run_s, since_s=since_s, first_start_s=0,
    )  # fmt: skip


def test_promotion_resets_the_queue_and_nothing_else() -> None:
    """Knob 2, 4 GPUs, limit 300: ran 100 s, preempted at 100, promoted at 300, demoted after 75 s
    more of running."""
    policy, notes = TiresiasLas(limits="300", promote_knob=2), Notes()
    job = waiting(400, 100, 100)
    level, _, due_s = policy.place(job, 100, notes)
    assert level[1] == 1
    assert due_s == 300
    policy.changed_by_itself(job, 300, notes)
    level, _, due_s = policy.place(job, 300, notes)
    assert level[1] == 0
    assert due_s == inf, "it has not run since its promotion"
    started = job.moved(((0, 4),), 300)
    assert policy.place(started, 300, notes)[2] == 375
    assert started.attained_gpu_s_then == 400


def test_demotion_instant_is_rounded_up() -> None:
    policy = TiresiasLas(limits="100")
    started = waiting(0, 0, 0, gpus=3).moved(((0, 3),), 7)
    assert policy.place(started, 7, Notes())[2] == 7 + 34
    assert policy.place(started, 40, Notes())[0][1] == 0
    assert policy.place(started, 41, Notes())[0][1] == 1


def test_equals_do_not_preempt_each_other() -> None:
    """Two jobs of one queue on one place: the running one stays although the other came first
    in the index."""
    assert completions("tiresias-las", [(1, 50), (1, 50)], 1, limits="1000") == [50, 100]


def test_promotion_keeps_a_long_job_from_starving() -> None:
    """Short jobs fill the machine for ever; with the knob the long one still gets through."""
    jobs = [submission(0, id="long", gpus=1, duration_s=400)] + [
        submission(i, id=f"s{i}", submit_s=100 + 90 * i, gpus=1, duration_s=90)
        for i in range(1, 60)
    ]
    ends = {}
    for knob in ("0", "1"):
        policy = make("tiresias-las", {"limits": "100", "promote_knob": knob})
        ends[knob] = Engine(jobs, Cluster.counted(1), policy, FixedModel()).run().outcomes[0].end_s
    assert ends["1"] < ends["0"] / 2


def test_a_wait_served_before_the_preemption_promotes_after_it_not_at_its_instant() -> None:
    """Arrived at 0, ran 80 to 100, preempted at 100: with knob 2 it owes 40 s and has waited 80.
    Whenever one asks, the answer is the same instant, and it is after the preemption's."""
    policy, notes = TiresiasLas(limits="300", promote_knob=2), Notes()
    job = waiting(400, 20, 100)
    assert [policy.place(job, now_s, notes)[2] for now_s in (100, 101, 150)] == [101, 101, 101]


@pytest.mark.parametrize("knob", ["1", "4"])
@pytest.mark.parametrize("name", ["tiresias-las", "tiresias-gittins"])
def test_whole_runs_with_promotion_end(name: str, knob: str) -> None:
    """A crowd on 8 GPUs: jobs are preempted with the wait that promotion asks for behind them."""
    rng = Random("crowd")
    submits = sorted(rng.randrange(2000) for _ in range(60))
    jobs = []
    for number, submit_s in enumerate(submits):
        gpus = rng.choice((1, 2, 4, 8))
        jobs.append(
            submission(
                number, submit_s=submit_s, gpus=gpus, duration_s=rng.choice((20, 100, 400, 1500))
            )
        )
    policy = make(name, {"limits": "200,2000", "promote_knob": knob})
    result = Engine(jobs, Cluster([(4, ""), (4, "")]), policy, FixedModel()).run()
    assert sum(outcome.preemptions for outcome in result.outcomes) > 0
    assert len(result.outcomes) == len(jobs)


@pytest.mark.parametrize("text", ["5,3", "0", "x", "-1", "nan", "3600,inf"])
def test_bad_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigRejected, match="limits"):
        parse_limits(text)


def test_unknown_order_is_refused() -> None:
    with pytest.raises(ConfigRejected, match="order='random': choose one of submission"):
        make("tiresias-las", {"order": "random"})
