"""The built-in workload, played twice: quietly, and with a core taken now and then.

The profiler's and the controller's own cores, joined, in virtual time. An iteration lasts as the
cycles of its aggregators make it, and longer where they are full; in a noisy run those that overlap
a busy moment are stretched by a random factor. Noise may delay decisions, and must not change them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from tests.unit.services.controller.harness import SHARE, Harness, Pool

from slackwater.common.base.effects import Effect, Observed, Publish
from slackwater.loadgen.simulator.pool.profiles import SERVER_CORES, cost
from slackwater.schemas.base import AggregatorId, JobId, Ok
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import PlaceJob
from slackwater.schemas.telemetry import (
    IterationsObserved,
    JobProfiled,
    TaskCost,
    TasksObserved,
    WindowMeasured,
)
from slackwater.services.controller.policies.scheme import Packing
from slackwater.services.controller.snapshot import cluster_view
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.profiler.core import Profiler

WORKERS = 2
ARRIVALS_S = {"alexnet": 0.0, "vgg19-0": 60.0, "vgg19-1": 180.0, "vgg19-2": 300.0}
ENDS_S = 700.0
FULL = 0.75
"""From here on the tasks of different jobs collide (as in tests/sim/plane.py)."""
BURST_S = 2.0

Span = tuple[float, float]


@dataclass
class Training:
    model: str
    arrives_s: float
    iterations: int = 0
    ends_s: float = 0.0
    first: int = 1
    durations_s: list[float] = field(default_factory=list)


class Played:
    """`busy`: when a core is taken, from arrival or from the run's begin."""

    def __init__(self, busy: Sequence[Span], factors: Random) -> None:
        self.harness = Harness(Pool(10))
        self.profiler = Profiler(ProfilerConfig())
        self.begin_s = self.harness.now_s
        self.busy, self.factors = busy, factors
        self.jobs = {
            id: Training(id.split("-")[0], at_s + self.begin_s) for id, at_s in ARRIVALS_S.items()
        }

    def run(self) -> None:
        harness = self.harness
        while harness.now_s < self.begin_s + ENDS_S:
            for id, job in self.jobs.items():
                if job.arrives_s == harness.now_s:
                    self._place(id, job)
            harness.pass_time(1)
            for id, job in self.jobs.items():
                if job.iterations or job.arrives_s < harness.now_s:
                    self._train(id, job, harness.now_s)
                    self._report(id, job)
            for id in harness.stored:  # A migration takes a second.
                harness.migrated(id)

    def _place(self, id: str, job: Training) -> None:
        spec = JobSpec(id=id, model=job.model, servers=2, workers=WORKERS)
        tensors = cost(job.model, WORKERS).tensors
        assert self.harness.ask(PlaceJob(spec=spec, tensors=tensors)) == Ok()
        job.ends_s = self.harness.now_s

    def _costs_s(self, job: Training) -> list[float]:
        return [s * SHARE / SERVER_CORES for s in cost(job.model, WORKERS).profile.task_cpu_s]

    def _lasts_s(self, id: str, job: Training) -> float:
        own_s = cost(job.model, WORKERS).profile.iteration_s
        state = self.harness.core.state
        duties: dict[AggregatorId, float] = {}
        for other, training in self.jobs.items():
            if other in self.harness.stored:
                known_s = cost(training.model, WORKERS).profile.iteration_s
                places = self.harness.stored[other].places
                for place, each_s in zip(places, self._costs_s(training), strict=True):
                    duty = each_s / SHARE / known_s
                    duties[place.aggregator] = duties.get(place.aggregator, 0.0) + duty
        homes = {place.aggregator for place in self.harness.stored[id].places}
        crowd = [
            duties[home]
            for home in homes
            if any(home in set(self.harness.homes(o)) for o in self.harness.stored if o != id)
        ]
        collided = own_s * (1.0 + max(0.0, max(crowd, default=0.0) - FULL))
        view = cluster_view(state, None)
        true = tuple(
            replace(each, iteration_s=cost(self.jobs[each.id].model, WORKERS).profile.iteration_s)
            for each in view.jobs
        )
        stretched = Packing(replace(view, jobs=true)).durations_s()
        return max(own_s, collided, stretched.get(JobId(id), own_s))

    def _train(self, id: str, job: Training, until_s: float) -> None:
        lasts_s = self._lasts_s(id, job)
        while True:
            noisy_s = lasts_s
            for from_s, to_s in self.busy:
                if (
                    from_s < job.ends_s + lasts_s - self.begin_s
                    and job.ends_s - self.begin_s < to_s
                ):
                    noisy_s = lasts_s * self.factors.uniform(1.0, 2.0)
            if job.ends_s + noisy_s > until_s:
                return
            job.iterations += 1
            job.ends_s += noisy_s
            job.durations_s.append(noisy_s)

    def _report(self, id: str, job: Training) -> None:
        if not job.durations_s:
            return
        places = self.harness.stored[id].places
        costs = tuple(
            TaskCost(job=JobId(id), bucket=n, executions=1, cpu_s=s, nbytes=1)
            for n, s in enumerate(self._costs_s(job))
        )
        tasks = TasksObserved(aggregator=AggregatorId("a0"), period_s=1.0, tasks=costs)
        self._hear(self.profiler.step(Observed("", tasks), self.harness.now_s))
        for rank in range(WORKERS):
            told = IterationsObserved(
                job=JobId(id),
                rank=rank,
                first_iteration=job.first,
                durations_s=tuple(job.durations_s),
                location_epoch=sum(place.location_epoch for place in places),
                bytes_pushed=0,
                bytes_pulled=0,
                workers=WORKERS,
                buckets=len(places),
            )
            self._hear(self.profiler.step(Observed("", told), self.harness.now_s))
        job.first, job.durations_s = job.iterations + 1, []

    def _hear(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish) and isinstance(
                effect.message, JobProfiled | WindowMeasured
            ):
                self.harness.see(effect.message)

    def placement(self) -> set[frozenset[tuple[str, int]]]:
        """Return the buckets that are together; the aggregators' names do not matter."""
        found: dict[str, set[tuple[str, int]]] = {}
        for id in self.harness.stored:
            for bucket, home in enumerate(self.harness.homes(id)):
                found.setdefault(home, set()).add((id, bucket))
        return {frozenset(each) for each in found.values()}


