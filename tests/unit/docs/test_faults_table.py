"""The table of faults names the tests that bring each about, and all of them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_row_of_faults_has_its_test_and_every_fault_its_row() -> None:
    rows = [
        line.split("|")
        for line in (ROOT / "docs/guide/faults.md").read_text().splitlines()
        if line.startswith("| ") and "---" not in line and not line.startswith("| fault ")
    ]
    assert len(rows) >= 30
    named = {re.fullmatch(r" `(test_\w+)(?:\[.*\])?` ", row[5])[1] for row in rows}  # type: ignore[index]
    there = {
        path.name: set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
        for path in (ROOT / "tests/lab").glob("test_*.py")
    }
    assert there["test_faults.py"] <= named
    assert named <= set().union(*there.values())
