"""Compiled kernels against the rules as they are defined, bit for bit, and against float64."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from numpy.typing import NDArray

from slackwater.common.domains.slots.folding import replay
from slackwater.common.domains.slots.kernels import KERNEL_DTYPES, SLOT_DTYPES, fold_chunk
from slackwater.common.domains.slots.packed import pack
from slackwater.common.domains.slots.rules import (
    RULES,
    Floats,
    Hyper,
    divisor,
    mean,
    narrow,
    scalars,
    step,
    widen,
)
from slackwater.schemas.tensors import DType, UpdateRule

Slots = NDArray[np.generic]
DTYPES: tuple[DType, ...] = (*KERNEL_DTYPES, "int8")
PAIRS: list[tuple[str, DType]] = [(rule, dtype) for rule in RULES for dtype in DTYPES]
STORED: dict[DType, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)
weird_float = st.floats(width=32)
hypers = st.builds(
    Hyper,
    learning_rate=st.floats(-0.5, 2.0),
    momentum=st.floats(0.0, 1.0),
    beta1=st.floats(0.0, 0.999),
    beta2=st.floats(0.0, 0.9999),
    epsilon=st.floats(1e-10, 1e-3),
    weight_decay=st.floats(0.0, 0.1),
    momentum_decay=st.floats(0.0, 1.0),
    threshold=st.floats(0.0, 2.0),
)


def stored(values: Floats, dtype: DType) -> Slots:
    """Convert values as a worker would put them into its slot."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "int8":
        return pack(values)
    with np.errstate(all="ignore"):
        return values.astype(STORED[dtype])


def folded(
    rule: str,
    gradients: list[Slots],
    p: Floats,
    states: list[Floats],
    k: Floats,
    dtype: DType,
    cuts: tuple[int, ...] = (),
) -> tuple[bool, Floats, list[Floats]]:
    """By the kernels, the gradients in one array as in a region, cut into chunks at `cuts`."""
    size, stride = len(p), len(gradients[0]) + 5
    slots = np.zeros(stride * len(gradients), SLOT_DTYPES[dtype])
    for rank, gradient in enumerate(gradients):
        slots[rank * stride : rank * stride + len(gradient)] = gradient.view(slots.dtype)
    new_p, new_states = np.empty_like(p), [np.empty_like(s) for s in states]
    clean = True
    pairs = list(zip(states, new_states, strict=True))
    edges = sorted({0, size, *(c for c in cuts if c < size)})
    for lo, hi in pairwise(edges):
        clean &= fold_chunk(rule, slots, stride, len(gradients), (lo, hi), (p, new_p), pairs, k)
    return clean, new_p, new_states


def bits(x: Floats) -> NDArray[np.uint32]:
    return x.view(np.uint32)


def check_bits(
    rule: str, dtype: DType, workers: int, data: Any, floats: st.SearchStrategy[float]
) -> None:
    size = data.draw(st.integers(1, 70))
    arrays = st_np.arrays(np.float32, size, elements=floats)
    gradients = [stored(data.draw(arrays), dtype) for _ in range(workers)]
    p = data.draw(st_np.arrays(np.float32, size, elements=st.floats(-1e4, 1e4, width=32)))
    squares = st_np.arrays(np.float32, size, elements=st.floats(0, 1e4, width=32))
    states = [data.draw(squares) for _ in range(RULES[rule].states)]
    k = scalars(data.draw(hypers), data.draw(st.integers(1, 10**7)), workers)
    cuts = tuple(data.draw(st.lists(st.integers(1, 69), max_size=4)))
    with np.errstate(all="ignore"):
        expected, expected_states = step(rule, mean(gradients, k), p, states, k)
    finite = all(np.isfinite(x).all() for x in (expected, *expected_states))
    clean, got, got_states = folded(rule, gradients, p, states, k, dtype, cuts)
    if RULES[rule].sums:
        assert clean
        np.testing.assert_array_equal(got, expected)
        return
    assert clean == finite
    if finite:
        assert (bits(got) == bits(expected)).all()
        for mine, theirs in zip(got_states, expected_states, strict=True):
            assert (bits(mine) == bits(theirs)).all()


@pytest.mark.parametrize(("rule", "dtype"), PAIRS)
@given(data=st.data())
@settings(max_examples=30)
def test_kernels_give_the_bits_that_the_rules_say(rule: str, dtype: DType, data: Any) -> None:
    """Subnormals and huge values among them, for any cut into chunks."""
    check_bits(rule, dtype, 2, data, any_float)


@pytest.mark.parametrize("workers", [1, 3, 4, 5, 6, 7, 9])
@pytest.mark.parametrize(
    ("rule", "dtype"), [("momentum", "float32"), ("adam", "bfloat16"), ("nesterov", "int8")]
)
@given(data=st.data())
@settings(max_examples=20)
def test_any_number_of_workers_is_summed_in_rank_order(
    rule: str, dtype: DType, workers: int, data: Any
) -> None:
    check_bits(rule, dtype, workers, data, any_float)


