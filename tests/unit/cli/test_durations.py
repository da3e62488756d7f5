"""How long and when, as people write and read it."""

from datetime import datetime

import pytest

from slackwater.console.durations import clock, seconds
from slackwater.console.outcome import Usage


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1h30m", 5400.0), ("2d", 172_800.0),
     (" 1.5H ", 5400.0), ("0", 0.0)],
)  # fmt: skip
def test_durations_are_read_as_they_are_written(text: str, expected: float) -> None:
    assert seconds(text, "--since") == expected


@pytest.mark.parametrize("text", ["", "soon", "10x", "m", "-5m", "5m 3", "1e3", "10m!"])
def test_what_is_no_duration_names_the_option_and_what_to_write(text: str) -> None:
    with pytest.raises(Usage, match=r"--since.*such as 90s"):
        seconds(text, "--since")


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "s", "36501d"])
def test_longer_than_a_hundred_years_is_refused(text: str) -> None:
    """`--since` with 400 digits was infinite, and `usage` ended in a traceback."""
    with pytest.raises(Usage, match="36500d at most"):
        seconds(text, "--since")


def test_times_are_the_local_clocks_with_a_date_on_another_day() -> None:
    noon = datetime(2026, 3, 4, 12, 0, 5).astimezone().timestamp()
    assert clock(noon, noon + 60.0) == "12:00:05"
    assert clock(noon, noon + 86_400.0) == "2026-03-04 12:00:05"
