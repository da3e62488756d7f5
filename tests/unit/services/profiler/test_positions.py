"""When a bucket is needed: which part of an iteration passes between its push and its next pull."""

import pytest

from slackwater.agent.control import GAPS_UNTIL, Progress
from slackwater.services.profiler.windows import Iterations


def test_the_rank_that_has_least_time_says_when_a_bucket_is_needed() -> None:
    iterations = Iterations(warm_up=1)
    for rank, gaps_s in ((0, (0.05, 1.8)), (1, (0.1, 1.6))):
        iterations.add(rank, 1, [9.0, 2.0], 0, 2, gaps_s=(0.0, 0.0))
        iterations.add(rank, 3, [2.0, 2.0], 0, 2, gaps_s=gaps_s)
    assert iterations.positions() == pytest.approx((0.025, 0.8)), "the warm-up's gaps do not count"
    iterations.add(0, 5, [2.0], 0, 2)
    assert iterations.positions() == pytest.approx((0.025, 0.8)), "nothing said changes nothing"
    iterations.add(0, 6, [2.0], 1, 2, gaps_s=(0.5, 0.5))
    assert iterations.positions() == (), "of another placement, and rank 1 has not spoken"


def test_an_agent_tells_the_shortest_gap_of_every_bucket_since_the_last_report() -> None:
    progress = Progress()
    progress.needed(0, 0.3)
    assert progress.take_gaps(2) == (), "bucket 1 was not waited for yet"
    progress.needed(1, 0.9)
    progress.needed(0, 0.2)
    progress.needed(0, 0.4)
    assert progress.take_gaps(2) == (0.2, 0.9)
    assert progress.take_gaps(2) == ()
    for bucket in (0, 1):
        progress.needed(bucket, 0.1)
    progress.first_iteration = GAPS_UNTIL + 1
    assert progress.take_gaps(2) == (), "nobody asks any more"
