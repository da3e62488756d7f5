"""Options of `submit` that say how a program runs: its environment."""

import pytest

from slackwater.cli.submit import environment
from slackwater.console.outcome import Usage


def test_variables_are_given_or_taken_from_ones_own() -> None:
    own = {"HOME": "/home/ann", "EMPTY": ""}
    given = ["A=1", "B=x=y", "C=", "HOME", "EMPTY"]
    found = {"A": "1", "B": "x=y", "C": "", "HOME": "/home/ann", "EMPTY": ""}
    assert environment(given, own) == found


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("1A=2", "letters, digits and _"),
        ("=2", "letters, digits and _"),
        ("A B=2", "letters, digits and _"),
        ("SLACKWATER_RANK=2", "does not begin with SLACKWATER_"),
        ("ABSENT", "you have no such variable; give ABSENT=VALUE"),
    ],
)
def test_what_cannot_be_a_variable_is_refused(word: str, said: str) -> None:
    with pytest.raises(Usage, match=said):
        environment([word], {})
