"""Compute what sharing costs the jobs, and the monitor windows that tell their controllers.

Live, the profiler measures windows of iterations and the controller undoes what slows a job
(services/controller/feedback.py). Here that same code gets windows of simulated iterations, whose
duration is either what the policy itself expects (d_j against D_j; by deadlines the most that a job
can lose, whatever the phases) or what the placement shows when it is played out slot by slot
(slots.py). Only jobs beyond their limit, and those that wait to be moved for it, are watched: what
any other window says changes nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from slackwater.loadgen.simulator.pool.profiles import SERVER_CORES, PoolJob, cost
from slackwater.loadgen.simulator.pool.slots import SlotJob, SlotTask, losses
from slackwater.schemas.base import ClusterId, JobId
from slackwater.schemas.placement import Profile
from slackwater.schemas.telemetry import WindowMeasured
from slackwater.services.controller import slot_plans
from slackwater.services.controller.core import Controller
from slackwater.services.controller.policies.demand import slack_s
from slackwater.services.controller.snapshot import cluster_view
from slackwater.services.controller.state import Job

PLAYED_S: Final = 20.0
SETTLED_S: Final = 1.0
"""Seconds after a change until all that depends on it has changed, too."""
SAID_S: Final = 1.0
"""From a window's last iteration until its report has come."""

Mode = Literal["none", "scheme", "slots"]
At = Callable[[float, Callable[[], None]], None]
Say = Callable[[str, WindowMeasured], None]


@dataclass(slots=True)
class LossRecord:
    """The loss of one job so far."""

    loss: float = 0.0
    since_s: float = 0.0
    lost_s: float = 0.0
    """The sum of the job's losses, each times the seconds that it lasted."""
    worst: float = 0.0
    beyond_s: float = -1.0
    """Since when it is beyond its limit; -1: it is not."""
    beyond_longest_s: float = 0.0
    """The longest that it was, under one placement of its neighbourhood or several."""

    def note(self, loss: float, limit: float, now_s: float) -> None:
        self.lost_s += self.loss * (now_s - self.since_s)
        if self.beyond_s >= 0.0:
            self.beyond_longest_s = max(self.beyond_longest_s, now_s - self.beyond_s)
        self.loss, self.since_s, self.worst = loss, now_s, max(self.worst, loss)
        if loss <= limit:
            self.beyond_s = -1.0
        elif self.beyond_s < 0.0:
            self.beyond_s = now_s


