"""Squares of gradients are summed in the fold, whose bits stay as they are (live-GPU rows 12)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from slackwater.common.domains.slots import folding
from slackwater.common.domains.slots.folding import commit, fold, squares_of
from slackwater.common.domains.slots.gradient_squares import FLOOR_PART
from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.common.domains.slots.live import live_parts
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import RULES, Hyper, widen
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.tensors import DType, TensorSpec, UpdateRule
from slackwater.services.aggregator.early_fold import Ahead, done_by, fold_ahead

ELEMENTS = 3 * 64 * 1024 + 77
BETA2 = 0.9


def region(
    rule: str,
    workers: int,
    dtype: DType = "float32",
    *,
    noise: bool = True,
    elements: int = 300,
    active: int = 0,
) -> SlotRegion:
    tensors = (TensorSpec(name="w", shape=(elements,)),)
    update = UpdateRule(name=rule, learning_rate=0.01, beta2=BETA2, weight_decay=0.1)  # type: ignore[arg-type]
    plan = JobPlan(
        job=JobId("j1"), workers=workers, gradient_dtype=dtype, update=update, layout_epoch=0,
        token="", noise=noise, active=active,
    )  # fmt: skip
    bucket = plan_buckets(tensors)[0]
    memory = bytearray(SlotRegion.nbytes_of(plan, bucket, tensors))
    made = SlotRegion.format(memory, plan, bucket, tensors, 0)
    made.parameters(0)[:] = np.random.default_rng(1).standard_normal(elements)
    made.initialize(0)
    for rank in range(workers):
        made.set_hyper(rank, Hyper.of(update))
    return made


def push(made: SlotRegion, rng: np.random.Generator) -> list[np.ndarray]:
    """Fill every slot; return the gradients as float64."""
    scale = 0.1 + rng.random(made.geometry.elements)  # Elements differ in their second moments.
    pushed = []
    for rank in range(made.geometry.workers):
        drawn = ((1.0 + rng.standard_normal(made.geometry.elements)) * scale).astype(np.float32)
        slot = made.gradient(rank)
        if slot.dtype == np.uint16:
            slot[:] = (drawn.view(np.uint32) >> 16).astype(np.uint16)
        else:
            slot[:] = drawn
        pushed.append(widen(slot).astype(np.float64))
    return pushed


def weights(made: SlotRegion) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of the next version's squares, and the kernel's own: those in float32."""
    rule, ones = RULES[made.plan.update.name], np.ones(made.geometry.elements)
    if rule.second is None:
        return ones, ones
    v = made.state(made.version, rule.second)
    mean = v.mean(dtype=np.float64)
    part = 1.0 - BETA2**made.version if rule.ages else 1.0
    with np.errstate(all="ignore"):  # There are no second moments before the first version.
        x = v + np.float32(FLOOR_PART * mean)
        guess = (np.uint32(0x7EF127EA) - x.view(np.uint32)).view(np.float32)
        near = guess * (np.float32(2.00168) - x * guess)
        return part / (v + FLOOR_PART * mean), part * near.astype(np.float64)


def expected(pushed: list[np.ndarray], weight: np.ndarray) -> tuple[float, float]:
    """Return both sums of the next version, in float64."""
    each = sum(float((g * g * weight).sum()) for g in pushed)
    return each, float((np.mean(pushed, 0) ** 2 * weight).sum())


def equal_bits(left: SlotRegion, right: SlotRegion) -> bool:
    version = left.version
    assert right.version == version
    pairs = [(left.parameters(version), right.parameters(version))]
    pairs += [
        (left.state(version, at), right.state(version, at)) for at in range(left.geometry.states)
    ]
    return all((a.view(np.uint32) == b.view(np.uint32)).all() for a, b in pairs)


def check(rule: str, dtype: DType, workers: int) -> None:
    """Fold three versions with and without sums: same bits, and the sums are right."""
    made = region(rule, workers, dtype, elements=ELEMENTS)
    plain = region(rule, workers, dtype, noise=False, elements=ELEMENTS)
    for seed in range(3):
        pushed = push(made, np.random.default_rng(seed))
        push(plain, np.random.default_rng(seed))
        unknown = made.version == 0 and RULES[rule].second is not None
        exact, near = weights(made)
        for each in (made, plain):
            assert fold(each)
            commit(each)
        assert equal_bits(made, plain)
        found = made.squares.at(made.version)
        assert plain.squares.at(plain.version) is None
        if workers == 1:
            assert found is None
            continue
        assert found is not None
        if unknown:
            assert found.workers == 0, "there are no second moments before the first version"
            continue
        assert found.workers == workers
        assert (found.each, found.mean) == pytest.approx(expected(pushed, near), rel=1e-6)
        assert (found.each, found.mean) == pytest.approx(expected(pushed, exact), rel=2e-3)
        second = RULES[rule].second
        if second is not None:
            total = made.state(made.version, second).sum(dtype=np.float64)
            assert found.second == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("workers", [1, 2, 4, 6])
@pytest.mark.parametrize("rule", ["momentum", "adam", "sum"])
def test_a_fold_with_sums_has_the_same_bits_and_the_right_sums(rule: str, workers: int) -> None:
    check(rule, "float32", workers)


