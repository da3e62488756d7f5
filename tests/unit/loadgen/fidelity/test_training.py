"""Profiled jobs: their processes wait, and the experiment trains them as the profiles say."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.sim.decisions.inputs import write_profiles
from tests.sim.submissions import submission

from slackwater.common.base import codec
from slackwater.common.base.clock import LiveClock
from slackwater.common.bus.base import Delivery
from slackwater.common.bus.memory import MemoryBroker
from slackwater.common.shell.client import Client
from slackwater.loadgen.fidelity import experiment, waiting_program
from slackwater.loadgen.fidelity.compare import Compared, Figures
from slackwater.loadgen.fidelity.experiment import Plan
from slackwater.loadgen.fidelity.jobs import SAVE_S, profiled_jobs
from slackwater.loadgen.fidelity.training import Training, placed
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.jobmodels.profiles import ProfileRun, ProfilesModel
from slackwater.schemas import subjects
from slackwater.schemas.telemetry import GoodputReport

pytestmark = pytest.mark.timeout(60)
GPUS = 2


@pytest.fixture
def time_scale() -> float:
    """Such that the job trains for a second or two."""
    return 0.004


@pytest.fixture
def run(tmp_path: Path, time_scale: float) -> ProfileRun:
    """A job of 2 GPUs."""
    write_profiles(tmp_path / "profiles", epoch=400)
    folder = str(tmp_path / "profiles")
    model = ProfilesModel(folder, report_s=0.1, whole_seconds=False, time_scale=time_scale)
    job = submission(0, id="p0000", gpus=GPUS, model="small", batch_size=400)
    (job,) = model.elastic([job], 4)
    return model.run(job, Cluster([(4, "fake")]).view)


class World:
    """The experiment's side, on a bus in memory, and ranks as real processes."""

    def __init__(self, run: ProfileRun, folder: Path) -> None:
        self.run, self.folder, self.broker = run, folder, MemoryBroker(seed=1)
        self.client = Client(self.broker.connect("fidelity"), LiveClock())
        self.training = Training(self.client, {"p0000": run})
        self.training.origin_s = self.client.clock.now_s()

    async def start(self, rank: int, attempt: int = 0) -> asyncio.subprocess.Process:
        environment = {
            "SLACKWATER_JOB": "p0000", "SLACKWATER_ATTEMPT": str(attempt),
            "SLACKWATER_RANK": str(rank), "SLACKWATER_GPUS": f"w1:{GPUS}",
            "SLACKWATER_RESULT": str(self.folder / f"result-{attempt}-{rank}"),
        }  # fmt: skip
        path = Path(waiting_program.__file__)
        words = ("-I", "-S", str(path), str(self.folder / "socket"), repr(SAVE_S))
        return await asyncio.create_subprocess_exec(
            sys.executable, *words, env=os.environ | environment
        )

    def results(self) -> list[str]:
        return sorted(each.name for each in self.folder.glob("result-*"))


@pytest.fixture
async def world(run: ProfileRun, tmp_path: Path) -> AsyncIterator[World]:
    made = World(run, tmp_path)
    async with made.training.listening(tmp_path / "socket"):
        yield made
    made.training.raise_failures()


async def test_ranks_end_when_the_profile_says_and_the_agent_reports(world: World) -> None:
    heard: list[GoodputReport] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(codec.decode(delivery.payload, GoodputReport))

    await world.client.bus.subscribe(subjects.telemetry("job", "p0000", "goodput"), hear)
    ranks = [await world.start(rank) for rank in range(GPUS)]
    assert [await each.wait() for each in ranks] == [0, 0]
    assert world.results() == ["result-0-0", "result-0-1"]
    wrote = world.training.written["p0000"][0]
    assert (wrote.before, wrote.after) == (0.0, world.run.work_total)
    assert wrote.ended_s > wrote.began_s
    assert heard
    assert {(each.job, each.attempt) for each in heard} == {("p0000", 0)}


@pytest.mark.parametrize("time_scale", [0.03])
async def test_a_stopped_attempt_keeps_its_work_and_the_next_one_goes_on(world: World) -> None:
    """The signal comes before the training can be over, on a busy machine, too: it is ten seconds
    long. The next attempt's time is turned on."""
    first = await world.start(0)
    second = await world.start(1)
    while world.run.work_done == 0.0:
        await asyncio.sleep(0.01)
        world.run.advance(world.client.clock.now_s() - world.training.origin_s)
    for each in (second, first):
        each.send_signal(signal.SIGTERM)
    assert [await first.wait(), await second.wait()] == [0, 0]
    assert world.results() == []
    wrote = world.training.written["p0000"][0]
    assert 0.0 < wrote.after < world.run.work_total
    ranks = [await world.start(rank, attempt=1) for rank in range(GPUS)]
    world.training.origin_s -= 3600.0
    assert [await each.wait() for each in ranks] == [0, 0]
    after = world.training.written["p0000"][1]
    assert (after.before, after.after) == (wrote.after, world.run.work_total)


def test_places_follow_from_what_a_rank_is_told() -> None:
    assert placed("w2:4,w1:2") == ((0, 4), (1, 2))
    assert placed("") == ()


def test_profiled_jobs_grow_and_need_no_aggregators(run: ProfileRun, tmp_path: Path) -> None:
    (job,) = profiled_jobs([run.job], {"p0000": run}, tmp_path, tmp_path / "socket")
    assert job.spec.adaptive
    assert (job.spec.gpus_min, job.spec.gpus_max, job.spec.workers) == (1, 4, GPUS)
    assert job.iterations == run.work_total


def test_pollux_has_a_trace_of_its_own_unless_one_is_given() -> None:
    own = experiment.planned(Plan(policy="", seed=3), "pollux")
    assert (own.trace, own.jobs) == (experiment.PROFILED_TRACE, 40)
    given = experiment.planned(Plan(policy="", trace="mine.csv", jobs=7), "pollux")
    assert (given.trace, given.jobs) == ("mine.csv", 7)
    assert experiment.planned(Plan(policy=""), "fifo").trace == experiment.TRACE


def test_reallocations_are_held_to_a_bound() -> None:
    def figures(number: int) -> Figures:
        return Figures(mean_jct_s=1.0, makespan_s=1.0, preemptions=0, reallocations=number)

    def compared(live: int) -> Compared:
        return Compared(live=figures(live), simulated=figures(100), jobs_near=1.0, tau=1.0)

    assert compared(105).misses() == []
    assert compared(94).misses() == ["94 reallocations live, 100 simulated"]
