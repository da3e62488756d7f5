"""Updates of their own: a plain parameter server against region, kernels and order of pushes."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.domains.slots import folding
from slackwater.common.domains.slots.consistency import (
    UNBOUNDED,
    acknowledged,
    next_rank,
    staleness_bound,
)
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import RULES, Hyper, scalars, step
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import BucketLayout, JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule

WORKERS = 3
ELEMENTS = 37
LAYOUT = BucketLayout(index=0, first=0, count=1, elements=ELEMENTS)
TENSORS = (TensorSpec(name="w", shape=(ELEMENTS,)),)


def plan(rule: str = "adam", consistency: str = "asynchronous", staleness: int = 0) -> JobPlan:
    return JobPlan(
        job=JobId("j"),
        workers=WORKERS,
        gradient_dtype="float32",
        update=UpdateRule(name=rule),  # type: ignore[arg-type]  # Drawn from RULES.
        consistency=consistency,  # type: ignore[arg-type]
        staleness=staleness,
        layout_epoch=0,
        token="",
    )


def region(of: JobPlan) -> SlotRegion:
    made = SlotRegion.format(
        bytearray(SlotRegion.nbytes_of(of, LAYOUT, TENSORS)), of, LAYOUT, TENSORS, 0, owner="a1"
    )
    made.parameters(0)[:] = 1.0
    made.initialize(0)
    return made


class PlainServer:
    """The papers' meaning of asynchronous: a server that applies what comes, when it comes."""

    def __init__(self, rule: str, bound: int) -> None:
        self.rule, self.bound = rule, bound
        self.parameters = np.ones(ELEMENTS, np.float32)
        self.states: Any = tuple(np.zeros(ELEMENTS, np.float32) for _ in range(RULES[rule].states))
        self.clocks = [0] * WORKERS
        self.updates = 0

    def push(self, worker: int, gradient: Any, hyper: Hyper) -> None:
        self.updates += 1
        k = scalars(hyper, self.updates, 1)
        self.parameters, self.states = step(self.rule, gradient, self.parameters, self.states, k)
        self.clocks[worker] += 1

    def may_go_on(self, worker: int) -> bool:
        return self.clocks[worker] - min(self.clocks) <= self.bound


class Killed(Exception):
    pass


def apply_next(it: SlotRegion, bound: int, last: int, rng: random.Random) -> int | None:
    """Apply a push like an aggregator that is killed now and then: before, in the middle, or just
    before the one store that counts."""
    rank = next_rank(it.all_pushed(), it.applied(), bound, last)
    if rank is None:
        return None
    moment = rng.choice(("", "", "fold", "commit", "after"))

    def middle() -> None:
        if moment == "fold":
            raise Killed

    assert folding.check_hypers(it, rank) is None
    assert folding.fold(it, middle, chunk_elements=16, alone=rank)
    if moment == "commit":  # The words of the next version are written, the version is not.
        torn = [word + 1 for word in it.applied()]
        it.set_applied(it.version + 1, torn)
        raise Killed
    folding.commit(it, rank)
    if moment == "after":
        raise Killed
    return rank


@settings(max_examples=60)
@given(
    rule=st.sampled_from(sorted(RULES)),
    bound=st.sampled_from((0, 1, 3, UNBOUNDED)),
    seed=st.integers(0, 10**9),
)
def test_any_interleaving_gives_the_bits_of_a_plain_server(
    rule: str, bound: int, seed: int
) -> None:
    """Workers push when they may, at any pace; the aggregator is killed at any point of an update
    and finds its words again; the region is copied elsewhere. Every push counts once."""
    rng = random.Random(seed)
    mode = "asynchronous" if bound == UNBOUNDED else "stale-synchronous"
    it, server = region(plan(rule, mode, min(bound, 1000))), PlainServer(rule, bound)
    gradients = np.random.default_rng(seed)
    waiting: dict[int, tuple[Any, Hyper]] = {}
    last = -1
    for _ in range(60):
        worker = rng.randrange(WORKERS)
        applied = it.applied()
        if worker not in waiting and acknowledged(applied, worker, bound) == applied[worker]:
            assert server.may_go_on(worker)
            gradient = gradients.standard_normal(ELEMENTS, dtype=np.float32)
            hyper = Hyper(learning_rate=rng.choice((0.1, 0.01)))
            it.gradient(worker)[:] = gradient
            it.set_hyper(worker, hyper)
            it.set_pushed(worker, applied[worker] + 1)
            waiting[worker] = (gradient, hyper)
        elif worker not in waiting:
            assert not server.may_go_on(worker), "held back without a reason"
        if rng.random() < 0.7:
            before = it.applied()
            try:
                rank = apply_next(it, bound, last, rng)
                last = rank if rank is not None else last
            except Killed:
                it, last = SlotRegion.open(it._buffer), -1  # type: ignore[arg-type]
            for rank, (old, new) in enumerate(zip(before, it.applied(), strict=True)):
                if new != old:
                    assert new == old + 1
                    server.push(rank, *waiting.pop(rank))
        if rng.random() < 0.1:
            assert it._buffer is not None
            it = SlotRegion.open(bytearray(it._buffer))
        assert it.applied() == server.clocks
        assert it.version == server.updates
        assert max(server.clocks) - min(server.clocks) <= min(bound, 60) + 1
        bits = it.parameters(it.version).view(np.uint32)
        assert (bits == server.parameters.view(np.uint32)).all()


def test_pushes_take_turns() -> None:
    """The rank that was applied last waits for the others that are in."""
    assert next_rank([1, 1, 1], [0, 0, 0], UNBOUNDED, -1) == 0
    assert next_rank([2, 1, 1], [1, 0, 0], UNBOUNDED, 0) == 1
    assert next_rank([2, 1, 1], [1, 0, 0], UNBOUNDED, 2) == 0
    assert next_rank([1, 1, 1], [1, 1, 1], UNBOUNDED, 2) is None


def test_nobody_is_further_ahead_than_the_bound() -> None:
    assert acknowledged([5, 3, 9], 2, UNBOUNDED) == 9
    assert acknowledged([5, 3, 9], 2, 2) == 5
    assert acknowledged([5, 3, 9], 1, 0) == 3
    assert next_rank([6, 3, 4], [5, 3, 4], 1, -1) is None, "5 is not answered: no 6 may come"
    assert next_rank([6, 4, 4], [5, 3, 4], 1, -1) == 1


@pytest.mark.parametrize(
    ("consistency", "bound"),
    [("synchronous", None), ("asynchronous", UNBOUNDED), ("stale-synchronous", 4)],
)
def test_the_bound_of_a_plan(consistency: str, bound: int | None) -> None:
    assert staleness_bound(plan(consistency=consistency, staleness=4)) == bound


def test_a_push_that_is_refused_alone_names_its_worker() -> None:
    it = region(plan("momentum"))
    for rank in range(WORKERS):
        it.gradient(rank)[:] = 1.0
        it.set_hyper(rank, Hyper(learning_rate=0.1 * (rank + 1)))
    it.gradient(2)[5] = np.nan
    it.gradient(1)[7] = np.inf
    assert folding.fold(it, alone=0), "others' slots are not looked at"
    assert not folding.fold(it, alone=2)
    assert folding.blame(it, 2)[:2] == ("w", 2)
    it.set_hyper(2, Hyper(learning_rate=np.nan))
    refusal = folding.check_hypers(it, 2)
    assert refusal is not None
    assert "learning_rate is nan" in refusal.why
    assert folding.check_hypers(it, 0) is None, "workers need not agree"
