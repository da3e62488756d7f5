"""Every format on the real files: counts, first and last job, and totals against plain csv."""

import csv
import hashlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from slackwater.loadgen.traces import TraceRejected, detect, read, read_distribution
from slackwater.loadgen.traces.gavel import with_durations

pytestmark = pytest.mark.traces


@dataclass(frozen=True)
class Golden:
    format: str
    jobs: int
    gpus: int
    """Sum over jobs."""
    first: tuple[str, float, int, float | None]
    """id, submission in the file's own time (seconds), GPUs, duration."""
    last: tuple[str, float, int, float | None]


FILES = {
    "philly/philly_gpu_jobs_2017-09_10.csv": Golden(
        "philly",
        52_849,
        63_436,
        ("0", 1504521041.0, 8, 2_240_194.0),
        ("52848", 1509493931.0, 1, 102.0),
    ),
    "muri/trace1.csv": Golden(
        "muri", 1494, 7398, ("0", 0.0, 1, 2_868_294.0), ("1493", 10_817_570.0, 1, 15_225.0)
    ),
    "muri/trace3.csv": Golden(
        "muri", 992, 9346, ("0", 0.0, 4, 927_475.0), ("991", 8_166_025.0, 8, 618.0)
    ),
    "tiresias/60_job.csv": Golden(
        "tiresias", 60, 170, ("0", 0.0, 1, 164.0), ("59", 1779.0, 1, 122.0)
    ),
    "elasticflow-itp/cluster01.csv": Golden(
        "itp",
        1595,
        3728,
        ("965d744f-0445-c1a8-12af-97e4c536c66e", 1_932_025.0, 64, 2429.0),
        ("c05db774-132a-5e58-2a57-e880de9205ea", 4_848_400.0, 1, 1032.0),
    ),
    "elasticflow-itp/cluster02.csv": Golden(
        "itp",
        5778,
        11_785,
        ("f60b9881-76f3-6fc7-d009-6b2a00419afc", 5010.0, 1, 1265.0),
        ("d8842354-7613-ef44-7a88-f16259f8068e", 5_166_386.0, 1, 1317.0),
    ),
    "elasticflow-itp/cluster03.csv": Golden(
        "itp",
        3011,
        18_760,
        ("0bc6e292-b9b4-36d3-61bf-fb714fe2f053", 911_907.0, 32, 709.0),
        ("dd7c5485-6c70-7048-5093-4c874f8ccb0b", 5_175_336.0, 8, 3738.0),
    ),
    "elasticflow-itp/cluster05.csv": Golden(
        "itp",
        3629,
        4329,
        ("930dd644-e119-8ce9-0935-e6148a7c7bed", 9940.0, 1, 16_235.0),
        ("26537783-4557-15bc-6329-bfd9d5a19fbc", 5_130_398.0, 1, 9274.0),
    ),
    "elasticflow-itp/cluster10.csv": Golden(
        "itp",
        260,
        383,
        ("5dc7d9cd-c300-9a4f-c3cd-dc2cc0935548", 2_266_647.0, 16, 604.0),
        ("827822bc-4cf5-72f5-3f1e-f01352929ea1", 5_104_565.0, 2, 42_698.0),
    ),
    "elasticflow-itp/195job_with_deadlines.csv": Golden(
        "itp",
        195,
        572,
        ("bdd640fb-0667-1ad1-1c80-317fa3b1799d", 3_715_485.0, 1, 1075.0),
        ("bf85bf0e-ad64-b56c-610f-aa3ff0bbac67", 3_887_530.0, 1, 1016.0),
    ),
    "elasticflow/philly_103959.csv": Golden(
        "elasticflow", 876, 1899, ("0", 0.0, 1, 976_570.0), ("875", 7_910_536.0, 1, 1710.0)
    ),
    "elasticflow/elasticVpollux_e.csv": Golden(
        "elasticflow", 195, 572, ("0", 3_715_485.0, 1, 5644.0), ("194", 3_887_530.0, 1, 707_549.0)
    ),
    "pollux/workloads/workload-6.csv": Golden(
        "pollux", 160, 1134, ("cifar10-0", 53.0, 6, None), ("cifar10-159", 28_189.0, 8, None)
    ),
    "pollux/workloads-2.0/workload-1.csv": Golden(
        "pollux", 320, 2225, ("ncf-0", 29.0, 1, None), ("ncf-319", 28_332.0, 1, None)
    ),
    "sia/newtrace/workload-1.csv": Golden(
        "pollux",
        960,
        9020,
        ("deepspeech2-0", 487.661836, 8, None),
        ("bert-959", 172_603.693348, 8, None),
    ),
    "alibaba/openb_pod_list_default.csv": Golden(
        "alibaba",
        7255,
        6571,
        ("openb-pod-0000", 0.0, 1, 12_537_496.0),
        ("openb-pod-8151", 12_901_761.0, 1, 30.0),
    ),
    "gavel/max_min_fairness.trace": Golden(
        "gavel", 96, 169, ("0", 0.0, 4, None), ("95", 46_317.0, 1, None)
    ),
    "gavel/msr_seed0/103959.trace": Golden(
        "gavel", 986, 2364, ("0", 0.0, 1, None), ("985", 7_910_536.0, 1, None)
    ),
    "shockwave/120_0.2_5_100_40_25_0,0.5,0.5_0.6,0.3,0.09,0.01_multigpu_dynamic.trace": Golden(
        "gavel", 120, 164, ("0", 0.0, 1, 1418.0), ("119", 5011.0, 1, 895.0)
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_golden_counts(traces_dir: Path, name: str) -> None:
    golden, path = FILES[name], traces_dir / name
    assert detect(path) == golden.format
    trace = read(path)
    assert (trace.format, len(trace.jobs)) == (golden.format, golden.jobs)
    assert sum(job.gpus for job in trace.jobs) == golden.gpus
    for job, (job_id, at_s, gpus, duration_s) in (
        (trace.jobs[0], golden.first),
        (trace.jobs[-1], golden.last),
    ):
        assert (job.id, job.gpus, job.duration_s) == (job_id, gpus, duration_s)
        assert job.submit_s + trace.origin_s == pytest.approx(at_s, abs=1e-6)
    assert trace.origin_s == golden.first[1]
    assert trace.jobs[0].submit_s == 0.0
    assert trace.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "gpus", "duration", "per_second"),
    [
        ("muri/trace3.csv", "num_gpu", "duration", 1000),
        ("muri/job_type_2.csv", "num_gpu", "duration", 1000),
        ("elasticflow-itp/cluster02.csv", "num_gpu", "duration", 1),
        ("philly/philly_gpu_jobs_2017-09_10.csv", "num_gpus", "duration", 1),
    ],
)
def test_gpu_time_equals_a_plain_sum(
    traces_dir: Path, name: str, gpus: str, duration: str, per_second: int
) -> None:
    with (traces_dir / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = sum(int(row[gpus]) * float(row[duration]) for row in rows) / per_second
    jobs = read(traces_dir / name).jobs
    assert len(jobs) == len(rows)
    assert sum(job.gpus * (job.duration_s or 0.0) for job in jobs) == pytest.approx(expected)


def test_every_workload_of_pollux_and_sia(traces_dir: Path) -> None:
    """Job load 1.0 is 160 jobs, and the other loads scale with it."""
    sizes = {"-0.5": 80, "": 160, "-1.5": 240, "-2.0": 320, "-realistic": 160}
    for suffix, jobs in sizes.items():
        for number in (1, 2, 3, 5, 6):
            path = traces_dir / "pollux" / f"workloads{suffix}" / f"workload-{number}.csv"
            assert len(read(path).jobs) == jobs
    workloads = sorted((traces_dir / "sia").rglob("workload*.csv"))  # Leaves out the profiles.
    assert workloads
    for path in workloads:
        assert read(path).format == "pollux"


def test_muri_is_in_milliseconds(traces_dir: Path) -> None:
    job = read(traces_dir / "muri" / "trace3.csv").jobs[0]
    assert (job.model, job.batch_size) == ("shufflenet_v2_x1_0", 128)
    assert (job.iterations, job.iteration_s) == (1_046_811, 0.886)
    assert dict(job.stages_s) == {"resource_0": 0.703, "resource_1": 0.062, "resource_2": 0.017}
    assert job.extra["priority"] == 0
    assert job.iterations is not None
    assert job.iteration_s is not None
    assert job.iterations * job.iteration_s == pytest.approx(job.duration_s, rel=1e-5)


def test_philly_week_and_clusters(traces_dir: Path) -> None:
    trace = read(traces_dir / "philly" / "philly_gpu_jobs_2017-09_10.csv")
    assert len({job.tenant for job in trace.jobs}) == 12
    assert trace.jobs[0].tenant == "7f04ca"
    assert all(a.submit_s <= b.submit_s for a, b in pairwise(trace.jobs))


def test_alibaba_counts_pods_that_never_ran(traces_dir: Path) -> None:
    trace = read(traces_dir / "alibaba" / "openb_pod_list_default.csv")
    assert sum(trace.skipped.values()) == 897
    assert len(trace.jobs) + 897 == 8152
    assert trace.jobs[1].extra["gpu_milli"] == 460


def test_deadlines_count_from_the_submission(traces_dir: Path) -> None:
    job = read(traces_dir / "elasticflow-itp" / "195job_with_deadlines.csv").jobs[0]
    assert job.extra["deadline_after_s"] == 3_716_178 - 3_715_485
    assert (job.model, job.iterations, job.batch_size) == ("deepspeech2", 3249, 32)


def test_gavel_commands_are_opaque_and_steps_become_time(traces_dir: Path) -> None:
    trace = read(traces_dir / "gavel" / "minimize_makespan.trace")
    job = trace.jobs[0]
    assert (job.model, job.batch_size, job.iterations) == ("Transformer", 128, 19_605)
    assert str(job.extra["command"]).startswith("python3 train.py -data %s/translation")
    timed = with_durations(trace, traces_dir / "gavel" / "simulation_throughputs.json")
    for before, after in zip(trace.jobs, timed.jobs, strict=True):
        assert before.duration_s is None
        assert after.duration_s is not None
        assert after.duration_s > 0
    with pytest.raises(Exception, match="no GPU type 'h200'; it has: k80"):
        with_durations(trace, traces_dir / "gavel" / "simulation_throughputs.json", "h200")


def test_gpu_time_distributions(traces_dir: Path) -> None:
    for size, count in ((1000, 1001), (5000, 5000), (10_000, 9999)):
        samples = read_distribution(traces_dir / "tiresias" / f"yarn-gput{size}.csv")
        assert len(samples) == count
        assert (samples[0], samples[-1]) == (121.0, 53_294_624.0)
        assert list(samples) == sorted(samples)


@pytest.mark.parametrize(
    "name", ["README.md", "tiresias/n32g4.csv", "gavel/simulation_throughputs.json"]
)
def test_files_of_other_kinds_are_refused(traces_dir: Path, name: str) -> None:
    with pytest.raises(TraceRejected, match="known format: slackwater, tiresias"):
        read(traces_dir / name)


def test_limit_and_origin(traces_dir: Path) -> None:
    path = traces_dir / "pollux" / "workloads" / "workload-6.csv"
    trace = read(path, limit=5, origin_s=0.0)
    assert [job.submit_s for job in trace.jobs][:2] == [53.0, 154.0]
    assert (len(trace.jobs), trace.origin_s) == (5, 0.0)
