"""Runs of several policies and seeds, in parallel processes, with the same bytes for any number.

A run is a pure function of (options, policy, seed); processes share nothing but a table of how far
each has come. What comes back is small (figures, not events): a run writes its own event log.
"""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from os import cpu_count
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from slackwater.loadgen.simulator.gpu import eventlog
from slackwater.loadgen.simulator.gpu.build import (
    build_cluster,
    build_model,
    build_policy,
    build_settings,
)
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.jobmodels.base import FitsPolicy
from slackwater.loadgen.simulator.gpu.metrics import (
    JobFigures,
    Summary,
    job_figures,
    size_bins,
    summarize,
)
from slackwater.loadgen.simulator.gpu.outcome import Result
from slackwater.loadgen.simulator.gpu.prepare import prepare
from slackwater.loadgen.simulator.gpu.series import Series, series
from slackwater.loadgen.simulator.gpu.tunings import JobTunings
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.loadgen.simulator.options import Options
from slackwater.services.master.scheduling.view import Pending

POLL_S = 0.2

Progress = Callable[[int, int, float], None]
"""(task, jobs done, simulated seconds)"""


class Task(msgspec.Struct):
    """One run. `log_path` empty: no event log."""

    number: int
    options: Options
    policy: str
    seed: int
    log_path: str = ""


def tasks_of(options: Options, report: Path | None) -> list[Task]:
    """Every policy with every seed; the first seed's runs write event logs into the report."""
    return [
        Task(
            p * options.seeds + s, options, policy, options.seed + s,
            str(report / f"events-{policy}.json") if report is not None and s == 0 else "",
        )
        for p, policy in enumerate(options.policies)
        for s in range(options.seeds)
    ]  # fmt: skip


class RunReport(msgspec.Struct):
    summary: Summary
    figures: list[JobFigures]
    bins: list[dict[str, object]]
    series: Series | None
    reasons: list[tuple[float, Pending]]
    gpus: int
    tunings: list[JobTunings] = []


def run(
    task: Task,
    on_progress: Callable[[int, float], None] | None = None,
    jobs: Sequence[Submission] | None = None,
) -> RunReport:
    """`jobs`: the task's, where they were prepared already."""
    return simulated(task, on_progress, jobs)[0]


def simulated(
    task: Task,
    on_progress: Callable[[int, float], None] | None = None,
    jobs: Sequence[Submission] | None = None,
) -> tuple[RunReport, Result]:
    """Run it, and return also what it was made of."""
    options = task.options
    began_s = perf_counter()
    jobs = prepare(options, task.seed).jobs if jobs is None else jobs
    cluster = build_cluster(options)
    settings = build_settings(options, jobs, task.seed)
    nodes = list(zip(cluster.sizes, cluster.types, strict=True))
    model = build_model(options, task.seed)
    policy = build_policy(options, task.policy)
    if isinstance(model, FitsPolicy):
        jobs = model.adapt(jobs, policy)
    engine = Engine(jobs, cluster, policy, model, settings, on_progress=on_progress)
    result = engine.run()
    gpus = sum(cluster.sizes)
    figures = job_figures(result, gpus)
    if task.log_path:
        exact = model.name == "fixed" and model.integer_times and not settings.slowdowns.any
        exact = exact and not (options.speeds or options.throughputs)
        log = eventlog.event_log(result, task.policy, model.name, nodes, exact, settings.rules)
        eventlog.write(log, Path(task.log_path))
    summary = summarize(task.policy, result, figures, perf_counter() - began_s)
    report = RunReport(
        summary, figures, size_bins(figures, [o.alone_s for o in result.outcomes]),
        series(result) if task.log_path else None, result.pending_reasons, gpus,
        [
            JobTunings(o.job.spec.id, o.end_s, list(o.tunings))
            for o in result.outcomes if task.log_path and o.tunings
        ],
    )  # fmt: skip
    return report, result


def run_all(
    tasks: Sequence[Task],
    processes: int,
    on_progress: Progress | None,
    prepared: Mapping[int, Sequence[Submission]],
) -> list[RunReport]:
    """Every task's report, in the order of the tasks. `processes`: 0 is one a core. `prepared`: the
    jobs by seed, where known; other processes read the trace themselves."""
    processes = processes or min(len(tasks), cpu_count() or 1)
    if processes <= 1 or len(tasks) == 1:
        reports = []
        for task in tasks:
            tick = _reporter(task.number, on_progress)
            found = run(task, tick, prepared.get(task.seed))
            # Encoded here, too: the same bytes in the report, whatever the number of processes.
            reports.append(_decode(msgspec.msgpack.encode(found)))
        return reports
    context = multiprocessing.get_context("spawn")
    table = context.Array("d", 2 * len(tasks), lock=False)
    by_number: dict[int, RunReport] = {}
    with ProcessPoolExecutor(
        min(processes, len(tasks)), context, initializer=_adopt, initargs=(table,)
    ) as pool:
        pending: set[Future[bytes]] = set()
        numbers: dict[Future[bytes], int] = {}
        for task in tasks:
            future = pool.submit(_run_encoded, msgspec.msgpack.encode(task))
            numbers[future] = task.number
            pending.add(future)
        while pending:
            done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                by_number[numbers[future]] = _decode(future.result())
            if on_progress is not None:
                for task in tasks:
                    i = 2 * task.number
                    on_progress(task.number, int(table[i]), table[i + 1])
    return [by_number[task.number] for task in tasks]


def _decode(encoded: bytes) -> RunReport:
    return msgspec.msgpack.decode(encoded, type=RunReport)


def _reporter(number: int, on_progress: Progress | None) -> Callable[[int, float], None] | None:
    if on_progress is None:
        return None
    return lambda done, now_s: on_progress(number, done, now_s)


_table: Any = None


def _adopt(table: Any) -> None:
    """In a worker process: where to write how far its run has come."""
    global _table
    _table = table


def _run_encoded(encoded: bytes) -> bytes:
    task = msgspec.msgpack.decode(encoded, type=Task)

    def note(done: int, now_s: float) -> None:
        _table[2 * task.number], _table[2 * task.number + 1] = done, now_s

    return msgspec.msgpack.encode(run(task, note))
