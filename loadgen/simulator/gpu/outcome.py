"""Settings of a simulated world, and the outcome of a run: the engine's input and output."""

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

import msgspec

from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.interference import Slowdowns
from slackwater.loadgen.simulator.gpu.jobmodels.base import Tuning
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.view import Allocation, JobView, Pending, Rules


class Costs(msgspec.Struct, frozen=True):
    """Costs of giving a job GPUs, in seconds without progress."""

    start_s: float = 0
    """At its first start."""
    restart_s: float = 0
    """At every later one, and at every change of its allocation."""
    restart_by_model_s: dict[str, float] = msgspec.field(default_factory=dict)
    stop_s: float = 0
    """Until a job that was paused or resized has saved and left: whoever is given its GPUs waits so
    long, and so does the job itself."""

    def known_s(self, model: str) -> float | None:
        """Return the seconds that a restart of that model costs; None where nothing was said of
        it: policies are told what is measured of each job then."""
        return self.restart_by_model_s.get(model, self.restart_s or None)

    def told_s(self, model: str) -> float | None:
        """Return the re-allocation delay that policies are told: a job saves, and starts again."""
        known_s = self.known_s(model)
        return known_s if known_s is None else known_s + self.stop_s


class Scaling(msgspec.Struct, frozen=True):
    """The cluster may grow and shrink between bounds, as the policy's `desired_nodes` says."""

    nodes_min: int
    nodes_max: int
    provision_s: float = 0


class Settings(msgspec.Struct, frozen=True):
    """Everything about the simulated world that is neither its jobs nor its machines."""

    rules: Rules = Rules()
    costs: Costs = Costs()
    slowdowns: Slowdowns = Slowdowns()
    failures: Failures = Failures()
    scaling: Scaling | None = None
    may_wait_for_ever: bool = False
    """Let jobs that nothing ever starts end at inf; else they are an error."""
    ask_why_s: tuple[float, ...] = ()
    """At the first decision from each of these instants on, every pending job's reason is noted."""


DEFAULT_SETTINGS = Settings()


class Begun(NamedTuple):
    """A simulation that goes on from a cluster at work."""

    at_s: float
    """Jobs that were submitted before arrive then, all at once."""
    jobs: Mapping[str, JobView]
    """Job -> its attained service and the GPUs that it holds."""


class Segment(NamedTuple):
    """One stretch of a job holding one allocation: what the auditor re-checks."""

    number: int
    start_s: float
    end_s: float
    ready_s: float
    allocation: Allocation
    group: str
    work_before: float
    work_after: float
    """Without what was lost at the end."""
    useful_gpu_s: float
    why: str
    """How it ended: `completed`, `preempted`, `resized`, `regrouped` or `node-lost`."""


class Outcome(msgspec.Struct):
    """The outcome of a job."""

    job: Submission
    start_s: float = inf
    end_s: float = inf
    run_s: float = 0
    gpu_s: float = 0
    preemptions: int = 0
    restarts: int = 0
    failures: int = 0
    wasted_gpu_s: float = 0
    """Restart time and lost work, in GPU-seconds held."""
    alone_s: float = 0
    work_total: float = 0
    tunings: tuple[Tuning, ...] = ()
    """How it was tuned over time, where its model says."""


class Result(msgspec.Struct):
    """A finished run."""

    outcomes: list[Outcome]
    segments: list[Segment]
    end_s: float
    capacity_gpu_s: float
    """GPUs that were up, times seconds, from the first submission to the end."""
    decisions: int
    events: int
    outages: list[tuple[int, float, float]]
    """(node, from, until); until inf where it was still down at the end."""
    pending_reasons: list[tuple[float, Pending]]
