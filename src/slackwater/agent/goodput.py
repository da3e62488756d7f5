"""`slackwater.GoodputReporter`: tells the cluster how well a job trains, for the policy Pollux.

    limits = BatchLimits(initial=128, total_max=4096, per_gpu_max=512)
    with GoodputReporter(limits, state=checkpoints / "goodput") as goodput:
        for batch in batches:
            per_gpu, accumulation = goodput.batch_split()
            ...                                     # train an iteration, however it synchronises
            goodput.saw_iteration(iteration_s, per_gpu, accumulation)
            goodput.saw_replicas(small_sqr, large_sqr, batch_small, batch_large)

Every rank may have one. That of rank 0 reports, from a thread of its own, every `report_s` and a
little before the cluster's next round; reporting re-tunes the batch (Qiao, thesis, section 3.4.1).
The thread alone touches the Pollux agent, so that a fit never holds training up. Ranks that measure
for themselves may come to different splits: take rank 0's for all.

A job that is given other GPUs begins in new processes. `state` names a file in its checkpoint, in
which rank 0 keeps what it has learned. Reports are measurements: while the bus is away they are
lost, and training goes on.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from slackwater.agent import sharing
from slackwater.agent.client import Agent
from slackwater.agent.goodput_report import (
    GPUS,
    REPORT_S,
    ReportThread,
    check_period,
    reports_to,
)
from slackwater.agent.identity import identify, plainly, write_result
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.access import Credentials
from slackwater.common.domains.models.fitting import Observation
from slackwater.common.domains.models.goodput import BatchLimits
from slackwater.common.domains.models.pollux_agent import (
    BatchSplit,
    Learned,
    PolluxAgent,
    check_iteration,
    check_replicas,
)
from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import BATCH_VARIABLE
from slackwater.schemas.telemetry import GoodputReport

ATTEMPT: Final = "SLACKWATER_ATTEMPT"
SEEN_MAX: Final = 4096
"""Iterations between two reports; beyond it the oldest are not learned from."""
STATE_BYTES_MAX: Final = 1 << 20


class Placement(NamedTuple):
    """The GPUs of the job's present attempt."""

    attempt: int
    nodes: int
    gpus: int


