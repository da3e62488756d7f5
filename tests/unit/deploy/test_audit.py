"""The judgement of `make audit` on a report of pip-audit's."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
judged = runpy.run_path(str(ROOT / "deploy" / "audit.py"))["judged"]


def package(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": [], **fields}


FLAW = {"id": "PYSEC-2026-1", "fix_versions": ["1.1", "2.0"]}
SKIPPED = {"name": "own", "skip_reason": "not found"}


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize(
    ("packages", "said", "code"),
    [
        ([package("a"), package("b")], "2 packages looked up, nothing is known against them", 0),
        (
            [package("a"), SKIPPED],
            "1 packages looked up, nothing is known against them; 1 are not in the database",
            0,
        ),
        ([package("a"), package("b", vulns=[FLAW])], "b 1.0: PYSEC-2026-1; mended in 1.1, 2.0", 1),
        ([package("b", vulns=[{"id": "X"}]), SKIPPED], "b 1.0: X; mended in no version yet", 1),
    ],
)
def test_what_is_known_against_a_package_fails(
    packages: list[dict[str, Any]], said: str, code: int, required: bool
) -> None:
    assert judged({"dependencies": packages}, required) == ([said], code)


def test_a_database_that_cannot_be_reached_is_said_and_fails_only_where_it_is_required() -> None:
    for packages in ([], [SKIPPED]):
        lines, code = judged({"dependencies": packages}, False)
        assert "nothing was looked up" in lines[0]
        assert code == 0
        assert judged({"dependencies": packages}, True)[1] == 69
