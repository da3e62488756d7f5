"""Speed of the performance models on one core, against the obvious way of computing the same.

    python benchmarks/models.py

Goals: hybrid MVA for 100 workers in 5 ms; Harmony's scheduling of 8,000 jobs onto 10,000 machines
in 5 s (the paper's own figure). The peers are the same algorithms in their textbook form: a table
of every station and population for MVA; for Harmony, a job list searched from its head for the
next job that fits and every number of groups tried, on a hundredth of the jobs (its time grows with
their square or faster, so the ratio at full size is larger still).
"""

from random import Random
from time import perf_counter

from figures import Figure, interleaved, show

from slackwater.common.domains.models.cost import Machine, Training
from slackwater.common.domains.models.cost_programme import different_optimum
from slackwater.common.domains.models.group import Subtasks
from slackwater.common.domains.models.queueing import StepTimes, throughputs
from slackwater.services.master.scheduling.policies.harmony_grouping import (
    Jobs,
    group_count,
    schedule,
)

MB_8 = StepTimes(0.029, 0.018, 0.072, 0.072)
WORKERS, MVA_GOAL_S = 100, 0.005
JOBS, MACHINES, HARMONY_GOAL_S = 8_000, 10_000, 5.0
ROUNDS = 5


def elapsed_s(work: object) -> float:
    began_s = perf_counter()
    work()  # type: ignore[operator]
    return perf_counter() - began_s


def textbook_hybrid(step: StepTimes, workers: int) -> float:
    """Eq. 3 with a class per worker and no use of their being alike: sums over all classes."""
    service = {"U": step.uplink_s, "S": step.server_s, "D": step.downlink_s}
    tasks = {place: [0.0] * workers for place in service}
    busy = {place: [0.0] * workers for place in service}
    rate = 0.0
    for n in range(1, workers + 1):
        response = {}
        for place, time_s in service.items():
            shared = time_s * (1 + sum(tasks[place]))
            in_turn = time_s + sum(
                time_s * (t - b / 2) for t, b in zip(tasks[place], busy[place], strict=True)
            )
            used = sum(busy[place])
            gamma = min(max((used - 0.8) / 0.2, 0.0), 1.0) if place != "S" else 1.0
            response[place] = gamma * shared + (1 - gamma) * in_turn
        rate = n / (step.worker_s + sum(response.values()))
        for place, time_s in service.items():
            tasks[place] = [rate * response[place] / n] * n + [0.0] * (workers - n)
            busy[place] = [rate * time_s / n] * n + [0.0] * (workers - n)
    return rate


def random_jobs(count: int) -> list[Subtasks]:
    rng = Random(1)
    return [Subtasks(10 * 12 ** rng.random(), 10 * 12 ** rng.random(), 16) for _ in range(count)]


def textbook_group_counts(jobs: list[Subtasks], machines: int) -> list[int]:
    """n_G of every prefix by trying every number of groups."""
    found = []
    for count in range(2, len(jobs) + 1):
        prefix = jobs[:count]
        options = range(1, min(count, machines) + 1)
        found.append(
            min(
                options,
                key=lambda n: sum(  # type: ignore[misc]
                    abs(job.cpu_on_s(machines / n) - job.network_s) for job in prefix
                ),
            )
        )
    return found


def main() -> None:
    assert abs(textbook_hybrid(MB_8, 6) - throughputs(MB_8, 6, "hybrid")[-1]) < 1e-9
    mva = interleaved(
        {
            "ours": lambda: elapsed_s(lambda: throughputs(MB_8, WORKERS, "hybrid")),
            "textbook": lambda: elapsed_s(lambda: textbook_hybrid(MB_8, WORKERS)),
        },
        20,
    )
    many, few = random_jobs(JOBS), random_jobs(JOBS // 100)
    arrays = Jobs(few)
    ours = [group_count(arrays, n, MACHINES // 100) for n in range(2, len(few) + 1)]
    assert ours == textbook_group_counts(few, MACHINES // 100)
    counts = interleaved(
        {
            "ours": lambda: elapsed_s(
                lambda: [group_count(arrays, n, MACHINES // 100) for n in range(2, len(few) + 1)]
            ),
            "textbook": lambda: elapsed_s(lambda: textbook_group_counts(few, MACHINES // 100)),
        },
        ROUNDS,
    )
    harmony = interleaved({"ours": lambda: elapsed_s(lambda: schedule(many, MACHINES))}, ROUNDS)[
        "ours"
    ]
    cluster = [Machine(6e-4, 1.25e9 / 8)] * 28 + [Machine(2.5e-4, 5e9 / 8)] * 4
    nmf = Training(instances=1.9e6, batch=1e4, model_bytes=71e3 * 1e3 * 4)
    programme = elapsed_s(lambda: different_optimum(nmf, cluster))
    show(
        "Performance models, one core",
        [
            Figure(f"hybrid MVA, {WORKERS} workers", mva["ours"] * 1e3, MVA_GOAL_S * 1e3, "ms",
                   "goal", 1.0, True),
            Figure("the same against sums over classes", mva["ours"] * 1e3, mva["textbook"] * 1e3,
                   "ms", "textbook", None, True),
            Figure(f"Harmony, {JOBS} jobs on {MACHINES} machines", harmony, HARMONY_GOAL_S, "s",
                   "published", 1.0, True),
            Figure("n_G of 79 prefixes", counts["ours"] * 1e3, counts["textbook"] * 1e3, "ms",
                   "textbook", None, True),
            Figure("Cruise's programme, 28 + 4 machines", programme, 37.4, "s", "published", 1.0,
                   True),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