def played(busy: Sequence[Span] = (), seed: int = 0) -> Played:
    made = Played(busy, Random(f"factors {seed}"))
    made.run()
    return made


def busy_moments(random: Random) -> list[Span]:
    """In each profile, for up to a half of it, and then now and then."""
    found: list[Span] = []
    for id, at_s in ARRIVALS_S.items():
        lasts_s = 12 * cost(id.split("-")[0], WORKERS).profile.iteration_s
        noisy_s = random.uniform(0.1, 0.5) * lasts_s
        begin_s = at_s + random.uniform(0.0, lasts_s - noisy_s)
        found.append((begin_s, begin_s + noisy_s))
    at_s = 20.0
    while at_s < ENDS_S:
        found.append((at_s, at_s + random.uniform(0.1, BURST_S)))
        at_s += random.uniform(30.0, 60.0)
    return found


@pytest.fixture(scope="module")
def quiet() -> Played:
    return played()


def test_the_quiet_run_shares_and_undoes_what_loses(quiet: Played) -> None:
    homes = {home for id in ARRIVALS_S for home in quiet.harness.homes(id)}
    assert 2 <= len(homes) < 8, "fewer than the eight that were asked for"
    assert any(fact.fact == "reverted" for fact in quiet.harness.facts)


@pytest.mark.parametrize("seed", range(12))
def test_a_core_that_is_taken_now_and_then_changes_no_placement(quiet: Played, seed: int) -> None:
    noisy = played(busy_moments(Random(seed)), seed)
    assert noisy.placement() == quiet.placement()
