"""Generated workloads against the papers' figures, within sampling error under fixed seeds."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from math import log, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, pvariance, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.loadgen import models
from slackwater.loadgen.generate import WORKLOADS, generate, harmony, lin, options, pollux
from slackwater.loadgen.traces import TraceJob, read, write

SEEDS = range(5)


def _gaps(jobs: tuple[TraceJob, ...]) -> list[float]:
    return [b.submit_s - a.submit_s for a, b in pairwise(jobs)]


def _within_sampling_error(sample: list[float], mean: float, deviation: float) -> bool:
    """Five standard errors: a right generator fails once in more than a million seeds."""
    return abs(fmean(sample) - mean) <= 5 * deviation / sqrt(len(sample))


# Common to all ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_equal_bytes(name: str) -> None:
    assert write(generate(name, 7)) == write(generate(name, 7))
    assert write(generate(name, 7)) != write(generate(name, 8))


def test_bytes_do_not_depend_on_the_process() -> None:
    """Another hash seed in another process changes nothing."""
    program = (
        "import hashlib\n"
        "from slackwater.loadgen.generate import WORKLOADS, generate\n"
        "from slackwater.loadgen.traces import write\n"
        "text = ''.join(write(generate(name, 3)) for name in WORKLOADS)\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    text = "".join(write(generate(name, 3)) for name in WORKLOADS)
    assert done.stdout.strip() == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("name", WORKLOADS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**63))
def test_any_seed_gives_a_whole_workload(name: str, seed: int) -> None:
    """Unique ids, submissions in order from 0 on, positive times; it can be written."""
    jobs = generate(name, seed)
    assert len({job.id for job in jobs}) == len(jobs)
    assert all(gap >= 0 for gap in _gaps(jobs))
    assert jobs[0].submit_s >= 0
    assert all(job.duration_s is None or job.duration_s > 0 for job in jobs)
    assert write(jobs).count("\n") == len(jobs) + 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_written_and_read_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / "workload.csv"
    path.write_text(write(generate(name, 1)))
    trace = read(path, origin_s=0.0)
    assert trace.format == "slackwater"
    assert trace.jobs == generate(name, 1)


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(Rejected, match="unknown workload 'tiresia', did you mean tiresias"):
        generate("tiresia", 1)
    with pytest.raises(Rejected, match=r"lin has no option 'loads'; it has: load=0\.5, jobs="):
        generate("lin", 1, loads=2)
    with pytest.raises(Rejected, match="jobs is 'many'; expected a whole number"):
        generate("lin", 1, jobs="many")
    with pytest.raises(Rejected, match="load is nan"):
        generate("lin", 1, load="nan")
    with pytest.raises(Rejected, match="table III has nin"):
        generate("lin", 1, models="resnet50")
    with pytest.raises(Rejected, match="give tuned or realistic"):
        generate("pollux", 1, configuration="ideal")
    with pytest.raises(Rejected, match="mean_gap_s is -1"):
        generate("tiresias", 1, mean_gap_s=-1)
    with pytest.raises(Rejected, match="jobs is 0"):
        generate("lin", 1, jobs=0)
    assert options("harmony")["iterations_median"] == 50.0


# Tiresias -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_tiresias_counts_are_the_papers(seed: int) -> None:
    """Section 3.5.1: GPUs, models and bins are exact whatever the seed."""
    jobs = generate("tiresias", seed)
    assert Counter(job.gpus for job in jobs) == {1: 240, 2: 40, 4: 80, 8: 90, 16: 25, 32: 5}
    by_model = Counter(job.model for job in jobs)
    assert set(by_model.values()) == {48}
    assert all(models.resolve(model) == model for model in by_model)
    bins = Counter((job.gpus <= 4, (job.duration_s or 0.0) < 800.0) for job in jobs)
    published = {(True, True): 63.5, (True, False): 12.5, (False, True): 16.5, (False, False): 7.5}
    for key, percent in published.items():
        assert bins[key] / 4.80 == pytest.approx(percent, abs=1.0)
    assert all(120.0 <= (job.duration_s or 0.0) <= 7200.0 for job in jobs)
    assert all(job.extra["servers"] == (job.gpus if job.gpus > 1 else 0) for job in jobs)
    assert all(job.duration_s == (job.iterations or 0) * (job.iteration_s or 0.0) for job in jobs)


def test_tiresias_arrivals_are_poisson() -> None:
    gaps = [gap for seed in SEEDS for gap in _gaps(generate("tiresias", seed))]
    assert _within_sampling_error(gaps, 30.0, 30.0)
    assert stdev(gaps) == pytest.approx(30.0, rel=0.1)  # Exponential: deviation equals mean.


@pytest.mark.traces
def test_tiresias_iteration_times_are_the_authors(traces_dir: Path) -> None:
    """The sample trace's duration / iterations, to the three digits that we keep."""
    ours = {
        (job.model, min(job.gpus, 8)): job.iteration_s
        for seed in SEEDS
        for job in generate("tiresias", seed)
    }
    for job in read(traces_dir / "tiresias" / "60_job.csv").jobs:
        measured = (job.duration_s or 0.0) / (job.iterations or 1)
        assert ours[job.model, job.gpus] == pytest.approx(measured, rel=5e-3)


