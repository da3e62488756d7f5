"""Placement by deadlines, as it is built and as it is told: looking at every aggregator for every
task, reckoning everything anew. Both give the same plan."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.policies.demand import Demand, Tasks, holds, schedulable
from slackwater.services.controller.policies.edf import place_by_deadline
from slackwater.services.controller.policies.view import (
    AggregatorView,
    ClusterView,
    JobView,
    loss_limit,
)


class Slow:
    """The text of edf.py, line by line."""

    def __init__(self, view: ClusterView, job: JobView, looks: int) -> None:
        self.view, self.job, self.looks = view, job, looks
        self.here = {a.id: (a.cpu_share, a.usable) for a in view.aggregators}
        self.chosen: dict[str, list[int]] = {}
        for task, place in enumerate(job.places):
            if place in self.here:
                self.chosen.setdefault(place, []).append(task)

    def residents(self, name: str) -> list[JobView]:
        return [other for other in self.view.jobs if name in other.places and other.iteration_s]

    def tasks(self, job: JobView, name: str) -> Tasks:
        return Tasks(job, self.here[name][0], loss_limit(job, self.view))  # type: ignore[index]

    def free(self, name: str) -> float:
        share, usable = self.here[name]  # type: ignore[index]
        used = 0.0
        for other in self.residents(name):
            cpu_s = 0.0
            for each_s, place in zip(other.task_cpu_s, other.places, strict=True):
                cpu_s += each_s if place == name else 0.0
            used += cpu_s / share / other.iteration_s
        own = self.tasks(self.job, name)
        mask = self.mask(self.chosen.get(name, []))
        mine = float(own.slots_s[mask].sum()) / own.iteration_s
        return usable - used - mine

    def mask(self, tasks: list[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.isin(np.arange(len(self.job.places)), tasks)

    def takes(self, name: str, tasks: list[int]) -> bool:
        own = self.tasks(self.job, name)
        if float(own.slots_s[tasks].sum()) / own.iteration_s > self.free(name) + 1e-9:
            return False
        mask = self.mask([*self.chosen.get(name, []), *tasks])
        parts = [
            (self.tasks(other, name), np.array([place == name for place in other.places]))
            for other in self.residents(name)
        ]
        loads = [each.load(there) for each, there in parts]
        if schedulable((*loads, own.load(mask)), self.here[name][1]):  # type: ignore[index]
            return True
        if not self.looks:
            return False
        self.looks -= 1
        demands = [Demand.of(each, there) for each, there in parts]
        return holds((*demands, Demand.of(own, mask)))

    def place(self) -> tuple[dict[int, str], int]:
        job, names = self.job, sorted(self.here)
        ranks = {name: rank for rank, name in enumerate(names)}
        open_ = [b for b, place in enumerate(job.places) if place is None]
        open_.sort(key=lambda b: (-job.task_cpu_s[b], b))
        welcome: list[str] = [name for name in names if name not in job.excluded]
        for name in sorted(welcome, key=lambda each: (self.free(each), ranks[each])):  # type: ignore[index]
            if self.takes(name, open_):
                return dict.fromkeys(open_, name), 0
        placed: dict[int, str] = {}
        new = 0
        for bucket in open_:
            order = sorted(welcome, key=lambda each: (self.free(each), ranks[each]))  # type: ignore[index]
            found = (n for n in order if self.free(n) > 0.0 and self.takes(n, [bucket]))
            name = next(found, "")
            if not name:
                name = AggregatorId(f"new#{new}")
                new += 1
                self.here[AggregatorId(name)] = (self.view.new_share, 1.0)
                ranks[AggregatorId(name)] = len(ranks)
                welcome.append(name)
            self.chosen.setdefault(name, []).append(bucket)
            placed[bucket] = name
        return placed, new


SHARES = (0.25, 0.5)
NAMES = [f"a{n}" for n in range(6)]


@st.composite
def jobs(draw: st.DrawFn, id: str, placed: bool) -> JobView:
    count = draw(st.integers(1, 6))
    iteration_s = draw(st.sampled_from([0.14, 0.5, 0.93, 1.0]))
    duty = draw(st.sampled_from([0.1, 0.3, 0.6, 1.1]))
    parts = [draw(st.integers(1, 20)) for _ in range(count)]
    cpu_s = tuple(0.25 * duty * iteration_s * part / sum(parts) for part in parts)
    homes = [draw(st.sampled_from(NAMES)) for _ in range(count)]
    kept = placed or draw(st.booleans())
    return JobView(
        id=JobId(id),
        servers=2,
        iteration_s=iteration_s,
        task_cpu_s=cpu_s,
        places=tuple(AggregatorId(home) if kept and (placed or n) else None
                     for n, home in enumerate(homes)),
        excluded=frozenset(draw(st.sets(st.sampled_from(NAMES), max_size=2))),  # type: ignore[arg-type]
        loss_limit=draw(st.sampled_from([0.0, 0.05, 0.3])),
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> tuple[ClusterView, JobView]:
    count = draw(st.integers(0, 5))
    residents = tuple(draw(jobs(f"j{n}", True)) for n in range(count))
    names = sorted(draw(st.sets(st.sampled_from(NAMES), max_size=6)))
    view = ClusterView(
        aggregators=tuple(
            AggregatorView(
                AggregatorId(name),
                draw(st.sampled_from(SHARES)),
                draw(st.sampled_from([0.67, 1.0])),
            )
            for name in names
        ),
        jobs=residents,
        new_share=draw(st.sampled_from(SHARES)),
        new_max=99,
        loss_limit=0.1,
    )
    return view, draw(jobs("new", False))


@settings(max_examples=300, deadline=None)
@given(cases(), st.sampled_from([0, 3]))
def test_the_quick_placement_is_the_obvious_one(
    case: tuple[ClusterView, JobView], looks: int
) -> None:
    view, job = case
    expected = Slow(view, job, looks).place()
    assert place_by_deadline(view, job, looks) == expected
    # Nothing that was reckoned of a view before changes what follows from it.
    assert place_by_deadline(view, job, looks) == expected
    assert place_by_deadline(replace(view, jobs=tuple(map(replace, view.jobs))), job, looks) == (
        expected
    )
