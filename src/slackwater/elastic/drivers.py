"""Drivers: which micro-task is dispatched when (Qiao 2021, sections 4.3 and 4.6).

A driver is a function of what it is told: its `start`, then its `done` for each completion, in one
order. It draws from a generator with a seed of its own, if at all, and looks at no clock: when its
process dies, another one is told the same again, or what came after a state that it saved, and must
dispatch the same tasks.
"""

from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, Protocol

from slackwater.common.base.errors import Rejected


class Run(Protocol):
    """A run of a program, as its driver sees it."""

    @property
    def executors(self) -> int: ...

    def dispatch(self, executor: int, task: Any) -> None:
        """Let the executor run the task after those that it was given before."""
        ...

    def report(self, iteration: int, of: int, /, **measured: float) -> None:
        """Tell people how far the program is, and what was measured."""
        ...

    def use(self, hosts: int) -> None:
        """Ask for so many hosts from now on, within what `--hosts` allows, as `slackwater scale`
        does: fewer, as soon as the rest of the work or of the model needs no more. Raises
        ValueError."""
        ...

    def end(self, result: Any = None) -> None:
        """Finish the program, with a result for its record."""
        ...


class Driver(ABC):
    """Base of all drivers."""

    @abstractmethod
    def start(self, run: Run) -> None:
        """Dispatch the first tasks."""

    @abstractmethod
    def done(self, run: Run, executor: int, task: Any, result: Any) -> None:
        """Take note that the executor's task is complete: its updates are in the tables."""

    def save(self) -> Any:
        """Return its state, as numbers, text and arrays within tuples, lists and maps, so that the
        journal of a long run can be shortened to that; None: every completion stays in it, and is
        told again to a driver that comes after a kill."""
        return None

    def restore(self, state: Any) -> None:
        """Take up a state that `save` returned, in place of `start` and of all that was told."""
        raise Rejected(f"{self!r} saves a state and has no restore(): write that, too")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _check_whole(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise Rejected(f"{name} is {value!r}; give a whole number of at least {least}")


class Ssp(Driver):
    """Stale synchronous parallel: an executor runs its iteration i, a task of that number, as soon
    as all others have completed their iteration i - staleness - 1 (Ho et al. 2013).

    Tasks return the loss of their part, or nothing. The loss of an iteration is the mean of its
    tasks' results.
    """

    def __init__(self, iterations: int, staleness: int = 0) -> None:
        """Raises Rejected."""
        _check_whole("iterations", iterations, 1)
        _check_whole("staleness", staleness, 0)
        self.iterations, self.staleness = iterations, staleness

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.iterations}, {self.staleness})"

    def start(self, run: Run) -> None:
        self._sent, self._completed = [0] * run.executors, [0] * run.executors
        self._reported, self.loss = 0, float("nan")
        self._losses: dict[int, list[float]] = {}
        self._more(run)

    def done(self, run: Run, executor: int, task: Any, result: Any) -> None:
        self._completed[executor] += 1
        if isinstance(result, Real):
            self._losses.setdefault(task, []).append(float(result))
        slowest = min(self._completed)
        while self._reported < slowest:
            losses = self._losses.pop(self._reported, [])
            self._reported += 1
            if losses:
                self.loss = sum(losses) / len(losses)
            run.report(self._reported, self.iterations, **({"loss": self.loss} if losses else {}))
        if slowest == self.iterations:
            loss = {} if self.loss != self.loss else {"loss": self.loss}
            run.end({"iterations": self.iterations, **loss})
            return
        self._more(run)

    def save(self) -> Any:
        reported = self._reported, self.loss
        return list(self._sent), list(self._completed), reported, dict(self._losses)

    def restore(self, state: Any) -> None:
        self._sent, self._completed, (self._reported, self.loss), self._losses = state

    def _more(self, run: Run) -> None:
        ahead = min(self._completed) + self.staleness
        for executor, sent in enumerate(self._sent):
            for iteration in range(sent, min(ahead + 1, self.iterations)):
                run.dispatch(executor, iteration)
            self._sent[executor] = max(sent, min(ahead + 1, self.iterations))


class Bsp(Ssp):
    """Bulk synchronous parallel: nobody begins an iteration before all have completed the last."""

    def __init__(self, iterations: int) -> None:
        super().__init__(iterations, 0)


class Asp(Ssp):
    """Asynchronous: no executor waits for another. Each has two tasks at a time, so that it never
    waits for an order either."""

    def __init__(self, iterations: int) -> None:
        super().__init__(iterations, iterations)

    def _more(self, run: Run) -> None:
        for executor, sent in enumerate(self._sent):
            until = min(self._completed[executor] + 2, self.iterations)
            for iteration in range(sent, until):
                run.dispatch(executor, iteration)
            self._sent[executor] = max(sent, until)


class Rotation(Driver):
    """Parts of the model in rotation: in turn t executor e has part (e + t) mod E to itself, where
    E is the number of executors, and nobody begins a turn before all have completed the last
    (STRADS; Qiao 2021, section 4.7). A sweep is E turns: then each executor had each part.

    A task is the number of its turn. Turn -1 comes before the first sweep: in it executors put what
    they begin with into the tables. Tasks return a number, or a sum and a count; `measured` names
    what the sweep's sums are by its counts.
    """

    def __init__(self, sweeps: int, measured: str = "loss") -> None:
        """Raises Rejected."""
        _check_whole("sweeps", sweeps, 1)
        self.sweeps, self.measured = sweeps, measured

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sweeps})"

    def start(self, run: Run) -> None:
        self._turn, self._sum, self._count = -1, 0.0, 0.0
        self._begin_turn(run)

    def done(self, run: Run, executor: int, task: Any, result: Any) -> None:
        if task >= 0:
            self._add(result)
        self._left -= 1
        if self._left:
            return
        self._turn += 1
        sweep, rest = divmod(self._turn, run.executors)
        if sweep and not rest:
            self._end_sweep(run, sweep)
        if sweep < self.sweeps:
            self._begin_turn(run)

    def save(self) -> Any:
        return self._turn, self._left, self._sum, self._count

    def restore(self, state: Any) -> None:
        self._turn, self._left, self._sum, self._count = state

    def _begin_turn(self, run: Run) -> None:
        self._left = run.executors
        for executor in range(run.executors):
            run.dispatch(executor, self._turn)

    def _add(self, result: Any) -> None:
        match result:
            case Real():
                total, count = result, 1
            case [Real() as total, Real() as count]:
                pass
            case _:
                return
        self._sum += float(total)
        self._count += float(count)

    def _end_sweep(self, run: Run, sweep: int) -> None:
        found = {self.measured: self._sum / self._count} if self._count else {}
        self._sum = self._count = 0.0
        run.report(sweep, self.sweeps, **found)
        if sweep == self.sweeps:
            run.end({"sweeps": sweep, **found})