# Pollux -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "jobs"), [(0.5, 80), (1.0, 160), (1.5, 240), (2.0, 320)])
def test_pollux_size_follows_the_load(load: float, jobs: int) -> None:
    workload = generate("pollux", 1, load=load)
    assert len(workload) == jobs
    assert all(0 <= job.submit_s < 8 * 3600 for job in workload)


def test_pollux_parts_are_table_3_1() -> None:
    jobs = generate("pollux", 1, load=100)
    counts = Counter(job.model for job in jobs)
    for name, application in pollux.APPLICATIONS.items():
        error = 5 * sqrt(application.part * (1 - application.part) / len(jobs))
        assert counts[name] / len(jobs) == pytest.approx(application.part, abs=error)
    assert sum(a.part for a in pollux.APPLICATIONS.values()) == pytest.approx(1.0)


@pytest.mark.traces
@pytest.mark.parametrize("configuration", ["tuned", "realistic"])
def test_pollux_pairs_are_the_published_ones(traces_dir: Path, configuration: str) -> None:
    """Every (application, GPUs, batch) of the authors' workloads can be drawn, and no other."""
    folder = "workloads" if configuration == "tuned" else "workloads-realistic"
    published = {
        (job.model, job.gpus, job.batch_size)
        for path in (traces_dir / "pollux" / folder).glob("*.csv")
        for job in read(path).jobs
    }
    drawn = {
        (job.model, job.gpus, job.batch_size)
        for job in generate("pollux", 1, load=60, configuration=configuration)
    }
    assert drawn == published


def test_pollux_realistic_batches_are_m0_times_gpus() -> None:
    for job in generate("pollux", 1, configuration="realistic", load=3):
        assert job.batch_size == pollux.APPLICATIONS[job.model].batch_size_initial * job.gpus


# Lin et al. ---------------------------------------------------------------------------------------


def test_lin_service_times_are_the_papers() -> None:
    """Station times of table III, and AlexNet's 12 days on one node."""
    worker = {"nin": 5.452, "googlenet": 7.893, "alexnet": 5.696, "vgg19": 97.640}
    link = {"nin": 0.240, "googlenet": 0.432, "alexnet": 1.992, "vgg19": 4.600}
    for name, row in lin.TABLE_III.items():
        assert row.worker_s == pytest.approx(worker[name], abs=5e-4)
        assert row.link_s == pytest.approx(link[name], abs=5e-4)
    alexnet = lin.TABLE_III["alexnet"]
    assert alexnet.steps(alexnet.epochs) == 105_469
    assert lin.mean_service_s(("alexnet",)) / 86_400 == pytest.approx(11.82, abs=0.005)
    assert alexnet.step_s / alexnet.link_s == pytest.approx(4.86, abs=0.005)


def test_lin_moments() -> None:
    jobs = generate("lin", 2, jobs=20_000, load=0.7)
    counts = Counter(job.model for job in jobs)
    for name, row in lin.TABLE_III.items():
        assert counts[name] / len(jobs) == pytest.approx(0.25, abs=5 * sqrt(0.25 * 0.75 / 20_000))
        epochs = [float(job.extra["epochs"]) for job in jobs if job.model == name]
        assert _within_sampling_error(epochs, row.epochs, sqrt(2.0))
        assert pvariance(epochs) == pytest.approx(2.0, rel=0.1)
    for job in jobs:
        assert job.iteration_s == pytest.approx(
            job.stages_s["worker"] + job.stages_s["uplink"] + job.stages_s["downlink"]
        )


