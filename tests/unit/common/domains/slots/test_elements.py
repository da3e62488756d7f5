"""A half is the same float32 whether the processor converts it or we do."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slackwater.common.domains.slots import elements
from slackwater.common.native.compiled import njit


def converted(convert: Callable[[Any], Any], halves: np.ndarray) -> np.ndarray:
    @njit
    def each(halves: Any, found: Any) -> None:
        for i in range(halves.size):
            found[i] = convert(halves[i])

    found = np.zeros(halves.size, np.float32)
    each(halves, found)
    return found


@pytest.mark.parametrize("way", ["_half", "_converted"])
def test_every_half_is_numpys_float(way: str) -> None:
    """All 65,536: subnormal ones, infinities and both zeros too; what is not a number stays so."""
    if way == "_converted" and not elements._converts():
        pytest.skip("this processor does not convert halves")
    halves = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        expected = halves.view(np.float16).astype(np.float32)
    found = converted(getattr(elements, way), halves)
    number = ~np.isnan(expected)
    assert (found.view(np.uint32) == expected.view(np.uint32))[number].all()
    assert np.isnan(found[~number]).all()


def test_a_weight_is_a_reciprocal_to_two_thousandths() -> None:
    x = np.geomspace(1e-30, 1e30, 200_000, dtype=np.float32)
    found = converted(elements.weight, x).astype(np.float64)
    assert np.abs(found * x - 1).max() < 2e-3
