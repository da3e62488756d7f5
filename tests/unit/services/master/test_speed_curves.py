"""HELL, KNEE, SRPT and waterfilling size live jobs by what Agents measured (Lin et al. 2018)."""

import msgspec
import pytest
from tests.unit.services.master.test_gpu_dispatch import GpuHarness
from tests.unit.services.master.test_master_core import spec

from slackwater.common.domains.models.queueing import StepTimes, throughputs
from slackwater.common.domains.models.speedup import SpeedupCurve
from slackwater.schemas.base import JobId
from slackwater.schemas.gpus import held
from slackwater.schemas.job_requests import RegisterJob, ScaleJob, SubmitJob
from slackwater.schemas.steps import StepProfile, TurnTimes
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.schemas.tensors import TensorSpec
from slackwater.services.master.progress import Progress
from slackwater.services.master.speed_curves import curve_of, updates_left
from slackwater.services.master.turn_sums import TURNS_MIN

STEPS = StepProfile(worker_s=0.3, uplink_s=0.05, server_s=0.0, downlink_s=0.05, turns=40)
SIZED = ["hell", "knee", "srpt", "waterfill", "equal-share"]


def observed(job: str, turns: int, uplink_s: float, first: int = 1) -> IterationsObserved:
    return IterationsObserved(
        job=JobId(job), rank=0, first_iteration=first, durations_s=(0.4,) * turns,
        location_epoch=0, bytes_pushed=0, bytes_pulled=0, workers=1,
        turns=TurnTimes(
            turns=turns, worker_s=0.3 * turns, uplink_s=uplink_s * turns,
            downlink_s=uplink_s * turns,
        ),
    )  # fmt: skip


class Sized(GpuHarness):
    """Eight GPUs and asynchronous jobs that may have any number of them."""

    def __init__(self, policy: str) -> None:
        super().__init__(gpus=4, gpu_policy=policy, node_silent_s=1e6)
        self.report("c1", 8.0)

    def begin(self, id: str, iterations: int = 10_000) -> None:
        asked = spec(
            id, workers=1, gpus=1, gpus_min=1, gpus_max=8, adaptive=True, servers=1,
            consistency="asynchronous", iterations=iterations,
        )  # fmt: skip
        self.now_s += 1.0
        self.ask(SubmitJob(spec=asked))
        for node in ("n1", "n2"):
            self.confirm(f"start@{node}/{id}")
        self.confirm(f"start/{id}")
        tensors = (TensorSpec(name="w", shape=(8,)),)
        self.ask(RegisterJob(job=id, rank=0, tensors=tensors))

    def gpus_of(self, id: str) -> int:
        """Count what it holds, or is to hold."""
        record = self.job(id)
        return held(record.planned if record.state == "stopping" else record.allocation)


@pytest.mark.parametrize("policy", SIZED)
def test_a_job_begins_with_its_fewest_gpus_and_is_sized_once_it_is_measured(policy: str) -> None:
    harness = Sized(policy)
    harness.begin("a")
    assert harness.gpus_of("a") == 1, "that is where the model is profiled"
    harness.see(observed("a", TURNS_MIN, 0.02))
    assert harness.gpus_of("a") > 1
    assert harness.job("a").resizing == "joining", "it trains on meanwhile"


@pytest.mark.parametrize("policy", ["hell", "knee"])
def test_a_job_that_waits_for_its_link_gets_fewer_than_one_that_computes(policy: str) -> None:
    harness = Sized(policy)
    harness.begin("links")
    harness.begin("computes")
    harness.see(observed("links", TURNS_MIN, 0.5))
    harness.see(observed("computes", TURNS_MIN, 0.001))
    links, computes = harness.gpus_of("links"), harness.gpus_of("computes")
    assert links < computes
    assert links + computes <= 8


def test_a_job_of_another_kind_runs_with_the_number_that_it_asked_for() -> None:
    harness = Sized("hell")
    harness.submit("plain", 2)
    assert harness.gpus_of("plain") == 2
    harness.begin("a")
    harness.see(observed("a", TURNS_MIN, 0.001))
    assert harness.gpus_of("plain") == 2
    assert harness.gpus_of("a") <= 6


def test_a_curve_is_by_gpus_and_equal_ones_are_one_object() -> None:
    curve = curve_of(STEPS, 8, 2)
    exact = throughputs(StepTimes(0.3, 0.0, 0.05, 0.05), 4)
    assert curve is curve_of(msgspec.structs.replace(STEPS), 8, 2)
    assert isinstance(curve, SpeedupCurve)
    assert curve.x[2::2] == pytest.approx(list(exact[1:]))
    assert curve.x[3] == curve.x[2], "a GPU more makes no worker more"
    assert 0 < curve.x[1] < curve.x[2]


def test_times_that_cannot_be_are_no_curve() -> None:
    assert curve_of(msgspec.structs.replace(STEPS, worker_s=1e300), 8, 1) is None


def test_what_is_left_is_in_updates_of_all_ranks() -> None:
    progress = Progress()
    assert updates_left(1000, progress, told=True) == 1000
    for rank, turns in ((0, 300), (1, 100)):
        message = observed("a", turns, 0.1)
        progress.reported(msgspec.structs.replace(message, rank=rank), 5.0)
    assert updates_left(1000, progress, told=True) == 600
    assert updates_left(300, progress, told=True) == 1
    assert updates_left(1, progress, told=False) == 400


def test_an_asynchronous_job_is_scaled_by_hand() -> None:
    harness = GpuHarness(gpus=4)
    harness.report("c1", 8.0)
    asked = spec("a", workers=2, gpus=2, gpus_min=1, gpus_max=8, consistency="asynchronous")
    harness.ask(SubmitJob(spec=asked))
    harness.confirm("start@n1/a")
    harness.confirm("start/a")
    harness.now_s += 5.0
    harness.ask(ScaleJob(job="a", workers=4))
    record = harness.job("a")
    assert held(record.planned or record.allocation) == 4