@pytest.mark.slow  # Compiles over a hundred kernels, each once on a machine.
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_all_rules_dtypes_and_numbers_of_workers_sum_squares(
    rule: str, workers: int, dtype: DType
) -> None:
    check(rule, dtype, workers)


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_threads_and_chunks_add_up_to_the_same_sums(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Sums of chunks are added up exactly, in whatever order threads end them."""
    monkeypatch.setattr(folding, "SHARED_ELEMENTS_MIN", 1)

    def share(work: Callable[[], bool]) -> bool:
        with ThreadPoolExecutor(3) as pool:
            return all([each.result() for each in [pool.submit(work) for _ in range(3)]])

    alone, together = region(rule, 3), region(rule, 3)
    for seed in range(3):
        for made in (alone, together):
            push(made, np.random.default_rng(seed))
        assert fold(alone, None, 7)
        assert fold(together, None, 7, share)
        assert commit(alone) == commit(together)
        assert alone.squares.at(seed + 1) == together.squares.at(seed + 1) is not None


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_what_was_folded_ahead_counts_in_the_sums(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setattr(folding, "CHUNK_ELEMENTS", 100)
    early, late = region(rule, 2), region(rule, 2)
    for seed in range(3):
        for made in (early, late):
            push(made, np.random.default_rng(seed))
        ahead = Ahead(version=early.version + 1, upto=250)
        while fold_ahead(early, ahead):
            pass
        done = done_by(early, ahead)
        assert done == 250
        assert fold(early, done=done, squares=ahead.squares)
        assert fold(late)
        commit(early), commit(late)
        found, other = early.squares.at(seed + 1), late.squares.at(seed + 1)
        assert found is not None
        assert other is not None
        assert found == pytest.approx(other, rel=1e-6)


def test_a_part_folded_ahead_by_other_hypers_does_not_count_twice() -> None:
    """A rank that attached anew pushed another learning rate: the part is folded again."""
    made = region("sgd", 2)
    pushed = push(made, np.random.default_rng(1))
    ahead = Ahead(version=1, upto=100)
    assert not fold_ahead(made, ahead)
    for rank in range(2):
        made.set_hyper(rank, Hyper(0.5))
    assert done_by(made, ahead) == 0
    wanted, _ = expected(pushed, weights(made)[0])
    assert fold(made, done=0, squares=ahead.squares)
    commit(made)
    found = made.squares.at(1)
    assert found is not None
    assert found.each == pytest.approx(wanted, rel=1e-6)


def test_two_versions_are_kept_and_a_refused_fold_changes_neither() -> None:
    made = region("sgd", 2)
    for seed in range(2):
        push(made, np.random.default_rng(seed))
        assert fold(made)
        commit(made)
    kept = made.squares.at(1), made.squares.at(2)
    assert None not in kept
    push(made, np.random.default_rng(3))
    made.gradient(1)[5] = np.nan
    assert not fold(made)
    assert (made.squares.at(1), made.squares.at(2)) == kept
    assert made.squares.at(0) is None
    assert made.squares.at(3) is None


def test_squares_that_overflow_are_unknown() -> None:
    """The rule `sum` takes any value; an infinite length is nobody's noise."""
    made = region("sum", 2)
    push(made, np.random.default_rng(3))
    made.gradient(1)[5] = np.inf
    assert fold(made)
    commit(made)
    found = made.squares.at(1)
    assert found is not None
    assert found.workers == 0


def test_a_region_opened_again_goes_on_with_the_second_moments() -> None:
    made = region("adam", 2)
    push(made, np.random.default_rng(0))
    assert fold(made)
    commit(made)
    assert made._buffer is not None
    again = SlotRegion.open(made._buffer)
    assert again.squares.at(1) == made.squares.at(1)
    first, second = squares_of(again), squares_of(made)
    assert first is not None
    assert second is not None
    assert first.floor == second.floor > 0.0


def test_a_push_by_itself_is_not_measured() -> None:
    made = region("sgd", 2)
    push(made, np.random.default_rng(0))
    assert squares_of(made, alone=1) is None


def test_only_ranks_that_count_are_summed() -> None:
    """An elastic job of at most four workers begins with two, goes on with three, then with one."""
    made = region("adam", 4, active=2)
    counts = []
    for version, active in enumerate((2, 2, 3, 1, 2), 1):
        made.sizes.write(made.sizes.newest.then(version, active))
        made.active = made.active_now
        pushed = push(made, np.random.default_rng(version))[:active]
        exact, _ = weights(made)
        assert fold(made)
        found = made.squares.at(commit(made))
        counts.append(found.workers if found is not None else None)
        if found is not None and found.workers:
            assert (found.each, found.mean) == pytest.approx(expected(pushed, exact), rel=2e-3)
    assert counts == [0, 2, 3, None, 2], "the first has no second moments, one worker no mean"


def test_a_copy_to_another_host_brings_the_sums() -> None:
    made = region("adam", 2)
    for seed in range(2):
        push(made, np.random.default_rng(seed))
        assert fold(made)
        commit(made)
    assert made._buffer is not None
    there = bytearray(len(made._buffer))
    for first, nbytes in live_parts(made, len(there), made.all_pushed()):
        there[first : first + nbytes] = made._buffer[first : first + nbytes]
    copied = SlotRegion.open(there)
    assert copied.squares.at(2) == made.squares.at(2)
    first_floor, second_floor = squares_of(copied), squares_of(made)
    assert first_floor is not None
    assert second_floor is not None
    assert first_floor.floor == second_floor.floor
