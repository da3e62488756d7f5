"""The state machine of one bucket."""

from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from slackwater.common.base.transitions import InvalidTransition
from slackwater.common.domains.slots.frames import HeldStates
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.placement import BucketLayout, Endpoint, JobPlan
from slackwater.schemas.tensors import UpdateRule
from slackwater.services.aggregator.bucket import (
    TRANSITIONS,
    Bucket,
    Move,
    SeededStates,
    Spare,
    Verdict,
)

PLAN = JobPlan(
    job=JobId("j1"),
    workers=3,
    gradient_dtype="float32",
    update=UpdateRule(),
    layout_epoch=0,
    token="",
)
LAYOUT = BucketLayout(index=4, first=0, count=1, elements=10)
MOVE = Move("m1", 8, Endpoint(aggregator=AggregatorId("a2"), addresses=()))


def bucket(**options: Any) -> Bucket:
    return Bucket(PLAN, LAYOUT, 1, 4096, 7, **options)


def stood_in(iteration: int = 40, updates: int = 38) -> Bucket:
    """One that a checkpoint has filled, which all three workers attached."""
    bare = bucket()
    bare.spare = Spare(iteration, updates)
    for rank in range(3):
        bare.attach(rank, rank + 10)
    return bare


def ready(version: int = 5) -> Bucket:
    return bucket(version=version, initialized=True)


def test_the_newest_version_of_the_lowest_rank_seeds_once_all_have_offered() -> None:
    bare = bucket()
    for rank in range(3):
        bare.attach(rank, rank + 10)
    assert bare.offered(0, 3) == ()
    assert bare.offered(2, 9) == ()
    assert bare.offered(1, 9) == (1,)
    assert bare.phase == "seeding"
    assert not bare.seeded(2, 9), "it was not asked"
    assert not bare.seeded(1, 8), "it offered another version"
    assert bare.seeded(1, 9)
    assert (bare.phase, bare.version) == ("ready", 9)
    assert not bare.seeded(1, 9)


@pytest.mark.parametrize("said", [43, 0], ids=["as asked", "by an older release"])
def test_first_values_get_the_version_of_the_other_buckets(said: int) -> None:
    """A machine with all workers and one of two aggregators was lost: ranks that read version 0 of
    some buckets and 43 of others would wait for one another for ever."""
    bare = bucket()
    for rank in range(3):
        bare.attach(rank, rank + 10)
        asked = bare.offered(rank, 0, wanted=43 * (rank == 1))
    assert asked == (0,)
    assert bare.asked(0) == (43, False)
    assert not bare.seeded(0, 42)
    assert bare.seeded(0, said)
    assert (bare.phase, bare.version, bare.first_values) == ("ready", said, True)
    bare.check_invariants()


def test_a_checkpoint_stands_in_where_no_worker_has_parameters() -> None:
    """At the version of the job's other buckets, which one of the workers knows."""
    bare = stood_in()
    assert bare.offered(0, 0, wanted=0) == ()
    assert bare.offered(1, 0, wanted=43) == ()
    assert bare.begin_with_spare() is None, "one has not said what it has"
    assert bare.offered(2, 0, wanted=43) == (0,)
    assert bare.begin_with_spare() == 43
    assert (bare.phase, bare.version) == ("ready", 43)
    bare.check_invariants()
    alone = stood_in()
    for rank in range(3):
        alone.offered(rank, 0)
    assert alone.begin_with_spare() == 40, "all of the job was lost: nobody knows a newer one"


def test_a_checkpoint_of_an_asynchronous_job_stands_in_with_what_it_has_of_each_rank() -> None:
    """Updates whose answer a worker knows are done, whether or not these values have them."""
    plan = msgspec.structs.replace(PLAN, consistency="asynchronous")
    bare = Bucket(plan, LAYOUT, 1, 4096, 7, version=12, applied=(5, 4, 3))
    bare.spare = Spare(12, 12)
    for rank, done in enumerate((0, 6, 0)):
        bare.attach(rank, rank + 10)
        bare.offered(rank, done)
    assert bare.begin_with_spare() == 12, "its own: each counts for itself"
    assert bare.applied == [5, 6, 3]
    bare.check_invariants()


