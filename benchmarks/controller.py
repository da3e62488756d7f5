"""A controller's core alone, with the master's core and obedient aggregators around it: how long an
event waits for its plan while 500 jobs of 16 buckets run, and what jobs that wait for aggregators
cost.

Events come in open loop (Poisson, 200 a second: windows within the limit, windows beyond it, jobs
that come and go) and a tick each second; the core is one server, so an event's response is its
waiting for the core and its own steps, in CPU time of the thread. The master's and the aggregators'
part is not counted. Goal: 99 of 100 events that lead to a plan have it within 50 ms. Then a pool
that is taken, with jobs that wait for it and without: a tick should cost about the same.

    python benchmarks/controller.py [--policies edf cyclic] [--jobs 500] [--waiting 951]
        [--seconds 20] [--json FILE]
"""

import argparse
import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from figures import Figure, Row, show, this_command, write_json

from slackwater.common.base.effects import Effect, ShellEvent
from slackwater.loadgen.simulator.pool.world import MASTER, World
from slackwater.schemas.base import JobId, Message
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_requests import CancelJob, RegisterJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import Profile
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured
from slackwater.schemas.tensors import TensorSpec
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.core import Controller
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.core import Master

SHARE: Final = 0.1
BUCKETS: Final = 16
TENSORS: Final = tuple(TensorSpec(name=f"t{n}", shape=(262_144,)) for n in range(BUCKETS))
ITERATIONS_S: Final = (0.13, 0.5, 0.8, 0.93, 1.0, 1.4)
DUTIES: Final = (0.1, 0.25, 0.33, 0.5)
EVENTS: Final = {"window": 80, "beyond": 10, "arrive": 5, "exit": 5}
EVENTS_S: Final = 200
PROFILED_AFTER_S: Final = 0.2
PLANNED: Final = ("beyond", "arrive", "exit", "profiled")
GOAL_S: Final = 0.050


class Timed(Controller):
    """Adds up the CPU seconds of its steps."""

    spent_s = 0.0
    longest_s = 0.0

    def step(self, event: ShellEvent, now_s: float) -> list[Effect]:
        begin_s = time.thread_time()
        effects = super().step(event, now_s)
        took_s = time.thread_time() - begin_s
        self.spent_s += took_s
        self.longest_s = max(self.longest_s, took_s)
        return effects


@dataclass
class Bench:
    policy: str
    aggregators: int
    rng: Random = field(default_factory=lambda: Random(2))
    profiles: dict[str, Profile] = field(default_factory=dict)
    responses_s: dict[str, list[float]] = field(default_factory=dict)
    steps_s: dict[str, list[float]] = field(default_factory=dict)
    free_s: float = 0.0
    """The time at which the core has done all that came before."""
    busy_s: float = 0.0
    profiling: bool = True

    def __post_init__(self) -> None:
        self.core = Timed(ControllerConfig(id="c0", policy=self.policy, resync_s=1e9), Random(7))
        master = Master(MasterConfig(aggregators_max=self.aggregators))
        self.world = World(master, {"c0": self.core}, self.aggregators, SHARE, self.hear)

    def hear(self, now_s: float, message: Message) -> None:
        if isinstance(message, JobEvent) and message.fact == "located" and self.profiling:
            self.world.at(now_s + PROFILED_AFTER_S, lambda: self.event("profiled", message.job))

    def event(self, kind: str, job: str = "") -> None:
        """Play everything that follows at this instant."""
        spent_s = self.core.spent_s
        if kind == "tick":
            self.world.tick("c0")
        elif kind == "arrive":
            self.arrive()
        elif kind == "profiled":
            self.profiled(job)
        elif self.profiles:
            self.happen(kind, self.rng.choice(list(self.profiles)))
        self.account(kind, self.core.spent_s - spent_s)

    def account(self, kind: str, spent_s: float) -> None:
        now_s = self.world.now_s
        self.free_s = max(self.free_s, now_s) + spent_s
        self.busy_s += spent_s
        self.responses_s.setdefault(kind, []).append(self.free_s - now_s)
        self.steps_s.setdefault(kind, []).append(spent_s)

    def arrive(self) -> None:
        id = f"j{len(self.responses_s.get('arrive', ())):05d}-{self.rng.randrange(10**6)}"
        iteration_s, duty = self.rng.choice(ITERATIONS_S), self.rng.choice(DUTIES)
        cpu_s = (iteration_s * duty * SHARE / BUCKETS,) * BUCKETS
        self.profiles[id] = Profile(iteration_s=iteration_s, task_cpu_s=cpu_s, iterations=5)
        spec = JobSpec(id=id, servers=2, workers=2, fractional_share=True)
        self.world.command(MASTER, RegisterJob(job=id, rank=0, tensors=TENSORS, spec=spec))

    def profiled(self, id: str) -> None:
        known = self.core.state.jobs.get(JobId(id))
        if known is not None and id in self.profiles:
            epoch, profile = known.location_epoch, self.profiles[id]
            self.world.fact("c0", JobProfiled(job=known.id, location_epoch=epoch, profile=profile))

    def happen(self, kind: str, id: str) -> None:
        if kind == "exit":
            del self.profiles[id]
            self.world.command(MASTER, CancelJob(job=id))
            return
        known = self.core.state.jobs.get(JobId(id))
        if known is None:
            return
        window = WindowMeasured(
            job=known.id,
            location_epoch=known.location_epoch,
            last_iteration=100,
            iterations=20,
            iteration_s=self.profiles[id].iteration_s * (1.0 if kind == "window" else 1.2),
        )
        for _ in range(1 if kind == "window" else 2):  # The second confirms the first.
            self.world.fact("c0", window)

    def play(self, until_s: float) -> None:
        """Play the planned events; arriving copies count as work of the core, too."""
        while self.world.next_s() <= until_s:
            before_s, busy_s = self.core.spent_s, self.busy_s
            self.world.run_next()
            rest_s = (self.core.spent_s - before_s) - (self.busy_s - busy_s)
            self.free_s = max(self.free_s, self.world.now_s) + rest_s
            self.busy_s += rest_s

    def plan(self, begin_s: float, seconds: float, events: dict[str, int], rate: float) -> float:
        at_s = begin_s
        for n in range(int(seconds) + 1):
            self.world.at(begin_s + n, lambda: self.event("tick"))
        while (at_s := at_s + self.rng.expovariate(rate)) < begin_s + seconds:
            kind = self.rng.choices(list(events), list(events.values()))[0]
            self.world.at(at_s, lambda kind=kind: self.event(kind))  # type: ignore[misc]
        self.play(begin_s + seconds)
        return begin_s + seconds

    def forget(self) -> None:
        self.responses_s.clear()
        self.steps_s.clear()
        self.busy_s, self.free_s = 0.0, self.world.now_s


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] * 1e3


