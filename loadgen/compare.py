"""Set two reports side by side: figures, their ratios, and times of the same jobs. Pure."""

from collections.abc import Mapping
from math import exp, log
from typing import Final

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.web.report import Result, Results

ALIKE: Final = 0.01
"""Jobs whose times differ by less are neither faster nor slower."""
CHANGED_MAX: Final = 20


class Compared(msgspec.Struct, frozen=True):
    """A figure of two sets. `ratio`: b over a; None where a is 0 or one of them is missing."""

    figure: str
    a: float | None
    b: float | None
    ratio: float | None


class ChangedJob(msgspec.Struct, frozen=True):
    """Seconds from submission to end, and b's over a's."""

    job: str
    a_s: float
    b_s: float
    ratio: float


class Comparison(msgspec.Struct, frozen=True):
    """`mean_ratio`: the geometric mean of b's times over a's, over the jobs that both have; None:
    they have none in common."""

    a: str
    b: str
    figures: tuple[Compared, ...]
    jobs: int
    faster: int
    slower: int
    mean_ratio: float | None
    changed: tuple[ChangedJob, ...]
    """The jobs whose times changed most."""


def chosen(results: Results, name: str, where: str) -> tuple[str, Result]:
    """Return the set of that name; without a name the only one. Raises Rejected."""
    sets = results.sets
    if not name and len(sets) == 1:
        return next(iter(sets.items()))
    if name not in sets:
        those = ", ".join(sets)
        what = f"has no {name!r}" if name else f"has {len(sets)} sets"
        raise Rejected(f"{where} {what}: choose one of {those}")
    return name, sets[name]


def pairs(a: Results, b: Results) -> list[str]:
    """Return the names of the sets that both have, in the order of a."""
    return [name for name in a.sets if name in b.sets]


def compare(a_name: str, a: Result, b_name: str, b: Result) -> Comparison:
    names = [*a.figures, *(name for name in b.figures if name not in a.figures)]
    found = tuple(
        Compared(name, a.figures.get(name), b.figures.get(name), _ratio(a.figures, b.figures, name))
        for name in names
    )
    both = [
        ChangedJob(job, a_s, b.jobs[job], b.jobs[job] / a_s)
        for job, a_s in a.jobs.items()
        if job in b.jobs and a_s > 0 and b.jobs[job] > 0
    ]
    changed = sorted(both, key=lambda each: (-abs(log(each.ratio)), each.job))
    return Comparison(
        a=a_name,
        b=b_name,
        figures=found,
        jobs=len(both),
        faster=sum(each.ratio < 1 - ALIKE for each in both),
        slower=sum(each.ratio > 1 + ALIKE for each in both),
        mean_ratio=exp(sum(log(each.ratio) for each in both) / len(both)) if both else None,
        changed=tuple(changed[:CHANGED_MAX]),
    )


def _ratio(a: Mapping[str, float], b: Mapping[str, float], name: str) -> float | None:
    before, after = a.get(name), b.get(name)
    return None if not before or after is None else after / before
