"""Every pass takes each example once, whatever batches and replicas there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.example_order import ExampleOrder


@given(
    size=st.integers(1, 40),
    seed=st.integers(0, 99),
    iterations=st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.integers(1, 7), min_size=1, max_size=3)),
        max_size=30,
    ),
)
def test_no_example_is_left_out_or_taken_twice_in_a_pass(
    size: int, seed: int, iterations: list[tuple[int, list[int]]]
) -> None:
    """Iterations of random numbers of replicas and backward passes, one after the other."""
    order, taken = ExampleOrder(size, seed), []
    for replicas, passes in iterations:
        position = len(taken)
        for rank in range(replicas):
            shares = order.share(position, rank, replicas, tuple(passes))
            assert [len(share) for share in shares] == passes
            taken += [example for share in shares for example in share]
    for start in range(0, len(taken) - size + 1, size):
        assert sorted(taken[start : start + size]) == list(range(size))
    assert taken == ExampleOrder(size, seed).take(0, len(taken)).tolist()


def test_an_order_begins_anywhere_and_is_the_seeds() -> None:
    whole = ExampleOrder(100, 7).take(0, 300).tolist()
    assert ExampleOrder(100, 7).take(150, 100).tolist() == whole[150:250]
    assert ExampleOrder(100, 8).take(0, 300).tolist() != whole
    assert whole[:100] != whole[100:200], "each pass is shuffled anew"


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(Rejected, match="has 0 examples"):
        ExampleOrder(0)
