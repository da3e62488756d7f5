"""An asynchronous worker over a network rings as soon as its word is on its way, and once more."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.agent.test_agent_snapshot import ELEMENTS, LAYOUT, PLAN, Remote, region

from slackwater.agent.effects import Ring
from slackwater.agent.snapshot import Snapshots, StagedSnapshot
from slackwater.agent.transfers import Transfers
from slackwater.common.base.errors import Unavailable
from slackwater.common.domains.slots.layout import Geometry
from slackwater.common.domains.slots.rules import Hyper
from slackwater.schemas.base import AggregatorId

HERE = AggregatorId("a1")


class Link:
    """Writes are answered when the test says so; what happens is noted in its order."""

    def __init__(self) -> None:
        self.region = region()
        self.happened: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.lost = False

    async def read(self, remote: Remote, offset: int, local: memoryview) -> None:
        local[:] = remote.view[offset : offset + len(local)]

    async def write(self, local: memoryview, remote: Remote, offset: int) -> None:
        words = offset == Geometry.of(PLAN, LAYOUT).pushed_offset(0)
        self.happened.append("word" if words else "bytes")
        if words:
            self.answers.clear()
        await self.answers.wait()
        remote.view[offset : offset + len(local)] = local
        if words:
            self.happened.append("word answered")

    def send(self, frame: bytes) -> None:
        if self.lost:
            raise Unavailable("it is lost")
        self.happened.append("ring")


class Pushes:
    """Pushes of iteration 1, over a link."""

    def __init__(self, link: Link, slots: StagedSnapshot) -> None:
        channel: Any = link
        core: Any = None
        self.bucket: Any = SimpleNamespace(was_refused=False, hyper=Hyper.of(PLAN.update))
        self.dropped: list[Exception] = []
        self._slots = slots
        self._transfers = Transfers(core, {HERE: channel}, {}, lambda *given: None, self._drop)

    async def _drop(self, aggregator: AggregatorId, channel: Any, error: Exception) -> None:
        self.dropped.append(error)

    async def begin(self) -> "asyncio.Task[None]":
        push = self._transfers.push(Ring(HERE, 3, 0, 1), self.bucket, self._slots, None)
        task = asyncio.create_task(push)
        for _ in range(10):
            await asyncio.sleep(0)
        return task


async def pushes(link: Link) -> Pushes:
    channel: Any = link
    remote: Any = Remote(link.region)
    slots = await StagedSnapshot.attach(
        channel, remote, Geometry.of(PLAN, LAYOUT), 0, Snapshots(ELEMENTS, "float32")
    )
    link.happened.clear()
    assert isinstance(slots, StagedSnapshot)
    return Pushes(link, slots)


@pytest.mark.asyncio
async def test_the_doorbell_follows_the_word_at_once_and_comes_again_after_its_answer() -> None:
    link = Link()
    made = await pushes(link)
    push = await made.begin()
    assert link.happened[-2:] == ["word", "ring"], "nobody waits for the answer"
    link.answers.set()
    await push
    assert link.happened[-2:] == ["word answered", "ring"]
    assert link.region.pushed(0) == 1
    assert not made.dropped


@pytest.mark.asyncio
async def test_a_channel_that_is_lost_at_the_doorbell_is_dropped_once() -> None:
    link = Link()
    link.lost = True
    made = await pushes(link)
    push = await made.begin()
    link.answers.set()
    await push
    assert [type(error) for error in made.dropped] == [Unavailable]


@pytest.mark.asyncio
async def test_a_push_that_is_refused_before_its_word_is_answered_is_written_again() -> None:
    """Red before: the answer made the worker forget the refusal. The next push of the iteration was
    taken for done, and all workers waited until their deadlines."""
    link = Link()
    made = await pushes(link)
    first = await made.begin()
    made.bucket.was_refused = True  # By an aggregator that has seen the word: another rank rang.
    link.answers.set()
    await first
    link.region.set_pushed(0, 0)
    link.happened.clear()
    second = await made.begin()
    link.answers.set()
    await second
    assert link.happened[-2:] == ["word answered", "ring"]
    assert "bytes" in link.happened
    assert link.region.pushed(0) == 1
    assert not made.bucket.was_refused
    assert not made.dropped
