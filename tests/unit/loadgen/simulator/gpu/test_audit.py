"""The auditor finds what is wrong: one lie in the log for each of its rules."""

from collections.abc import Callable

import msgspec
import pytest
from tests.sim.submissions import submission

from slackwater.loadgen.simulator.gpu.audit import audit
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Costs, Engine, Settings
from slackwater.loadgen.simulator.gpu.eventlog import EventLog, event_log
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.traces.record import TraceJob
from slackwater.services.master.scheduling.registry import make


def log() -> EventLog:
    jobs = [
        submission(i, submit_s=10 * i, gpus=g, duration_s=d)
        for i, (g, d) in enumerate([(6, 500), (4, 100), (2, 30), (8, 60)])
    ]
    engine = Engine(
        jobs, Cluster([(4, ""), (4, "")]), make("srsf"), FixedModel(),
        Settings(costs=Costs(restart_s=20)),
    )  # fmt: skip
    made = event_log(engine.run(), "srsf", "fixed", [(4, ""), (4, "")], exact=True)
    return msgspec.json.decode(msgspec.json.encode(made), type=EventLog)


def slices(made: EventLog, job: int) -> list[dict]:
    return [e for e in made.trace_events if e["ph"] == "X" and e["args"]["job"] == job]


def more_gpus(made: EventLog) -> None:
    for event in slices(made, 1):
        event["args"]["gpus"] += 1


def one_machine_late(made: EventLog) -> None:
    slices(made, 0)[0]["args"]["start_s"] += 1


def free_work(made: EventLog) -> None:
    slices(made, 1)[-1]["args"]["work_after"] += 5


def too_early(made: EventLog) -> None:
    made.slackwater.jobs[2].submit_s = 10_000


def forgotten(made: EventLog) -> None:
    made.trace_events[:] = [e for e in made.trace_events if e["ph"] != "X" or e["args"]["job"] != 2]


def smaller_machine(made: EventLog) -> None:
    made.slackwater.nodes[0] = (3, "")


def down(made: EventLog) -> None:
    made.slackwater.outages.append((0, 5.0, 50.0))


def test_an_honest_log_passes() -> None:
    assert audit(log()) == []


@pytest.mark.parametrize(
    ("lie", "finding"),
    [
        (more_gpus, "its gang is"),
        (one_machine_late, "gang"),
        (free_work, "of 100"),
        (too_early, "before its submission"),
        (forgotten, "never held a GPU"),
        (smaller_machine, "over its capacity"),
        (down, "over its capacity"),
    ],
)
def test_each_lie_is_found(lie: Callable[[EventLog], None], finding: str) -> None:
    made = log()
    lie(made)
    assert any(finding in text for text in audit(made)), audit(made)


def test_the_trace_is_compared() -> None:
    rows = [TraceJob(id=f"j{i}", submit_s=0, gpus=2) for i in range(5)]
    text = " ".join(audit(log(), rows))
    assert "job j4 of the trace is not in the log" in text
    assert "the trace has 5 jobs, the log 4" in text
