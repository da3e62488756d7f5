"""One trace live and simulated, on a real bus with real services and programs, without bounds on
times. The whole table with its bounds is `make nightly`'s."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import pytest
from tests.integration.fidelity.conftest import Keep

from slackwater.loadgen.fidelity import experiment
from slackwater.loadgen.fidelity.costs import Measured
from slackwater.loadgen.fidelity.experiment import Plan
from slackwater.loadgen.simulator.gpu import eventlog
from slackwater.schemas.jobs import JobRecord

COSTS = Measured(start_s=0.1, stop_s=0.55, restart_s=0.1)
APART_S = 3.0
"""Jobs that the simulator starts so far apart are started in that order on any machine."""


def quiet(phase: str, records: Mapping[str, JobRecord], at_s: float, jobs: int) -> None: ...


def first_starts(path: Path) -> dict[str, float]:
    log = eventlog.read(path)
    found: dict[str, float] = {}
    for event in log.trace_events:
        if event["ph"] == "X":
            start_s = event["args"]["start_s"]
            found[event["name"]] = min(found.get(event["name"], start_s), start_s)
    return found


async def test_a_trace_lives_as_the_simulator_says(tmp_path: Path) -> None:
    """It takes half a minute: twelve jobs queue on four GPUs, and the trace is played in real
    time."""
    plan = Plan(policy="srsf", seed=4, jobs=12, nodes=2, gpus_per_node=2, time_scale=1 / 120)
    found = await experiment.experiment(plan, tmp_path, quiet, COSTS)
    assert found.lost == ()
    assert found.findings == ()
    live = first_starts(tmp_path / "events-srsf-live.json")
    simulated = first_starts(tmp_path / "events-srsf-simulated.json")
    assert len(live) == len(simulated) == 12
    for one, other in combinations(sorted(simulated), 2):
        apart_s = simulated[one] - simulated[other]
        if abs(apart_s) > APART_S:
            assert (live[one] - live[other]) * apart_s > 0, (one, other)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("policy", experiment.POLICIES)
async def test_the_whole_table(policy: str, seed: int, tmp_path: Path, keep: Keep) -> None:
    """Sixty jobs take four to seven minutes, forty profiled ones ten."""
    plan = experiment.planned(Plan(policy=policy, seed=seed), policy)
    found = keep(await experiment.experiment(plan, tmp_path, quiet))
    assert found.doubts() == []


@pytest.mark.nightly
async def test_two_kills_of_the_master_lose_no_job_and_change_no_plan(
    tmp_path: Path, keep: Keep
) -> None:
    """It takes five minutes. What srsf decides follows from the view alone, so that the jobs end
    as they do without the kills."""
    plan = Plan(policy="srsf", seed=1, kills=2)
    found = keep(await experiment.experiment(plan, tmp_path, quiet))
    assert found.kills == 2
    assert found.doubts() == []