class GoodputReporter:
    """Learns how one job trains, tunes its batch, and reports. What is not given is taken from the
    environment, where the worker service puts it. Without a job to which the cluster gives GPUs it
    reports to nobody."""

    def __init__(
        self,
        limits: BatchLimits,
        *,
        state: Path | str | None = None,
        report_s: float = REPORT_S,
        lr_rule: str = "adascale",
        agent: Agent | None = None,
        job: str | None = None,
        rank: int | None = None,
        workers: int | None = None,
        url: str | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`limits`: of the batch; with `fixed` it stays as it is. `report_s`: seconds between two
        reports. `lr_rule`: how `learning_rate_scale` reckons. `agent`: the one that synchronises
        the program's iterations, through shared aggregators; without it they count as all-reduced.

        Raises Rejected for an environment that cannot be understood, or a `state` that is damaged;
        ConfigRejected for a rule that nobody offers.
        """
        check_period(report_s)
        self.job, self.rank, self.workers, _ = identify(job, rank, workers, url)
        self.placement = placement_of(os.environ, self.workers)
        told = reports_to(self.job, self.rank, url, credentials)
        limits = fixed_by(os.environ, limits)
        through = sharing.carried(agent) if agent is not None else None
        self._agent = PolluxAgent(limits, carried=through, lr_rule=lr_rule)
        self._synchronises = agent
        self._state = Path(state) if state is not None else None
        if self._state is not None and self._state.exists():
            self._agent.recall(_read(self._state))
            self._agent.refit()
        self._split = self._tuned()
        self._progress: tuple[float | None, float | None] = None, None
        self._seen: deque[Callable[[], object]] = deque(maxlen=SEEN_MAX)
        self._scale = threading.Lock()
        """Held while gradients are added, or the rate is scaled by them."""
        self._thread = ReportThread(self.job, self.rank, told, report_s, self._learn)

    # The program's side ---------------------------------------------------------------------------

    def batch_split(self) -> BatchSplit:
        """(examples a GPU, accumulation steps) of the next iteration, as of the last report."""
        self._check()
        return self._split

    def saw_iteration(
        self, iteration_s: float, per_gpu: int, accumulation: int = 0, grad_s: float = 0.0
    ) -> None:
        """An iteration of this batch split took so long; `grad_s`: one forward and backward pass of
        it, where it was measured. Raises Rejected for a time that cannot be."""
        self._check()
        _, nodes, gpus = self.placement
        by = self._synchronises
        through = sharing.aggregators(by) if by is not None else 0
        seen = Observation(nodes, gpus, per_gpu, accumulation, iteration_s, grad_s, through)
        check_iteration(seen)
        self._seen.append(lambda: self._agent.saw_iteration(seen))

    def saw_replicas(
        self, small_sqr: float, large_sqr: float, batch_small: float, batch_large: float
    ) -> None:
        """Tell how noisy the gradients of one iteration were; see `PolluxAgent.saw_replicas`.
        Raises Rejected for a single gradient."""
        self._check()
        check_replicas(batch_small, batch_large)
        self._seen.append(
            lambda: self._agent.saw_replicas(small_sqr, large_sqr, batch_small, batch_large)
        )

    def saw_difference(self, mean_sqr: float, difference_sqr: float, batch: float) -> None:
        """Tell how noisy single gradients are; see `PolluxAgent.saw_difference`."""
        self._check()
        self._seen.append(lambda: self._agent.saw_difference(mean_sqr, difference_sqr, batch))

    def saw_progress(self, epochs: float, target: float | None = None) -> None:
        """Tell how far training is, in statistical epochs: examples by their efficiency, over the
        data set; `target`: how many it trains for. People are shown progress and ETA by it."""
        self._check()
        self._progress = epochs, target

    def learning_rate_scale(self, batch: float, epoch: float = float("inf")) -> float:
        """Return the factor on the learning rate of the smallest batch, for one of `batch`."""
        with self._scale:
            return self._agent.learning_rate_scale(batch, epoch)

    def close(self) -> None:
        """Send the last report, and end. Idempotent."""
        self._thread.close()

    @property
    def reports(self) -> int:
        """Reports that were sent."""
        return self._thread.reports

    def _check(self) -> None:
        self._thread.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread -----------------------------------------------------------------------------------

    def _learn(self) -> GoodputReport | None:
        agent = self._agent
        with self._scale:
            while self._seen:
                self._seen.popleft()()
        if agent.refit():
            self._split = self._tuned()
            if self._state is not None and self.rank == 0:
                self._state.parent.mkdir(parents=True, exist_ok=True)
                write_result(self._state, msgspec.json.encode(agent.learned()).decode())
        if agent.model is None:
            return None
        epochs, target = self._progress
        (per_gpu, steps), gpus = self._split, self.placement.gpus
        return msgspec.structs.replace(
            agent.report(JobId(self.job), self.placement.attempt),
            per_gpu=per_gpu,
            accumulation=steps,
            rate_scale=agent.learning_rate_scale(gpus * per_gpu * (steps + 1)),
            progress_epochs=epochs,
            target_epochs=target,
        )

    def _tuned(self) -> BatchSplit:
        return self._agent.batch_split(self.placement.nodes, self.placement.gpus)


def placement_of(environment: "os._Environ[str] | dict[str, str]", workers: int) -> Placement:
    """Read what the worker service says of the job's GPUs; where it says nothing, each worker has
    one, and all are on one machine. Raises Rejected."""
    attempt, held = environment.get(ATTEMPT, "0"), environment.get(GPUS, "")
    try:
        parts = [int(part.rpartition(":")[2]) for part in held.split(",") if part]
        found = Placement(int(attempt), max(1, len(parts)), sum(parts) if parts else workers)
    except ValueError:
        raise plainly(
            f"{ATTEMPT} is {attempt!r} and {GPUS} {held!r}; the worker service sets them to a "
            "whole number and to NODE:GPUS,...; unset both where you start the program yourself"
        ) from None
    return found


def fixed_by(environment: Mapping[str, str], limits: BatchLimits) -> BatchLimits:
    """Fix the batch where the job was submitted so. Raises Rejected."""
    text = environment.get(BATCH_VARIABLE)
    if text is None:
        return limits
    if not text.isdecimal():
        raise plainly(f"{BATCH_VARIABLE} is {text!r}; give examples, or 0 for its first batch")
    return msgspec.structs.replace(limits, fixed=int(text) or limits.fixed or limits.initial)


def _read(path: Path) -> Learned:
    """Raises Rejected."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(STATE_BYTES_MAX), type=Learned)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Rejected(
            f"state {path} is not what a reporter of goodput left ({error}); delete it, and it "
            "learns anew"
        ) from error
