"""`loadgen simulate --pool control` in small: the services' own shells, metered."""

import json
from pathlib import Path

import pytest

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.shell.simulated_loop import SIM_START_S
from slackwater.loadgen.cli.simulate_control import jobs_of, simulate_fleet
from slackwater.loadgen.simulator.control.report import (
    MESSAGE_S,
    RECORDS_PER_S,
    kind_of,
    summarize,
    tables,
)
from slackwater.loadgen.simulator.control.scale import (
    WINDOW_S,
    ControlOutcome,
    ControlSettings,
    Sample,
    simulate_control,
)
from slackwater.loadgen.simulator.options import Options

SETTINGS = ControlSettings(
    controllers=2, aggregators=8, submitted_s=4.0, lasting_s=15.0, tail_s=120.0
)


@pytest.fixture(scope="module")
def outcome() -> ControlOutcome:
    return simulate_control("fifo", 1, 8, 4, 40, SETTINGS)


def test_all_jobs_are_accepted_run_and_end(outcome: ControlOutcome) -> None:
    assert (outcome.accepted, outcome.refused, outcome.ended) == (40, 0, 40)
    assert max(sample.running for sample in outcome.samples) > 5
    assert outcome.samples[-1].running == 0


def test_each_service_is_metered_and_its_messages_are_counted(outcome: ControlOutcome) -> None:
    for sample in outcome.samples[:-1]:
        spent = {kind_of(party) for party, cpu_s in sample.cpu_s.items() if cpu_s > 0}
        assert spent >= {"master", "controller", "worker", "profiler"}
        beats = sum(sample.arrived[name] for name in ("c0", "c1", "master"))
        assert beats > 8 * WINDOW_S, "8 nodes and 8 aggregators tell that they are there"
    assert outcome.subjects["cmd master.submit"] == 40
    assert outcome.subjects["tel worker.heartbeat"] >= 8 * (outcome.simulated_s - 2)
    assert sum(s.stored.get("master", 0) for s in outcome.samples) >= 2 * 40, "began, and ended"
    assert sum(s.stored.get("c0", 0) + s.stored.get("c1", 0) for s in outcome.samples) > 20


def test_what_happens_is_a_function_of_the_seed(outcome: ControlOutcome) -> None:
    """The processor's time is not, and so not part of it."""
    again = simulate_control("fifo", 1, 8, 4, 40, SETTINGS)
    assert again.subjects == outcome.subjects
    assert again.accepted_s == outcome.accepted_s
    assert [s.stored for s in again.samples] == [s.stored for s in outcome.samples]
    assert simulate_control("fifo", 2, 8, 4, 40, SETTINGS).subjects != outcome.subjects


def sample(**fields: dict[str, float]) -> Sample:
    known = {"cpu_s": {}, "arrived": {}, "sent": {}, "stored": {}}
    return Sample(SIM_START_S + WINDOW_S, WINDOW_S, 3, 4, **(known | fields))  # type: ignore[arg-type]


def test_the_first_ceiling_is_what_is_fullest_in_its_worst_window() -> None:
    quiet = sample(cpu_s={"master": 1.0, "c0": 1.0, "c1": 0.5, "n1": 0.1})
    busy = sample(
        cpu_s={"master": 2.0, "c0": 4.0, "c1": 5.0, "n1": 0.1}, arrived={"c1": 1000},
        stored={"master": 100},
    )  # fmt: skip
    made = ControlOutcome("fifo", 0, 1, 7, SETTINGS, samples=[quiet, busy], simulated_s=20.0)
    found = summarize(made)
    assert found.ceiling == "the processor of the controller"
    assert found.ceiling_at == pytest.approx(1.0 / (0.5 + 100 * MESSAGE_S))
    controllers = next(row for row in found.services if row.kind == "controller")
    assert controllers.instances == 2
    assert controllers.cpu == pytest.approx((1.0 + 0.5 + 4.0 + 5.0) / 40 + 100 * MESSAGE_S / 4)
    stored = sample(cpu_s={"master": 0.1}, stored={"master": int(RECORDS_PER_S * WINDOW_S * 2)})
    full = ControlOutcome("fifo", 0, 1, 7, SETTINGS, samples=[stored], simulated_s=10.0)
    assert summarize(full).ceiling == "records of one bus server"
    assert summarize(full).ceiling_at == pytest.approx(0.5)
    assert len(list(tables([found]))) == 2


@pytest.mark.parametrize(
    ("trace", "why"),
    [
        ("generate:lin", "knows one workload, generate:fleet"),
        ("generate:fleet,jobs=0", "from 1 to 10000"),
        ("generate:fleet,jobs=many", "from 1 to 10000"),
        ("generate:fleet,nodes=3", "the one option"),
    ],
)
def test_another_workload_is_refused_with_what_there_is(trace: str, why: str) -> None:
    with pytest.raises(ConfigRejected, match=why):
        jobs_of(Options(trace=trace))


def test_a_policy_or_a_setting_that_is_unknown_ends_it_before_it_begins() -> None:
    with pytest.raises(ConfigRejected, match="nosuch"):
        simulate_fleet(Options(trace="generate:fleet", policies=("nosuch",)))
    with pytest.raises(ConfigRejected, match="aggregators"):
        simulate_fleet(Options(trace="generate:fleet", settings=("control.nosuch=3",)))


def test_the_report_has_a_row_for_each_service_and_window(tmp_path: Path) -> None:
    options = Options(
        trace="generate:fleet,jobs=10", policies=("fifo",), nodes=4,
        settings=("control.controllers=1", "control.aggregators=4", "control.lasting_s=10"),
    )  # fmt: skip
    (summary,) = simulate_fleet(options, tmp_path / "r", as_json=True)
    assert json.loads((tmp_path / "r/summary.json").read_text())[0]["ceiling"] == summary.ceiling
    rows = (tmp_path / "r/windows.csv").read_text().splitlines()
    assert rows[0] == "policy,until_s,service,instance,messages_s,core,records_s"
    assert len(rows) - 1 >= 7, "a master, a controller, a profiler, four workers"
    assert (tmp_path / "r/core.png").stat().st_size > 5000
