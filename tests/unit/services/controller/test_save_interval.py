"""The interval of saves follows from what is seen, step by step."""

from itertools import pairwise

import pytest

from slackwater.common.domains.models.rework import SLOWEST, best_interval
from slackwater.services.controller.save_interval import MOST_S, SaveInterval

DAY_S = 86_400.0
LEAST_S = 10.0


class Job:
    """Training that contracts by c in each iteration of a tenth of a second, saved in time."""

    def __init__(self, c: float, mtbf_s: float = DAY_S, aggregators: int = 4) -> None:
        self.interval, self.c = SaveInterval(), c
        self.mtbf_s, self.aggregators = mtbf_s, aggregators
        self.now_s, self.iteration = 100.0, 50

    def saved(self, took_s: float = 0.5, *, known: bool = True) -> bool:
        every_s = self.interval.every_s or LEAST_S
        self.now_s += every_s
        before, self.iteration = self.iteration, self.iteration + round(every_s / 0.1)
        went = self.iteration - before
        moved = 10.0 * (self.c**before - self.c**self.iteration) if self.c < 1.0 else went**0.5
        return self.interval.saved(
            self.iteration, self.now_s, took_s, moved if known else None, self.aggregators,
            self.mtbf_s, LEAST_S,
        )  # fmt: skip


@pytest.mark.parametrize("c", [0.999, 0.99999])
def test_it_becomes_the_one_that_costs_least(c: float) -> None:
    job = Job(c)
    told = [job.saved() for _ in range(12)]
    interval = job.interval
    assert interval.contraction == pytest.approx(c, abs=0.02 * (1 - c))
    rate = interval.failures_per_s(job.now_s, 4, DAY_S)
    best = best_interval(c, 0.1, 0.5, rate, lost=0.25)
    assert interval.every_s == pytest.approx(best.period_s, rel=0.05)
    assert told[:4] == [False, False, False, True], "three moves must be known"
    assert sum(told) <= 5, "on the way to twice, four times ... and not any more"


def test_training_that_only_wanders_is_saved_as_if_all_had_to_be_done_again() -> None:
    job = Job(1.0)
    for _ in range(40):
        job.saved()
    assert job.interval.contraction is not None
    assert job.interval.contraction > 0.9999
    rate = job.interval.failures_per_s(job.now_s, 4, DAY_S)
    youngs = best_interval(SLOWEST, 0.1, 0.5, rate, lost=0.25)
    assert job.interval.every_s == pytest.approx(youngs.period_s, rel=0.1)


def test_it_goes_no_further_than_twice_or_half_at_once_nor_beyond_its_bounds() -> None:
    job = Job(0.999999, mtbf_s=1e12)
    intervals = []
    for _ in range(30):
        job.saved(took_s=5.0)
        intervals.append(job.interval.every_s or LEAST_S)
    assert all(b <= 2.0 * a for a, b in pairwise(intervals))
    assert intervals[-1] == MOST_S
    job.interval.losses += 1_000_000
    job.mtbf_s = 1.0
    job.saved(took_s=1e-3)
    assert job.interval.every_s == MOST_S / 2
    for _ in range(20):
        job.saved(took_s=1e-3)
    assert job.interval.every_s == LEAST_S


def test_losses_make_it_shorter() -> None:
    calm, troubled = Job(0.9999), Job(0.9999)
    troubled.interval.losses = 20
    for _ in range(12):
        calm.saved()
        troubled.saved()
    assert troubled.interval.every_s is not None
    assert calm.interval.every_s is not None
    assert troubled.interval.every_s < 0.5 * calm.interval.every_s


def test_where_nothing_tells_how_far_it_went_all_counts_as_to_be_trained_again() -> None:
    """Aggregators of a release before do not tell, nor do those without room to remember."""
    job = Job(0.999)
    for _ in range(12):
        job.saved(known=False)
    assert job.interval.contraction is None
    rate = job.interval.failures_per_s(job.now_s, 4, DAY_S)
    youngs = best_interval(SLOWEST, 0.1, 0.5, rate, lost=0.25)
    assert job.interval.every_s == pytest.approx(youngs.period_s, rel=0.05)
    assert "it is not known by what" in job.interval.described


def test_an_iteration_that_did_not_go_on_teaches_nothing() -> None:
    job = Job(0.999)
    for _ in range(6):
        job.saved()
    every_s = job.interval.every_s
    job.interval.saved(job.iteration, job.now_s + 5.0, 0.5, 1.0, 4, DAY_S, LEAST_S)
    assert job.interval.every_s == every_s
