"""The profiles model: interpolation, epochs, the job's agent; and the published artifact's runs."""

import json
from collections.abc import Callable
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import pytest
from tests.sim.submissions import changed, submission

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.common.domains.models.throughput import (
    ThroughputParams,
)
from slackwater.loadgen.simulator.gpu.audit import audit
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.eventlog import event_log
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.interference import Slowdowns
from slackwater.loadgen.simulator.gpu.jobmodels.applications import Application, read_applications
from slackwater.loadgen.simulator.gpu.jobmodels.base import (
    TUNINGS_MAX,
    Conditions,
    FitsPolicy,
)
from slackwater.loadgen.simulator.gpu.jobmodels.profiles import Options, ProfileRun, ProfilesModel
from slackwater.loadgen.simulator.gpu.jobmodels.registry import make_model
from slackwater.loadgen.simulator.gpu.outcome import Costs, Result, Scaling, Settings
from slackwater.loadgen.simulator.gpu.tunings import JobTunings, draw, tunings_csv
from slackwater.loadgen.simulator.gpu.workload import Submission, workload
from slackwater.loadgen.traces import read
from slackwater.loadgen.traces.record import TraceJob, TraceRejected
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.view import Rules

THETA = ThroughputParams(0.05, 0.001, 0.02, 0.002, 0.1, 0.004, 1.0)
SIZES = (20, 40, 80, 160)
SHAPES = ("1", "2", "3", "4", "11", "12", "22", "44")
EPOCHS = 5


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """A folder of one application whose every number is known: no overlap, phi = 300."""
    folder = tmp_path / "toy"
    folder.mkdir()

    def row(shape: tuple[int, ...], m: int) -> str:
        nodes, gpus = len(shape), sum(shape)
        step = float(THETA.iteration_s(nodes, gpus, m))
        return f"{m},{step!r},{float(THETA.sync_s(nodes, gpus))!r}"

    placements = [f"{s},{row(tuple(map(int, s)), m)}" for s in SHAPES for m in SIZES]
    header = "local_bsz,step_time,sync_time"
    (folder / "placements.csv").write_text("\n".join([f"placement,{header}", *placements]))
    beyond = [
        f"{n},{k},{row((4,) * (n - 1) + (k - 4 * n + 4,), m)}"
        for n, k in ((8, 16), (8, 32), (16, 16), (16, 64))
        for m in SIZES
    ]
    (folder / "scalability.csv").write_text(
        "\n".join([f"num_nodes,num_replicas,{header}", *beyond])
    )
    for batch in (100, 400, 1600):
        lines = ["progress,iteration,metric,grad_sqr,grad_var"]
        lines += [f"{e * 1000.0},{e * 1000},0.5,1.0,3.0" for e in range(1, EPOCHS + 1)]
        (folder / f"validation-{batch}.csv").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def toy(profiles: Path) -> Application:
    return read_applications(profiles)["toy"]


def job(number: int = 0, submit_s: float = 0.0, gpus: int = 1, batch: int = 100) -> Submission:
    return submission(
        number, id=f"toy-{number}", submit_s=submit_s, gpus=gpus, model="toy", batch_size=batch
    )


def run_of(toy: Application, options: Options, **fields: int) -> ProfileRun:
    return ProfilesModel.of({"toy": toy}, options).run(job(**fields), Cluster([(4, "")] * 4).view)


FIXED = Options(adaptive=False, whole_seconds=False)
ADAPTIVE = Options(whole_seconds=False)


def test_measured_placements_are_interpolated_over_the_batch(toy: Application) -> None:
    assert toy.step_times((1,), 40)[0] == pytest.approx(0.09)
    assert toy.step_times((1,), 30)[0] == pytest.approx(0.08)
    # Machines in a circle: (2, 1) is (1, 2), whatever was measured first.
    assert toy.step_times((2, 1), 40) == toy.step_times((1, 2), 40)


def test_other_placements_are_interpolated_over_machines_and_gpus(toy: Application) -> None:
    """The times are linear in all three here, so the interpolation is exact."""
    step, sync = toy.step_times((4, 4, 4, 4, 4, 4, 4, 4)[:8], 50)
    assert step == pytest.approx(float(THETA.iteration_s(8, 32, 50)))
    assert sync == pytest.approx(float(THETA.sync_s(8, 32)))


