"""Tells at the end of nightly runs what they measured: a row for each, and all as JSON.

A run is kept as a property of its test's report, so that it comes from workers of xdist, too.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
import pytest

from slackwater.loadgen.cli import fidelity
from slackwater.loadgen.fidelity.experiment import Fidelity

_PROPERTY: Final = "fidelity"
FOLDER: Final = Path("reports", "fidelity")
Keep = Callable[[Fidelity], Fidelity]
"""Keeps a run for the table, and returns it."""


@pytest.fixture
def keep(record_property: Callable[[str, object], None]) -> Keep:
    def kept(found: Fidelity) -> Fidelity:
        record_property(_PROPERTY, msgspec.json.encode(found).decode())
        return found

    return kept


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    reports = (each for some in terminalreporter.stats.values() for each in some)
    runs = runs_of(each for each in reports if getattr(each, "when", "") == "call")
    if not runs:
        return
    folder = config.rootpath / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    documents = [fidelity.document(each) for each in runs]
    (folder / "runs.json").write_text(json.dumps(documents, indent=2) + "\n")
    terminalreporter.section("fidelity: live / simulated")
    for line in fidelity.summary(runs):
        terminalreporter.write_line(line)
    for each in runs:
        for doubt in each.doubts():
            terminalreporter.write_line(f"{each.plan.policy}, seed {each.plan.seed}: {doubt}")
    terminalreporter.write_line(f"as JSON: {FOLDER / 'runs.json'}")


def runs_of(reports: Iterable[pytest.TestReport]) -> list[Fidelity]:
    """Return the runs that tests kept, by policy, seed and kills."""
    found = [
        msgspec.json.decode(str(text), type=Fidelity)
        for report in reports
        for name, text in report.user_properties
        if name == _PROPERTY
    ]
    return sorted(found, key=lambda each: (each.plan.policy, each.plan.seed, each.kills))
