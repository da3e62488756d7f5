"""Numbers with their nouns."""

import pytest

from slackwater.common.base.words import number_of


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 GPUs"), (1, "1 GPU"), (-1, "-1 GPUs"), (2, "2 GPUs")]
)
def test_one_is_not_many(number: int, said: str) -> None:
    assert number_of(number, "GPU") == said