def test_beyond_all_measurements_the_fitted_model_answers(toy: Application) -> None:
    """Eight GPUs on one machine were never measured."""
    step, _ = toy.step_times((8,), 40)
    assert step == pytest.approx(float(THETA.iteration_s(1, 8, 40)), rel=0.1)


def test_a_fixed_job_takes_as_long_as_its_numbers_say(toy: Application) -> None:
    """5,000 iterations of M0 = 100 on one GPU: s = 0, m = 100, 0.15 s each."""
    run = run_of(toy, FIXED)
    assert run.remaining_s() == pytest.approx(750.0)
    assert run.alone_s(1) == pytest.approx(750.0)
    run.resume(0.0, ((0, 1),), Conditions(delay_s=30))
    ends = []
    while not run.done:
        run.advance(run.next_s())
        ends.append(run._at_s)
    assert ends[-1] == pytest.approx(780.0)
    assert run.work_done == run.work_total == 5000.0
    assert run.useful_gpu_s == pytest.approx(750.0)


def test_a_larger_batch_makes_progress_by_its_efficiency(toy: Application) -> None:
    """Batch 400: phi = 300, an iteration is worth (1 + 3) / (1 + 3 / 4) = 16 / 7 of M0's."""
    run = run_of(toy, FIXED, gpus=4, batch=400)
    assert run.alone_s(4) == pytest.approx(5000 * 7 / 16 * 0.174)


def test_slowdowns_and_slow_gpus_stretch_the_step(toy: Application) -> None:
    run = run_of(toy, FIXED)
    run.resume(0.0, ((0, 1),), Conditions(slowdown=2.0))
    assert run.next_s() == pytest.approx(300.0)
    run.advance(10.0)
    # The neighbour leaves: the rest of the epoch runs at full speed, without a restart.
    run.resume(10.0, ((0, 1),), Conditions())
    assert run.next_s() == pytest.approx(155.0)
    slow = run_of(toy, FIXED)
    slow.resume(0.0, ((0, 1),), Conditions(gpu_speed=0.5))
    assert slow.next_s() == pytest.approx(300.0)


def test_epochs_end_in_whole_seconds_and_never_before_a_report(toy: Application) -> None:
    """150 s of an epoch at slowdown 1.0027 are 150.4 s, which ends at 150; ending at 240.3 s is
    seen after the round at 240 s."""
    run = run_of(toy, Options(adaptive=False))
    run.resume(0.0, ((0, 1),), Conditions(slowdown=1.0027))
    assert run.next_s() == 150.0
    run = run_of(toy, Options(adaptive=False))
    run.resume(0.0, ((0, 1),), Conditions(delay_s=90.3))
    assert run.next_s() == pytest.approx(240.3)


def test_an_agent_learns_before_it_tunes(toy: Application) -> None:
    """Nothing is known until the first iteration is over; the batch changes at the next report."""
    run = run_of(toy, ADAPTIVE)
    run.resume(0.0, ((0, 1), (1, 2)), Conditions(delay_s=30))
    assert (run.model, run.gpus_seen, run._per_gpu) == (None, 0, 34)
    run.advance(31.0)
    assert run.model is not None
    assert run.gpus_seen == 3
    assert run.model.noise_scale == pytest.approx(300.0)
    run.advance(59.9)
    assert run._per_gpu == 34
    before = run._rate
    run.advance(60.0)
    assert run._per_gpu > 34
    assert run._rate > before


def test_an_agent_reports_a_new_model_only_when_something_changed(toy: Application) -> None:
    run = run_of(toy, ADAPTIVE)
    run.resume(0.0, ((0, 1),), Conditions())
    run.advance(600.0)
    settled = run.model
    run.advance(601.0)
    assert run.model is settled
    assert run.done or run.next_s() < inf


def test_throughput_driven_agents_ignore_noise(toy: Application) -> None:
    run = run_of(toy, Options(throughput_only=True))
    careful = run_of(toy, ADAPTIVE)
    for each in (run, careful):
        each.resume(0.0, ((0, 4),), Conditions())
        each.advance(120.0)
    assert run.model is not None
    assert run.model.noise_scale == inf
    assert run._per_gpu * (run._steps + 1) > 1.5 * careful._per_gpu * (careful._steps + 1)
    assert run._rate < careful._rate


