"""The seam between the engine and a job's progress.

The engine knows instants, GPUs and events; how fast a job gets on is the model's business. A model
makes one `JobRun` per job. The engine tells the run where it runs (`resume`), asks when something
happens (`next_s`), and moves it there (`advance`). Everything is lazy: between two changes of its
own allocation or conditions a run is not touched.

    run.resume(now, allocation, conditions)   # GPUs given, taken (NOTHING), or conditions changed
    run.next_s()                              # next instant of its own: completion, or a phase
    run.advance(now)                          # integrate progress up to now (never backwards)
    run.done                                  # after advance(next_s()): is that the end?

A run that changes behaviour by itself (a learning-rate step, an epoch with another noise scale)
returns that instant from `next_s`, is advanced there, and is asked again.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import msgspec

from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.view import Allocation, ClusterView, Policy


class Conditions(msgspec.Struct, frozen=True):
    """Under what conditions a run holds its GPUs."""

    delay_s: float = 0
    """Restart: no progress before now + delay."""
    slowdown: float = 1.0
    """Factor >= 1 on the time of a step: network interference and a bad placement, as the engine
    was told to model them."""
    gpu_speed: float = 1.0
    """Speed of the GPU type relative to the reference."""
    peers: Sequence["JobRun"] = ()
    """The other jobs on the very same GPUs, in order of their numbers."""
    group: str = ""
    """The label under which they share, as the policy chose it."""


class JobRun(Protocol):
    """One job's progress. `work_done` grows to `work_total` in the model's own unit."""

    job: Submission

    @property
    def work_done(self) -> float: ...
    @property
    def work_total(self) -> float: ...
    @property
    def done(self) -> bool: ...
    @property
    def speed(self) -> float:
        """Oracle seconds (see `remaining_s`) worked off per second now; 0 where unknown."""
        ...

    @property
    def useful_gpu_s(self) -> float:
        """GPU-seconds of held time that went into progress so far: efficiency over time."""
        ...

    @property
    def profile(self) -> Any:
        """The part of the job that policies may see (JobView.profile); may be a live object."""
        ...

    def resume(self, now_s: float, allocation: Allocation, conditions: Conditions) -> None: ...
    def advance(self, now_s: float) -> None: ...
    def next_s(self) -> float: ...

    def remaining_s(self) -> float:
        """The oracle: seconds still needed, undisturbed, with the GPUs the job asks for."""
        ...

    def alone_s(self, gpus: int) -> float:
        """Seconds from start to end alone on `gpus` GPUs: for finish-time fairness."""
        ...

    def mark(self) -> None:
        """A checkpoint: progress up to the last `advance` is safe."""
        ...

    def restore(self) -> None:
        """Back to the last `mark` (or the start)."""
        ...


TUNINGS_MAX: Final = 512
"""Tunings that a job keeps, thinned evenly."""


class Tuning(NamedTuple):
    """How a job trains from an instant on (figure 3.11 of Pollux's thesis)."""

    at_s: float
    gpus: int
    batch: int
    """Examples of an iteration over all GPUs and accumulation steps."""
    accumulation: int
    rate_scale: float
    """The factor on the learning rate of the smallest batch."""
    efficiency: float
    """The part that an example teaches of one of the smallest batch."""
    progress: float
    """Part of its work that was done."""


@runtime_checkable
class Tuned(Protocol):
    """A run that tells how it was tuned."""

    @property
    def tunings(self) -> Iterable[Tuning]:
        """Its tunings so far, oldest first, of bounded number."""
        ...


class JobModel(Protocol):
    name: str
    integer_times: bool
    """True: instants are whole seconds, so that GPU-seconds add up exactly."""

    def run(self, job: Submission, cluster: ClusterView) -> JobRun: ...


@runtime_checkable
class FitsPolicy(Protocol):
    """A job model whose jobs do what the policy can make use of: be resized, tune their batch."""

    def adapt(self, jobs: Sequence[Submission], policy: Policy) -> list[Submission]: ...