@pytest.mark.parametrize("rule", list(RULES))
@given(data=st.data())
@settings(max_examples=40)
def test_a_value_that_is_not_finite_is_always_found(rule: str, data: Any) -> None:
    """Infinities, NaN, sums that overflow: found exactly when a new value is not finite."""
    check_bits(rule, "float32", 2, data, weird_float)


def halves(finite: bool) -> Iterator[Slots]:
    every = np.arange(2**16, dtype=np.uint16)
    keep = np.isfinite(every.view(np.float16)) == finite
    yield every[keep].view(np.float16)
    keep = np.isfinite(widen(every)) == finite
    yield every[keep]


def test_every_finite_half_and_bfloat16_widens_exactly() -> None:
    """With lr = -1 and p = 0 the new parameters are the gradients."""
    k = scalars(Hyper(-1.0), 1, 1)
    for values, dtype in zip(halves(finite=True), ("float16", "bfloat16"), strict=True):
        zero = np.zeros(len(values), np.float32)
        clean, got, _ = folded("sgd", [values], zero, [], k, dtype)  # type: ignore[arg-type]
        assert clean
        assert (got == widen(values)).all()
    assert (widen(np.float16([6e-8, 65504, -0.5])) == np.float32([2**-24, 65504, -0.5])).all()


def test_a_number_is_narrowed_to_the_nearest_bfloat16() -> None:
    """By a slow way: of the numbers that bfloat16 has, the nearest, the even one of two. The
    largest of float32 stays finite."""
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    halfway = (np.arange(2**16, dtype=np.uint32) << 16) + 0x8000
    values = np.concatenate([bits, halfway, halfway + 1, halfway - 1]).view(np.float32)
    values = values[np.isfinite(values)]
    every = np.arange(2**16, dtype=np.uint16)
    known = every[np.isfinite(widen(every))]
    order = np.argsort(widen(known).astype(np.float64), kind="stable")
    known, numbers = known[order], widen(known)[order].astype(np.float64)
    at = np.clip(np.searchsorted(numbers, values.astype(np.float64)), 1, len(numbers) - 1)
    below, above = values - numbers[at - 1], numbers[at] - values
    even = np.where(known[at] % 2 == 0, at, at - 1)
    nearest = np.where(below == above, even, np.where(below < above, at - 1, at))
    assert (widen(narrow(values)) == numbers[nearest]).all()
    assert (narrow(widen(known)) == known).all(), "what bfloat16 has stays as it is"