def test_a_failure_goes_back_to_the_last_checkpoint(toy: Application) -> None:
    run = run_of(toy, FIXED)
    run.resume(0.0, ((0, 1),), Conditions())
    run.advance(20.0)
    run.mark()
    safe = run.work_done
    run.advance(40.0)
    assert run.work_done > safe
    run.restore()
    assert run.work_done == safe
    assert run.remaining_s() == pytest.approx(730.0)


def test_the_oracle_counts_iterations_of_the_traces_batch(toy: Application) -> None:
    run = run_of(toy, FIXED, batch=400)
    # The published count runs from the end of the current epoch, counted from 1, to the last.
    assert run.remaining_iterations == 4000.0
    assert run.iteration_s(4) == pytest.approx(0.174)
    # One GPU holds 160 and accumulates: three steps of 134.
    assert run.iteration_s(1) == pytest.approx(3 * (0.05 + 0.134))


def test_slower_types_have_measurements_of_their_own_or_a_speed(profiles: Path) -> None:
    folder = profiles / "toy"
    slow = (folder / "placements.csv").read_text().replace(",0.09,", ",0.9,")
    (folder / "placements-old.csv").write_text(slow)
    application = read_applications(profiles)["toy"]
    assert application.step_times((1,), 40, "old")[0] == pytest.approx(0.9)
    assert application.step_times((1,), 40, "unknown")[0] == pytest.approx(0.09)
    assert application.measured("old")
    assert not application.measured("unknown")


def test_a_scale_shortens_what_was_measured_and_changes_no_statistics(profiles: Path) -> None:
    whole, scaled = (read_applications(profiles, scale)["toy"] for scale in (1.0, 1 / 60))
    for shape, per_gpu in (((1,), 40), ((4,), 100), ((2, 2), 40), ((8, 8), 64)):
        measured = whole.step_times(shape, per_gpu)
        assert scaled.step_times(shape, per_gpu) == pytest.approx(
            [s / 60 for s in measured],
            rel=1e-4,  # Beyond what was measured it is a fit.
        )
    assert scaled.moments(400, 1) == whole.moments(400, 1)
    assert scaled.progress_at(2) == whole.progress_at(2)


def test_profiles_that_cannot_be_used_are_refused(profiles: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigRejected, match="a folder per application"):
        read_applications(empty)
    (profiles / "toy" / "validation-100.csv").write_text("a,b,c,d,e\n1,2,x,4,5")
    with pytest.raises(TraceRejected, match=r"validation-100\.csv.*progress"):
        read_applications(profiles)


def test_a_job_without_a_profile_is_refused_by_name(toy: Application) -> None:
    model = ProfilesModel.of({"toy": toy}, FIXED)
    stranger = submission(0, id="gpt-1", gpus=1, model="gpt")
    with pytest.raises(Rejected, match=r"job gpt-1 trains 'gpt'.*profiles exist for toy"):
        model.run(stranger, Cluster([(4, "")]).view)


def test_the_model_by_name_fits_its_jobs_to_the_policy(profiles: Path) -> None:
    model = make_model("profiles", {"folder": str(profiles), "fixed": "toy=2x400"}, 0)
    assert isinstance(model, FitsPolicy)
    (elastic,) = model.adapt([job(gpus=4, batch=400)], make("pollux"))
    assert elastic.spec.gpu_bounds == (1, 2)
    (rigid,) = model.adapt([job(gpus=4, batch=400)], make("tiresias-artifact"))
    assert rigid.spec.gpu_bounds == (4, 4)
    with pytest.raises(ConfigRejected, match="GPUSxBATCH"):
        make_model("profiles", {"folder": str(profiles), "fixed": "toy"}, 0)


# Whole runs


def simulate(
    toy: Application, policy: str, settings: Settings, jobs: int = 8, nodes: int = 4
) -> Result:
    options = Options(adaptive=policy == "pollux")
    model = ProfilesModel.of({"toy": toy}, options)
    rng = np.random.default_rng(4)
    work = [
        job(n, float(at), int(rng.integers(1, 5)), 400)
        for n, at in enumerate(np.sort(rng.integers(0, 300, jobs)))
    ]
    chosen = make(policy)
    work = model.adapt(work, chosen)
    return Engine(work, Cluster([(4, "")] * nodes), chosen, model, settings).run()


