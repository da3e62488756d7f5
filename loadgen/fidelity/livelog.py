"""A live run as the simulator would have told it: the same outcomes, segments and event log, from
the master's facts and records and from what the programs saved.

A job holds what a decision gave it from the instant of that decision until the one that takes it,
or until its end is stored: so the live policy counts, and so does the simulator's. That its
processes are still leaving is a cost (`stop_s`) of whoever waits for the GPUs.
"""

from collections.abc import Mapping, Sequence
from math import inf

from slackwater.loadgen.fidelity.jobs import Attempt, LiveJob
from slackwater.loadgen.fidelity.live import LiveRun
from slackwater.loadgen.simulator.gpu.eventlog import EventLog, event_log
from slackwater.loadgen.simulator.gpu.outcome import Outcome, Result, Segment
from slackwater.schemas.gpus import NodeAllocation, held
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.services.master.scheduling.view import NO_RULES, Allocation, Rules


class Stretch:
    """One allocation of a job, from a decision to the next, in seconds since 1970."""

    __slots__ = ("allocation", "attempt", "end_s", "start_s", "why")

    def __init__(self, start_s: float, allocation: NodeAllocation) -> None:
        self.start_s, self.end_s, self.why = start_s, inf, ""
        self.allocation, self.attempt = allocation, -1


def stretches(facts: Sequence[JobEvent], record: JobRecord | None = None) -> list[Stretch]:
    """Return what the job held, in its order. `facts`: of its life. A fact that was lost with its
    master is made up for by the next one, and the last by the job's `record`, which is stored
    before its end is told. What a job that is still stopping is promised, and loses before it has
    begun, it does not hold."""
    found: list[Stretch] = []
    held_now: Stretch | None = None

    def end(at_s: float, why: str) -> None:
        nonlocal held_now
        if held_now is not None:
            held_now.end_s, held_now.why = at_s, why
            held_now = None

    def begin(fact: JobEvent) -> None:
        nonlocal held_now
        held_now = Stretch(fact.at_s, fact.allocation)
        found.append(held_now)

    for fact in facts:
        match fact.fact:
            case "starting":
                if held_now is None or held_now.allocation != fact.allocation:
                    end(fact.at_s, "resized")
                    begin(fact)
                assert held_now is not None
                held_now.attempt = fact.attempt
            case "resized":
                end(fact.at_s, "resized")
                begin(fact)
            case "stopping" | "paused":
                end(fact.at_s, "preempted")
            case _:
                end(fact.at_s, "completed" if fact.fact in TERMINAL_STATES else fact.fact)
    if record is not None and record.state in TERMINAL_STATES:
        end(record.finished_s, "completed")
    return [each for each in found if each.attempt >= 0]


def result_of(
    run: LiveRun, jobs: Sequence[LiveJob], written: Mapping[str, Mapping[int, Attempt]]
) -> Result:
    """Build what the engine returns of a run. `written`: by job, what its programs wrote.

    Work is in iterations. Jobs that did not complete are left out: the caller counts them as lost.
    """
    nodes = sorted({
        node for facts in run.facts.values() for fact in facts for node, _ in fact.allocation
    })  # fmt: skip
    place = {node: index for index, node in enumerate(nodes)}
    outcomes: list[Outcome] = []
    segments: list[Segment] = []
    end_s = 0.0
    for job in jobs:
        record = run.records[job.spec.id]
        if record.state != "completed":
            continue
        outcome = Outcome(
            job.submission, record.started_s - run.origin_s, record.finished_s - run.origin_s,
            record.run_s, record.gpu_s, record.preemptions, record.reallocations,
            alone_s=job.submission.oracle.duration_s, work_total=job.iterations,
        )  # fmt: skip
        done = 0.0
        for each in stretches(run.facts[job.spec.id], record):
            wrote = written[job.spec.id].get(each.attempt)
            before, after = (wrote.before, wrote.after) if wrote else (done, done)
            done = after
            allocation: Allocation = tuple(sorted((place[n], g) for n, g in each.allocation))
            segments.append(
                Segment(
                    len(outcomes), each.start_s - run.origin_s, each.end_s - run.origin_s,
                    (wrote.began_s if wrote else each.end_s) - run.origin_s, allocation, "",
                    before, after, (after - before) * job.iteration_s * held(each.allocation),
                    each.why,
                )
            )  # fmt: skip
        outcomes.append(outcome)
        end_s = max(end_s, outcome.end_s)
    return Result(outcomes, segments, end_s, 0.0, 0, 0, [], [])


def live_log(
    result: Result, policy: str, nodes: Sequence[tuple[int, str]], rules: Rules = NO_RULES
) -> EventLog:
    """Make the event log of a live run, as `loadgen audit` and trace viewers read it."""
    return event_log(result, policy, "live", nodes, False, rules)
