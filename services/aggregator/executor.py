"""Runs the slot's tasks: the kernel in a thread, the interpreter lock released, one at a time.

When and in which order is schedule.py's decision. A task's update is committed as soon as its
kernel is done; it is told (`ended`) when its slot ends.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Any, Final, Protocol, TypeVar

from slackwater.common.base import failpoints, limits
from slackwater.common.base.clock import Clock
from slackwater.common.base.failpoints import failpoint
from slackwater.common.domains.slots.layout import PARAMETER_BYTES, ROWS, folded_bytes
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rows import ALL, width_of
from slackwater.common.domains.slots.serving import serve
from slackwater.common.transport.gpu import Device
from slackwater.schemas.base import JobId
from slackwater.schemas.telemetry import JobCpu, TaskCost
from slackwater.services.aggregator.bucket import Bucket, Key
from slackwater.services.aggregator.early_fold import Ahead, done_by, fold_ahead
from slackwater.services.aggregator.fold_threads import Team
from slackwater.services.aggregator.schedule import Ended, Profile, SlotSchedule
from slackwater.services.aggregator.task_scheduling import TaskRules


@dataclass(frozen=True, slots=True)
class Refused:
    """The content of a PushRefused."""

    tensor: str
    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class Task:
    """One update of one bucket."""

    bucket: Bucket
    slots: SlotRegion
    alone: int | None = None
    """The rank whose push is the update; None: the mean of all is."""
    ahead: Ahead | None = None
    """The part of it that is folded already."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`version` is the region's now; `refused` says why it is the old one."""

    version: int
    cpu_s: float
    refused: Refused | None = None
    owned: bool = True
    """False: the bucket was dropped, or is another aggregator's by now; nothing was applied."""


_TELL_S: Final = 0.005
"""While there is more of their job to fold, tasks that ended are told of together: a worker waits
for the last one, and each time that it is told costs as much as a small fold."""
_ALONE_BYTES: Final = 8 * limits.CHUNK_BYTES
"""Size up to which each thread takes a task of its own where there are several: to begin and to end
one together costs two threads more than one of them may have to wait for the other in the end."""
Told = Callable[[Task, Outcome], None]
T = TypeVar("T")


class OffLoop(Protocol):
    """How work that takes long is done: in threads; at once under virtual time."""

    async def __call__(self, work: Callable[..., T], *arguments: Any) -> T: ...


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.to_thread(work, *arguments)


