"""The state machine of one bucket whose updates are not synchronous."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.placement import BucketLayout, Endpoint, JobPlan
from slackwater.schemas.tensors import UpdateRule
from slackwater.services.aggregator.bucket import Bucket, Move, Verdict

WORKERS = 3
LAYOUT = BucketLayout(index=4, first=0, count=1, elements=10)
MOVE = Move("m1", 8, Endpoint(aggregator=AggregatorId("a2"), addresses=()))


def plan(staleness: int | None) -> JobPlan:
    return JobPlan(
        job=JobId("j1"),
        workers=WORKERS,
        gradient_dtype="float32",
        update=UpdateRule(),
        consistency="asynchronous" if staleness is None else "stale-synchronous",
        staleness=staleness or 0,
        layout_epoch=0,
        token="",
    )


def bucket(staleness: int | None = None, **options: Any) -> Bucket:
    return Bucket(plan(staleness), LAYOUT, 1, 4096, 7, **options)


def ready(applied: list[int], staleness: int | None = None) -> Bucket:
    it = bucket(staleness, version=sum(applied), applied=applied, initialized=True)
    for rank in range(WORKERS):
        it.attach(rank, rank + 10)
    return it


def test_a_push_is_applied_without_the_others() -> None:
    it = ready([3, 3, 3])
    assert it.on_doorbell(1, 4, [3, 4, 3]) is Verdict.FOLD
    assert it.fold_begun([3, 4, 3]) == 1
    assert it.on_doorbell(2, 4, [3, 4, 4]) is Verdict.WAIT
    assert it.fold_ended(10, [3, 4, 3]) == (1,), "only who pushed may go on"
    assert it.answered(1) == 4
    assert it.complete([3, 4, 4])
    assert it.fold_begun([3, 4, 4]) == 2


def test_a_rank_that_joins_begins_with_the_newest_parameters_and_its_own_iteration() -> None:
    """Until rank 0 lets it count, its pushes are unfounded; others go on meanwhile."""
    it = bucket(version=9, applied=[5, 4, 0], initialized=True)
    it.active = 2
    for rank in range(WORKERS):
        it.attach(rank, rank + 10)
    assert it.on_doorbell(2, 1, [5, 4, 1]) is Verdict.UNFOUNDED
    assert it.resized(3) == (2,), "it hears which version is there"
    assert it.answered(2) == 0
    assert it.on_doorbell(2, 1, [5, 4, 1]) is Verdict.FOLD
    assert it.fold_begun([5, 4, 1]) == 2
    assert it.fold_ended(10, [5, 4, 1]) == (2,)


def test_what_a_rank_pushed_before_it_left_is_applied_once() -> None:
    it = ready([5, 4, 3])
    it.resized(2)
    assert it.complete([5, 4, 4])
    assert it.fold_begun([5, 4, 4]) == 2
    it.fold_ended(13, [5, 4, 4])
    assert not it.complete([5, 4, 4])
    assert it.on_doorbell(0, 6, [6, 4, 4]) is Verdict.FOLD, "nobody waits for it"


def test_who_is_too_far_ahead_is_answered_when_the_slowest_has_pushed() -> None:
    it = ready([5, 4, 4], staleness=1)
    assert it.on_doorbell(0, 6, [6, 4, 4]) is Verdict.FOLD
    it.fold_begun([6, 4, 4])
    assert it.fold_ended(14, [6, 4, 4]) == ()
    assert it.on_doorbell(0, 6, [6, 4, 4]) is Verdict.WAIT
    assert it.on_doorbell(0, 7, [7, 4, 4]) is Verdict.AHEAD
    for rank, applied in ((1, [6, 5, 4]), (2, [6, 5, 5])):
        it.fold_begun([6, 5, 5])
        going_on = it.fold_ended(14 + rank, applied)
    assert going_on == (0, 2)
    assert it.on_doorbell(0, 6, [6, 5, 5]) is Verdict.DONE


def test_a_refused_push_holds_nobody_up() -> None:
    it = ready([3, 3, 3])
    it.fold_begun([4, 3, 4])
    assert it.fold_ended(9, [3, 3, 3]) == ()
    assert it.fold_begun([3, 3, 4]) == 2


def test_it_leaves_at_once_with_what_is_pending() -> None:
    it = ready([3, 3, 3])
    it.move = MOVE
    assert it.may_freeze([4, 3, 4]), "pushes that wait go along"
    it.fold_begun([4, 3, 4])
    assert not it.may_freeze([4, 3, 4])
    it.fold_ended(10, [4, 3, 3])
    it.freeze()
    assert it.on_doorbell(2, 4, [4, 3, 4]) is Verdict.AWAY
    assert not it.complete([4, 3, 4])
    there = bucket(version=10, applied=[4, 3, 3], initialized=True, arrived=True)
    assert there.complete([4, 3, 4])
    assert there.fold_begun([4, 3, 4]) == 2


def test_the_richest_copy_seeds_and_no_push_counts_twice() -> None:
    """The region was lost. Rank 1 read last: its copy has an update of rank 0 of which rank 0 was
    not told yet, and lacks one of rank 2, which rank 2 knows to be in: it is lost with the region,
    as the optimiser's state is; pushing it again is not asked for."""
    bare = bucket()
    for rank in range(WORKERS):
        bare.attach(rank, rank + 10)
    assert bare.offered(0, 4, (4, 3, 3)) == ()
    assert bare.offered(1, 5, (5, 5, 3)) == ()
    assert bare.offered(2, 4, (2, 4, 4)) == (1,)
    bare.detach(2, 12)  # Its last acknowledged version stays known.
    assert not bare.seeded(1, 5), "a seed is known by the updates in it"
    assert bare.seeded(1, 13)
    assert (bare.version, bare.applied) == (13, [5, 5, 4])
    assert bare.on_doorbell(0, 5, [5, 5, 4]) is Verdict.DONE


