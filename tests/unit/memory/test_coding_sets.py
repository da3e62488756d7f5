"""CodingSets: few sets of lenders that must not fail together (Hydra, 5.2)."""

import itertools
import math
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.domains.memory.coding_sets import choose, groups, order
from slackwater.schemas.memory import LenderId


def lenders(count: int) -> list[LenderId]:
    return [LenderId(f"s{i}") for i in range(count)]


@given(st.integers(1, 200), st.integers(1, 12), st.integers(0, 4))
def test_groups_are_disjoint_and_large_enough(count: int, width: int, slack: int) -> None:
    made = groups(lenders(count), width, slack)
    assert sorted(lender for group in made for lender in group) == sorted(lenders(count))
    assert all(len(group) >= min(count, width + slack) for group in made)
    assert all(len(group) < 2 * (width + slack) for group in made)


def test_groups_do_not_depend_on_who_looks() -> None:
    known = lenders(60)
    mixed = Random(1).sample(known, len(known))
    assert groups(known, 10) == groups(mixed, 10)


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(0, 2**32), st.data())
def test_a_span_stays_in_one_group_if_one_has_room(
    count: int, seed: int, data: st.DataObject
) -> None:
    known, rng, width = lenders(count), Random(seed), 5
    able = data.draw(st.lists(st.sampled_from(known), unique=True))
    load = {lender: rng.random() for lender in able}
    group = choose(known, load, width, rng)
    asked = order(group, load)
    assert sorted(asked) == sorted(load)
    inside = [lender for lender in asked if lender in group]
    assert asked[: len(inside)] == inside == sorted(inside, key=lambda one: load[one])
    if any(len(one & load.keys()) >= width for one in groups(known, width)):
        assert len(inside) >= width


def _sets(count: int, spans: int, k: int, r: int, *, coding_sets: bool) -> set[frozenset[str]]:
    """The combinations of r + 1 lenders whose failure loses some span."""
    known, rng = lenders(count), Random(5)
    load = dict.fromkeys(known, 0.0)
    fatal: set[frozenset[str]] = set()
    for _ in range(spans):
        if coding_sets:
            chosen = order(choose(known, load, k + r, rng), load)[: k + r]
        else:
            chosen = rng.sample(known, k + r)
        for lender in chosen:
            load[lender] += 1.0
        fatal.update(frozenset(few) for few in itertools.combinations(chosen, r + 1))
    if coding_sets:
        assert max(load.values()) <= 2.0 * spans * (k + r) / count
    return fatal


def test_an_order_of_magnitude_fewer_failures_lose_bytes() -> None:
    """8 + 2: the paper has CodingSets lose bytes about ten times less often than random placement;
    here the combinations of three lenders that do are counted."""
    random_sets = _sets(240, 600, 8, 2, coding_sets=False)
    coding_sets = _sets(240, 600, 8, 2, coding_sets=True)
    assert len(coding_sets) <= 20 * math.comb(12, 3)
    assert 10 * len(coding_sets) < len(random_sets)


def test_with_more_spans_random_placement_gets_worse_and_coding_sets_hardly() -> None:
    ours = [len(_sets(120, n, 8, 2, coding_sets=True)) for n in (100, 500)]
    theirs = [len(_sets(120, n, 8, 2, coding_sets=False)) for n in (100, 500)]
    assert ours[1] <= 10 * math.comb(12, 3)
    assert theirs[1] > 3 * theirs[0]
    assert ours[1] < 2 * ours[0]
