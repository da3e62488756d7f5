"""The whole control plane in virtual time: real master, controllers and profiler in real shells
over the in-memory bus and store; aggregators and jobs are models that keep the slot protocol's
promises (loadgen/simulator/control/plane.py)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from slackwater.common.base.codec import decode
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.faults import Faults
from slackwater.common.shell.client import Client
from slackwater.common.shell.world import World
from slackwater.common.store.memory import StoreFaults
from slackwater.loadgen.simulator.control import plane as models
from slackwater.loadgen.simulator.control.plane import MIB, SHARE, AggregatorModel, JobModel
from slackwater.schemas.base import AggregatorId, JobId, Ok
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_requests import FinishJob, JobRegistered, RegisterJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import MigrationEvent
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.shell import definition as controller_definition
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.shell import definition as master_definition
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.profiler.shell import definition as profiler_definition

__all__ = ["MIB", "SHARE"]


def slots_s(model: JobModel, aggregator: AggregatorId) -> float:
    here = [b for b, (place, _) in model.places.items() if place == aggregator]
    return sum(model.costs_s[bucket] for bucket in here) / SHARE


class Plane(models.Plane):
    """Jobs that were started by hand, which slow each other, and the facts that were told."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.watcher: World = self.sim.client("watcher")
        self.events: list[tuple[float, str, Any]] = []

    async def kill(self, name: str) -> None:
        if name in self.aggregators:
            self.aggregators[name].running = False
        await super().kill(name)

    async def stop(self) -> None:
        await self.end_services()
        await self.end_tasks()
        self.raise_failures()

    # Jobs ---------------------------------------------------------------------------------------

    def penalty(self, model: JobModel) -> float:
        """How contention stretches an iteration: tasks collide as an aggregator fills up."""
        worst = 0.0
        for aggregator in {place for place, _ in model.places.values()}:
            own = slots_s(model, aggregator) / model.compute_s
            rest = sum(
                slots_s(other, aggregator) / other.compute_s
                for other in self.models.values()
                if other is not model and not other.result
            )
            if rest > 0.0:
                worst = max(worst, max(0.0, own + rest - 0.75))
        return worst

    async def run_job(self, model: JobModel, at_s: float) -> None:
        spec = model.spec
        await asyncio.sleep(at_s)
        self.models[JobId(spec.id)] = model
        outside = self.sim.client(f"agent-{spec.id}")
        client = Client(outside.bus, outside.clock, budget_s=120.0, rng=outside.rng)
        for rank in range(spec.workers):
            register = RegisterJob(job=spec.id, rank=rank, tensors=model.tensors, spec=spec)
            registered = await client.master("register", register, JobRegistered)
        await self.locate(client, registered.cluster, model)
        first, durations_s = 1, []
        told_s = self.now_s()
        while model.iteration < spec.iterations:
            begun_s = self.now_s()
            model.iteration += 1
            await asyncio.sleep(model.compute_s * (1.0 + self.penalty(model)))
            for bucket in range(len(model.costs_s)):
                await self.push(client, registered.cluster, model, bucket)
            durations_s.append(self.now_s() - begun_s)
            if self.now_s() - told_s >= 1.0:
                told_s = self.now_s()
                for rank in range(spec.workers):
                    self.tell(model, rank, first, durations_s)
                first, durations_s = model.iteration + 1, []
        for rank in range(spec.workers):
            await client.master("finish", FinishJob(job=spec.id, rank=rank), Ok)
        model.result = "done"

    # Observations ---------------------------------------------------------------------------------

    async def watch(self) -> None:
        async def take(delivery: Any) -> None:
            kind = JobEvent | MigrationEvent | AllocationEvent
            try:
                message = decode(delivery.payload, kind)
            except Rejected:
                return  # A fact of another type.
            self.events.append((self.now_s(), delivery.subject, message))

        await self.watcher.bus.subscribe("sw.v1.evt.>", take)

    def facts(self, job: str) -> list[str]:
        return [
            message.fact
            for _, _, message in self.events
            if isinstance(message, JobEvent) and message.job == job
        ]


P = TypeVar("P", bound=Plane)


@asynccontextmanager
async def plane(
    seed: int,
    aggregators: int,
    *,
    clusters: int = 1,
    faults: Faults | None = None,
    store: StoreFaults | None = None,
    aggregators_max: int = 16,
    policy: str = "cyclic",
    kind: type[P] = Plane,  # type: ignore[assignment]  # mypy knows no defaults of variables
    **controller: Any,
) -> AsyncIterator[P]:
    made = kind(seed, faults, store)
    master = MasterConfig(aggregators_max=aggregators_max)
    made.definitions["master"] = partial(master_definition, master)
    for number in range(clusters):
        config = ControllerConfig(id=f"c{number}", policy=policy, **controller)
        made.definitions[f"c{number}"] = partial(controller_definition, config)
    profiler = ProfilerConfig(profile_iterations=5, window_iterations=20)
    made.definitions["profiler"] = partial(profiler_definition, profiler)
    for number in range(aggregators):
        made.add(AggregatorModel(f"a{number}", made))
    await made.watch()
    for name in made.definitions:
        made.start(name)
    made.spawn(made.watch_indexes())
    try:
        yield made
        made.raise_failures()
    finally:
        await made.stop()


def check_settled(made: Plane) -> None:
    held: dict[tuple[JobId, int], list[tuple[AggregatorId, int]]] = {}
    for model in made.aggregators.values():
        for key, region in model.regions.items():
            held.setdefault(key, []).append((model.id, region.location_epoch))
    made.check_settled(held)


def job(
    id: str, compute_s: float, costs_s: list[float], iterations: int = 400, servers: int = 2
) -> JobModel:
    spec = JobSpec(
        id=id, model=id[0], workers=2, servers=servers, iterations=iterations,
        fractional_share=True,
    )  # fmt: skip
    return JobModel(spec, compute_s, tuple(costs_s))


async def settle(made: Plane, seconds: float = 40.0) -> None:
    await asyncio.sleep(seconds)
    made.raise_failures()


def finished(made: Plane) -> bool:
    return all(model.result for model in made.models.values())


async def all_done(made: Plane, jobs: int, limit_s: float) -> None:
    until_s = made.now_s() + limit_s
    while len(made.models) < jobs or not finished(made):
        assert made.now_s() < until_s, {j: (m.iteration, m.result) for j, m in made.models.items()}
        made.raise_failures()
        await asyncio.sleep(1.0)