WORLDS = {
    "restarts": Settings(costs=Costs(start_s=30, restart_s=30)),
    "interference": Settings(slowdowns=Slowdowns(interference=0.5)),
    "failures": Settings(failures=Failures(mtbf_s=300, repair_s=60, checkpoint_s=20)),
    "protected": Settings(rules=Rules(min_run_s=90)),
}


@pytest.mark.parametrize("world", sorted(WORLDS))
@pytest.mark.parametrize("policy", ["pollux", "optimus", "tiresias-artifact", "srtf"])
def test_every_run_is_sound_and_repeatable(toy: Application, policy: str, world: str) -> None:
    """No job lost, capacity kept and work conserved (an auditor who shares no code says so), and
    the same again from the same seed."""
    result = simulate(toy, policy, WORLDS[world])
    assert all(outcome.end_s < inf for outcome in result.outcomes)
    log = event_log(result, policy, "profiles", [(4, "")] * 4, False)
    assert not audit(log)
    again = simulate(toy, policy, WORLDS[world])
    assert [o.end_s for o in again.outcomes] == [o.end_s for o in result.outcomes]


def test_jobs_that_share_gpus_may_end_at_the_same_instant(toy: Application) -> None:
    """The first one's end changes the conditions of the second, which is at its end, too."""
    model = ProfilesModel.of({"toy": toy}, FIXED)
    engine = Engine(
        [job(0, gpus=4), job(1, gpus=4)], Cluster([(4, "")]), make("naive-colocation"), model
    )
    first, second = engine.run().outcomes
    assert first.end_s == second.end_s < inf


def test_pollux_beats_the_rigid_policies_on_the_toy(toy: Application) -> None:
    averages = {
        name: np.mean([o.end_s - o.job.submit_s for o in simulate(toy, name, Settings()).outcomes])
        for name in ("pollux", "tiresias-artifact")
    }
    assert averages["pollux"] < averages["tiresias-artifact"]


@pytest.mark.parametrize("policy", ["pollux", "tiresias-las"])
def test_adaptive_and_fixed_jobs_run_in_one_workload(toy: Application, policy: str) -> None:
    """A batch of 1600 is too large for the noise: jobs that may tune theirs end sooner than equal
    ones that may not, under either kind of policy; those that do not say are as the policy has it.
    """
    rows = [
        TraceJob(id=f"{kind}-{n}", submit_s=0.0, gpus=4, model="toy", batch_size=1600, extra=extra)
        for n in range(2)
        for kind, extra in (
            ("adaptive", {"batch": "adaptive"}), ("fixed", {"batch": "fixed"}), ("unsaid", {}),
        )
    ]  # fmt: skip
    chosen = make(policy)
    model = ProfilesModel.of({"toy": toy}, Options(adaptive=policy == "pollux"))
    result = Engine(workload(rows), Cluster([(4, "")] * 6), chosen, model, Settings()).run()
    length = {o.job.spec.id: o.end_s - o.start_s for o in result.outcomes}
    for n in range(2):
        assert length[f"adaptive-{n}"] < 0.9 * length[f"fixed-{n}"]
        alike = "adaptive" if policy == "pollux" else "fixed"
        assert length[f"unsaid-{n}"] == pytest.approx(length[f"{alike}-{n}"], rel=0.05)
    with pytest.raises(Rejected, match="job x has batch 'large'"):
        workload([TraceJob(id="x", submit_s=0.0, gpus=1, extra={"batch": "large"})])


def test_a_run_tells_how_each_job_was_tuned(toy: Application, tmp_path: Path) -> None:
    """Figure 3.11: under Pollux the batch grows with the GPUs, and efficiency is that of the batch;
    the tunings are ordered, bounded, and end with the work."""
    result = simulate(toy, "pollux", Settings())
    for outcome in result.outcomes:
        tunings = outcome.tunings
        assert 0 < len(tunings) <= TUNINGS_MAX
        assert all(a.at_s <= b.at_s and a.progress <= b.progress for a, b in pairwise(tunings))
        for each in tunings:
            # phi = 300, M0 = 100: the gain of AdaScale is the batch's efficiency times its scale.
            assert each.efficiency == pytest.approx(400 / (300 + each.batch))
            assert each.rate_scale >= 0.99
    several = [JobTunings(o.job.spec.id, o.end_s, list(o.tunings)) for o in result.outcomes]
    largest = max(each.gpus for one in several for each in one.tunings)
    assert largest > 1
    table = tunings_csv([("pollux", several)]).splitlines()
    assert table[0] == "policy,job,at_s,gpus,batch,accumulation,rate_scale,efficiency,progress"
    assert len(table) == 1 + sum(len(one.tunings) for one in several)
    draw(tmp_path / "tunings.png", "pollux", several)
    assert (tmp_path / "tunings.png").read_bytes().startswith(b"\x89PNG")


