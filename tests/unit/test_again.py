"""The second look at tests that failed beside others."""

import pytest
from tests.again import MANY, verdict

LIVE = "tests/faults/test_crash_loop.py::test_a"


@pytest.mark.parametrize(
    ("failed", "why"),
    [
        ([], "no test is on record"),
        ([LIVE, "tests/unit/test_x.py::test_b"], "test_b does not depend on time"),
        (["tests/sim/test_x.py::test_c[1]"], "does not depend on time"),
        ([f"{LIVE}[{number}]" for number in range(MANY)], "4 tests failed"),
    ],
)
def test_what_cannot_fail_by_chance_is_not_run_again(failed: list[str], why: str) -> None:
    assert why in verdict(failed)


def test_a_few_tests_of_real_processes_are_run_again() -> None:
    assert verdict([LIVE, "tests/integration/cli/test_launch.py::test_d"]) == ""