@pytest.mark.parametrize(("worker_has", "begun_at"), [((4, 4, 3), 12), ((5, 4, 3), None)])
def test_the_newer_one_counts_of_a_checkpoint_and_what_a_worker_read_of_an_asynchronous_job(
    worker_has: tuple[int, ...], begun_at: int | None
) -> None:
    plan = msgspec.structs.replace(PLAN, consistency="asynchronous")
    bare = Bucket(plan, LAYOUT, 1, 4096, 7, version=12, applied=(5, 4, 3))
    bare.spare = Spare(12, 12)
    for rank in range(3):
        bare.attach(rank, rank + 10)
        bare.offered(rank, 4, worker_has if rank == 1 else ())
    assert bare.begin_with_spare() == begun_at
    bare.check_invariants()


def test_a_checkpoint_is_left_for_what_a_worker_has() -> None:
    bare = stood_in()
    for rank, version in enumerate((0, 41, 0)):
        bare.offered(rank, version)
    assert bare.begin_with_spare() is None
    assert bare.seeded(1, 41)
    without = stood_in()
    without.spare = None
    for rank in range(3):
        without.offered(rank, 0)
    assert without.begin_with_spare() is None


def test_a_worker_with_the_states_seeds_before_one_of_a_lower_rank() -> None:
    bare = bucket()
    for rank in range(3):
        bare.attach(rank, rank + 10)
    assert bare.offered(0, 9, states="parts") == ()
    assert bare.offered(1, 8, states="whole") == (), "its parameters are older"
    assert bare.offered(2, 9, states="whole") == (2,), "nobody else need be asked"
    assert bare.asked(2) == (9, False)
    assert bare.seeded(2, 9, SeededStates(7, 4, 0))
    assert bare.states_seeded == SeededStates(7, 4, 0, (2,))


def test_copies_of_parts_are_asked_of_all_that_have_some() -> None:
    """The region is filled when the last has written; the oldest copy says how old they are."""
    bare = bucket()
    for rank in range(3):
        bare.attach(rank, rank + 10)
    assert bare.offered(0, 8, states="parts") == ()
    assert bare.offered(1, 9) == ()
    assert bare.offered(2, 9, states="parts") == (1, 0, 2)
    assert [bare.asked(rank) for rank in (0, 1, 2)] == [(9, True), (9, False), (9, True)]
    assert not bare.seeded(0, 8, SeededStates(5, 2, 3)), "for the version that it was asked for"
    assert not bare.seeded(0, 9, SeededStates(6, 2, 3))
    assert not bare.seeded(1, 9)
    assert bare.offered(2, 9, states="parts") == (2,), "it has not heard that it was asked"
    assert bare.offered(1, 9) == (), "it has written"
    assert bare.seeded(2, 9, SeededStates(9, 2, 1))
    assert (bare.phase, bare.version) == ("ready", 9)
    assert bare.states_seeded == SeededStates(9, 4, 3, (0, 2))


def test_copies_of_a_rank_that_does_not_count_any_more_are_not_asked_for() -> None:
    """It may have kept them since it left: the parts are others' now."""
    bare = bucket()
    bare.resized(2)
    for rank in (2, 1):
        assert bare.offered(rank, 9 - rank, states="parts") == ()
    assert bare.offered(0, 9, states="parts") == (0, 1)


def test_all_are_asked_anew_where_one_of_them_leaves() -> None:
    bare = bucket()
    for rank in range(3):
        bare.attach(rank, rank + 10)
        asked = bare.offered(rank, 9, states="parts")
    assert asked == (0, 1, 2)
    assert not bare.seeded(0, 9, SeededStates(9, 2, 1))
    bare.detach(2, 12)
    assert bare.phase == "empty"
    bare.attach(2, 50)
    assert bare.offered(2, 9) == (0, 1)
    assert not bare.seeded(1, 9, SeededStates(9, 1, 4))
    assert bare.seeded(0, 9, SeededStates(9, 2, 1))
    assert bare.states_seeded == SeededStates(9, 3, 4, (0, 1))


def test_a_seeder_that_offers_again_is_asked_again() -> None:
    bare = bucket()
    for rank in range(3):
        bare.attach(rank, rank + 10)
    assert [bare.offered(rank, 2) for rank in (1, 2, 0, 1, 0)] == [(), (), (0,), (), (0,)]