def test_a_fresh_job_is_seeded_by_rank_0() -> None:
    bare = bucket(staleness=2)
    assert [bare.offered(rank, 0) for rank in (2, 1, 0)] == [(), (), (0,)]
    assert bare.seeded(0, 0)
    assert (bare.version, bare.applied) == (0, [0, 0, 0])


class Alone(RuleBasedStateMachine):
    """Workers that push when they may, repeat and lose doorbells; an aggregator that applies what
    it is told to, is killed, and sends the bucket away and back."""

    staleness: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.bucket = ready([0] * WORKERS, self.staleness)
        self.pushed = [0] * WORKERS
        self.applied = [0] * WORKERS
        """The region's words."""
        self.told = [0] * WORKERS
        self.alone: int | None = None

    @rule(rank=st.integers(0, WORKERS - 1))
    def push(self, rank: int) -> None:
        if self.pushed[rank] == self.told[rank]:
            self.pushed[rank] += 1

    @rule(rank=st.integers(0, WORKERS - 1), behind=st.integers(-1, 2))
    def ring(self, rank: int, behind: int) -> None:
        iteration = self.pushed[rank] - behind
        verdict = self.bucket.on_doorbell(rank, iteration, self.pushed)
        if verdict is Verdict.DONE:
            assert iteration <= self.applied[rank]
            self.told[rank] = max(self.told[rank], iteration)
        if verdict is Verdict.AHEAD:
            assert behind < 0, "no worker that waits for its answers is refused"
        if verdict is Verdict.FOLD:
            self._begin()

    def _begin(self) -> None:
        assert self.alone is None
        self.alone = self.bucket.fold_begun(self.pushed)
        assert self.alone is not None
        assert self.pushed[self.alone] == self.applied[self.alone] + 1

    @precondition(lambda self: self.alone is not None)
    @rule(clean=st.booleans())
    def fold(self, clean: bool) -> None:
        alone, self.alone = self.alone, None
        assert alone is not None
        if clean:
            self.applied[alone] += 1
        else:
            self.pushed[alone] = self.applied[alone]
        for rank in self.bucket.fold_ended(sum(self.applied), self.applied):
            self.told[rank] = self.bucket.answered(rank)
        if self.bucket.complete(self.pushed):
            self._begin()

    @rule()
    def restart(self) -> None:
        """Killed: a fold that was under way applied nothing. Whoever comes back is told."""
        self.alone = None
        self.bucket = ready(list(self.applied), self.staleness)
        self.told = list(self.bucket.all_answered)
        if self.bucket.complete(self.pushed):
            self._begin()

    @precondition(lambda self: self.alone is None)
    @rule()
    def leave_and_stay(self) -> None:
        self.bucket.move = MOVE
        assert self.bucket.may_freeze(self.pushed)
        self.bucket.freeze()
        assert not self.bucket.complete(self.pushed)
        self.bucket.thaw(9)
        self.bucket.location_epoch = 7
        if self.bucket.complete(self.pushed):
            self._begin()

    @invariant()
    def nobody_goes_on_too_early(self) -> None:
        self.bucket.check_invariants()
        for rank in range(WORKERS):
            assert self.told[rank] <= self.applied[rank] <= self.pushed[rank]
            if self.staleness is not None:
                assert self.told[rank] <= min(self.applied) + self.staleness

    @invariant()
    def nothing_that_can_be_applied_lies_about(self) -> None:
        """Unless its doorbell is still to come."""
        if self.alone is None and self.bucket.complete(self.pushed):
            rung = [
                self.bucket.on_doorbell(rank, word, self.pushed)
                for rank, word in enumerate(self.pushed)
            ]
            assert Verdict.FOLD in rung


class StaleByOne(Alone):
    staleness = 1


class StaleByNone(Alone):
    staleness = 0


TestAlone = Alone.TestCase
TestStaleByOne = StaleByOne.TestCase
TestStaleByNone = StaleByNone.TestCase
for case in (TestAlone, TestStaleByOne, TestStaleByNone):
    case.settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.parametrize("staleness", [None, 0, 3])
def test_a_word_that_was_never_pushed_is_not_applied(staleness: int | None) -> None:
    it = ready([2, 2, 2], staleness)
    assert it.on_doorbell(0, 3, [2, 2, 2]) is Verdict.UNFOUNDED
    assert it.on_doorbell(0, 4, [4, 2, 2]) is Verdict.AHEAD
    assert not it.complete([4, 2, 2])
