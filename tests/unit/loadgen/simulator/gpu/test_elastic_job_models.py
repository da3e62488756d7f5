"""The job models `queueing` and `subtasks`: rates by the performance models, exact accounts."""

import pytest
from tests.sim.submissions import submission

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.common.domains.models.queueing import StepTimes, throughputs
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions, JobRun
from slackwater.loadgen.simulator.gpu.jobmodels.queueing import QueueingModel
from slackwater.loadgen.simulator.gpu.jobmodels.registry import make_model, names
from slackwater.loadgen.simulator.gpu.jobmodels.subtasks import SubtasksModel
from slackwater.loadgen.simulator.gpu.runner import Task, run
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.loadgen.simulator.options import Options

ALEXNET = StepTimes(5.696, 0.0, 1.992, 1.992)
VIEW = Cluster.counted(16).view


def sim_job(stages_s: tuple[float, ...], iterations: int = 1000, gpus: int = 1) -> Submission:
    return submission(
        0, id="j", gpus=gpus, gpus_min=1, gpus_max=16, stages_s=stages_s, iterations=iterations
    )


@pytest.mark.parametrize("method", ["exact", "fcfs", "hybrid"])
def test_steps_are_done_at_the_model_s_rate(method: str) -> None:
    model = make_model("queueing", {"method": method}, 0)
    run = model.run(sim_job((5.696, 1.992, 1.992)), VIEW)
    x = throughputs(ALEXNET, 16, method)  # type: ignore[arg-type]
    assert run.alone_s(1) == pytest.approx(1000 * ALEXNET.total_s)
    run.resume(0.0, ((0, 4),), Conditions(delay_s=10))
    assert run.next_s() == pytest.approx(10 + 1000 / x[4])
    run.advance(10 + 500 / x[4])
    assert run.work_done == pytest.approx(500)
    run.resume(10 + 500 / x[4], ((0, 8),), Conditions(slowdown=2.0))
    assert run.next_s() == pytest.approx(10 + 500 / x[4] + 1000 / x[8])
    assert run.speed == pytest.approx(x[8] / 2 / x[1])


def test_a_fourth_stage_is_the_server_s() -> None:
    found = QueueingModel().run(sim_job((0.029, 0.072, 0.018, 0.072)), VIEW)
    assert found.alone_s(3) == pytest.approx(1000 / 9.694, rel=1e-4)


def test_a_charged_server_takes_a_node() -> None:
    """Two nodes are one worker and one server: slower than one node that needs no transfers."""
    curve = (
        QueueingModel(charge_server=True).run(sim_job((5.696, 1.992, 1.992)), VIEW).profile.curve
    )
    free = throughputs(ALEXNET, 16)
    assert curve.x[1] == pytest.approx(1 / 5.696)
    assert curve.x[2:] == pytest.approx(free[1:16].tolist())
    assert curve.x[2] < curve.x[1]


@pytest.mark.parametrize("model", ["queueing", "subtasks"])
def test_lost_progress_is_done_again(model: str) -> None:
    stages = (1.0, 0.1, 0.1) if model == "queueing" else (1.0, 0.2)
    run: JobRun = make_model(model, {}, 0).run(sim_job(stages), VIEW)
    run.resume(0.0, ((0, 1),), Conditions())
    run.advance(120.0)
    run.mark()
    run.advance(600.0)
    assert run.work_done == pytest.approx(500)
    run.restore()
    assert run.work_done == pytest.approx(100)
    run.resume(600.0, ((0, 1),), Conditions())
    assert run.next_s() == pytest.approx(600 + 900 * 1.2)
    run.advance(run.next_s())
    assert run.done
    assert run.work_done == run.work_total


def test_jobs_of_a_group_iterate_together() -> None:
    model = SubtasksModel(contention=0.0)
    first = model.run(sim_job((6.0, 2.0), 100, gpus=4), VIEW)
    second = model.run(sim_job((2.0, 6.0), 100, gpus=4), VIEW)
    four = ((0, 4),)
    first.resume(0.0, four, Conditions(peers=(second,), group="harmony-1"))
    assert first.next_s() == pytest.approx(800)
    first.resume(0.0, four, Conditions(peers=(second,), group="naive-1"))
    assert first.next_s() == pytest.approx(1100)
    slowed = SubtasksModel(contention=0.25).run(sim_job((6.0, 2.0), 100, gpus=4), VIEW)
    slowed.resume(0.0, four, Conditions(peers=(second,), group="naive-1"))
    assert slowed.next_s() > 1100 * 1.05

    first.resume(0.0, ((0, 8),), Conditions())
    assert first.next_s() == pytest.approx(500)


def test_policies_see_times_that_are_off_and_jobs_run_at_the_true_ones() -> None:
    job = sim_job((6.0, 2.0), 100, gpus=4)
    off = SubtasksModel(error=0.5, seed=3).run(job, VIEW)
    again = SubtasksModel(error=0.5, seed=3).run(job, VIEW)
    assert off.profile == again.profile != SubtasksModel().run(job, VIEW).profile
    assert 3.0 <= off.profile.cpu_s <= 9.0
    assert 1.0 <= off.profile.network_s <= 3.0
    off.resume(0.0, ((0, 4),), Conditions())
    assert off.next_s() == pytest.approx(800)


def test_what_a_model_needs_is_said() -> None:
    assert {"queueing", "subtasks"} <= set(names())
    for model, word in ((QueueingModel(), "stages"), (SubtasksModel(), "stages")):
        with pytest.raises(Rejected, match=word):
            model.run(sim_job((1.0,)), VIEW)
        with pytest.raises(Rejected, match="iterations"):
            model.run(sim_job((1.0, 1.0, 1.0), iterations=0), VIEW)
    with pytest.raises(ConfigRejected, match="method"):
        make_model("queueing", {"method": "magic"}, 0)


@pytest.mark.parametrize(
    ("model", "policy", "free"),
    [("queueing", "hell", True), ("queueing", "fifo", False), ("subtasks", "harmony", True),
     ("subtasks", "isolated", False), ("subtasks", "naive-colocation", False)],
)  # fmt: skip
def test_jobs_are_free_in_size_where_the_policy_chooses(
    model: str, policy: str, free: bool
) -> None:
    """Such a policy needs no further option."""
    trace = "generate:lin,jobs=20" if model == "queueing" else "generate:harmony"
    options = Options(
        trace=trace, policies=(policy,), nodes=100, gpus_per_node=1, overhead="none",
        job_model=model,
    )  # fmt: skip
    report = run(Task(0, options, policy, 0))
    held = {round(job.gpu_s / job.run_s, 3) for job in report.figures}
    asked = {float(job.gpus) for job in report.figures}
    assert (held != asked) == free
    assert report.summary.completed == report.summary.jobs
