"""Jobs measured on several types of GPU: read by column, learned by type, placed on one type."""

from pathlib import Path

import pytest
from tests.conftest import public_traces
from tests.sim.submissions import submission

from slackwater.loadgen.simulator.gpu.cluster import Cluster, parse_nodes
from slackwater.loadgen.simulator.gpu.engine import Engine, Settings
from slackwater.loadgen.simulator.gpu.jobmodels.applications import read_applications
from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions
from slackwater.loadgen.simulator.gpu.jobmodels.profiles import Options, ProfileRun, ProfilesModel
from slackwater.loadgen.simulator.gpu.outcome import Costs, Result
from slackwater.loadgen.simulator.gpu.workload import Submission, workload
from slackwater.loadgen.traces import read
from slackwater.loadgen.traces.record import TraceRejected
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.view import Rules

SIA = public_traces() / "sia"
SIA_TYPES = ("aws", "azure", "dgx", "dgx-ext", "quad", "rtx")


def _write(folder: Path, name: str, columns: str, rows: list[dict[str, object]]) -> None:
    names = columns.split(",")
    lines = [columns, *(",".join(str(row[n]) for n in names) for row in rows)]
    (folder / name).write_text("\n".join(lines))


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """A folder of one application: `fast` takes a quarter of the time, its columns turned round."""
    folder = tmp_path / "toy"
    folder.mkdir()
    columns = "placement,local_bsz,step_time,sync_time"
    for suffix, factor, order in (
        ("", 1.0, columns),
        ("-slow", 1.0, columns),
        ("-fast", 0.25, "local_bsz,step_time,sync_time,placement"),
    ):
        rows: list[dict[str, object]] = [
            {
                "placement": shape, "local_bsz": size, "sync_time": 0.01 * factor * (shape != "1"),
                "step_time": factor * (0.02 + 0.001 * size + 0.01 * (shape != "1")),
            }
            for shape in ("1", "2", "4", "11", "22", "44")
            for size in (20, 80, 320)
        ]  # fmt: skip
        _write(folder, f"placements{suffix}.csv", order, rows)
    for batch in (100, 400, 1600):
        epochs: list[dict[str, object]] = [
            {"progress": e * 4000, "iteration": e * 4000, "grad_sqr": 1, "grad_var": 3}
            for e in range(1, 4)
        ]
        _write(folder, f"validation-{batch}.csv", "grad_var,grad_sqr,iteration,progress", epochs)
    return tmp_path


def _jobs(count: int) -> list[Submission]:
    return [
        submission(i, submit_s=60 * i, gpus=1, gpus_min=1, gpus_max=64, model="toy", batch_size=100)
        for i in range(count)
    ]


def _run(profiles: Path, jobs: list[Submission], nodes: str) -> Result:
    policy, model = make("pollux", {"steps": "40"}), ProfilesModel(str(profiles))
    world = Settings(rules=Rules(restart_s=30), costs=Costs(restart_s=30))
    cluster = Cluster(parse_nodes(nodes))
    return Engine(model.adapt(jobs, policy), cluster, policy, model, world).run()


def _types(result: Result, nodes: str) -> list[set[str]]:
    kinds = [kind for _, kind in parse_nodes(nodes)]
    return [{kinds[node] for node, _ in each.allocation} for each in result.segments]


def test_columns_are_found_by_name(profiles: Path) -> None:
    toy = read_applications(profiles)["toy"]
    assert toy.step_times((1,), 80, "slow") == pytest.approx((0.1, 0.0))
    assert toy.step_times((2, 2), 80, "fast") == pytest.approx((0.0275, 0.0025))
    assert toy.progress_at(3) == 12000
    assert (toy.moments(100, 0).sqr, toy.moments(100, 0).var) == (1, 3)


@pytest.mark.parametrize(("old", "new", "expected"),
    [("placement", "shape", "column 'placement'"), ("80", "nan", "local_bsz")])  # fmt: skip
def test_a_profile_that_cannot_be_read_is_refused_by_line_and_column(
    profiles: Path, old: str, new: str, expected: str
) -> None:
    path = profiles / "toy" / "placements-slow.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(TraceRejected, match=expected.split("'")[0].strip()) as caught:
        read_applications(profiles)
    assert "placements-slow.csv" in str(caught.value)


def test_a_job_learns_each_type_apart(profiles: Path) -> None:
    """Measurements on one type say nothing of another but by one GPU, timed beforehand."""
    toy = read_applications(profiles)["toy"]
    cluster = Cluster(parse_nodes("1x4:slow,1x4:fast")).view
    for bootstrap in (True, False):
        run = ProfileRun(_jobs(1)[0], toy, cluster, Options(bootstrap=bootstrap))
        run.resume(0.0, ((0, 1),), Conditions())
        run.advance(1.0)
        slow, fast = run.model_on("slow"), run.model_on("fast")
        assert slow is not None
        assert fast is not None
        gain = float(fast.goodput(1, 1, 100) / slow.goodput(1, 1, 100))
        assert gain == pytest.approx(4.0 if bootstrap else 1.0, rel=0.2)
        assert run.model_on("unmeasured") is slow


def test_a_job_lies_on_one_type_and_the_fast_one_is_used(profiles: Path) -> None:
    nodes = "2x4:slow,1x4:fast"
    result = _run(profiles, _jobs(6), nodes)
    types = _types(result, nodes)
    assert all(len(kinds) == 1 for kinds in types)
    assert {"slow"} in types
    assert {"fast"} in types
    alone = _run(profiles, _jobs(6), "2x4:slow")
    assert result.end_s < alone.end_s


@pytest.mark.traces
def test_sias_profiles_run_as_they_are_published() -> None:
    """Six types, each file with columns in an order of its own. Three seconds: 25 jobs."""
    if not (SIA / "profiles").is_dir():
        pytest.skip(f"Sia's profiles are absent ({SIA / 'profiles'}); set SLACKWATER_TRACES")
    applications = read_applications(SIA / "profiles")
    for application in applications.values():
        assert set(SIA_TYPES) <= set(application.gpu_types)
        assert application.step_times((1,), application.per_gpu_bounds()[0], "dgx")[0] < 5
    jobs = workload(read(SIA / "saturn" / "workload-1.csv").jobs[:25], whole_seconds=False)
    nodes = "6x4:aws,3x8:rtx,2x8:dgx-ext"
    assert all(len(kinds) == 1 for kinds in _types(_run(SIA / "profiles", jobs, nodes), nodes))
