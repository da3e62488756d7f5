"""Kept facts as `events` shows them: whose they are, what is left out, what cannot be read."""

import msgspec

from slackwater.cli.events import line, recent_events
from slackwater.client.happened import read, recent
from slackwater.common.base import codec
from slackwater.common.shell.client import Client
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.common.store.history import Keeping, Kept
from slackwater.schemas import subjects
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.placement import MigrationEvent
from slackwater.schemas.telemetry import WindowMeasured


def job_event(job: str, fact: str) -> tuple[str, bytes]:
    event = JobEvent(job=JobId(job), fact=fact, at_s=1.0)
    return subjects.event("job", job, fact), codec.encode(event)


def migration(job: str, fact: str) -> tuple[str, bytes]:
    event = MigrationEvent(
        migration=f"m-{job}", job=JobId(job), fact=fact, cause="reverted", buckets=(0,),  # type: ignore[arg-type]
        sources=(AggregatorId("a1"),), targets=(AggregatorId("a4"),), at_s=1.0,
    )  # fmt: skip
    return subjects.event("migration", f"m-{job}", fact), codec.encode(event)


def window(job: str) -> tuple[str, bytes]:
    fact = WindowMeasured(
        job=JobId(job), location_epoch=1, last_iteration=9, iterations=9, iteration_s=0.1
    )
    return subjects.event("job", job, "window"), codec.encode(fact)


async def kept(sim: SimWorld) -> Client:
    world = sim.client("cli")
    await sim.history.keep(Keeping(nbytes=1024**2, seconds=3600.0, per_subject=100))
    for subject, payload in (
        job_event("j1", "pending"), job_event("j2", "pending"), window("j1"),
        migration("j2", "finished"), migration("j1", "finished"), job_event("j1", "completed"),
    ):  # fmt: skip
        await world.bus.publish(subject, payload)
    return Client(world.bus, world.clock, rng=world.rng, history=world.history)


def test_a_jobs_events_are_its_own_with_its_moves_and_without_the_routine() -> None:
    async def program() -> None:
        client = await kept(SimWorld(1))
        moved = "j1 is moved from a1 to a4 while it trains, to leave those whom sharing hurts"
        told = [each.text for each in await recent(client, "j1", 10)]
        assert told == ["j1 is submitted", moved, "j1 completed"]
        assert len(await recent(client, "j1", 10, routine=True)) == 4
        assert len(await recent(client, "", 10)) == 5
        lines = await recent_events(client, "j1", 2)
        assert [each.split(" ", 1)[1] for each in lines] == [moved, "j1 completed"]

    run_simulated(program())


def test_what_cannot_be_read_is_shown_by_its_subject() -> None:
    """A fact of a newer version, or of somebody who plays with the bus."""
    for payload in (b"", b"\xc1", b"{", msgspec.msgpack.encode({"t": "job.juggled"})):
        told = read(Kept("sw.v1.evt.job.j1.juggled", payload, 1, 1.0))
        assert told.fact is None
        assert line(told, 1.0).split(" ", 1)[1].startswith("sw.v1.evt.job.j1.juggled: ")


def test_a_fact_written_as_json_is_told_like_any() -> None:
    payload = msgspec.json.encode(JobEvent(job=JobId("j1"), fact="completed", at_s=1.0))
    assert read(Kept("sw.v1.evt.job.j1.completed", payload, 1, 1.0)).text == "j1 completed"