class Feedback:
    """`at` plans a call, `say` gives a window to a controller; `changed` is told of every cluster
    in which a placement changed, `settle` is called after each event of the simulation."""

    def __init__(
        self,
        mode: Mode,
        controllers: Mapping[str, Controller],
        jobs: Mapping[JobId, PoolJob],
        loss_limit: float,
        window_iterations: int,
        at: At,
        say: Say,
    ) -> None:
        self._mode: Mode = mode
        self._controllers, self._jobs = controllers, jobs
        self._limit = loss_limit
        self._window_iterations = window_iterations
        self._at, self._say = at, say
        self.felt: dict[JobId, LossRecord] = {}
        self.slow: dict[JobId, float] = {}
        """Jobs whose own machines are slow just now: how many times longer an iteration lasts."""
        self._changed: set[str] = set()
        self._looking: dict[str, float] = {}
        self._watched: set[JobId] = set()
        self._played: dict[tuple[tuple[JobId, int], ...], dict[str, float]] = {}
        """The losses last played, by the jobs that share and where; kept while they share."""

    def changed(self, cluster: ClusterId | None) -> None:
        self._changed.add(str(cluster))

    def settle(self, now_s: float) -> None:
        while self._changed:
            cluster = self._changed.pop()
            if self._mode == "slots":
                self._look_later(cluster, now_s)
            else:
                self._note(cluster, self._reckoned(cluster), now_s)

    def ended(self, job: JobId, now_s: float) -> None:
        felt = self.felt.setdefault(job, LossRecord(since_s=now_s))
        felt.note(0.0, self._limit, now_s)

    # How long iterations last ---------------------------------------------------------------------

    def _reckoned(self, cluster: str) -> dict[JobId, float]:
        state = self._controllers[cluster].state
        policy, view = state.policy_named(state.config.policy), cluster_view(state, None)
        found = {job.id: 0.0 for job in state.living() if _shares(job)}
        for job in view.jobs:
            expected = policy.explains(view, job.id)
            if expected is not None:
                found[job.id] = expected.loss
        return found

    def _look_later(self, cluster: str, now_s: float) -> None:
        """Look again once nothing has changed there for a moment."""
        due_s = self._looking[cluster] = now_s + SETTLED_S

        def look() -> None:
            if self._looking.get(cluster) == due_s:
                del self._looking[cluster]
                self._note(cluster, self._from_slots(cluster, due_s), due_s)

        self._at(due_s, look)

    def _from_slots(self, cluster: str, now_s: float) -> dict[JobId, float]:
        found: dict[JobId, float] = {}
        kept: dict[tuple[tuple[JobId, int], ...], dict[str, float]] = {}
        for group in _neighbourhoods(self._controllers[cluster]):
            key = tuple((job.id, job.location_epoch) for job in group)
            lost = self._played.pop(key, None)
            if lost is None:
                lost = {group[0].id: 0.0} if len(group) == 1 else self.play(cluster, group, now_s)
            kept[key] = lost
            found.update({JobId(id): loss for id, loss in lost.items()})
        for key in [k for k in self._played if k[0][0] in found]:
            del self._played[key]
        self._played.update(kept)
        return found

    def play(self, cluster: str, group: Sequence[Job], now_s: float) -> dict[str, float]:
        """Return the loss of each of the jobs that share: from random phases, slot by slot, their
        aggregators' slots ordered by what the controller tells them now."""
        rng = Random(f"phases at {now_s}")
        shares: dict[str, float] = {}
        played = []
        for job in group:
            profile, source = _profile(job), self._jobs[job.id]
            tasks = tuple(
                SlotTask(place.aggregator, cpu_s, position)
                for place, cpu_s, position in zip(
                    job.record.places, profile.task_cpu_s, profile.positions, strict=True
                )
            )
            shares.update({task.aggregator: SERVER_CORES for task in tasks})
            computing_s = cost(source.model, source.workers).compute_s
            slack = slack_s(1.0, self._limit)
            begin_s = rng.uniform(0.0, 2.0)
            played.append(SlotJob(job.id, computing_s, tasks, profile.iteration_s, slack, begin_s))
        state = self._controllers[cluster].state
        plans = {str(id): plan for id, plan in slot_plans.plans(state).items() if id in shares}
        order = state.policy_named(state.config.policy).order
        return losses(played, shares, order, PLAYED_S, plans)

    def play_all(self, now_s: float) -> dict[str, float]:
        """Every cluster's placement as it is now."""
        found: dict[str, float] = {}
        for cluster, controller in self._controllers.items():
            group = [job for job in controller.state.living() if _shares(job)]
            if group:
                found |= self.play(cluster, group, now_s)
        return found

    # Windows --------------------------------------------------------------------------------------

    def _note(self, cluster: str, found: Mapping[JobId, float], now_s: float) -> None:
        state = self._controllers[cluster].state
        for id, shared_loss in found.items():
            loss = 1.0 - (1.0 - shared_loss) / self.slow.get(id, 1.0)
            self.felt.setdefault(id, LossRecord(since_s=now_s)).note(loss, self._limit, now_s)
            if self._mode != "none" and (loss > self._limit or _asks_to_leave(state.jobs[id])):
                self._watch(cluster, id, now_s)

    def _watch(self, cluster: str, id: JobId, now_s: float) -> None:
        """Plan the end of a window of iterations from now."""
        if id in self._watched:
            return
        self._watched.add(id)
        job = self._controllers[cluster].state.jobs[id]
        epoch = job.location_epoch
        due_s = now_s + self.window_s(job)

        def measured() -> None:
            self._watched.discard(id)
            known = self._controllers[cluster].state.jobs.get(id)
            if known is None or known.record.profile is None:
                return
            loss = self.felt[id].loss
            if known.location_epoch == epoch:
                self._say(cluster, self._window(known, loss))
            if loss > self._limit or _asks_to_leave(known):
                self._watch(cluster, id, due_s)

        self._at(due_s, measured)

    def window_s(self, job: Job) -> float:
        """From a window's first iteration until the controller has heard of it."""
        iteration_s = _profile(job).iteration_s / (1.0 - self.felt[job.id].loss)
        return self._window_iterations * iteration_s + SAID_S

    def _window(self, job: Job, loss: float) -> WindowMeasured:
        return WindowMeasured(
            job=job.id,
            location_epoch=job.location_epoch,
            last_iteration=self._window_iterations,
            iterations=self._window_iterations,
            iteration_s=_profile(job).iteration_s / (1.0 - loss),
        )


def _profile(job: Job) -> Profile:
    profile = job.record.profile
    assert profile is not None
    return profile


def _shares(job: Job) -> bool:
    """Say whether it is where it is to stay: profiled, and on its way nowhere."""
    return job.record.profile is not None and not job.record.temporary and not job.moving


def _asks_to_leave(job: Job) -> bool:
    return job.pending is not None and job.pending.cause == "reverted"


def _neighbourhoods(controller: Controller) -> Iterator[list[Job]]:
    """The jobs of a cluster, by who shares aggregators with whom, over others too."""
    left = {job.id: job for job in controller.state.living() if _shares(job)}
    users: dict[str, list[JobId]] = {}
    for job in left.values():
        for home in sorted(job.homes()):
            users.setdefault(home, []).append(job.id)
    while left:
        group: list[Job] = []
        reached = [left.pop(next(iter(left)))]
        while reached:
            job = reached.pop()
            group.append(job)
            near = {id for home in job.homes() for id in users[home] if id in left}
            reached += [left.pop(id) for id in sorted(near)]
        yield sorted(group, key=lambda job: job.id)
