"""An Agent's report of its links: bytes, and the time in which anything was under way."""

import pytest

from slackwater.agent.link_times import Link, LinkDirection, Links
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


def test_a_transfer_that_failed_took_time_and_brought_nothing() -> None:
    now = Now()
    link = Link(now)

    def fail() -> None:
        with link.pulling(1000):
            now.s = 1.5
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()
    assert link.pulled.take() == (0, 1.5)


def test_only_links_on_which_something_went_are_said_by_name_of_the_aggregator() -> None:
    links = Links()
    links.to(AggregatorId("a2"))
    with links.to(AggregatorId("a1")).pushing(8), links.to(AggregatorId("a1")).pulling(4):
        pass
    (said,) = links.take()
    assert (said.aggregator, said.pushed_bytes, said.pulled_bytes) == ("a1", 8, 4)
    assert said.pushing_s > 0.0
    assert links.take() == ()