def test_gpu_types_are_used_by_what_they_are_worth(toy: Application) -> None:
    """The same jobs end sooner with half of the machines three times as fast; nobody is spread
    over types (the plans are validated), and the fast machines are not left idle."""
    ends = []
    for speed in (1.0, 3.0):
        model, policy = ProfilesModel.of({"toy": toy}, Options()), make("pollux")
        jobs = [changed(job(n, 10.0 * n), gpu_types={"old": 1.0, "new": speed}) for n in range(6)]
        cluster = Cluster([(4, "old"), (4, "new"), (4, "old"), (4, "new")])
        result = Engine(model.adapt(jobs, policy), cluster, policy, model).run()
        ends.append(np.mean([o.end_s for o in result.outcomes]))
        busy = {kind: 0.0 for kind in (0, 1)}
        for segment in result.segments:
            for node, gpus in segment.allocation:
                busy[node % 2] += gpus * (segment.end_s - segment.start_s)
    assert ends[1] < 0.8 * ends[0]
    assert busy[1] > busy[0]


def test_pollux_scales_a_cluster_up(toy: Application) -> None:
    model = ProfilesModel.of({"toy": toy}, Options())
    policy = make("pollux", {"scale": "true"})
    jobs = model.adapt([job(n, 0.0, 1, 100) for n in range(6)], policy)
    settings = Settings(scaling=Scaling(1, 4))
    result = Engine(jobs, Cluster([(4, "")] * 4, up=1), policy, model, settings).run()
    assert 16 * result.end_s > result.capacity_gpu_s > 4 * result.end_s


# The artifact's runs

Cell = Callable[[str, int, str], dict[str, float]]


@pytest.fixture
def artifact(traces_dir: Path) -> Cell:
    applications = read_applications(traces_dir / "pollux" / "profiles")

    def cell(policy: str, number: int, folder: str) -> dict[str, float]:
        model = ProfilesModel.of(applications, Options(adaptive=policy == "pollux"))
        chosen = make(policy)
        rows = read(traces_dir / "pollux" / folder / f"workload-{number}.csv", origin_s=0.0).jobs
        settings = Settings(rules=Rules(restart_s=30), costs=Costs(start_s=30, restart_s=30))
        jobs = model.adapt(workload(rows), chosen)
        result = Engine(jobs, Cluster([(4, "")] * 16), chosen, model, settings).run()
        return {o.job.spec.id: o.end_s - o.job.submit_s for o in result.outcomes}

    return cell


def average(jcts: dict[str, float]) -> float:
    return sum(jcts.values()) / len(jcts)


@pytest.mark.traces
def test_the_artifacts_baselines_are_reproduced_job_by_job(
    artifact: Cell, traces_dir: Path
) -> None:
    """Workload 6: Optimus' average to a second and nine of ten jobs to the second."""
    published = json.loads(
        (traces_dir / "pollux/published/results-jobload/optimus-1.0.json").read_text()
    )["jcts"]["workload-6"]
    ours = artifact("optimus", 6, "workloads")
    assert average(ours) == pytest.approx(5301.875, abs=1.0)
    same = sum(abs(ours[name] - jct) <= 1 for name, jct in published.items())
    assert same >= 0.9 * len(published)
    assert average(artifact("tiresias-artifact", 6, "workloads")) == pytest.approx(3470, rel=0.01)


@pytest.mark.timeout(300)
@pytest.mark.traces
@pytest.mark.slow
def test_pollux_on_workload_6_reaches_the_published_average(artifact: Cell) -> None:
    assert average(artifact("pollux", 6, "workloads")) <= 1.05 * 2446
