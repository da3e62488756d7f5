"""The baseline as Pollux's authors ran it: their two choices, in the smallest cases."""

from tests.sim.submissions import submission

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine, Result
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.services.master.scheduling.registry import make


def _run(jobs: list[tuple[int, int, int]], nodes: list[tuple[int, str]], **knobs: str) -> Result:
    """Jobs of (submission, GPUs, duration)."""
    made = [submission(i, submit_s=at, gpus=g, duration_s=s) for i, (at, g, s) in enumerate(jobs)]
    return Engine(made, Cluster(nodes), make("tiresias-artifact", knobs), FixedModel()).run()


def test_a_job_is_demoted_in_the_round_in_which_it_reaches_the_limit() -> None:
    """60 GPU-seconds at 60 s: one that came at 30 s runs from then on, not a round later."""
    result = _run([(0, 1, 200), (30, 1, 50)], [(1, "")], limit_gpu_s="60")
    assert [(s.number, s.start_s, s.end_s) for s in result.segments[:2]] == [
        (0, 0, 60),
        (1, 60, 110),
    ]


def test_gpus_come_from_the_emptiest_machine() -> None:
    result = _run([(0, 2, 500), (60, 1, 100), (120, 3, 100)], [(4, ""), (4, "")])
    where = {s.number: s.allocation for s in result.segments}
    assert where == {0: ((0, 2),), 1: ((1, 1),), 2: ((1, 3),)}