def test_every_half_and_bfloat16_that_is_not_finite_is_found() -> None:
    k = scalars(Hyper(0.1), 1, 1)
    for values, dtype in zip(halves(finite=False), ("float16", "bfloat16"), strict=True):
        zero = np.zeros(1, np.float32)
        for value in values[:: max(1, len(values) // 50)]:
            one = np.array([value], values.dtype)
            clean, _, _ = folded("sgd", [one], zero, [], k, dtype)  # type: ignore[arg-type]
            assert not clean


def exact(rule: str, g: Any, p: Any, states: list[Any], hyper: Hyper, t: int) -> tuple[Any, Any]:
    """The rule in float64, and how much its float32 result may differ: a few roundings of what
    goes into it."""
    lr, mu, b1, b2, eps, wd, psi, c = hyper
    size = np.abs(g)
    if rule == "sum":
        return g, size
    if rule != "adamw":
        g, size = g + wd * p, size + np.abs(wd * p)
    if rule == "sgd":
        return p - lr * g, np.abs(p) + lr * size
    if rule == "nonnegative":
        return np.maximum(p - lr * g, 0), np.abs(p) + lr * size
    if rule == "soft_threshold":
        q = p - lr * g
        return np.sign(q) * np.maximum(np.abs(q) - c, 0), np.abs(p) + lr * size + c
    if rule in ("momentum", "nesterov"):
        m = mu * states[0] + g
        size = size + np.abs(mu * states[0])
        ahead = g + mu * m if rule == "nesterov" else m
        return p - lr * ahead, np.abs(p) + 3 * lr * size
    if rule == "adagrad":
        return p - lr * g / (np.sqrt(states[0] + g * g) + eps), np.abs(p) + 4 * lr
    if rule.startswith("rmsprop"):
        v = b2 * states[0] + (1 - b2) * g * g
        if rule == "rmsprop":
            return p - lr * g / (np.sqrt(v) + eps), np.abs(p) + 4 * lr * size / np.sqrt(v)
        a = b2 * states[2] + (1 - b2) * g if rule == "rmsprop_centered" else np.zeros_like(g)
        variance = np.abs(v - a * a)
        lost = (v + a * a) / variance  # Cancellation loses so much.
        m = mu * states[1] + g / (np.sqrt(variance) + eps)
        return p - lr * m, np.abs(p) + 4 * lr * (
            np.abs(mu * states[1]) + lost * size / np.sqrt(variance)
        )
    m, v = b1 * states[0] + (1 - b1) * g, b2 * states[1] + (1 - b2) * g * g
    root = np.sqrt(v) / np.sqrt(1 - b2**t) + eps
    rate = lr / (1 - b1**t)
    if rule == "nadam":
        mus = [b1 * (1 - 0.5 * 0.96 ** (each * psi)) for each in range(1, t + 2)]
        before = math.prod(mus[:t])
        ahead = lr * mus[t] / (1 - before * mus[t])
        now = lr * (1 - mus[t - 1]) / (1 - before)
        moments = ahead * (np.abs(b1 * states[0]) + (1 - b1) * size) + now * size
        return p - (now * g + ahead * m) / root, np.abs(p) + 4 * moments / root
    decayed = p * (1 - lr * wd) if rule == "adamw" else p
    moments = np.abs(b1 * states[0]) + (1 - b1) * size
    return decayed - rate * m / root, np.abs(p) + 4 * rate * moments / root


@pytest.mark.parametrize(("rule", "dtype"), PAIRS)
def test_float64_agrees_within_a_few_roundings(rule: str, dtype: DType) -> None:
    rng = np.random.default_rng(7)
    size, workers, t = 20_000, 2, 5
    hyper = Hyper(0.05, weight_decay=0.01, threshold=0.25)
    gradients = [
        stored(rng.standard_normal(size).astype(np.float32), dtype) for _ in range(workers)
    ]
    p = rng.standard_normal(size).astype(np.float32)
    states = [
        np.abs(rng.standard_normal(size)).astype(np.float32) for _ in range(RULES[rule].states)
    ]
    parts = divisor(rule, workers)
    clean, got, _ = folded(rule, gradients, p, states, scalars(hyper, t, parts), dtype)
    wide = [widen(g).astype(np.float64) for g in gradients]
    expected, scale = exact(
        rule,
        sum(wide) / parts,
        p.astype(np.float64),
        [s.astype(np.float64) for s in states],
        hyper,
        t,
    )
    assert clean
    # The mean's own rounding and cancellation count relative to its terms.
    scale = scale + hyper.learning_rate * sum(np.abs(w) for w in wide)
    assert (np.abs(got - expected) <= 8 * np.finfo(np.float32).eps * scale).all()


def test_three_workers_in_another_order_give_other_bits() -> None:
    """Why rank order is fixed: from three on the order of a sum matters (two commute)."""
    rng = np.random.default_rng(3)
    g = [rng.standard_normal(10_000).astype(np.float32) for _ in range(3)]
    k = scalars(Hyper(-1.0), 1, 3)
    zero = np.zeros(10_000, np.float32)
    _, forward, _ = folded("sgd", g, zero, [], k, "float32")
    _, backward, _ = folded("sgd", g[::-1], zero, [], k, "float32")
    assert 0.1 < np.mean(bits(forward) != bits(backward)) < 0.6
    two = scalars(Hyper(-1.0), 1, 2)
    _, forward, _ = folded("sgd", g[:2], zero, [], two, "float32")
    _, backward, _ = folded("sgd", g[1::-1], zero, [], two, "float32")
    assert (bits(forward) == bits(backward)).all()


@pytest.mark.parametrize("rule", list(RULES))
def test_replay_is_the_rule_step_by_step(rule: str) -> None:
    rng = np.random.default_rng(11)
    update = UpdateRule(name=rule, learning_rate=0.1, weight_decay=0.01)  # type: ignore[arg-type]
    iterations = [[rng.standard_normal(300).astype(np.float32) for _ in range(2)] for _ in range(6)]
    p = initial = rng.standard_normal(300).astype(np.float32)
    states: tuple[Floats, ...] = (np.zeros(300, np.float32),) * RULES[rule].states
    for t, gradients in enumerate(iterations, 1):
        k = scalars(Hyper.of(update), t, divisor(rule, 2))
        p, states = step(rule, mean(gradients, k), p, states, k)
    assert (bits(replay(update, "float32", initial, iterations)) == bits(p)).all()


def test_replay_stops_at_a_value_that_is_not_finite() -> None:
    bad = [[np.float32([1.0, np.nan])]]
    with pytest.raises(ValueError, match="iteration 1"):
        replay(UpdateRule(), "float32", np.zeros(2, np.float32), bad)


def test_adams_first_step_has_the_size_of_the_learning_rate() -> None:
    """Bias correction makes it lr g / (|g| + eps), whatever the betas: known of PyTorch's."""
    update = UpdateRule(name="adam", learning_rate=0.1)
    gradients = [[np.float32([3.0, -0.02, 1e-3])]]
    moved = replay(update, "float32", np.zeros(3, np.float32), gradients)
    assert moved == pytest.approx([-0.1, 0.1, -0.1], rel=2e-5)
