"""One checkpoint, as the controller leads it: beside aggregators that go on training."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.transitions import InvalidTransition
from slackwater.common.domains.slots.saved_pieces import threshold
from slackwater.schemas.checkpoints import BINS
from slackwater.services.controller.checkpoint_state import (
    ATTEMPTS_MAX,
    STALLED_S,
    TRANSITIONS,
    Checkpoint,
)


class Aggregator:
    """A slow, obvious one: it copies a bucket in the instant in which it commits the version that
    is wanted, or when it is asked and has that one or the next."""

    def __init__(self, buckets: list[int]) -> None:
        self.buckets = buckets
        self.versions = dict.fromkeys(buckets, 0)
        self.order: tuple[int, int | None] | None = None
        self.copies: dict[int, int] = {}

    def commit(self, bucket: int) -> None:
        self.versions[bucket] += 1
        self._look(bucket)

    def _look(self, bucket: int) -> None:
        if self.order is None or bucket in self.copies:
            return
        wanted = self.order[1]
        if wanted is None or wanted == self.versions[bucket]:
            self.copies[bucket] = self.versions[bucket]

    def asked(self, attempt: int, version: int | None, *, look: bool) -> list[int]:
        if not look and self.order != (attempt, version):
            self.order, self.copies = (attempt, version), {}
        for bucket in self.buckets:
            if not look:
                self._look(bucket)
                if bucket not in self.copies and version == self.versions[bucket] - 1:
                    self.copies[bucket] = version
        return [self.copies.get(bucket, -1) for bucket in self.buckets]


def checkpoint(buckets: int = 4, *, synchronous: bool = True) -> Checkpoint:
    return Checkpoint("r", "/f", buckets, synchronous, begun_s=0.0)


def train(aggregators: list[Aggregator], rng: Random, commits: int) -> None:
    """Bucket by bucket, nobody more than one version ahead of another."""
    for _ in range(commits):
        oldest = min(min(each.versions.values()) for each in aggregators)
        behind = [
            (each, bucket)
            for each in aggregators
            for bucket in each.buckets
            if each.versions[bucket] == oldest
        ]
        each, bucket = rng.choice(behind)
        each.commit(bucket)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 30), st.booleans())
@settings(max_examples=200)
def test_all_buckets_are_copied_at_one_version_while_they_go_on(
    seed: int, count: int, speed: int, synchronous: bool
) -> None:
    """`speed`: commits between two messages, at most. A job that is not synchronous has each as it
    is."""
    rng = Random(seed)
    aggregators = [Aggregator([2 * each, 2 * each + 1]) for each in range(count)]
    made, now_s = checkpoint(2 * count, synchronous=synchronous), 0.0
    train(aggregators, rng, rng.randrange(50))
    for _ in range(10_000):
        if made.phase == "writing":
            break
        for number, each in enumerate(aggregators):
            train(aggregators, rng, rng.randint(0, speed))
            copied = each.asked(made.attempt, made.version, look=made.phase == "looking")
            made.told(f"a{number}", each.buckets, list(each.versions.values()), copied)
        if not made.decide(now_s):
            train(aggregators, rng, rng.randint(0, 4 * speed))
            now_s += 0.1
    assert made.phase == "writing", made
    versions = {version for each in aggregators for version in each.copies.values()}
    if synchronous:
        assert versions == {made.iteration}
    for number, each in enumerate(aggregators):
        over = made.wrote(f"a{number}", each.buckets, 100, now_s)
        assert over == (number == count - 1)
    assert (made.phase, sum(made.nbytes.values())) == ("done", 100 * count)


def test_a_job_that_stands_still_short_of_the_version_is_copied_as_it_stands() -> None:
    made = checkpoint(2)
    made.told("a1", [0, 1], [7, 7], [-1, -1])
    assert made.decide(0.0)
    made.told("a1", [0, 1], [9, 9], [-1, -1])
    assert made.decide(0.1), "version 7 is gone: one to come is named"
    assert made.version is not None
    assert made.version > 9
    made.told("a1", [0, 1], [9, 9], [-1, -1])
    assert not made.decide(0.2)
    made.told("a1", [0, 1], [9, 9], [-1, -1])
    assert made.decide(0.3 + STALLED_S)
    assert made.version == 9


def test_a_job_that_stands_still_in_the_middle_of_an_iteration_is_given_up() -> None:
    """One of its buckets came to its aggregator after the version that the others have."""
    made = checkpoint(2)
    made.told("a1", [0, 1], [7, 8], [-1, -1])
    made.decide(0.0)
    for now_s in (0.1, 9.0):
        made.told("a1", [0, 1], [7, 8], [7, -1])
        assert not made.decide(now_s)
    assert made.phase == "copying"
    made.told("a1", [0, 1], [7, 8], [7, -1])
    made.decide(10.5)
    assert made.phase == "failed"
    assert "stands still between versions 7 and 8" in made.reason


def test_a_bucket_that_moved_begins_it_anew_and_at_last_fails_it() -> None:
    made = checkpoint(1)
    for attempt in range(1, ATTEMPTS_MAX):
        made.told("a1", [0], [5], [-1])
        assert made.decide(0.0)
        assert (made.attempts, made.phase) == (attempt, "copying")
        made.begin_anew("a bucket moved", 0.0)
        assert not made.heard
    made.told("a1", [0], [5], [-1])
    made.decide(0.0)
    made.begin_anew("a bucket moved", 3.0)
    assert made.phase == "failed"
    assert made.reason == f"no version could be copied in {ATTEMPTS_MAX} attempts"
    made.fail("again", 4.0)
    assert made.ended_s == 3.0, "it failed once"


def test_a_job_that_did_not_go_on_is_not_saved_again() -> None:
    made = checkpoint(2)
    made.before = {0: 4, 1: 4}
    made.told("a1", [0, 1], [4, 4], [-1, -1])
    assert not made.decide(1.0)
    assert (made.phase, made.unchanged) == ("done", True)


def test_the_versions_that_count_as_saved_are_those_of_the_copies() -> None:
    """The job went on by one version while it was copied, and stands still there now."""
    made = checkpoint(1)
    made.told("a1", [0], [4], [-1])
    made.decide(0.0)
    made.told("a1", [0], [5], [4])
    made.decide(0.0)
    assert (made.phase, made.iteration, made.copied) == ("writing", 4, {0: 4})
    after = checkpoint(1)
    after.before = made.copied
    after.told("a1", [0], [5], [-1])
    assert after.decide(1.0), "version 5 is not saved yet"


def test_an_update_takes_what_is_farthest_of_all_aggregators() -> None:
    made = checkpoint(2, synchronous=True)
    made.fraction = 0.25
    made.told("a1", [0], [5], [-1])
    made.told("a2", [1], [6], [-1])
    assert made.decide(0.0)
    assert made.version is None, "pieces may be of several versions"
    bins = [0] * BINS
    bins[10], bins[40] = 6, 0
    more = [0] * BINS
    more[40], more[0] = 1, 1
    made.told("a1", [0], [5], [5], bins)
    made.told("a2", [1], [6], [6], more)
    assert made.decide(0.0)
    assert (made.above, made.share) == (10, 1 / 6), "two of eight: the far one, one of six"
    rounded = checkpoint(1)
    rounded.fraction, rounded.rounded = 0.25, True
    rounded.told("a1", [0], [5], [-1])
    rounded.decide(0.0)
    rounded.told("a1", [0], [5], [5], [0] * 10 + [8] + [0] * (BINS - 11))
    rounded.decide(0.0)
    assert (rounded.above, rounded.share) == (10, 0.5), "twice as many, for as many bytes"
    nothing = checkpoint(1)
    nothing.fraction = 0.5
    nothing.told("a1", [0], [5], [-1])
    nothing.decide(0.0)
    nothing.told("a1", [0], [5], [5], [8] + [0] * (BINS - 1))
    nothing.decide(0.0)
    assert (nothing.phase, nothing.unchanged) == ("done", True)


def test_a_threshold_never_asks_for_what_did_not_change() -> None:
    assert threshold([100] + [0] * (BINS - 1), 0.5) == (0, 0.0)
    assert threshold([90] + [0] * (BINS - 2) + [10], 0.5) == (0, 0.0)
    assert threshold([0] * (BINS - 1) + [10], 0.5) == (BINS - 1, 0.5)


def test_the_table_has_every_transition_that_can_be_and_no_other() -> None:
    for old, allowed in TRANSITIONS.items():
        for new in TRANSITIONS:
            made = checkpoint()
            made.phase = old
            if new in allowed:
                made._become(new, "a test")
                assert made.phase == new
            else:
                with pytest.raises(InvalidTransition):
                    made._become(new, "a test")