def test_a_bucket_whose_workers_were_sent_on_waits_for_none_of_them() -> None:
    """Killed after it had told some of epoch 8, and found again: rank 0 has pushed, the others push
    only where they were sent to. MIGRATE_INIT of that epoch is repeated: it leaves at once."""
    here = Bucket(PLAN, LAYOUT, 1, 4096, MOVE.location_epoch, version=5, initialized=True)
    here.move = MOVE
    assert here.may_freeze((6, 5, 5))
    here.fold_begun()
    assert not here.may_freeze((6, 6, 6)), "somebody works on it"


def test_a_bucket_that_stays_after_all_is_what_its_region_says() -> None:
    """The aggregator that it was offered to had it for a while."""
    it = ready(5)
    it.move = MOVE
    it.freeze()
    it.found(7, True)
    it.thaw(9)
    assert (it.phase, it.version) == ("ready", 7)
    assert it.on_doorbell(0, 8, (8, 7, 7)) is Verdict.WAIT


def test_at_the_start_rank_0_seeds() -> None:
    bare = bucket()
    assert [bare.offered(rank, 0) for rank in (2, 1, 0)] == [(), (), (0,)]


def test_another_worker_is_asked_when_the_seeder_is_gone() -> None:
    bare = bucket()
    for rank in range(3):
        bare.attach(rank, rank + 10)
        bare.offered(rank, 2)
    bare.detach(0, 99)
    assert bare.phase == "seeding", "that was an older channel of its"
    bare.detach(0, 10)
    assert bare.phase == "empty"
    bare.attach(0, 50)
    assert bare.offered(0, 1) == (1,), "the others' offers still stand"


def test_the_last_push_folds_and_says_so_once() -> None:
    it = ready()
    assert it.on_doorbell(0, 6, [6, 5, 5]) is Verdict.WAIT
    assert it.on_doorbell(0, 6, [6, 5, 5]) is Verdict.WAIT, "a retry is not counted"
    assert it.on_doorbell(2, 6, [6, 5, 6]) is Verdict.WAIT
    assert it.on_doorbell(1, 6, [6, 6, 6]) is Verdict.FOLD
    it.fold_begun()
    assert it.on_doorbell(2, 6, [6, 6, 6]) is Verdict.WAIT
    it.fold_ended(6)
    assert it.on_doorbell(0, 6, [6, 6, 6]) is Verdict.DONE
    assert it.on_doorbell(1, 4, [6, 6, 6]) is Verdict.DONE


def test_doorbells_that_cannot_be_are_told_apart() -> None:
    it = ready()
    assert it.on_doorbell(0, 7, [7, 5, 5]) is Verdict.AHEAD
    assert it.on_doorbell(0, 6, [5, 5, 5]) is Verdict.UNFOUNDED
    assert bucket().on_doorbell(0, 1, [1, 0, 0]) is Verdict.UNFOUNDED


def test_a_refused_fold_waits_for_the_guilty_alone() -> None:
    it = ready()
    it.on_doorbell(0, 6, [6, 6, 6])
    it.fold_begun()
    it.fold_ended(5)
    assert it.on_doorbell(1, 6, [6, 5, 6]) is Verdict.UNFOUNDED
    assert it.on_doorbell(1, 6, [6, 6, 6]) is Verdict.FOLD


def test_it_leaves_after_a_committed_version_or_when_idle() -> None:
    it = ready()
    it.move = MOVE
    assert it.may_freeze([5, 5, 5])
    assert not it.may_freeze([5, 6, 5]), "a push waits for its update"
    it.on_doorbell(0, 6, [6, 6, 6])
    it.fold_begun()
    assert not it.may_freeze([6, 6, 6])
    it.fold_ended(6)
    assert it.may_freeze([6, 6, 6])
    it.freeze()
    assert (it.phase, it.location_epoch, it.initialized) == ("moving", 8, True)
    assert it.on_doorbell(0, 7, [7, 6, 6]) is Verdict.AWAY
    assert not it.complete([7, 7, 7]), "nobody folds what is being copied"


def test_a_cancelled_move_leaves_it_as_it_was_at_a_higher_epoch() -> None:
    for it, phase in ((ready(), "ready"), (bucket(), "empty")):
        it.move = MOVE
        it.freeze()
        it.thaw(9)
        assert (it.phase, it.move, it.location_epoch) == (phase, None, 9)
    assert not bucket().initialized


