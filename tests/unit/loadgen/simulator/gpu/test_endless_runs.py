"""A run that cannot end stops, and names the job that gets no further."""

import pytest
from tests.sim.submissions import submission

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Costs, Engine, Settings
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.registry import make

WEEK_S = 604_800.0


def _job(name: str, number: int, duration_s: int) -> Submission:
    return submission(number, id=name, gpus=64, duration_s=duration_s)


def _run(jobs: list[Submission], policy: str, world: Settings) -> float:
    nodes = [(8, "")] * 8
    return Engine(jobs, Cluster(nodes), make(policy), FixedModel(), world, record=False).run().end_s


def test_a_job_that_failures_never_let_end_is_named() -> None:
    """Eight machines fail every 21 hours; twenty days without a checkpoint take e^22 attempts."""
    unsafe = Settings(failures=Failures(mtbf_s=WEEK_S, checkpoint_s=1e7))
    with pytest.raises(Rejected, match=r"job long held GPUs 1000 times.*--checkpoint-s"):
        _run([_job("long", 0, 1_728_000)], "fifo", unsafe)
    safe = Settings(failures=Failures(mtbf_s=WEEK_S, checkpoint_s=3600))
    assert _run([_job("long", 0, 1_728_000)], "fifo", safe) > 1_728_000


@pytest.mark.parametrize("restart_s", [60, 90])
def test_jobs_whose_turns_are_not_longer_than_a_restart_are_named(restart_s: int) -> None:
    costly = Settings(costs=Costs(start_s=restart_s, restart_s=restart_s))
    with pytest.raises(Rejected, match=r"job a held GPUs 1000 times.*longer turns"):
        _run([_job("a", 0, 5000), _job("b", 1, 100)], "gandiva", costly)
