"""An Agent's report of its links: bytes, and the time in which anything was under way."""

from typing import cast

import pytest

from slackwater.agent.link_times import Link, LinkDirection, Links
from slackwater.agent.permits import MovePermit
from slackwater.schemas.base import AggregatorId


class Now:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def test_transfers_that_overlap_count_once_and_pauses_not_at_all() -> None:
    now = Now()
    way = LinkDirection(now)
    way.begin()
    now.s = 1.0
    way.begin()
    now.s = 3.0
    way.end(100)
    now.s = 4.0
    way.end(50)
    now.s = 9.0
    assert way.take() == (150, 4.0)
    assert way.take() == (0, 0.0)


def test_a_transfer_that_a_report_cuts_counts_in_both() -> None:
    """Its time so far in the first, the rest and its bytes in the second."""
    now = Now()
    way = LinkDirection(now)
    way.begin()
    now.s = 2.0
    assert way.take() == (0, 2.0)
    now.s = 5.0
    way.end(10)
    assert way.take() == (10, 3.0)


async def test_a_transfer_that_failed_took_time_and_brought_nothing() -> None:
    now = Now()
    link = Link(now)

    async def fail() -> None:
        async with link.pulling(1000):
            now.s = 1.5
            raise ConnectionError

    with pytest.raises(ConnectionError):
        await fail()
    assert link.pulled.take() == (0, 1.5)


async def test_only_links_on_which_something_went_are_said_by_name_of_the_aggregator() -> None:
    links = Links()
    links.to(AggregatorId("a2"))
    link = links.to(AggregatorId("a1"))
    async with link.moving(), link.pushing(8), link.pulling(4):
        pass
    (said,) = links.take()
    assert (said.aggregator, said.pushed_bytes, said.pulled_bytes) == ("a1", 8, 4)
    assert said.pushing_s > 0.0
    assert links.take() == ()


class Permit:
    """A permit to move bytes, which is had after so many seconds."""

    def __init__(self, now: Now) -> None:
        self.now, self.transfers, self.taken = now, 0, 0

    async def begin(self) -> None:
        if not self.transfers:
            self.now.s += 2.0
            self.taken += 1
        self.transfers += 1

    def end(self) -> None:
        self.transfers -= 1


async def test_waiting_for_a_permit_is_not_being_on_the_way() -> None:
    now = Now()
    permit = Permit(now)
    link = Link(now, receives=cast(MovePermit, permit))
    async with link.pulling(8):
        now.s += 1.0
    assert link.pulled.take() == (8, 1.0)
    assert permit.transfers == 0


async def test_each_way_has_a_permit_of_its_own() -> None:
    now = Now()
    sends, receives = Permit(now), Permit(now)
    link = Link(now, sends=cast(MovePermit, sends), receives=cast(MovePermit, receives))
    async with link.pushing(8):
        assert (sends.transfers, receives.transfers) == (1, 0)
        async with link.pulling(8):
            assert (sends.transfers, receives.transfers) == (1, 1)


async def test_a_read_that_is_looked_at_again_keeps_its_permit_meanwhile() -> None:
    """It waited for its turn between two looks at the version: others wrote then, and it was read
    again and again."""
    now = Now()
    permit = Permit(now)
    link = Link(now, receives=cast(MovePermit, permit))
    async with link.moving():
        for _ in range(3):
            async with link.pulling(8):
                assert permit.transfers == 2
    assert (permit.taken, permit.transfers) == (1, 0)
