"""Congested links in virtual time: master, controller and profiler as they are live, jobs whose
transfers to one aggregator take longer from some moment on."""

from typing import Any

from tests.sim.plane import MIB, Plane, check_settled, job, plane, settle

from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.schemas import subjects
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.placement import MigrationEvent
from slackwater.schemas.telemetry import IterationsObserved, LinkTimes

BYTES_S = 10_000_000
"""The rate of a link that is not congested."""


class Networked(Plane):
    """Each bucket of 1 MiB is pulled over its aggregator's link; what shares a link waits for one
    another. `congestion`: how many times longer it takes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.congestion: dict[str, float] = {}

    def link_s(self, model: Any) -> dict[AggregatorId, float]:
        taken: dict[AggregatorId, float] = {}
        for place, _ in model.places.values():
            factor = self.congestion.get(place, 1.0)
            taken[place] = taken.get(place, 0.0) + factor * MIB / BYTES_S
        return taken

    def penalty(self, model: Any) -> float:
        waited: float = max(self.link_s(model).values()) / model.compute_s
        return float(super().penalty(model)) + waited

    def tell(self, model: Any, rank: int, first: int, durations_s: list[float]) -> None:
        count = len(durations_s)
        links = tuple(
            LinkTimes(
                aggregator=id,
                pulled_bytes=int(count * taken_s / self.congestion.get(id, 1.0) * BYTES_S),
                pulling_s=count * taken_s,
            )
            for id, taken_s in sorted(self.link_s(model).items())
        )
        message = IterationsObserved(
            job=JobId(model.spec.id), rank=rank, first_iteration=first,
            durations_s=tuple(durations_s),
            location_epoch=sum(epoch for _, epoch in model.places.values()),
            bytes_pushed=0, bytes_pulled=0, workers=model.spec.workers,
            buckets=len(model.costs_s), links=links,
        )  # fmt: skip
        self.publish(subjects.telemetry("job", model.spec.id, "iterations"), message)


def moves(made: Any) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [
        (event.cause, event.sources, event.targets)
        for _, _, event in made.events
        if isinstance(event, MigrationEvent) and event.fact == "started"
    ]


def test_a_lone_job_leaves_the_congested_link_and_comes_back_when_it_is_good_again() -> None:
    """No aggregator to spare: the other one takes everything, which costs less than the
    congestion. Some minutes later the link counts as good, and the job gets its two servers."""

    async def main() -> None:
        async with plane(1, 2, congestion_s=500.0, kind=Networked) as made:
            model = job("v1", 1.0, [0.02, 0.01, 0.005, 0.005], iterations=2000)
            made.spawn(made.run_job(model, 2.0))
            await settle(made, 60.0)
            assert moves(made) == []
            made.congestion["a0"] = 15.0
            await settle(made, 300.0)
            assert moves(made) == [("interfered", ("a0",), ("a1",))]
            before = model.iteration
            await settle(made, 100.0)
            assert model.iteration - before > 60, "congested there it would be 24, alone 82"
            made.congestion.clear()
            await settle(made, 600.0)
            assert moves(made)[-1][0] == "expanded"
            assert made.allocated() == {"a0", "a1"}
            check_settled(made)

    run_simulated(main())


def test_above_the_limit_nothing_moves() -> None:
    """Pulls take three times as long and are 6 % of an iteration: it keeps 90 % of its speed."""

    async def main() -> None:
        async with plane(2, 4, kind=Networked) as made:
            model = job("v1", 4.0, [0.02, 0.01], iterations=400)
            made.spawn(made.run_job(model, 2.0))
            await settle(made, 60.0)
            made.congestion["a0"] = 3.0
            await settle(made, 250.0)
            assert moves(made) == []
            assert "interfered" not in made.facts("v1")

    run_simulated(main())


def test_workers_whose_own_link_is_slow_are_not_helped_by_moving() -> None:
    async def main() -> None:
        async with plane(3, 2, kind=Networked) as made:
            model = job("v1", 1.0, [0.02, 0.01], iterations=400)
            made.spawn(made.run_job(model, 2.0))
            await settle(made, 60.0)
            made.congestion |= {"a0": 30.0, "a1": 30.0}
            await settle(made, 400.0)
            assert moves(made) == []

    run_simulated(main())


def test_of_two_jobs_only_the_one_that_suffers_moves_and_the_link_is_left_alone() -> None:
    """They share; only one of them has so much to pull that it loses more than the limit."""

    async def main() -> None:
        async with plane(4, 6, congestion_s=10_000.0, kind=Networked) as made:
            light = job("light", 10.0, [0.02, 0.01], iterations=400)
            heavy = job("heavy", 1.0, [0.01, 0.008, 0.004], iterations=3000)
            made.spawn(made.run_job(light, 2.0))
            await settle(made, 100.0)
            made.spawn(made.run_job(heavy, 1.0))
            await settle(made, 60.0)
            shared = {a for a, _ in heavy.places.values()} & {a for a, _ in light.places.values()}
            where = min(shared or {a for a, _ in heavy.places.values()})
            made.congestion[where] = 6.0
            await settle(made, 300.0)
            assert "interfered" in made.facts("heavy")
            assert "interfered" not in made.facts("light")
            assert where not in {a for a, _ in heavy.places.values()}
            assert where in {a for a, _ in light.places.values()}

    run_simulated(main())
