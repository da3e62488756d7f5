"""The auditor re-checks the operator's rules: one forged log for each, and honest ones pass."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.sim.submissions import submission

from slackwater.loadgen.simulator.gpu.audit import audit
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine, Settings
from slackwater.loadgen.simulator.gpu.eventlog import EventLog, event_log
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.view import NO_RULES, Rules

ONE = [(4, ""), (4, "")]
TWO = [(4, "a100"), (4, "t4")]
STRICT = Rules(quotas={"a": 4, "b": 4}, borrowing=False)


def job(number: int, submit_s: int, gpus: int, duration_s: int, **more: Any) -> Submission:
    return submission(number, submit_s=submit_s, gpus=gpus, duration_s=duration_s, **more)


def log(
    jobs: list[Submission], nodes: list[tuple[int, str]] = ONE, rules: Rules = NO_RULES,
    policy: str = "srsf",
) -> EventLog:  # fmt: skip
    result = Engine(jobs, Cluster(nodes), make(policy), FixedModel(), Settings(rules=rules)).run()
    made = event_log(result, policy, "fixed", nodes, exact=not jobs[0].spec.gpu_types, rules=rules)
    return msgspec.json.decode(msgspec.json.encode(made), type=EventLog)


def of_types() -> EventLog:
    speeds = {"a100": 1.0, "t4": 0.5}
    return log([job(0, 0, 2, 50, gpu_types=speeds), job(1, 0, 2, 50, gpu_types=speeds)], TWO)


def of_quotas() -> EventLog:
    return log([job(i, 0, 2, 100, tenant="a" if i < 3 else "b") for i in range(5)], rules=STRICT)


def of_minimum() -> EventLog:
    return log([job(0, 0, 8, 500), job(1, 10, 8, 5)], rules=Rules(min_run_s=60))


def of_priorities() -> EventLog:
    """The first holds all; of the equal others, the last to come goes first."""
    jobs = [job(0, 0, 8, 100), *(job(i, i, 8, 100, priority=int(i == 3)) for i in range(1, 4))]
    return log(jobs, policy="best-effort")


HONEST = [of_types, of_quotas, of_minimum, of_priorities]


@pytest.mark.parametrize("made", HONEST)
def test_an_honest_log_passes(made: Callable[[], EventLog]) -> None:
    assert audit(made()) == []


def on_a_type_it_cannot_use(made: EventLog) -> None:
    made.slackwater.jobs[0].gpu_types = ("h100",)


def on_two_types(made: EventLog) -> None:
    made.slackwater.nodes = [(2, "a100"), (2, "t4")]
    for event in made.trace_events:
        if event["ph"] == "X":
            event["args"]["gpus"] = 1
    second = msgspec.json.decode(msgspec.json.encode(made.trace_events))
    for event in second:
        if event["ph"] == "X":
            event["pid"] = 3 - event["pid"]
            made.trace_events.append(event)


def smaller_quota(made: EventLog) -> None:
    made.slackwater.quotas["a"] = 2


def longer_minimum(made: EventLog) -> None:
    made.slackwater.min_run_s = 70


def a_later_first(made: EventLog) -> None:
    made.slackwater.jobs[2].priority = 2


@pytest.mark.parametrize(
    ("made", "lie", "finding"),
    [
        (of_types, on_a_type_it_cannot_use, r"job j0 lies on GPUs of .*; it can run on"),
        (of_types, on_two_types, r"job j0 lies on GPUs of \['a100', 't4'\] at 0"),
        (of_quotas, smaller_quota, r"tenant 'a' holds 4 GPUs at 0(\.0)? s; its quota is 2"),
        (of_minimum, longer_minimum, r"job j0 is preempted at 60(\.0)? s, 60(\.0)? s after"),
        (
            of_priorities, a_later_first,
            r"job j3 of priority 1 starts at 100(\.0)? s while job j2 of priority 2, as large",
        ),
    ],
)  # fmt: skip
def test_each_lie_is_found(
    made: Callable[[], EventLog], lie: Callable[[EventLog], None], finding: str
) -> None:
    forged = made()
    lie(forged)
    found = audit(forged)
    assert any(re.search(finding, sentence) for sentence in found), found


def test_a_log_without_rules_has_the_bytes_it_always_had() -> None:
    made = msgspec.json.encode(log([job(0, 0, 2, 50, tenant="a")]))
    for key in (b"quotas", b"borrowing", b"min_run_s", b"tenant", b"priority", b"gpu_types"):
        assert key not in made
