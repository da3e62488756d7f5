"""The paper's heuristic (pseudocode 1) against the exact optimum of appendix C, on random small
cases: how many aggregators more it takes, and on as many, how much more the worst job loses.

A case is two or three jobs of one to three tasks, iterations from 0.13 to 1.4 s as in the
simulation's table, tasks of 5 to 60 % of an iteration. Jobs come one after another; the optimum
sees all of them at once.

    python benchmarks/assignment_gap.py [--cases 60] [--seed 1]
"""

import argparse
from collections import Counter
from dataclasses import replace
from random import Random

from slackwater.loadgen.simulator.pool.oracle import Job, fewest, least_loss
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.policies.edf import place_by_deadline
from slackwater.services.controller.policies.scheme import Packing, loss, place_tasks
from slackwater.services.controller.policies.view import AggregatorView, ClusterView, JobView

LIMIT = 0.1
ITERATIONS_S = (0.13, 0.25, 0.4, 0.5, 0.65, 0.8, 1.0, 1.4)


def drawn(rng: Random) -> list[Job]:
    jobs = []
    for _ in range(rng.randint(2, 3)):
        iteration_s = rng.choice(ITERATIONS_S)
        slots = [rng.uniform(0.05, 0.6) * iteration_s for _ in range(rng.randint(1, 3))]
        jobs.append(Job(iteration_s, tuple(slots)))
    return jobs


def placed(jobs: list[Job], by_deadline: bool) -> ClusterView:
    """The cluster after the jobs came one by one. By deadline, every layer is the last one."""
    place = place_by_deadline if by_deadline else place_tasks
    cluster = ClusterView((), (), 1.0, 99, LIMIT)
    for index, job in enumerate(jobs):
        count = len(job.slots_s)
        newcomer = JobView(
            JobId(f"j{index}"), 2, job.iteration_s, job.slots_s, (None,) * count,
            positions=(1.0,) * count,
        )  # fmt: skip
        chosen, new = place(cluster, newcomer)
        names = {f"new#{k}": f"a{len(cluster.aggregators) + k}" for k in range(new)}
        homes = tuple(AggregatorId(names.get(chosen[t], chosen[t])) for t in sorted(chosen))
        fresh = tuple(AggregatorView(AggregatorId(name), 1.0) for name in names.values())
        cluster = replace(
            cluster,
            aggregators=cluster.aggregators + fresh,
            jobs=(*cluster.jobs, replace(newcomer, places=homes)),
        )
    return cluster


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--cases", type=int, default=60)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    rng = Random(given.seed)
    more: Counter[int] = Counter()
    ours: Counter[int] = Counter()
    lost_more = []
    for _ in range(given.cases):
        jobs = drawn(rng)
        cluster = placed(jobs, by_deadline=False)
        used = len(cluster.aggregators)
        least, _ = fewest(jobs, LIMIT)
        durations_s = Packing(cluster).durations_s()
        lost = max(loss(j.iteration_s, durations_s[j.id]) for j in cluster.jobs)
        best = least_loss(jobs, used)
        if best is None or best.loss > lost + 1e-6:
            raise SystemExit(f"the heuristic beat the optimum: {jobs}")
        more[used - least] += 1
        lost_more.append(lost - best.loss)
        ours[len(placed(jobs, by_deadline=True).aggregators) - least] += 1
    lost_more.sort()
    print(f"{given.cases} cases, seed {given.seed}")
    for name, counts in (("heuristic", more), ("by deadline", ours)):
        row = ", ".join(f"{gap:+d}: {count}" for gap, count in sorted(counts.items()))
        print(f"{name}, aggregators against the fewest of the cycle: {row}")
    half, last = lost_more[len(lost_more) // 2], lost_more[-1]
    print(f"heuristic, worst loss above the optimum's: median {half:.3f}, most {last:.3f}")


if __name__ == "__main__":
    main()