class KernelThread:
    """One thread: its CPU time is a kernel's own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kernel")

    async def __call__(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def close(self) -> None:
        """Wait for the kernel that runs, if any."""
        self._pool.shutdown(cancel_futures=True)


async def at_once(work: Callable[..., T], *arguments: Any) -> T:
    return work(*arguments)


@dataclass(slots=True)
class _Measured:
    profile: Profile
    nbytes: int
    executions: int = 0
    undercharged: int = 0
    charge_s: float = 0.0
    """The charge of one execution, by its bytes; 0: charged as measured."""

    @property
    def charged_s(self) -> float:
        """The charge of the next execution, as far as it is known."""
        return self.charge_s or self.profile.cpu_s


@dataclass(slots=True)
class _Account:
    cpu_s: float = 0.0
    slot_s: float = 0.0


class Executor:
    """`ended` is called at the end of each task's slot. `off_loop` runs the kernels."""

    def __init__(
        self,
        owner: int,
        clock: Clock,
        cpu_share: float,
        off_loop: OffLoop,
        ended: Told,
        team: Team | None = None,
        ended_ahead: Callable[[Bucket], None] | None = None,
        charge_ns_per_byte: float = 0.0,
    ) -> None:
        self._owner = owner
        self._off_loop = off_loop
        self._clock = clock
        self._ended = ended
        self._ended_ahead = ended_ahead
        self._team = team
        self._cpu_share = cpu_share
        self._charge_ns_per_byte = charge_ns_per_byte
        self.executions = 0
        """Folds since the start."""
        self.cpu_s = 0.0
        """CPU seconds of all that was executed."""
        self.undercharged = 0
        """Executions that took more CPU time than they were charged, by `charge_ns_per_byte`."""
        self._schedule: SlotSchedule[Task] = SlotSchedule(cpu_share)
        self.turns = TaskRules()
        """The order of tasks, by the controller's plan."""
        self._interrupted: dict[Bucket, Outcome] = {}
        """Outcomes of tasks that were executed and still wait for the rest of their slots."""
        self._woken = asyncio.Event()
        self._holding = False
        """A task has the slot, and nothing is to be decided until it ends, but for what is more
        urgent."""
        self._ready: list[tuple[float, int, Task]] = []
        """(deadline, number, task), for the kernel's thread. Pushing and popping are one operation
        each to the interpreter, so that no lock is needed."""
        self._readied = 0
        self._aheads: deque[tuple[Bucket, SlotRegion, Ahead]] = deque()
        self._executed: deque[tuple[Task, Outcome]] = deque()
        self._thread_works = self._telling = False
        self._told_s = 0.0
        self._measured: dict[Key, _Measured] = {}
        self._accounts: dict[JobId, _Account] = {}

    @property
    def busy_s(self) -> float:
        return self._schedule.busy_s

    def submit(self, task: Task) -> None:
        now_s, key = self._clock.now_s(), task.bucket.key
        deadline_s = inf
        if self.turns.planned(key):
            slot_s = self._measured_of(task).charged_s / self._cpu_share
            deadline_s = self.turns.arrived(key, now_s, slot_s)
        self._schedule.arrived(task, now_s, deadline_s)
        if self._cpu_share >= 1.0:  # The kernel's thread may be at work: it sees it at once.
            self._make_ready()
        if not self._holding or self._schedule.urgent:
            self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        if self._cpu_share >= 1.0:
            await self._run_freely()
        while True:
            begun = self._schedule.begin()
            if begun is None:
                await self._until_woken()
                continue
            task, start_s = begun.task, begun.start_s
            await self._until(start_s)
            outcome = self._interrupted.pop(task.bucket, None)
            charged_s = 0.0
            if outcome is None:
                outcome = await self._off_loop(execute, task, self._owner, self._team)
                charged_s = self._charge(task, outcome)
            slot = self._schedule.end(charged_s, self._clock.now_s())
            if await self._hold(slot):
                self._ended(task, outcome)
            else:
                self._interrupted[task.bucket] = outcome

    async def _hold(self, slot: Ended) -> bool:
        """Wait until the slot ends; return whether the task has had all of its time."""
        self._holding = True
        while (now_s := self._clock.now_s()) < slot.at_s:
            cut = self._schedule.cut(now_s) if slot.done else None
            if cut is None:
                await self._until_woken(slot.at_s)
            else:
                slot = cut
        self._holding = False
        return slot.done

    async def _until_woken(self, at_s: float = inf) -> None:
        """Wait until then, or until a task arrives."""
        self._woken.clear()
        timer = None
        if at_s < inf:
            in_s = max(0.0, at_s - self._clock.now_s())
            timer = asyncio.get_running_loop().call_later(in_s, self._woken.set)
        await self._woken.wait()
        if timer is not None:
            timer.cancel()

    # Without stretching ---------------------------------------------------------------------------

    def _make_ready(self) -> None:
        """Give the tasks that wait to the kernel's thread, the most urgent first."""
        now_s = self._clock.now_s()
        while (begun := self._schedule.begin()) is not None:
            deadline_s = self._schedule.deadline_s
            self._schedule.end(0.0, now_s)
            if _is_short(begun.task) and not self._ready and not self._thread_works:
                asyncio.get_running_loop().call_soon(self._execute_here, begun.task)
                continue
            self._readied += 1
            heappush(self._ready, (deadline_s, self._readied, begun.task))
            self._woken.set()

    async def _run_freely(self) -> None:
        """A slot of whole cores stretches nothing: the kernel's thread goes from task to task
        without asking the loop, which hears of what ended after a moment. A turn of the loop
        after each cost more than a small bucket's fold."""
        self._loop = asyncio.get_running_loop()
        while True:
            if self._ready or self._aheads:
                self._thread_works = True
                await self._off_loop(self._execute_ready)
                self._thread_works = False
                self._tell_ended()
            else:
                self._woken.clear()
                await self._woken.wait()

    def _execute_here(self, task: Task) -> None:
        """A lone short fold, in the loop: it takes no longer than to wake a thread and be woken."""
        self._executed.append((task, execute(task, self._owner)))
        self._tell_ended()

    def _execute_ready(self) -> None:
        """In the kernel's thread: large folds one by one, and the last one, with all of the team in
        each; of others everybody takes one. What is ahead of its turn comes last."""
        while self._ready or self._aheads:
            if not self._ready:
                self._execute_ahead(*self._aheads.popleft())
            elif self._team is None or len(self._ready) == 1 or _is_large(self._ready[0][2]):
                self._execute_one(heappop(self._ready)[2], self._team)
            else:
                self._team(self._execute_alone)

    def _execute_alone(self) -> bool:
        while True:
            try:
                entry = heappop(self._ready)
            except IndexError:
                return True
            if _is_large(entry[2]):
                heappush(self._ready, entry)
                return True
            self._execute_one(entry[2], None)

    def _execute_one(self, task: Task, team: Team | None) -> None:
        outcome = execute(task, self._owner, team)
        self._executed.append((task, outcome))
        now_s, job = time.monotonic(), task.bucket.key[0]
        if self._telling:
            return
        more = any(entry[2].bucket.key[0] == job for entry in self._ready)
        if not more or now_s - self._told_s > _TELL_S:
            self._telling, self._told_s = True, now_s
            self._loop.call_soon_threadsafe(self._tell_ended)

    def _tell_ended(self) -> None:
        self._telling = False  # First: what ends from now on is told by a call of its own.
        while self._executed:
            task, outcome = self._executed.popleft()
            self._schedule.busy_s += self._charge(task, outcome) / self._cpu_share
            self._ended(task, outcome)

    # Ahead of its turn ----------------------------------------------------------------------------

    def submit_ahead(self, bucket: Bucket, slots: SlotRegion, ahead: Ahead) -> None:
        """Fold what is there of a version that is not complete. Only where the slot is whole cores,
        which are idle else; and only in host memory, where the kernel takes parts of a fold."""
        if self._cpu_share < 1.0 or slots.kernels is not None or ahead.queued:
            return
        ahead.queued = True
        bucket.parts.at_work += 1
        self._aheads.append((bucket, slots, ahead))
        self._woken.set()

    def _execute_ahead(self, bucket: Bucket, slots: SlotRegion, ahead: Ahead) -> None:
        begun_s = time.thread_time()
        more = bucket.phase != "gone"
        while more and not self._ready:
            more = fold_ahead(slots, ahead)
        ahead.cpu_s += time.thread_time() - begun_s
        self._loop.call_soon_threadsafe(self._tell_ahead, bucket, slots, ahead)

    def _tell_ahead(self, bucket: Bucket, slots: SlotRegion, ahead: Ahead) -> None:
        ahead.queued = False
        bucket.parts.at_work -= 1
        if ahead.done < ahead.upto and not ahead.over and bucket.phase != "gone":
            self.submit_ahead(bucket, slots, ahead)
        elif self._ended_ahead is not None:
            self._ended_ahead(bucket)

    # Both -----------------------------------------------------------------------------------------

    async def _until(self, at_s: float) -> None:
        if at_s > self._clock.now_s():
            await self._clock.sleep_until(at_s)

    def _charge(self, task: Task, outcome: Outcome) -> float:
        charged_s = 0.0 if self._charge_ns_per_byte else outcome.cpu_s
        if task.bucket.phase != "gone":  # Else it is forgotten, and to stay so.
            charged_s = self._measure(task, outcome)
        account = self._accounts.setdefault(task.bucket.key[0], _Account())
        account.cpu_s += outcome.cpu_s
        self.cpu_s += outcome.cpu_s
        account.slot_s += charged_s / self._cpu_share
        return charged_s

    def _measure(self, task: Task, outcome: Outcome) -> float:
        """Return the task's charge: by its bytes, or by what its bucket's tasks cost."""
        measured = self._measured_of(task)
        charged_s = outcome.cpu_s
        if outcome.refused is None:  # Else no execution: it stopped, or looked twice.
            measured.executions += 1
            self.executions += 1
            charged_s = measured.profile.charge(outcome.cpu_s)
        if measured.charge_s:
            charged_s = measured.charge_s if outcome.owned else 0.0
            if outcome.refused is None and outcome.cpu_s > charged_s:
                measured.undercharged += 1
                self.undercharged += 1
        if measured.profile.kept_s:  # It goes where the region goes.
            kept_ns = max(1, round(measured.profile.kept_s * 1e9))
            if task.slots.task_cpu_ns != kept_ns:
                task.slots.task_cpu_ns = kept_ns
        return charged_s

    def _measured_of(self, task: Task) -> _Measured:
        measured = self._measured.get(task.bucket.key)
        if measured is None:
            geometry = task.slots.geometry
            measured = _Measured(
                Profile(kept_s=task.slots.task_cpu_ns / 1e9), geometry.parameter_bytes
            )
            self._measured[task.bucket.key] = measured
        if self._charge_ns_per_byte:
            workers = task.slots.active if task.alone is None else 1
            nbytes = folded_bytes(_nbytes(task), workers)
            measured.charge_s = nbytes * self._charge_ns_per_byte / 1e9
        return measured

    def forget(self, key: Key) -> None:
        """The bucket is not here any more."""
        self._measured.pop(key, None)
        self.turns.forget(key)

    def accounts(self) -> tuple[JobCpu, ...]:
        """Return what each job used and was charged since the last call."""
        spent = tuple(
            JobCpu(job=job, cpu_s=account.cpu_s, slot_s=account.slot_s)
            for job, account in sorted(self._accounts.items())
        )
        self._accounts.clear()
        return spent

    def observed(self) -> list[TaskCost]:
        """Return the costs of tasks that ran since the last call."""
        costs = []
        for (job, bucket), measured in self._measured.items():
            if measured.executions:
                costs.append(
                    TaskCost(
                        job=job,
                        bucket=bucket,
                        executions=measured.executions,
                        cpu_s=measured.charged_s,
                        nbytes=measured.nbytes,
                        real_cpu_s=measured.profile.cpu_s,
                        undercharged=measured.undercharged,
                    )
                )
                measured.executions = measured.undercharged = 0
        return costs