def churn(policy: str, jobs: int, seconds: float) -> list[Row]:
    bench = Bench(policy, 1000)
    now_s = bench.plan(1.0, jobs / 20, {"arrive": 1}, 20.0)
    while len(bench.profiles) < jobs:
        bench.arrive()
    now_s = bench.plan(now_s + 5.0, 5.0, {"window": 1}, 1.0)
    bench.forget()
    bench.plan(now_s + 1.0, seconds, EVENTS, EVENTS_S)
    planned = [each for kind in PLANNED for each in bench.responses_s.get(kind, [])]
    what = f"{policy}, {jobs} jobs, {EVENTS_S} events/s"
    return [
        Figure(f"{what}: event to plan, p99", quantile(planned, 0.99), GOAL_S * 1e3, "ms",
               "the goal", 1.0, True),
        Figure(f"{what}: the core's thread, busy", 100 * bench.busy_s / seconds, 100.0, "%",
               "one thread"),
        Figure(f"{what}: tick, p99", quantile(bench.steps_s["tick"], 0.99),
               quantile(bench.steps_s["tick"], 0.5), "ms", "its median"),
    ]  # fmt: skip


def waiting(policy: str, count: int) -> list[Row]:
    """Let jobs occupy every aggregator for a profiling that does not end; then submit others."""
    seen = []
    for more in (0, count):
        bench = Bench(policy, 100)
        bench.profiling = False
        bench.plan(1.0, 2.0, {"window": 1}, 1.0)
        for _ in range(50 + more):
            bench.arrive()
        bench.forget()
        bench.core.longest_s = 0.0
        bench.plan(4.0, 50.0, {"window": 1}, 1.0)
        waits = sum(job.record.phase == "waiting" for job in bench.core.state.jobs.values())
        seen.append((waits, quantile(bench.steps_s["tick"], 0.5), bench.core.longest_s * 1e3))
    (few, few_ms, few_longest_ms), (many, many_ms, many_longest_ms) = seen
    return [
        Figure(f"{policy}, {many} jobs wait: tick, median", many_ms, few_ms, "ms",
               f"{few} wait", None, True),
        Figure(f"{policy}, {many} jobs wait: longest step", many_longest_ms, few_longest_ms, "ms",
               f"{few} wait", None, True),
    ]  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--policies", nargs="+", default=["edf", "cyclic"])
    options.add_argument("--jobs", type=int, default=500)
    options.add_argument("--waiting", type=int, default=951)
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    gc.freeze()  # Services do it, too: no step pays for a look at all modules.
    rows: list[Row] = []
    for policy in given.policies:
        rows += [*churn(policy, given.jobs, given.seconds), *waiting(policy, given.waiting)]
    show("a controller's core", rows)
    if given.json is not None:
        write_json(given.json, this_command(), rows, "CPU time of the thread.")


if __name__ == "__main__":
    main()
