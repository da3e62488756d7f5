"""How many hosts a program makes use of, by what its iterations take (Lee 2020, 3.2 and 3.3.1).

With w hosts an iteration takes as long as the host with most executors computes, and a transfer
beyond that: ceil(E / w) c + max(w / s, 1) u + v, where s aggregators hold the tables. c, the
seconds of a task, is measured. u and v are fitted to what iterations took beside computing, in each
number of hosts that the program has had (common/domains/models/cost_fit.py); with one number alone
v is 0, so that fewer hosts look better than they are. Where more would pay if u were 0, they are
tried. A number that was measured lately is as good as it was then, not as the model says.

The least estimate is asked for where it pays: an iteration becomes shorter by 5 % or more, and what
the rest of the run saves is more than a change cost so far. Pure, and forgotten with its process:
whoever comes after it measures anew.
"""

from collections.abc import Mapping
from math import ceil
from typing import Final, NamedTuple

from slackwater.common.base.words import number_of
from slackwater.common.domains.models.cost import pays
from slackwater.common.domains.models.cost_fit import Fit, Measured, fitted

WARM_UP_ITERATIONS: Final = 2
"""Iterations after a change that are not measured: hosts read what is new to them."""
SET_ITERATIONS: Final = 5
SET_S: Final = 2.0
"""A set of measurements is of so many iterations, and takes at least so long."""
WEIGHT: Final = 0.5
"""Weight of a new set in the moving average of its number of hosts."""
KEPT_S: Final = 900.0
"""Seconds after which a measurement in another number of hosts says nothing any more."""
CHANGE_S: Final = 2.0
"""Seconds that the first change is expected to cost; later ones cost what those before did."""
PATIENCE_S: Final = 60.0
"""Seconds in which hosts that were asked for may come, before the program asks again."""
_LEAST_S: Final = 1e-9


class Choice(NamedTuple):
    hosts: int
    now_s: float
    """Seconds that an iteration takes."""
    then_s: float
    """Seconds that one will take."""
    fit: Fit
    """The model that says so."""
    tries: bool = False
    """The estimate is the best that can be hoped for, and no measurement contradicts it."""

    def __str__(self) -> str:
        hosts, task_s = number_of(self.hosts, "host"), self.fit.machine.instance_s
        takes = f"{'at best ' * self.tries}{self.then_s:.3g} s"
        return (
            f"an iteration takes {self.now_s:.3g} s, with {hosts} {takes}: asks for {hosts} (a "
            f"task takes {task_s:.3g} s; the model is off by up to {self.fit.worst:.1%})"
        )


class _Known(NamedTuple):
    task_s: float
    iteration_s: float
    at_s: float


class _Set:
    """Measurements while hosts and executors stay where they are."""

    def __init__(self, loads: Mapping[int, int], now_s: float, *, warm: bool) -> None:
        self.loads, self.since_s, self.warm = dict(loads), now_s, warm
        self.tasks = 0
        self.computed_s: dict[int, float] = {}
        self.computed: dict[int, int] = {}

    def add(self, rank: int, tasks: int, computed_s: float) -> None:
        self.tasks += tasks
        self.computed[rank] = self.computed.get(rank, 0) + tasks
        self.computed_s[rank] = self.computed_s.get(rank, 0.0) + computed_s

    @property
    def hosts(self) -> int:
        """Count the hosts that have executors."""
        return sum(count > 0 for count in self.loads.values())

    @property
    def task_s(self) -> float:
        """Return the seconds of a task on a host of the mean speed of all."""
        speed = sum(
            count / max(self.computed_s[rank], _LEAST_S) for rank, count in self.computed.items()
        )
        return len(self.computed) / speed


