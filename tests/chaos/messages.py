"""Requests and facts of every kind, made and changed by their structure, at a cluster that runs.

No service may end by one, and each request is answered, if only by a refusal. The sender has the
credentials of an operator; what services say of themselves comes from their own users of the bus.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.fuzz.messages import message

from slackwater.common.base import codec
from slackwater.common.base.errors import Rejected, Retryable
from slackwater.common.bus.memory import permitted
from slackwater.common.bus.nats import NatsBus
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell import ServiceDefinition
from slackwater.common.shell.client import connect
from slackwater.common.shell.requester import decode_any
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.schemas import subjects
from slackwater.schemas.base import Message, Refused
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.permissions import Service, of_service
from slackwater.schemas.service import GetHealth, Health
from slackwater.services.aggregator.config import AggregatorConfig
from slackwater.services.aggregator.shell import definition as aggregator
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.shell import definition as controller
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.shell import definition as master
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.profiler.shell import definition as profiler
from slackwater.services.slabd.config import SlabdConfig
from slackwater.services.slabd.shell import Slabd
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.shell import definition as worker

IN_FLIGHT: Final = 64
ANSWER_S: Final = 60.0
"""Longer than any service keeps a request without an answer."""
FACTS: Final = 0.3
"""The part of the messages that nobody asks for."""
IDS: Final[dict[str, str]] = {
    "master": subjects.MASTER, "controller": "c1", "worker": "w1", "profiler": "p1",
    "aggregator": "a1", "slabd": "s1",
}  # fmt: skip
SPEAKERS: Final[dict[Service, str]] = {
    "master": "master-m1", "aggregator": "aggregator-a1", "worker": "worker-w1",
    "slabd": "slabd-s1", "controller": "controller-c1", "profiler": "profiler-p1",
}  # fmt: skip
"""Service -> the user of the bus that says its telemetry."""


@dataclass
class Told:
    """The outcomes of a run. `wrong`: what must not have happened."""

    answered: Counter[str] = field(default_factory=Counter)
    facts: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def sent(self) -> int:
        return sum(self.answered.values()) + self.facts


def definitions(folder: Path) -> list[ServiceDefinition]:
    """Make one of each service, for its tables: none of them runs."""

    async def main() -> list[ServiceDefinition]:
        world = SimWorld(1).client("tables")
        state = str(folder / "tables")
        return [
            master(MasterConfig(), world),
            controller(ControllerConfig(id="c1"), world),
            worker(WorkerConfig(id="w1", state_dir=state, gpus=0), world),
            profiler(ProfilerConfig(id="p1"), world),
            aggregator(AggregatorConfig(id="a1", state_dir=state), world),
            Slabd(SlabdConfig(id="s1", state_dir=state), world).definition(),
        ]

    return run_simulated(main())


def plain(made: Any) -> Any:
    """Return the message without the numbers of its sender's lives: forged ones would depose a
    service, which is what whoever has its credentials may do."""
    lives = {"incarnation": 0} if "incarnation" in made.__struct_fields__ else {}
    return msgspec.structs.replace(made, sender="", epoch=0, **lives)


async def storm(made: list[ServiceDefinition], count: int, seed: int) -> Told:
    """Send so many messages to a cluster of its own."""
    told, rng = Told(), random.Random(seed)
    endpoints = [
        (each.service, verb, kind)
        for each in made
        for verb, kind in each.endpoints.items()
    ]  # fmt: skip
    facts = [(pattern, kind) for each in made for pattern, kind in each.subscriptions.items()]
    options = ClusterOptions(
        controllers=1, aggregators=2, lenders=1, cpu_share=0.2, log_dir=Path.cwd() / "logs"
    )
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(EmbeddedCluster(options))
        client = await stack.enter_async_context(connect(cluster.url, "stranger"))
        speakers = {}
        for service, user in SPEAKERS.items():
            bus = await NatsBus.connect(cluster.supervisor.url_of(user), f"posing-{service}")
            stack.push_async_callback(bus.close)
            speakers[service] = bus
        room = asyncio.Semaphore(IN_FLIGHT)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                await room.acquire()
                if rng.random() < FACTS:
                    pattern, kind = rng.choice(facts)
                    work = _say(told, client.bus, speakers, pattern, kind, rng)
                else:
                    work = _ask(told, client.bus, rng.choice(endpoints), rng)
                tasks.create_task(_then(work, room))
        await _after(told, client, cluster)
    return told


async def _then(work: Any, room: asyncio.Semaphore) -> None:
    try:
        await work
    finally:
        room.release()


async def _ask(told: Told, bus: Any, endpoint: tuple[str, str, Any], rng: random.Random) -> None:
    service, verb, kind = endpoint
    try:
        payload = codec.encode(plain(message(kind, rng)))
    except Rejected:
        told.answered["not sent"] += 1  # Too large for any message.
        return
    subject = subjects.command(service, IDS[service], verb)
    try:
        answer = decode_any(await bus.request(subject, payload, timeout_s=ANSWER_S, again=False))
    except Retryable as error:
        told.wrong.append(f"{service}.{verb} was not answered: {error}")
        return
    told.answered["refused" if isinstance(answer, Refused) else "done"] += 1


async def _say(
    told: Told,
    bus: Any,
    speakers: Mapping[Service, NatsBus],
    pattern: str,
    kind: type[Message],
    rng: random.Random,
) -> None:
    """Publish under a subject that fits the pattern, as the user that may."""
    tokens = pattern.split(".")  # sw.v1.tel.KIND.*.WHAT
    id = IDS.get(tokens[3], "j1")
    tokens = [id if token in ("*", ">") else token for token in tokens]
    subject = ".".join(tokens)
    may = [each for each in SPEAKERS if permitted(of_service(each, IDS[each]).publish, subject)]
    try:
        payload = codec.encode(plain(message(kind, rng)))
    except Rejected:
        return
    await (speakers[may[0]] if may else bus).publish(subject, payload)
    told.facts += 1


async def _after(told: Told, client: Any, cluster: EmbeddedCluster) -> None:
    """All services are the same processes still, say that they are well, and take a job."""
    for unit in cluster.supervisor.status():
        if unit.restarts:
            log = (cluster.supervisor.log_dir / f"{unit.name}.log").read_text().splitlines()
            said = [line for line in log if "error" in line.lower()][-2:]
            told.wrong.append(f"{unit.name} ended {unit.restarts} times: {said}")
    for service, id in IDS.items():
        health = await client.ask(subjects.command(service, id, "health"), GetHealth(), Health)
        if health.state != "ok":
            told.wrong.append(f"{service} {id} is {health.state}: {health.reason}")
    await client.submit(JobSpec(id="after-all", workers=1, servers=1))
    record = await client.job("after-all")
    if record.state != "pending":
        told.wrong.append(f"a job is {record.state} after it: {record.reason}")
