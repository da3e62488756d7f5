"""The GPU kernel's source, run on this CPU, against the rules and the CPU's kernels, bit for bit.

The same text is what a GPU gets; what is not shown here is the GPU's own compiler and memory.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from tests.gpu.host_kernels import HostKernels, slots_of

from slackwater.common.domains.slots.gpu_source import source, trace
from slackwater.common.domains.slots.kernels import KERNEL_DTYPES, fold_chunk
from slackwater.common.domains.slots.rules import RULES, Hyper, mean, scalars, step, widen
from slackwater.schemas.tensors import DType

PAIRS: list[tuple[str, DType]] = [(rule, dtype) for rule in RULES for dtype in KERNEL_DTYPES]
hypers = st.builds(
    Hyper,
    learning_rate=st.floats(-0.5, 2.0),
    momentum=st.floats(0.0, 1.0),
    beta1=st.floats(0.0, 0.999),
    beta2=st.floats(0.0, 0.9999),
    epsilon=st.floats(1e-10, 1e-3),
    weight_decay=st.floats(0.0, 0.1),
)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("kernels"))


def stored(values: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(all="ignore"):
        return values.astype({"float32": np.float32, "float16": np.float16}[dtype])


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32)


def compare(
    host: HostKernels, rule: str, dtype: DType, workers: int, data: Any, floats: Any
) -> None:
    """Source on this CPU == rules.py == numba; and all three agree on what is not finite."""
    size = data.draw(st.integers(1, 70))
    arrays = st_np.arrays(np.float32, size, elements=floats)
    gradients = [stored(data.draw(arrays), dtype) for _ in range(workers)]
    p = data.draw(st_np.arrays(np.float32, size, elements=st.floats(-1e4, 1e4, width=32)))
    squares = st_np.arrays(np.float32, size, elements=st.floats(0, 1e4, width=32))
    states = [data.draw(squares) for _ in range(RULES[rule].states)]
    k = scalars(data.draw(hypers), data.draw(st.integers(1, 10**7)), workers)
    slots, stride = slots_of(gradients, dtype)
    made = []
    for run in ("gpu", "cpu"):
        new = np.empty_like(p), [np.empty_like(state) for state in states]
        pairs = list(zip(states, new[1], strict=True))
        if run == "gpu":
            wide = data.draw(st.booleans())
            clean = host.fold(rule, dtype, slots, stride, workers, (p, new[0]), pairs, k, wide=wide)
        else:
            clean = fold_chunk(rule, slots, stride, workers, (0, size), (p, new[0]), pairs, k)
        made.append((clean, new))
    with np.errstate(all="ignore"):
        expected, expected_states = step(rule, mean(gradients, k), p, states, k)
    finite = all(np.isfinite(x).all() for x in (expected, *expected_states))
    for clean, (new_p, new_states) in made:
        if RULES[rule].sums:
            assert clean
            np.testing.assert_array_equal(new_p, expected)
            continue
        assert clean == finite
        if finite:
            assert (bits(new_p) == bits(expected)).all()
            for mine, theirs in zip(new_states, expected_states, strict=True):
                assert (bits(mine) == bits(theirs)).all()


@pytest.mark.parametrize(("rule", "dtype"), PAIRS)
@given(data=st.data())
@settings(max_examples=25)
def test_the_source_gives_the_bits_of_the_rules_and_of_the_cpu(
    host: HostKernels, rule: str, dtype: DType, data: Any
) -> None:
    compare(host, rule, dtype, 2, data, st.floats(width=32, allow_nan=False, allow_infinity=False))


@pytest.mark.parametrize("workers", [1, 3, 4, 5, 17])
@pytest.mark.parametrize(("rule", "dtype"), [("momentum", "float32"), ("adam", "bfloat16")])
@given(data=st.data())
@settings(max_examples=15)
def test_any_number_of_workers_is_summed_in_rank_order(
    host: HostKernels, rule: str, dtype: DType, workers: int, data: Any
) -> None:
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    compare(host, rule, dtype, workers, data, floats)


@pytest.mark.parametrize("rule", list(RULES))
@given(data=st.data())
@settings(max_examples=40)
def test_what_is_not_finite_is_found_exactly_when_a_new_value_is_not(
    host: HostKernels, rule: str, data: Any
) -> None:
    compare(host, rule, "float32", 2, data, st.floats(width=32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_and_bfloat16_widens_exactly(host: HostKernels, dtype: DType) -> None:
    """With lr = -1 and p = 0 the new parameters are the gradients; all 65,536 of them."""
    every = np.arange(2**16, dtype=np.uint16)
    values = every.view(np.float16) if dtype == "float16" else every
    expected = widen(values)
    keep = np.isfinite(expected)
    k = scalars(Hyper(-1.0), 1, 1)
    for wide in (True, False):
        slots, stride = slots_of([every], dtype)
        new = np.empty(2**16, np.float32)
        zero = np.zeros(2**16, np.float32)
        clean = host.fold("sgd", dtype, slots, stride, 1, (zero, new), [], k, wide=wide)
        assert not clean, "infinities and NaN are among them"
        assert (new[keep] == expected[keep]).all()
        assert (np.isfinite(new) == keep).all()


def exact_adam(
    gradients: list[np.ndarray], p: Any, m: Any, v: Any, hyper: Hyper, t: int
) -> tuple[Any, Any]:
    """The rule in float64, and the terms that its float32 result rounds."""
    lr, _, b1, b2, eps, wd, *_ = hyper
    g = sum(gradient.astype(np.float64) for gradient in gradients) / len(gradients) + wd * p
    size = sum(np.abs(gradient.astype(np.float64)) for gradient in gradients) + np.abs(wd * p)
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    root = np.sqrt(v) / np.sqrt(1 - b2**t) + eps
    rate = lr / (1 - b1**t)
    return p - rate * m / root, np.abs(p) + 4 * rate * (np.abs(m) + size) / root


def test_float64_agrees_within_a_few_roundings(host: HostKernels) -> None:
    rng = np.random.default_rng(7)
    size, t, hyper = 20_001, 5, Hyper(0.05, weight_decay=0.01)
    gradients = [rng.standard_normal(size).astype(np.float32) for _ in range(3)]
    p, m = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    v = np.abs(rng.standard_normal(size)).astype(np.float32)
    slots, stride = slots_of(gradients, "float32")
    new, new_m, new_v = (np.empty_like(p) for _ in range(3))
    k = scalars(hyper, t, 3)
    pairs = [(m, new_m), (v, new_v)]
    assert host.fold("adam", "float32", slots, stride, 3, (p, new), pairs, k, grid=(7, 64))
    wide = [array.astype(np.float64) for array in (p, m, v)]
    expected, scale = exact_adam(gradients, *wide, hyper, t)
    assert (np.abs(new - expected) <= 8 * np.finfo(np.float32).eps * scale).all()


@pytest.mark.parametrize("grid", [(1, 1), (1, 256), (13, 7)])
def test_how_many_threads_share_the_work_changes_nothing(
    host: HostKernels, grid: tuple[int, int]
) -> None:
    rng = np.random.default_rng(8)
    gradients = [rng.standard_normal(1003).astype(np.float32) for _ in range(2)]
    p = rng.standard_normal(1003).astype(np.float32)
    slots, stride = slots_of(gradients, "float32")
    k = scalars(Hyper(0.1), 1, 2)
    new = np.empty_like(p)
    assert host.fold("sgd", "float32", slots, stride, 2, (p, new), [], k, grid=grid)
    expected, _ = step("sgd", mean(gradients, k), p, (), k)
    assert (bits(new) == bits(expected)).all()


def test_an_operation_of_the_rules_is_one_intrinsic_that_rounds_once() -> None:
    """Nothing is left that a compiler may contract, and what is used twice is computed once."""
    statements, new_p, states = trace("nesterov")
    assert statements == [
        "const float t0 = mul_rn(k7, p);",
        "const float t1 = add_rn(g, t0);",
        "const float t2 = mul_rn(k1, s0);",
        "const float t3 = add_rn(t2, t1);",
        "const float t4 = mul_rn(k1, t3);",
        "const float t5 = add_rn(t1, t4);",
        "const float t6 = mul_rn(k0, t5);",
        "const float t7 = sub_rn(p, t6);",
    ]
    assert (new_p, states) == ("t7", ["t3"])
    with pytest.raises(ValueError, match="unknown update rule"):
        source("sdg", "float32")
