"""`loadgen simulate --pool aggregation TRACE`: the jobs of a GPU trace over the aggregation pool.

The trace's jobs are first given their GPUs, first come first served; every job of two GPUs or more
then trains over the pool while it has them (profiles.py). Every policy gets the same jobs.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import inf
from os import cpu_count
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.loadgen import models
from slackwater.loadgen.cli.runs import Tick, bars, writing
from slackwater.loadgen.simulator.gpu.build import build_cluster
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.jobmodels.registry import make_model
from slackwater.loadgen.simulator.gpu.prepare import Prepared, prepare
from slackwater.loadgen.simulator.gpu.report import origin
from slackwater.loadgen.simulator.gpu.single import simulate_once
from slackwater.loadgen.simulator.options import Options, settings_in
from slackwater.loadgen.simulator.pool.minutes import minutes, summarize
from slackwater.loadgen.simulator.pool.profiles import MODELS, PoolJob, draw_models, workers_of
from slackwater.loadgen.simulator.pool.report import Reported, comparison, write_report
from slackwater.loadgen.simulator.pool.run import PoolOutcome, PoolRun, PoolSettings
from slackwater.services.controller.policies import load_policy

POLICIES: Final = ("static", "cyclic", "edf")
SMALLEST_GPUS: Final = 2


def settings_for(options: Options, policy: str) -> PoolSettings:
    own = dict(load_policy(policy).prefers)  # Unless told.
    return settings_in(PoolSettings, options, "pool", policy, own)


def _models(options: Options) -> tuple[str, ...]:
    named = settings_for(options, options.policies[0]).models
    if named == "all":
        return MODELS
    chosen = tuple(models.resolve(name) for name in named.split("+"))
    without = sorted(set(chosen) - set(MODELS))
    if without:
        raise ConfigRejected(f"pool.models: {without[0]} has no seconds of computing in the table")
    return chosen


def pool_jobs(options: Options, prepared: Prepared) -> list[PoolJob]:
    """Every distributed job, with the time that it holds its GPUs."""
    machines = Cluster.counted(sum(build_cluster(options).sizes))
    held = simulate_once(prepared.jobs, machines, "fifo", make_model("fixed", {}, options.seed))
    outcomes = [o for o in held.outcomes if o.job.spec.gpus >= SMALLEST_GPUS and o.end_s < inf]
    if not outcomes:
        raise Rejected(
            f"no job of the trace has {SMALLEST_GPUS} GPUs or more: a job on one GPU needs no "
            "parameter server; choose other jobs"
        )
    drawn = draw_models(len(outcomes), options.seed, _models(options))
    jobs = [
        PoolJob(f"j{o.job.number}", model, workers_of(o.job.spec.gpus), o.start_s, o.end_s)
        for o, model in zip(outcomes, drawn, strict=True)
    ]
    return sorted(jobs, key=lambda job: (job.start_s, job.id))


def simulate_pool(
    options: Options,
    report: Path | None = None,
    as_json: bool = False,
    processes: int = 0,
    progress: bool = True,
) -> list[Reported]:
    """Run every policy on the same jobs; write the report, print nothing."""
    for name in options.policies:
        load_policy(name)  # Refused before anything is simulated.
    settings = {name: settings_for(options, name) for name in options.policies}
    plain = msgspec.structs.replace(options, settings=())  # They are the pool's, see above.
    prepared = prepare(plain, options.seed)
    jobs = pool_jobs(options, prepared)
    processes = min(processes or cpu_count() or 1, len(options.policies))
    with bars(options.policies, len(jobs), progress and not as_json) as tick:
        outcomes = _run_all(options, settings, jobs, processes, tick)
    runs: list[Reported] = []
    for outcome in outcomes:
        found = minutes(outcome, jobs)
        limit = settings[outcome.policy].loss_limit
        runs.append((outcome, found, summarize(outcome, jobs, found, limit)))
    if report is not None:
        with writing(report):
            write_report(report, origin(options, prepared), settings, runs)
    return runs


def print_pool(out: Console, runs: Sequence[Reported], as_json: bool, folder: Path | None) -> None:
    summaries = [summary for _, _, summary in runs]
    if as_json:
        out.out(msgspec.json.encode(summaries).decode(), highlight=False)
        return
    out.print(comparison(summaries))
    if folder is not None:
        out.print(f"report: {folder}", highlight=False)


def _run_all(
    options: Options,
    settings: dict[str, PoolSettings],
    jobs: list[PoolJob],
    processes: int,
    tick: Tick | None,
) -> list[PoolOutcome]:
    names = options.policies
    if processes <= 1:
        return [
            PoolRun(
                name, jobs, settings[name], options.seed,
                partial(tick, number) if tick else None,
            ).run()
            for number, name in enumerate(names)
        ]  # fmt: skip
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        futures = [pool.submit(_run_one, name, jobs, settings[name], options.seed)
                   for name in names]  # fmt: skip
        outcomes = []
        for number, future in enumerate(futures):
            outcomes.append(msgspec.msgpack.decode(future.result(), type=PoolOutcome))
            if tick is not None:
                tick(number, len(jobs), max(job.end_s for job in jobs))
    return outcomes


def _run_one(name: str, jobs: list[PoolJob], settings: PoolSettings, seed: int) -> bytes:
    return msgspec.msgpack.encode(PoolRun(name, jobs, settings, seed).run())