@pytest.mark.parametrize("subset", ["nin,googlenet,alexnet,vgg19", "alexnet,vgg19"])
@pytest.mark.parametrize("load", [0.1, 0.7])
def test_lin_load_is_what_was_asked(subset: str, load: float) -> None:
    """lambda E[S(1)] / W, measured on the drawn jobs."""
    jobs = generate("lin", 3, jobs=20_000, load=load, models=subset)
    rate = (len(jobs) - 1) / jobs[-1].submit_s
    measured = rate * fmean(job.duration_s or 0.0 for job in jobs) / 100
    assert measured == pytest.approx(load, rel=0.06)


def test_lin_uses_common_random_numbers_across_loads() -> None:
    low, high = generate("lin", 4, load=0.1), generate("lin", 4, load=0.8)
    for a, b in zip(low, high, strict=True):
        assert (a.id, a.iterations) == (b.id, b.iterations)
        assert a.submit_s == pytest.approx(8 * b.submit_s)


# Harmony ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_harmony_has_eighty_jobs_at_sixteen_machines(seed: int) -> None:
    jobs = generate("harmony", seed)
    assert len(jobs) == 80
    assert Counter(job.model for job in jobs) == dict.fromkeys(harmony.DATASETS, 20)
    assert {job.gpus for job in jobs} == {16}
    assert {job.submit_s for job in jobs} == {0.0}
    for job in jobs:
        assert all(10.0 <= time_s <= 120.0 for time_s in job.stages_s.values())
        assert job.duration_s == (job.iterations or 0) * (job.iteration_s or 0.0)


@pytest.mark.parametrize("kind", harmony.MOST)
def test_harmony_s_jobs_of_a_kind_are_the_sixty_that_are_most_of_it(kind: str) -> None:
    everyone = generate("harmony", 3)
    chosen = generate("harmony", 3, most=kind)
    assert len(chosen) == harmony.JOBS_OF_A_KIND
    names = {job.id for job in chosen}

    def ratio(job: TraceJob) -> float:
        other = "network" if kind == "cpu" else "cpu"
        return job.stages_s[kind] / job.stages_s[other]

    assert max(ratio(job) for job in everyone if job.id not in names) < min(map(ratio, chosen))
    with pytest.raises(Rejected, match="most is 'gpu'; give cpu or network"):
        generate("harmony", 3, most="gpu")


def test_harmony_moments() -> None:
    """Both stage times log-uniform and independent, iterations log-normal."""
    jobs = [job for seed in range(40) for job in generate("harmony", seed)]
    spread = log(120 / 10)
    logs = {stage: [log(job.stages_s[stage]) for job in jobs] for stage in ("cpu", "network")}
    for sample in logs.values():
        assert _within_sampling_error(sample, log(10) + spread / 2, spread / sqrt(12))
        assert stdev(sample) == pytest.approx(spread / sqrt(12), rel=0.05)
    means = {stage: fmean(sample) for stage, sample in logs.items()}
    covariance = fmean(
        (a - means["cpu"]) * (b - means["network"])
        for a, b in zip(logs["cpu"], logs["network"], strict=True)
    )
    assert abs(covariance) / (spread**2 / 12) < 5 / sqrt(len(jobs))
    iterations = [log(job.iterations or 1) for job in jobs]
    assert _within_sampling_error(iterations, log(50.0), 0.5)
    assert stdev(iterations) == pytest.approx(0.5, rel=0.1)


def test_harmony_arrivals_can_be_poisson() -> None:
    gaps = _gaps(generate("harmony", 1, mean_gap_s=240.0))
    assert _within_sampling_error(gaps, 240.0, 240.0)


def test_generators_take_their_randomness_as_an_argument() -> None:
    """The same source of randomness, handed on, gives another workload: nothing is global."""
    rng = Random(5)
    assert harmony.workload(rng) == generate("harmony", 5)
    assert harmony.workload(rng) != generate("harmony", 5)