def test_a_bare_bucket_may_leave_but_not_while_it_is_seeded() -> None:
    bare = bucket()
    assert bare.may_freeze([0, 0, 0])
    for rank in range(3):
        bare.offered(rank, 0)
    assert not bare.may_freeze([0, 0, 0])


def test_worker_done_is_said_once_when_all_have_pushed_at_the_new_place() -> None:
    it = bucket(version=5, initialized=True, arrived=True)
    it.on_doorbell(0, 5, [5, 5, 5])
    it.on_doorbell(0, 6, [6, 5, 5])
    it.on_doorbell(2, 6, [6, 5, 6])
    assert not it.all_heard(), "a late doorbell of version 5 is not a push"
    it.on_doorbell(1, 6, [6, 6, 6])
    assert it.all_heard()
    assert not it.all_heard()
    assert not ready().all_heard()


def test_a_second_channel_of_a_rank_replaces_the_first() -> None:
    it = ready()
    assert it.attach(1, 10) is None
    assert it.attach(1, 11) == 10
    it.detach(1, 10)
    assert it.attached == {1: 11}


class Synchronous(RuleBasedStateMachine):
    """Workers that push, repeat and lose doorbells in any order, and an aggregator that folds when
    it is told to: each version is folded once, from pushes of exactly its iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = bucket(version=0, initialized=True)
        self.pushed = [0, 0, 0]
        self.folds = 0
        self.folding = False

    @rule(rank=st.integers(0, 2))
    def push(self, rank: int) -> None:
        """A worker goes on only after its last push's version."""
        if self.pushed[rank] == self.bucket.version:
            self.pushed[rank] += 1

    @rule(rank=st.integers(0, 2), behind=st.integers(-1, 3))
    def ring(self, rank: int, behind: int) -> None:
        iteration = self.pushed[rank] - behind
        verdict = self.bucket.on_doorbell(rank, iteration, self.pushed)
        if iteration <= self.bucket.version:
            assert verdict is Verdict.DONE
        if verdict is Verdict.FOLD:
            assert not self.folding
            assert self.pushed == [self.bucket.version + 1] * 3
            self.bucket.fold_begun()
            self.folding = True

    @precondition(lambda self: self.folding)
    @rule(clean=st.booleans(), guilty=st.integers(0, 2))
    def fold(self, clean: bool, guilty: int) -> None:
        self.folding = False
        if clean:
            self.folds += 1
            self.bucket.fold_ended(self.bucket.version + 1)
        else:
            self.pushed[guilty] = self.bucket.version
            self.bucket.fold_ended(self.bucket.version)

    @precondition(lambda self: not self.folding)
    @rule(initialized=st.just(True))
    def restart(self, initialized: bool) -> None:
        """The aggregator is killed and finds its words again."""
        version = self.bucket.version
        self.bucket = bucket(version=version, initialized=initialized, arrived=True)
        if self.bucket.complete(self.pushed):
            self.bucket.fold_begun()
            self.folding = True

    @invariant()
    def every_fold_is_a_version(self) -> None:
        self.bucket.check_invariants()
        assert self.folds == self.bucket.version
        assert all(word in (self.folds, self.folds + 1) for word in self.pushed)


TestSynchronous = Synchronous.TestCase
TestSynchronous.settings = settings(max_examples=60, stateful_step_count=40)


def test_freezing_needs_an_order() -> None:
    with pytest.raises(AssertionError):
        ready().freeze()


def test_an_impossible_transition_tells_the_story() -> None:
    it = ready()
    it.move = MOVE
    it.freeze()
    it.thaw(9)
    it.fold_begun()
    it.fold_ended(6)
    it.leave()
    it.move = MOVE
    with pytest.raises(InvalidTransition) as caught:
        it.freeze()
    assert str(caught.value) == (
        "bucket j1/4 at version 6: gone -> moving (frozen by m1) is impossible; before: ready (it "
        "is made or found), moving (frozen by m1), ready (it stays: 9), gone (it is removed)"
    )
    assert it.phase == "gone", "it stays what it was"
    assert it.fold_ended(7) == (), "a fold that ends late changes nothing"


