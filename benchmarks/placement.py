"""Measure the placement of one BERT-sized job (393 tensors, each a task of its own): the scheme as
it is built, beside the scheme as it is printed, which looks at every aggregator for every task.

`clusters` of equal size share the aggregators; the master chooses one by free CPU, its controller
places the job there. Aggregators are alike, with residents of several models on each. Both give the
same placement, and the programme stops if they do not. `placed`: since the last job was placed one
resident of fifty has changed, the others are known. `cold`: the first after a controller's start,
when nothing of any resident is reckoned yet. Goal: under 20 ms among 1,000 aggregators, in one
cluster and in 10.

    python benchmarks/placement.py [--rounds 9] [--policies cyclic edf] [--json FILE]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from figures import Figure, Row, show, this_command, write_json

from slackwater.loadgen.models import parameters, tensors
from slackwater.schemas.base import AggregatorId, ClusterId, JobId
from slackwater.services.controller.policies import load_policy
from slackwater.services.controller.policies.scheme import Packing, place_tasks
from slackwater.services.controller.policies.view import NEW, AggregatorView, ClusterView, JobView
from slackwater.services.master.clusters import ClusterRoom, best_fit

CPU_S_PER_BYTE = 0.9e-9
GOAL_S = 0.020
RESIDENTS = (("vgg19", 1.2), ("resnet50", 0.6), ("bert-large", 1.2), ("googlenet", 0.4))
SIZES = ((10, 1), (100, 1), (1000, 1), (10, 10), (100, 10), (1000, 10))


def subject(model: str, name: str, iteration_s: float, places: list[str | None]) -> JobView:
    """A job of the model, its tasks dealt over `places`."""
    costs_s = tuple(4 * parameters((spec,)) * CPU_S_PER_BYTE for spec in tensors(model))
    return JobView(
        id=JobId(name),
        servers=2,
        iteration_s=iteration_s,
        task_cpu_s=costs_s,
        places=tuple(
            None if place is None else AggregatorId(place)
            for place in (places[t % len(places)] for t in range(len(costs_s)))
        ),
    )


def cluster(aggregators: int) -> ClusterView:
    """Pairs of aggregators share a job, so that a cycle that changes concerns a neighbour too."""
    ids = [f"a{n:04d}" for n in range(aggregators)]
    jobs = []
    for n in range(aggregators):
        model, iteration_s = RESIDENTS[n % len(RESIDENTS)]
        jobs.append(subject(model, f"j{n:04d}", iteration_s, [ids[n], ids[(n + 4) % aggregators]]))
    return ClusterView(
        aggregators=tuple(AggregatorView(AggregatorId(id), 1.0) for id in ids),
        jobs=tuple(jobs),
        new_share=1.0,
        new_max=1024,
        loss_limit=0.1,
    )


def as_printed(view: ClusterView, job: JobView) -> dict[int, str]:
    """Pseudocode 1 line by line: every aggregator is estimated for every task."""
    packing = Packing(view)
    names = {a.id: a.cpu_share for a in view.aggregators}
    placed: dict[int, str] = {}
    for bucket in sorted(range(len(job.places)), key=lambda b: (-job.task_cpu_s[b], b)):
        cpu_s = job.task_cpu_s[bucket]
        best, best_free_s = "", float("inf")
        for name, cpu_share in names.items():
            estimate = packing.estimate(name, job.id, job.iteration_s)
            needed_s = estimate.executions * cpu_s / cpu_share * (1.0 - 1e-9)
            if packing.qualifies(estimate) and needed_s <= estimate.free_s < best_free_s:
                best, best_free_s = name, estimate.free_s
        if not best:
            best = f"{NEW}{sum(name.startswith(NEW) for name in names)}"
            names[AggregatorId(best)] = view.new_share
            packing.add(AggregatorView(AggregatorId(best), view.new_share))
        packing.assign(job.id, job.iteration_s, cpu_s, best)
        placed[bucket] = best
    return placed


CHANGED_OF: Final = 50


def seconds(
    work: Callable[[ClusterView], object], view: ClusterView, rounds: int, every: int = 1
) -> float:
    """Return the median of CPU seconds, since nothing here waits for anything and the machine may
    be busy; in every round one of `every` job views has not been reckoned on yet."""
    took = []
    for turn in range(rounds):
        jobs = enumerate(view.jobs, turn)
        fresh = replace(view, jobs=tuple(j if n % every else replace(j) for n, j in jobs))
        begin = time.thread_time()
        work(fresh)
        took.append(time.thread_time() - begin)
    return statistics.median(took)


def measure(name: str, rounds: int) -> list[Row]:
    policy, job = load_policy(name), subject("bert-large", "new", 1.2, [None])
    rows: list[Row] = []
    for aggregators, clusters in SIZES:
        view = cluster(aggregators // clusters)
        rooms = [ClusterRoom(ClusterId(f"c{n}"), 10.0 + n) for n in range(clusters)]

        def place(fresh: ClusterView, rooms: list[ClusterRoom] = rooms) -> None:
            best_fit(rooms, 1.0)
            policy.assign(fresh, job, None)

        cold_ms = seconds(place, view, rounds) * 1e3
        place(view)
        took_ms = seconds(place, view, rounds, CHANGED_OF) * 1e3
        if place_tasks(view, job)[0] != as_printed(view, job):
            raise SystemExit(f"{aggregators} aggregators: the two schemes differ")
        slow_ms = seconds(lambda fresh: as_printed(fresh, job), view, 1) * 1e3
        what = f"{name}, {len(job.places)} tensors, {aggregators} aggregators in {clusters}"
        if aggregators == SIZES[-1][0]:
            goal = (GOAL_S * 1e3, "ms", "the goal", 1.0, True)
            rows += [Figure(what, took_ms, *goal), Figure(f"{what}, cold", cold_ms, *goal)]
        rows.append(Figure(what, took_ms, slow_ms, "ms", "as printed", None, True))
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--policies", nargs="+", default=["cyclic", "edf"])
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    rows = [row for name in given.policies for row in measure(name, given.rounds)]
    show("placement", rows)
    if given.json is not None:
        write_json(given.json, this_command(), rows, "CPU time of the thread.")


if __name__ == "__main__":
    main()
