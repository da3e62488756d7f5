"""Tiresias' sensitivity to K, queue limits and PromoteKnob (Gu, dissertation, section 3.5.4).

Figures 3.14 and 3.15 have no numbers; what the text says of them is the goal. Where it says
"almost the same" or "minutely", 5 % is our reading.
"""

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Final

from slackwater.loadgen.reproduce.simulated import Given, Run, simulate
from slackwater.loadgen.reproduce.verdict import TOLERANCE, Row, yes

PHILLY: Final = "philly/philly_gpu_jobs_2017-09_10.csv"
WEEK: Final[Given] = {"start": "2017-10-09", "end": "2017-10-16"}
WORLD: Final[Given] = {"nodes": 1, "gpus_per_node": 432, "overhead": "none", **WEEK}
POLICIES: Final = ("tiresias-las", "tiresias-gittins")
HOUR: Final = 3600
LIMITS: Final = tuple(int(hours * HOUR) for hours in (0.5, 1, 2, 4, 8))
QUEUES: Final = ((HOUR,), (HOUR, 2 * HOUR), (HOUR, 2 * HOUR, 4 * HOUR))
"""K = 2, 3, 4: (2, 1h), (3, 1h, 2h) and (4, 1h, 2h, 4h)."""
KNOBS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, inf)
"""Infinite: nobody is promoted, which is our knob's 0."""
ALIKE: Final = 1 + TOLERANCE


def rows(traces: Path) -> Iterator[Row]:
    """K, thresholds and PromoteKnob (section 3.5.4), the same week and GPUs"""
    trace = str(traces / PHILLY)

    def tiresias(policy: str, limits: tuple[int, ...], knob: float = inf) -> Run:
        settings = [f"{policy}.limits={','.join(map(str, limits))}"]
        if knob < inf:
            settings.append(f"{policy}.promote_knob={knob:g}")
        return simulate(policy, {"trace": trace, "settings": tuple(settings), **WORLD})

    for policy in POLICIES:
        runs = {limit: tiresias(policy, (limit,)) for limit in LIMITS}
        yield from _of_limits(policy, runs)
        yield from _of_queues(policy, {len(q) + 1: tiresias(policy, q) for q in QUEUES})
        yield from _of_knobs(policy, {k: tiresias(policy, (HOUR,), k) for k in KNOBS})
    figures = runs[HOUR].figures
    short = sum(job.gpu_s <= HOUR for job in figures) / len(figures)
    yield Row("jobs of at most one hour of GPU time", "more than 60 % (published)", f"{short:.1%}",
              f"{short / 0.6:.3f}", yes(short > 0.6), runs[HOUR].command)  # fmt: skip


def _of_limits(policy: str, runs: dict[int, Run]) -> Iterator[Row]:
    average_s = {limit: run.summary.avg_jct_s for limit, run in runs.items()}
    if policy == "tiresias-las":
        short = average_s.pop(HOUR // 2) / average_s[HOUR]
        yield Row(f"{policy}, K = 2: average JCT, limit of half an hour over that of an hour",
                  "slightly worse (published): 1 to 1.1", f"{short:.3f}", "-",
                  yes(1 <= short <= 1.1), runs[HOUR // 2].command)  # fmt: skip
    spread = max(average_s.values()) / min(average_s.values())
    limits = ", ".join(f"{limit / HOUR:g}" for limit in average_s)
    yield Row(f"{policy}, K = 2: largest over smallest average JCT, limits of {limits} h",
              "almost the same (published): at most 1.05", f"{spread:.3f}", f"{spread:.3f}",
              yes(spread <= ALIKE), runs[HOUR].command)  # fmt: skip


def _of_queues(policy: str, runs: dict[int, Run]) -> Iterator[Row]:
    for k in (3, 4):
        ours = runs[k].summary.avg_jct_s / runs[2].summary.avg_jct_s
        goal, met = "no significant effect (published): within 5 %", abs(ours - 1) <= TOLERANCE
        if policy == "tiresias-las":
            goal, met = "1 % better (published): 0.98 to 1", 0.98 <= ours <= 1
        yield Row(f"{policy}: average JCT, K = {k} over K = 2", goal, f"{ours:.3f}", "-", yes(met),
                  runs[k].command)  # fmt: skip


def _of_knobs(policy: str, runs: dict[float, Run]) -> Iterator[Row]:
    p95_s = [run.summary.p95_jct_s for run in runs.values()]
    spread = max(p95_s) / min(p95_s)
    knobs = "knobs 1, 2, 4 ... 32, infinite"
    yield Row(f"{policy}, (2, 1h): largest over smallest p95 JCT, {knobs}",
              "minutely changed (published): at most 1.05", f"{spread:.3f}", f"{spread:.3f}",
              yes(spread <= ALIKE), runs[1.0].command)  # fmt: skip
    if policy == "tiresias-gittins":
        one, none = (max(job.jct_s for job in runs[knob].figures) for knob in (1.0, inf))
        yield Row(f"{policy}, (2, 1h): largest JCT, knob 1 over infinite",
                  "cut down (published): below 1", f"{one / none:.3f}", "-", yes(one < none),
                  runs[1.0].command)  # fmt: skip