def _is_short(task: Task) -> bool:
    """On a device, calls are what takes long."""
    return task.slots.kernels is None and _nbytes(task) <= limits.COPY_INLINE_BYTES


def _is_large(task: Task) -> bool:
    """Say whether the task's chunks are shared out among the team even where others wait. A
    device's tasks run one after the other in any case."""
    return task.slots.kernels is not None or _nbytes(task) >= _ALONE_BYTES


def _nbytes(task: Task) -> int:
    """Return how many bytes of parameters the task writes: of rows, once it is known what its
    buffers lack, the rows alone."""
    slots, word = task.slots, ALL
    if task.alone is not None and slots.lacking is not None:
        word = slots.rank_block(task.alone)[ROWS]
    if word == ALL:
        return slots.geometry.parameter_bytes
    return (word - 1) * PARAMETER_BYTES * width_of(slots.tensors)


def execute(task: Task, owner: int, team: Team | None = None) -> Outcome:
    """One update, in the kernel's thread; CPU time is this thread's own and its team's."""
    from slackwater.common.domains.slots import folding  # numba: loaded by `warm` before any push.

    slots, alone = task.slots, task.alone
    if task.bucket.phase == "gone":  # Dropped while it waited.
        return Outcome(slots.version, 0.0, owned=False)
    chunk = None
    if failpoints.any_armed():  # So that every fold has a middle.
        elements = slots.geometry.elements
        chunk, team = min(folding.chunk_of(slots), max(1, -(-elements // 2))), None
    begun_s = _spent_s(slots, team) - (task.ahead.cpu_s if task.ahead is not None else 0.0)
    failpoint("aggregator.fold.before")
    refusal = folding.check_hypers(slots, alone)
    middle = partial(failpoint, "aggregator.fold.mid")
    done = done_by(slots, task.ahead)
    squares = task.ahead.squares if task.ahead is not None else None
    if refusal is None and not folding.fold(slots, middle, chunk, team, alone, done, squares):
        refusal = folding.blame(slots, alone)
    if refusal is not None:
        cpu_s = _spent_s(slots, team) - begun_s
        return Outcome(slots.version, cpu_s, Refused(refusal.tensor, refusal.worker, refusal.why))
    if slots.owner != owner:
        return Outcome(slots.version, _spent_s(slots, team) - begun_s, owned=False)
    before = slots.applied() if alone is not None else ()
    version = folding.commit(slots, alone)
    failpoint("aggregator.fold.after")
    if task.bucket.copying is not None:
        task.bucket.copying.committed(slots)
    if alone is not None:
        serve(slots, before, owner)
    return Outcome(version, _spent_s(slots, team) - begun_s)


def _spent_s(slots: SlotRegion, team: Team | None) -> float:
    """Return CPU time; for a fold on a device, the time waited."""
    if slots.kernels is not None:
        return slots.kernels.now_s()
    return time.thread_time() + (team.cpu_s if team is not None else 0.0)


def warm(
    rule: str, dtype: str, workers: int, device: Device | None = None, noise: bool = False
) -> None:
    """Load or compile the kernel of a job: off the event loop, before the first push."""
    from slackwater.common.domains.slots import folding, gpu_kernels, kernels, row_kernels

    assert folding.CHUNK_ELEMENTS > 0  # Imports now what `execute` imports.
    if device is not None:
        gpu_kernels.kernels_of(device).warm(rule, dtype, workers)  # type: ignore[arg-type]  # As below.
        return
    kernels.warm(rule, dtype, workers, noise=noise)  # type: ignore[arg-type]  # A plan's dtype is one of them.
    if workers == 1:
        row_kernels.warm(rule, dtype)  # type: ignore[arg-type]  # As above.
