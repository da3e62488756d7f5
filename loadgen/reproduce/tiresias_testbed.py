"""Tiresias' testbed workload, simulated (Gu, dissertation, sections 3.5.2 and 3.5.3.1).

The authors replayed it in their own simulator, which charges no overheads and no placement: its
figures have a verdict. The testbed's own have preemptions of 62 s each, placement and a network in
them, and stand beside ours without one.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

from slackwater.loadgen.generate.tiresias import SMALL_GPUS_MAX, TRAINING_S_LONG
from slackwater.loadgen.reproduce.simulated import Run, simulate
from slackwater.loadgen.reproduce.verdict import Better, Row, judged, unlike

SEEDS: Final = 5
LIMIT: Final = 3200
LAS: Final = "tiresias-las"
POLICIES: Final = ("fifo", "srtf", "tiresias-gittins", LAS)
NAMES: Final = {"fifo": "YARN-CS", "srtf": "SRTF", "tiresias-gittins": "Tiresias-G"}

SIMULATED: Final[dict[str, tuple[float, float, Better]]] = {
    "fifo": (5.11, 1.50, "more"), "srtf": (0.74, 0.55, "more"),
    "tiresias-gittins": (1.01, 1.13, "more"),
}  # fmt: skip
"""Average and p95 JCT over Tiresias-L's in the authors' simulator, and what is better for it."""
TESTBED_JCT: Final = {"fifo": (5.5, 27.0), "tiresias-gittins": (1.06, 1.05)}
"""Average and median JCT over Tiresias-L's."""
MAKESPAN_S: Final = {"fifo": 33_270, "srtf": 28_070, "tiresias-gittins": 27_510, LAS: 27_400}
QUEUEING_S: Final = {
    "fifo": (8146, 7464, 15_327), "srtf": (593, 32, 3133), "tiresias-gittins": (1005, 39, 7933),
    LAS: (963, 13, 7755),
}  # fmt: skip
"""Table 3.5: average, median and p95 of DDL jobs."""
PREEMPTIONS: Final = {"srtf": 316, "tiresias-gittins": 297, LAS: 221}
SHORT_SMALL: Final = {"fifo": 27.6}
"""Average JCT of bin SS over Tiresias-L's, which is 300 s."""
WHY: Final = "their testbed, our simulation"


def rows(_traces: Path) -> Iterator[Row]:
    """The testbed's 480 jobs on 15 machines of 4 GPUs (sections 3.5.2 and 3.5.3.1), five seeds"""
    runs = {policy: [_run(policy, seed) for seed in range(SEEDS)] for policy in POLICIES}
    commands = {policy: found[0].command for policy, found in runs.items()}

    def over(policy: str, field: str) -> float:
        return fmean(
            getattr(one.summary, field) / getattr(las.summary, field)
            for one, las in zip(runs[policy], runs[LAS], strict=True)
        )

    def average(policy: str, figure: Callable[[Run], float]) -> float:
        return fmean(figure(found) for found in runs[policy])

    for policy, (mean, p95, better) in SIMULATED.items():
        for name, published, field in (
            ("average", mean, "avg_jct_s"), ("p95", p95, "p95_jct_s"),
        ):  # fmt: skip
            yield judged(f"{policy} / {LAS}, {name} JCT, their simulator", published,
                         over(policy, field), better, commands[policy])  # fmt: skip
    for policy, (mean, median) in TESTBED_JCT.items():
        ours = f"{over(policy, 'avg_jct_s'):.2f}, {over(policy, 'median_jct_s'):.2f}"
        yield unlike(f"{policy} / {LAS}, average and median JCT", f"{mean:g}, {median:g}", ours,
                     WHY, commands[policy])  # fmt: skip
    for policy, seconds in MAKESPAN_S.items():
        found = average(policy, lambda run: run.summary.makespan_s)
        yield unlike(f"{policy}, makespan (s)", f"{seconds:,}", f"{found:,.0f}", WHY,
                     commands[policy])  # fmt: skip
    for policy, delays_s in QUEUEING_S.items():
        parts = (average(policy, partial(_delay_s, part=part)) for part in _PARTS)
        yield unlike(f"{policy}, queueing of jobs on several GPUs: average, median, p95 (s)",
                     ", ".join(f"{s:,}" for s in delays_s), ", ".join(f"{s:,.0f}" for s in parts),
                     WHY, commands[policy])  # fmt: skip
    for policy, count in PREEMPTIONS.items():
        found = average(policy, lambda run: run.summary.preemptions)
        yield unlike(f"{policy}, preemptions", f"{count}", f"{found:.0f}", WHY, commands[policy])
    las_s = average(LAS, _short_small_s)
    yield unlike(f"{LAS}, average JCT of small short jobs (s)", "300", f"{las_s:.0f}", WHY,
                 commands[LAS])  # fmt: skip
    for policy, times in SHORT_SMALL.items():
        found = average(policy, _short_small_s) / las_s
        yield unlike(f"{policy} / {LAS}, average JCT of small short jobs", f"{times}",
                     f"{found:.1f}", WHY, commands[policy])  # fmt: skip


def _run(policy: str, seed: int) -> Run:
    settings = (f"{policy}.limits={LIMIT}",) if policy in (LAS, "tiresias-gittins") else ()
    return simulate(
        policy,
        {
            "seed": seed, "trace": "generate:tiresias", "nodes": 15, "gpus_per_node": 4,
            "overhead": "none", "settings": settings,
        },
    )  # fmt: skip


_PARTS: Final = (None, 0.5, 0.95)


def _delay_s(run: Run, part: float | None) -> float:
    """Average queueing of the jobs on several GPUs, or that quantile."""
    delays_s = sorted(job.queueing_s for job in run.figures if job.gpus > 1)
    return fmean(delays_s) if part is None else delays_s[int(part * len(delays_s))]


def _short_small_s(run: Run) -> float:
    """Average JCT of bin SS of table 3.4, scaled down: 4 GPUs and 800 s."""
    return fmean(
        job.jct_s
        for job in run.figures
        if job.gpus <= SMALL_GPUS_MAX and job.run_s < TRAINING_S_LONG
    )