@pytest.mark.parametrize("phase", sorted(TRANSITIONS.keys() - {"ready"}))
def test_only_a_ready_bucket_is_folded(phase: Any) -> None:
    it = bucket()
    it.phase = phase
    with pytest.raises(InvalidTransition, match=f"{phase} -> folding"):
        it.fold_begun()


class AnyLife(RuleBasedStateMachine):
    """Everything that can happen to a bucket, in any order in which the data plane lets it."""

    seen: ClassVar[set[tuple[str, str]]] = set()
    """Transitions that were made."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = bucket()
        self.before = self.bucket.phase
        self.pushed = [0, 0, 0]

    @precondition(lambda self: self.bucket.phase == "gone")
    @rule(initialized=st.booleans(), moving=st.booleans())
    def begin_anew(self, initialized: bool, moving: bool) -> None:
        self.bucket = bucket(version=2, initialized=initialized, arrived=True)
        self.before = self.bucket.phase
        self.pushed = [2, 2, 2]
        if moving:
            self.bucket.doubt()

    @rule(rank=st.integers(0, 1), there=st.booleans())
    def attach(self, rank: int, there: bool) -> None:
        (self.bucket.attach if there else self.bucket.detach)(rank, 0)

    @rule(
        version=st.integers(0, 2),
        ranks=st.sampled_from([(0, 1, 2), (2,)]),
        states=st.sampled_from(["", "parts", "whole"]),
    )
    def offer(self, version: int, ranks: tuple[int, ...], states: HeldStates) -> None:
        for rank in ranks:
            self.bucket.offered(rank, version, states=states)

    @rule(stands_in=st.booleans())
    def begin_with_spare(self, stands_in: bool) -> None:
        self.bucket.spare = Spare(1, 1) if stands_in else None
        if (version := self.bucket.begin_with_spare()) is not None:
            self.pushed = [version] * 3

    @rule(version=st.integers(0, 2), wanted=st.booleans())
    def seed(self, version: int, wanted: bool) -> None:
        """At the version that was asked for, or at any."""
        if wanted and self.bucket.phase == "seeding":
            version, _ = self.bucket.asked(0)
        if any([self.bucket.seeded(rank, version) for rank in range(3)]):
            self.pushed = [version] * 3

    @rule()
    def push(self) -> None:
        self.pushed = [self.bucket.version + 1] * 3
        if self.bucket.on_doorbell(0, self.pushed[0], self.pushed) is Verdict.FOLD:
            self.bucket.fold_begun()

    @rule(clean=st.booleans())
    def fold(self, clean: bool) -> None:
        """It may have gone meanwhile."""
        folding = self.bucket.phase == "folding"
        self.bucket.fold_ended(self.bucket.version + (folding and clean))

    @rule()
    def freeze(self) -> None:
        if self.bucket.phase != "moving" and self.bucket.may_freeze(self.pushed):
            self.bucket.move = MOVE
            self.bucket.freeze()

    @rule(initialized=st.booleans())
    def stay(self, initialized: bool) -> None:
        if self.bucket.phase == "moving":
            self.bucket.found(self.bucket.version, initialized)
        self.bucket.thaw(9)

    @precondition(lambda self: self.bucket.phase != "gone")
    @rule()
    def leave(self) -> None:
        self.bucket.leave()

    @invariant()
    def it_moves_by_its_table(self) -> None:
        now, before = self.bucket.phase, self.before
        assert now == before or now in TRANSITIONS[before]
        self.before = now
        self.seen.add((before, now))
        self.bucket.check_invariants()


def test_every_transition_of_the_table_happens() -> None:
    """Without one, its row is too wide, or something that happens is not driven above."""
    run_state_machine_as_test(AnyLife, settings=settings(max_examples=200, derandomize=True))
    table = {(old, new) for old, after in TRANSITIONS.items() for new in after}
    assert table <= AnyLife.seen


def test_an_offer_goes_with_its_rank() -> None:
    """An offer counts no more once its rank has left, even where it is back with another one."""
    bare = bucket()
    for rank in range(3):
        bare.attach(rank, rank + 10)
    bare.offered(0, 2)
    bare.offered(1, 9)
    bare.detach(1, 11)
    bare.attach(1, 51)
    assert bare.offered(2, 3) == (), "rank 1 has not said again what it has"
    assert bare.offered(1, 1) == (2,)
