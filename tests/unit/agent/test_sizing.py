"""Rank 0's decision how many workers count, where some may not leave yet."""

import numpy as np

from slackwater.agent.sizing import Sizing
from slackwater.common.domains.slots.sizes import SIZES_WORDS, Sizes
from slackwater.schemas.base import WORKERS_MAX


def found(workers: int, least: int) -> Sizing:
    """A process of rank 0 that found so many in a region."""
    sizing = Sizing(workers, least)
    sizing.found(Sizes(np.zeros(SIZES_WORDS, np.uint64), workers), 5, 5, bare=False)
    sizing.opened = True
    return sizing


def test_nobody_leaves_while_all_are_kept() -> None:
    sizing = found(4, WORKERS_MAX)
    sizing.wanted = 2
    assert sizing.target == 4, "all of the present ones, and not more"
    assert not sizing.decide(7)
    sizing.least = 3
    assert sizing.decide(7)
    assert sizing.newest.workers == 3, "one has still something"
    sizing.least = 1
    assert sizing.decide(8)
    assert sizing.newest.workers == 2


def test_whoever_joins_is_not_held_up() -> None:
    sizing = found(2, WORKERS_MAX)
    sizing.wanted = 4
    assert sizing.decide(7)
    assert sizing.newest.workers == 4


def test_other_jobs_keep_nobody() -> None:
    sizing = found(4, 0)
    sizing.wanted = 1
    assert sizing.decide(7)
    assert sizing.newest.workers == 1