class HostsChooser:
    """`least`, `most`: the numbers of hosts that the program may have."""

    def __init__(self, executors: int, least: int, most: int) -> None:
        self.executors, self.least, self.most = executors, least, min(most, executors)
        self.iterations_left: int | None = None
        """Iterations until the program's end, as far as it says."""
        self._known: dict[int, _Known] = {}
        self._set: _Set | None = None
        self._asked: tuple[int, float] | None = None
        """Hosts that were asked for and are not there yet, and since when."""
        self._tasks = 0
        """Tasks that were completed since that was asked."""
        self._change_s = CHANGE_S

    def heard(
        self,
        rank: int,
        tasks: int,
        computed_s: float,
        loads: Mapping[int, int],
        servers: int,
        now_s: float,
    ) -> Choice | None:
        """Take note of a host's batch. Return the hosts to ask for, if others than now are better.
        `loads`: executors by host; `servers`: aggregators that hold the tables."""
        self._tasks += tasks
        at_work = sum(count > 0 for count in loads.values())
        if at_work < min(len(loads), self.executors) or sum(loads.values()) < self.executors:
            self._set = None  # Executors are on their way.
            return None
        if self._set is None or self._set.loads != loads:
            self._set = _Set(loads, now_s, warm=False)
            return None
        self._set.add(rank, tasks, computed_s)
        return self._next(self._set, servers, now_s)

    def forget(self) -> None:
        """A host has come or gone: the present set is of no use."""
        self._set = None

    def _next(self, measured: _Set, servers: int, now_s: float) -> Choice | None:
        if not measured.warm:
            if measured.tasks >= WARM_UP_ITERATIONS * self.executors:
                self._set = _Set(measured.loads, now_s, warm=True)
            return None
        long = now_s - measured.since_s >= SET_S
        if not long or measured.tasks < SET_ITERATIONS * self.executors:
            return None
        self._learn(measured, now_s)
        self._set = _Set(measured.loads, now_s, warm=True)
        if self._asked is not None:
            wanted, since_s = self._asked
            if wanted != len(measured.loads) and now_s - since_s < PATIENCE_S:
                return None
            self._asked = None
        choice = self._choose(measured, servers, now_s)
        if choice is not None:
            self._asked, self._tasks = (choice.hosts, now_s), 0
        return choice

    def _learn(self, measured: _Set, now_s: float) -> None:
        hosts = measured.hosts
        iteration_s = (now_s - measured.since_s) * self.executors / measured.tasks
        task_s = measured.task_s
        before = self._known.get(hosts)
        if before is not None and now_s - before.at_s < KEPT_S:
            task_s = before.task_s + WEIGHT * (task_s - before.task_s)
            iteration_s = before.iteration_s + WEIGHT * (iteration_s - before.iteration_s)
        self._known[hosts] = _Known(task_s, iteration_s, now_s)
        if self._asked is not None and self._asked[0] == hosts:
            lost_s = now_s - self._asked[1] - self._tasks / self.executors * iteration_s
            self._change_s += WEIGHT * (max(0.0, lost_s) - self._change_s)

    def _choose(self, measured: _Set, servers: int, now_s: float) -> Choice | None:
        hosts, idle = measured.hosts, len(measured.loads) > measured.hosts
        self._known = {w: known for w, known in self._known.items() if now_s - known.at_s < KEPT_S}
        fit, now = self.fit(servers), self._known[hosts]
        best = min(
            range(self.least, self.most + 1),
            key=lambda w: (self.iteration_s(w, fit, servers), abs(w - hosts)),
        )
        choice = Choice(best, now.iteration_s, self.iteration_s(best, fit, servers), fit)
        if idle or (best != hosts and self._pays(choice)):
            return choice
        if len(self._known) > 1:
            return None
        more = min(2 * hosts, self.most)
        saved_s = now.task_s * (self._most_tasks(hosts) - self._most_tasks(more))
        hope = Choice(more, now.iteration_s, now.iteration_s - saved_s, fit, tries=True)
        return hope if self._pays(hope) else None

    def _pays(self, choice: Choice) -> bool:
        left, saved_s = self.iterations_left, choice.now_s - choice.then_s
        if left is not None and saved_s * left <= self._change_s:
            return False
        return pays(choice.now_s, choice.then_s)

    def _most_tasks(self, hosts: int) -> int:
        """Return the tasks of the host that has most, whole executors."""
        return ceil(self.executors / hosts)

    def fit(self, servers: int) -> Fit:
        """Fit the model to what is known."""
        measured = []
        for hosts, known in sorted(self._known.items()):
            tasks = self._most_tasks(hosts)
            compute_s = tasks * known.task_s
            transfer_s = max(known.iteration_s - compute_s, _LEAST_S)
            measured.append(Measured(hosts, servers, tasks, compute_s, transfer_s))
        return fitted(1.0, measured)

    def iteration_s(self, hosts: int, fit: Fit, servers: int) -> float:
        """Return the seconds that an iteration takes with so many hosts: as measured, else as the
        model says."""
        if (known := self._known.get(hosts)) is not None:
            return known.iteration_s
        return fit.batch_s(1.0, hosts, servers, self._most_tasks(hosts))
